// The engine as the server tells it: its state, its numbers, its blocks and steps.

import { ApiError, explain, json } from "./api.js";
import { BlockMap } from "./blocks.js";
import { Strip } from "./strip.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const element = (id) => document.getElementById(id);
const say = (id, text) => {
  if (element(id).textContent !== text) element(id).textContent = text;
};

const count = (value) => value.toLocaleString("en");
const milliseconds = (seconds) =>
  seconds >= 10 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

export class EnginePanel {
  #own = new Set();
  #restarts = null;
  #timer = null;
  #asking = false;

  /** visible: whether the panel is looked at. onKey: called when the server wants a key.
   * onState: with the state's name and words for a person, or null for those. */
  constructor({ visible, onKey, onState }) {
    Object.assign(this, { visible, onKey, onState });
    this.map = new BlockMap({
      canvas: element("blocks"),
      readout: element("block"),
      legend: element("requests"),
      name: (id, all) => this.#name(id, all),
    });
    this.strip = new Strip({ canvas: element("steps"), readout: element("step") });
    document.addEventListener("visibilitychange", () => this.poll());
    calm.addEventListener("change", () => this.poll());
  }

  own(id) {
    this.#own.add(id);
  }

  /** Ask now, and again after a while; not at all while the page is hidden. */
  async poll() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    let pause = 3000;
    try {
      if (this.visible()) {
        this.#show(await json(`engine/state?after=${this.strip.last}`));
        pause = calm.matches ? 2000 : 400;
      } else {
        this.#health(await json("health", { accept: [503] }));
      }
    } catch (error) {
      await this.#trouble(error);
    } finally {
      this.#asking = false;
      this.#timer = setTimeout(() => this.poll(), pause);
    }
  }

  redraw() {
    this.map.draw();
    this.strip.draw();
  }

  async #trouble(error) {
    if (error instanceof ApiError && error.status === 401) {
      this.onKey(explain(error));
      this.#health(await json("health", { accept: [503] }).catch(() => null));
    } else {
      this.onState("lost", explain(error));
      element("stale").hidden = false;
    }
  }

  #health(health) {
    if (!health) return this.onState("lost", explain(new TypeError()));
    const { status, loaded, to_load: total } = health;
    const what = total && loaded === total
      ? "The model is loaded, the engine prepares its steps"
      : `The model is being loaded${total ? `, ${loaded} of ${total} parts` : ""}`;
    const words = {
      starting: `${what}. You can write already.`,
      dead: "The engine has ended. The server starts it again if that can help.",
      busy: health.accepting ? null : "The server takes no more requests at the moment.",
    };
    return this.onState(status, words[status] ?? null, health);
  }

  #show({ health, model, engine }) {
    this.#health(health);
    if (this.#restarts !== null && this.#restarts !== health.restarts) this.strip.reset();
    this.#restarts = health.restarts;
    if (model) {
      const int4 = model.num_int4_layers ? `${model.num_int4_layers} INT4 layers, ` : "";
      say("about-model", `${model.architecture}, ${int4}${model.dtype}; at most ${count(model.max_model_len)} tokens a request, ${model.max_num_seqs} at once.`);
      say("blocks-about", `A square for each of ${count(model.num_blocks)}, of ${model.block_size} tokens.`);
    }
    element("stale").hidden = engine !== null || health.status === "starting";
    if (!engine) return;
    const { counters } = engine;
    if (counters.steps < this.strip.last) this.strip.reset();
    this.#numbers(counters, engine);
    this.strip.add(engine.steps.filter((step) => step[0] > this.strip.last));
    if (engine.blocks) this.map.show(engine.blocks);
  }

  #numbers(counters, engine) {
    const rate = engine.tokens_per_second;
    say("rate", rate >= 100 ? count(Math.round(rate)) : rate.toFixed(1));
    if (engine.ttft.p50 !== null) {
      say("ttft", milliseconds(engine.ttft.p50));
      say("ttft95", `p95 ${milliseconds(engine.ttft.p95)}`);
    }
    say("running", count(counters.running));
    say("waiting", counters.waiting ? `${count(counters.waiting)} waiting` : "none waiting");
    const share = counters.prefix_hits / Math.max(1, counters.prefix_queries);
    say("hits", `${Math.round(share * 100)} %`);
    say("hit-tokens", `${count(counters.prefix_hits)} tokens`);
    say("usage", `${((100 * counters.blocks_in_use) / counters.blocks_total).toFixed(0)} %`);
    say("used-blocks", `${count(counters.blocks_in_use)} of ${count(counters.blocks_total)}`);
    say("preemptions", count(counters.preemptions));
    say("swaps", counters.swaps ? `${count(counters.swaps)} by swapping` : "since the start");
  }

  /** A sample's id is its request's, and a number from the second sample on. */
  #name(id, all) {
    const [request, number] = id.split("\u0000");
    const several = number || all.includes(`${request}\u00001`);
    const base = request.replace(/-\d+$/, "");
    const name = this.#own.has(base) ? "this chat" : base.slice(0, 12);
    return several ? `${name} (sample ${Number(number ?? 0) + 1})` : name;
  }
}
