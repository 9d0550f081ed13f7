// What the latest steps computed, one bar a step, the newest on the right.

import { canvasSize, colour } from "./blocks.js";

const BAR = 4;
const HEIGHT = 96;
const KEPT = 512;
const [STEP, SECONDS, PREFILL, DECODE, , REQUESTS, RUNNING, WAITING] = Array(9).keys();

export class Strip {
  #steps = [];
  #at = null; // the number of the step under the pointer or the keyboard

  constructor({ canvas, readout }) {
    Object.assign(this, { canvas, readout });
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#select(null));
    canvas.addEventListener("blur", () => this.#select(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** The number of the latest step; -1 before the first. */
  get last() {
    return this.#steps.at(-1)?.[STEP] ?? -1;
  }

  reset() {
    this.#steps = [];
  }

  add(steps) {
    this.#steps = [...this.#steps, ...steps].slice(-KEPT);
    this.draw();
    this.#describe();
  }

  #shown() {
    return this.#steps.slice(-Math.max(1, Math.floor(this.canvas.clientWidth / (BAR + 1))));
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const { context, width } = canvasSize(this.canvas, HEIGHT);
    const steps = this.#shown();
    const tokens = (step) => step[PREFILL] + step[DECODE];
    const most = Math.max(1, ...steps.map(tokens));
    // By square root: a decode of few tokens is still seen beside a prefill of hundreds.
    const height = (count) => Math.sqrt(count / most) * (HEIGHT - 18);
    const [prefillColour, decodeColour, ink, muted] = ["prefill", "decode", "ink", "muted"].map(
      (name) => colour(this.canvas, `var(--${name})`),
    );
    steps.forEach((step, i) => {
      const x = width - (steps.length - i) * (BAR + 1);
      const whole = tokens(step) ? Math.max(2, height(tokens(step))) : 0;
      const prefill = whole * (step[PREFILL] / Math.max(1, tokens(step)));
      context.fillStyle = prefillColour;
      context.fillRect(x, HEIGHT - prefill, BAR, prefill);
      context.fillStyle = decodeColour;
      context.fillRect(x, HEIGHT - whole, BAR, whole - prefill);
      if (step[STEP] === this.#at) {
        context.strokeStyle = ink;
        context.lineWidth = 1.5;
        context.strokeRect(x - 1, HEIGHT - whole - 2, BAR + 2, whole + 2);
      }
    });
    context.fillStyle = muted;
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    if (steps.length) context.fillText(`highest: ${most} tokens`, 0, 10);
  }

  #point(event) {
    const steps = this.#shown();
    const from = this.canvas.clientWidth - steps.length * (BAR + 1);
    this.#select(steps[Math.floor((event.offsetX - from) / (BAR + 1))]?.[STEP] ?? null);
  }

  #key(event) {
    const steps = this.#shown();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined || !steps.length) return;
    event.preventDefault();
    const now = steps.findIndex((step) => step[STEP] === this.#at);
    const to = now < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, now + move));
    this.#select(steps[to][STEP]);
  }

  #select(step) {
    this.#at = step;
    this.draw();
    this.#describe();
  }

  #describe() {
    const step = this.#steps.find((each) => each[STEP] === this.#at) ?? this.#steps.at(-1);
    if (!step) {
      this.readout.textContent = "No step yet.";
      return;
    }
    const parts = [
      `Step ${step[STEP]}: ${step[PREFILL]} prefill and ${step[DECODE]} decode tokens`,
      `${step[REQUESTS]} ${step[REQUESTS] === 1 ? "request" : "requests"}`,
      `${(step[SECONDS] * 1000).toFixed(1)} ms`,
      `then ${step[RUNNING]} running, ${step[WAITING]} waiting`,
    ];
    this.readout.textContent = parts.join(" · ");
  }
}
