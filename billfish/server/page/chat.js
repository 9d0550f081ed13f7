// The conversation: sends it, shows answers as they come, several samples side by side.

import { ApiError, events, explain, request } from "./api.js";
import { Rendered } from "./text.js";

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have no such thing for pages that came over plain HTTP from another machine.
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("not copied");
}

/** One sample of an answer. */
class Sample {
  constructor(index, of) {
    this.text = "";
    this.reason = null;
    this.body = make("div", { className: "text" });
    this.meta = make("p", { className: "meta" });
    this.buttons = make("div", { className: "buttons" });
    this.name = of > 1 ? `Sample ${index + 1}` : "Answer";
    this.element = make("article", { className: "sample" });
    this.element.setAttribute("aria-label", this.name);
    if (of > 1) this.element.append(make("h3", { textContent: this.name }));
    this.element.append(this.body, make("footer", {}, this.meta, this.buttons));
    this.rendered = new Rendered(this.body);
  }

  show() {
    this.rendered.show(this.text);
  }
}

/** One message of the user's, and what was answered. */
class Turn {
  constructor(text) {
    this.text = text;
    this.samples = [];
    this.chosen = 0;
    this.answers = make("div", { className: "answers" });
    this.error = make("p", { className: "error", hidden: true });
    const said = make("div", { className: "user", textContent: text });
    said.setAttribute("aria-label", "You");
    said.setAttribute("role", "article");
    this.element = make("div", { className: "turn" }, said, this.answers, this.error);
  }

  get answer() {
    return this.samples[this.chosen]?.text ?? "";
  }
}

export class Chat {
  #turns = [];
  #abort = null;
  #again = null;

  /** onKey: called when the server wants a key. onBusy: with whether an answer is being written.
   * onRequest: with the id of each request sent. */
  constructor({ transcript, welcome, settings, onKey, onBusy, onRequest }) {
    Object.assign(this, { transcript, welcome, settings, onKey, onBusy, onRequest });
  }

  get busy() {
    return this.#abort !== null;
  }

  async send(text) {
    if (this.busy) return;
    const turn = new Turn(text);
    this.#turns.push(turn);
    this.welcome.hidden = true;
    this.transcript.append(turn.element);
    await this.#answer(turn);
  }

  /** Answers the last message anew. */
  async regenerate() {
    const turn = this.#turns.at(-1);
    if (turn && !this.busy) await this.#answer(turn);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    for (const turn of this.#turns) turn.element.remove();
    this.#turns = [];
    this.welcome.hidden = false;
  }

