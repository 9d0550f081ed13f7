// The KV cache, block by block, on a canvas: who holds each one.

const GAP = 1;
const LARGEST = 13;
const SMALLEST = 4;
const HEIGHT = 240; // more blocks than fit in it share squares
const HUES = [200, 28, 150, 320, 260, 50, 100, 350, 178, 228, 290, 75];

export const canvasSize = (canvas, height) => {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
};

/** A colour of CSS as a canvas understands it: with variables and the theme resolved. */
export const colour = (canvas, css) => {
  canvas.style.color = css;
  return getComputedStyle(canvas).color;
};

/** Colours for requests: each keeps its own as long as it is here. */
export class Colours {
  #of = new Map();

  update(requests) {
    const here = new Set(requests);
    for (const id of this.#of.keys()) if (!here.has(id)) this.#of.delete(id);
    const uses = HUES.map(() => 0);
    for (const at of this.#of.values()) uses[at] += 1;
    for (const id of requests) {
      if (this.#of.has(id)) continue;
      const at = uses.indexOf(Math.min(...uses));
      uses[at] += 1;
      this.#of.set(id, at);
    }
  }

  get(id) {
    const at = this.#of.get(id) ?? 0;
    return `light-dark(hsl(${HUES[at]} 68% 45%), hsl(${HUES[at]} 70% 60%))`;
  }
}

export class BlockMap {
  #state = null;
  #codes = new Uint16Array(0);
  #at = null; // the square under the pointer or the keyboard
  #grid = { columns: 1, size: LARGEST, per: 1, squares: 0 };

  /** name: what to call one of the requests. */
  constructor({ canvas, readout, legend, name }) {
    Object.assign(this, { canvas, readout, legend, name, colours: new Colours() });
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#select(null));
    canvas.addEventListener("focus", () => this.#at === null && this.#select(0));
    canvas.addEventListener("blur", () => this.#select(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  show(blocks) {
    this.#state = blocks;
    const total = blocks.runs.reduce((sum, value, i) => (i % 2 ? sum : sum + value), 0);
    this.#codes = new Uint16Array(total);
    for (let i = 0, at = 0; i < blocks.runs.length; i += 2) {
      this.#codes.fill(blocks.runs[i + 1], at, (at += blocks.runs[i]));
    }
    this.colours.update(blocks.requests);
    this.draw();
    this.#describe();
    this.#list();
  }

  #layOut() {
    const width = this.canvas.clientWidth;
    const total = this.#codes.length;
    for (let per = 1; ; per *= 2) {
      const squares = Math.ceil(total / per);
      for (let size = LARGEST; size >= SMALLEST; size -= 1) {
        const columns = Math.max(1, Math.floor((width + GAP) / (size + GAP)));
        const rows = Math.ceil(squares / columns);
        if (rows * (size + GAP) <= HEIGHT) return { columns, size, per, squares, rows };
      }
    }
  }

  draw() {
    if (!this.canvas.clientWidth || !this.#codes.length) return;
    const grid = (this.#grid = this.#layOut());
    const pitch = grid.size + GAP;
    const { context } = canvasSize(this.canvas, grid.rows * pitch);
    const resolved = new Map();
    const paint = (css) => {
      if (!resolved.has(css)) resolved.set(css, colour(this.canvas, css));
      return resolved.get(css);
    };
    for (let square = 0; square < grid.squares; square += 1) {
      const x = (square % grid.columns) * pitch;
      const y = Math.floor(square / grid.columns) * pitch;
      this.#square(context, x, y, grid.size, this.#codeOf(square), paint);
    }
    if (this.#at !== null && this.#at < grid.squares) {
      context.strokeStyle = paint("var(--ink)");
      context.lineWidth = 2;
      const x = (this.#at % grid.columns) * pitch;
      const y = Math.floor(this.#at / grid.columns) * pitch;
      context.strokeRect(x - 0.5, y - 0.5, grid.size + 1, grid.size + 1);
    }
  }

  /** Of the blocks in a square, the one that says most: held before cached before free. */
  #codeOf(square) {
    const { per } = this.#grid;
    let code = 0;
    for (let at = square * per; at < Math.min((square + 1) * per, this.#codes.length); at += 1) {
      code = Math.max(code, this.#codes[at]);
      if (per > 1 && code > 1) break;
    }
    return code;
  }

  #square(context, x, y, size, code, paint) {
    if (code < 2) {
      context.fillStyle = paint("var(--block-free)");
      context.fillRect(x, y, size, size);
      if (code === 1) { // told apart by its form as well
        const inset = Math.max(1, Math.round(size / 4));
        context.fillStyle = paint("var(--block-cached)");
        context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
      }
      return;
    }
    const [count, holders] = this.#state.groups[code - 2];
    const { requests } = this.#state;
    context.fillStyle = paint(this.colours.get(requests[holders[0]]));
    context.fillRect(x, y, size, size);
    if (count > 1) { // cut in two: the colours of two of its holders
      context.fillStyle = paint(holders.length > 1 ? this.colours.get(requests[holders[1]]) : "var(--ink)");
      context.beginPath();
      context.moveTo(x + size, y);
      context.lineTo(x + size, y + size);
      context.lineTo(x, y + size);
      context.fill();
    }
  }

  #point(event) {
    const pitch = this.#grid.size + GAP;
    const column = Math.floor(event.offsetX / pitch);
    const square = Math.floor(event.offsetY / pitch) * this.#grid.columns + column;
    const inside = column < this.#grid.columns && square >= 0 && square < this.#grid.squares;
    this.#select(inside ? square : null);
  }

  #key(event) {
    const { columns, squares } = this.#grid;
    const at = this.#at ?? 0;
    const to = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns,
      Home: 0, End: squares - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < squares) this.#select(to);
  }

  #select(square) {
    this.#at = square;
    this.draw();
    this.#describe();
  }

  #describe() {
    this.readout.textContent = this.#at === null
      ? "Point at a block, or move with the arrow keys."
      : this.#words(this.#at);
  }

  #words(square) {
    const { per } = this.#grid;
    const first = square * per;
    const last = Math.min(first + per, this.#codes.length) - 1;
    if (last > first) {
      const codes = this.#codes.subarray(first, last + 1);
      const held = codes.filter((code) => code > 1).length;
      const cached = codes.filter((code) => code === 1).length;
      return `Blocks ${first + 1} to ${last + 1}: ${held} held, ${cached} cached, ${codes.length - held - cached} free`;
    }
    const code = this.#codes[first];
    const id = `Block ${first + 1}`;
    if (code === 0) return `${id}: free, reference count 0`;
    if (code === 1) return `${id}: cached, held by no request, reference count 0`;
    const [count, holders] = this.#state.groups[code - 2];
    const names = holders.slice(0, 4).map((at) => this.name(this.#state.requests[at], this.#state.requests));
    if (holders.length > 4) names.push(`${holders.length - 4} more`);
    return `${id}: ${count > 1 ? "shared by" : "held by"} ${names.join(", ")}; reference count ${count}`;
  }

  /** The requests with most blocks, by colour. */
  #list() {
    const blocks = this.#state;
    const counts = new Map();
    for (const code of this.#codes) if (code > 1) counts.set(code, (counts.get(code) ?? 0) + 1);
    const held = new Map();
    for (const [code, count] of counts) {
      for (const at of blocks.groups[code - 2][1]) held.set(at, (held.get(at) ?? 0) + count);
    }
    const most = [...held].sort((a, b) => b[1] - a[1]);
    const items = most.slice(0, 8).map(([at, count]) => {
      const id = blocks.requests[at];
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = this.colours.get(id);
      item.append(swatch, `${this.name(id, blocks.requests)}: ${count} ${count === 1 ? "block" : "blocks"}`);
      return item;
    });
    if (most.length > 8) {
      const more = document.createElement("li");
      more.textContent = `and ${most.length - 8} more requests`;
      items.push(more);
    }
    this.legend.replaceChildren(...items);
  }
}
