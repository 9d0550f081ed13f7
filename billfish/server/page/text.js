// A model's text as nodes: paragraphs, code, emphasis. Nodes are made one by one and filled with
// plain text, so whatever a model writes stays text.

// Nothing here may take more time than the text is long: a model may write spaces, or the same mark,
// without an end, and all of it is shown again with every token.

/** A line of three or more ` or ~, and the language behind them; null for others. */
function fenceOf(line) {
  const text = line.trimStart();
  const mark = text[0];
  if ((mark !== "`" && mark !== "~") || line.length - text.length > 3) return null;
  let length = 1;
  while (text[length] === mark) length += 1;
  const language = text.slice(length).trim();
  return length < 3 || language.includes("`") ? null : { mark: text.slice(0, length), language };
}

/** Splits into {code, text, language} and {text} blocks. An open fence counts as code already. */
export function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    const joined = lines.join("\n");
    lines = [];
    if (fence) blocks.push({ code: true, language: fence.language, text: joined });
    else if (joined.trim()) blocks.push({ text: joined.trimEnd() });
  };
  for (const line of text.split("\n")) {
    const found = fenceOf(line);
    if (!fence && found) {
      flush();
      fence = found;
    } else if (fence && found && !found.language && found.mark.startsWith(fence.mark)) {
      flush();
      fence = null;
    } else if (!fence && !line.trim()) {
      flush();
    } else {
      lines.push(line);
    }
  }
  if (fence || lines.length) flush();
  return blocks;
}

function paragraph(text) {
  const element = document.createElement("p");
  const heading = /^#{1,6} /.exec(text);
  if (heading && !text.includes("\n")) {
    const strong = document.createElement("strong");
    strong.textContent = text.slice(heading[0].length).trimStart();
    element.append(strong);
    return element;
  }
  // Code between backticks, and bold between double asterisks.
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    const code = part.length > 2 && part[0] === "`" && part.at(-1) === "`";
    const bold = part.length > 4 && part.startsWith("**") && part.endsWith("**");
    if (!code && !bold) {
      element.append(part);
      continue;
    }
    const inner = document.createElement(code ? "code" : "strong");
    inner.textContent = code ? part.slice(1, -1) : part.slice(2, -2);
    element.append(inner);
  }
  return element;
}

function codeBlock({ text, language }) {
  const element = document.createElement("pre");
  element.tabIndex = 0; // it scrolls
  element.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  const code = document.createElement("code");
  code.textContent = text;
  element.append(code);
  return element;
}

/** Keeps `element` showing a text that grows; only blocks that change are made anew. */
export class Rendered {
  #shown = [];

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const blocks = split(text);
    let at = 0;
    const same = (a, b) => a && a.code === b.code && a.text === b.text && a.language === b.language;
    while (at < blocks.length && same(this.#shown[at], blocks[at])) at += 1;
    while (this.element.childNodes.length > at) this.element.lastChild.remove();
    for (const block of blocks.slice(at)) {
      this.element.append(block.code ? codeBlock(block) : paragraph(block.text));
    }
    this.#shown = blocks;
  }
}