  #messages(last) {
    const messages = [];
    if (this.settings.system) messages.push({ role: "system", content: this.settings.system });
    for (const turn of this.#turns) {
      messages.push({ role: "user", content: turn.text });
      if (turn === last) break;
      if (turn.answer) messages.push({ role: "assistant", content: turn.answer });
    }
    return messages;
  }

  async #answer(turn) {
    const abort = (this.#abort = new AbortController());
    this.onBusy(true);
    const options = this.settings.options;
    const count = options.n ?? 1;
    turn.chosen = 0;
    turn.error.hidden = true;
    turn.samples = Array.from({ length: count }, (_, index) => new Sample(index, count));
    turn.answers.replaceChildren(...turn.samples.map((sample) => sample.element));
    turn.answers.dataset.samples = count;
    turn.answers.setAttribute("aria-busy", "true"); // read out when it is complete
    turn.element.classList.add("writing");
    this.#again?.remove();
    this.#toEnd();
    let failure = null;
    const timing = { began: performance.now(), first: null, usage: null };
    try {
      await this.#read(turn, options, abort.signal, timing);
    } catch (error) {
      if (!abort.signal.aborted) failure = error;
    }
    const stopped = abort.signal.aborted;
    const near = this.#nearEnd();
    this.#abort = null;
    turn.element.classList.remove("writing");
    for (const sample of turn.samples) this.#end(turn, sample, stopped, timing);
    turn.answers.setAttribute("aria-busy", "false");
    if (this.#turns.includes(turn)) this.#offerAgain(turn, failure);
    this.onBusy(false);
    if (failure) this.#fail(turn, failure);
    if (near) this.#toEnd();
  }

  async #read(turn, options, signal, timing) {
    if (this.settings.model === null) await this.settings.findModel();
    const id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.onRequest(id);
    const body = {
      model: this.settings.model,
      messages: this.#messages(turn),
      stream: true,
      stream_options: { include_usage: true },
      ...options,
    };
    const response = await request("v1/chat/completions", {
      body, signal, headers: { "X-Request-Id": id },
    });
    let drawing = false;
    const draw = () => {
      drawing = false;
      const near = this.#nearEnd();
      for (const sample of turn.samples) sample.show();
      if (near) this.#toEnd();
    };
    for await (const event of events(response)) {
      timing.usage = event.usage ?? timing.usage;
      for (const choice of event.choices) {
        const sample = turn.samples[choice.index];
        if (choice.delta.content) {
          timing.first ??= performance.now();
          sample.text += choice.delta.content;
        }
        sample.reason = choice.finish_reason ?? sample.reason;
      }
      if (!drawing) {
        drawing = true;
        requestAnimationFrame(draw);
      }
    }
  }

  #toEnd() {
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  #nearEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.transcript;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  #end(turn, sample, stopped, { began, first, usage }) {
    sample.show();
    const facts = [];
    if (stopped && !sample.reason) facts.push("stopped");
    if (sample.reason === "length") facts.push("cut off at the most tokens");
    if (first !== null) facts.push(`first token after ${Math.round(first - began)} ms`);
    if (usage && sample === turn.samples[0]) {
      const seconds = (performance.now() - first) / 1000;
      const all = turn.samples.length > 1 ? " in all" : "";
      facts.push(`${usage.completion_tokens} tokens${all}`);
      if (first !== null && seconds > 0.05) {
        facts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
      }
      const cached = usage.prompt_tokens_details?.cached_tokens;
      if (cached) facts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
    }
    sample.meta.textContent = facts.join(" · ");
    if (!sample.text) {
      if (!stopped && sample.reason) sample.body.textContent = "(an empty answer)";
      return;
    }
    const copy = make("button", { type: "button", className: "quiet", textContent: "Copy" });
    copy.addEventListener("click", async () => {
      copy.textContent = await copyText(sample.text).then(() => "Copied", () => "Could not copy");
    });
    sample.buttons.replaceChildren(copy);
    if (turn.samples.length > 1) sample.buttons.append(this.#chooser(turn, sample));
  }

  #chooser(turn, sample) {
    const choose = make("button", {
      type: "button", className: "quiet choose", textContent: "Continue with this one",
    });
    const mark = () => {
      for (const each of turn.samples) {
        const chosen = each === turn.samples[turn.chosen];
        each.element.classList.toggle("chosen", chosen);
        each.buttons.querySelector(".choose")?.setAttribute("aria-pressed", chosen);
      }
    };
    choose.addEventListener("click", () => {
      turn.chosen = turn.samples.indexOf(sample);
      mark();
    });
    queueMicrotask(mark);
    return choose;
  }

  #offerAgain(turn, failure) {
    this.#again = make("button", {
      type: "button", className: "quiet again",
      textContent: failure ? "Try again" : "Regenerate",
    });
    this.#again.addEventListener("click", () => this.regenerate());
    const place = turn.samples.length > 1 || failure ? turn.element : turn.samples[0].buttons;
    place.append(this.#again);
  }

  #fail(turn, error) {
    turn.error.textContent = explain(error, turn.samples.some((sample) => sample.text));
    turn.error.hidden = false;
    if (error instanceof ApiError && error.status === 401) {
      this.onKey(explain(error), () => this.regenerate());
    }
  }
}
