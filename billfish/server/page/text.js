// A model's text as nodes: paragraphs, code, emphasis. Nodes are made one by one and filled with
// plain text, so whatever a model writes stays text.

/** Splits into {code, text, language} and {text} blocks. An open fence counts as code already. */
export function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    const joined = lines.join("\n");
    lines = [];
    if (fence) blocks.push({ code: true, language: fence.language, text: joined });
    else if (joined.trim()) blocks.push({ text: joined.replace(/^\n+|\s+$/g, "") });
  };
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
    if (!fence && mark) {
      flush();
      fence = { mark: mark[1], language: mark[2].trim() };
    } else if (fence && mark && !mark[2] && mark[1].startsWith(fence.mark)) {
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
  const heading = /^#{1,6} +(.*)$/.exec(text);
  if (heading) {
    const strong = document.createElement("strong");
    strong.textContent = heading[1];
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
