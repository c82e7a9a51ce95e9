// Markdown of a model as elements. markdown-it makes tokens of it, and this file makes elements of the tokens. No text is
// ever parsed as HTML: elements come from `createElement`, text from text nodes, and addresses from `targetOf`.

import markdownIt from "./markdown-it.js";

const PROTOCOLS = ["http:", "https:", "mailto:"];
const FIRST_HEADING = 3; // The page has headings of the levels 1 and 2.
const LONGEST_MARK = 40; // Characters of a line that is looked at as a possible mark of a block.

const parser = markdownIt("default", { html: false, linkify: true, breaks: true });
parser.disable("lheading"); // Models write "---" below a paragraph as a rule, not to make a heading of the paragraph.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (address) => targetOf(address) !== null; // Other links stay as they are written.
parser.core.ruler.before("inline", "close_last_span", closeLastSpan);

/** An answer that grows: its finished blocks are made once, and its last block again whenever the text has grown. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.container.replaceChildren();
    this.start = 0; // Where the last block begins in the text.
    this.numFinished = 0; // Blocks before it, each a child of the container.
    this.references = {};
  }

  /** Show `text`, which begins with the text of the last call. Until it `isComplete`, its end may be held back. */
  show(text, isComplete) {
    if (isComplete && Object.keys(this.references).length) this.start = this.numFinished = 0; // They may follow their use.
    const rest = text.slice(this.start);
    const part = isComplete ? rest : rest.slice(0, clearEnd(rest));
    const tokens = parser.parse(part, { references: this.references, isComplete });
    const blocks = elementsOf(tokens);
    blocks.forEach((made, index) => {
      const shown = this.container.children[this.numFinished + index];
      if (shown) update(shown, made);
      else this.container.append(made);
    });
    while (this.container.children.length > this.numFinished + blocks.length) this.container.lastElementChild.remove();
    const last = tokens.findLast(({ level, nesting, map }) => level === 0 && nesting >= 0 && map);
    if (last === undefined) return;
    this.start += offsetOfLine(part, last.map[0]);
    this.numFinished += blocks.length - 1;
  }
}

/** Return where the end of a growing text begins whose meaning the next characters decide: marks, the head of a table. */
function clearEnd(text) {
  const start = text.lastIndexOf("\n") + 1;
  if (!isUnclear(text.slice(start))) return text.length;
  const [head, headStart] = lineBefore(text, start);
  return isTableRow(head) && !isTableRow(lineBefore(text, headStart)[0]) ? headStart : start;
}

function isUnclear(line) {
  if (isTableRow(line)) return true;
  return line.length <= LONGEST_MARK && /^(?:[\s>=*+#~`|:_-]*|[\s>]*\d{1,9}[.)]?\s*)$/.test(line);
}

function isTableRow(line) {
  return line.trimStart().startsWith("|");
}

/** Return the line that ends before the line at `start`, and its own start. */
function lineBefore(text, start) {
  const begin = start < 2 ? 0 : text.lastIndexOf("\n", start - 2) + 1;
  return [text.slice(begin, Math.max(start - 1, 0)), begin];
}

/** Close the code or the bold text at the end of an incomplete text, so that it does not change its look later. */
function closeLastSpan({ tokens, env }) {
  if (env.isComplete) return;
  const token = tokens.findLast(({ type }) => ["inline", "fence", "code_block", "hr"].includes(type));
  if (token?.type === "inline") token.content = closed(token.content);
}

function closed(text) {
  const outside = text.replace(/`[^`]*`/g, (code) => "x".repeat(code.length)); // Marks within code mean nothing.
  if (outside.includes("`")) return outside.endsWith("`") ? text.slice(0, -1) : `${text}\``;
  let end = outside.length; // Of what comes before marks at the end.
  while (end > 0 && /[*\s]/.test(outside[end - 1])) end--;
  const mark = outside.lastIndexOf("**", end - 1);
  const opens = end > 0 && mark >= 0 && !/[\w*\\]/.test(outside[mark - 1] ?? "") && /\S/.test(outside[mark + 2] ?? " ");
  if (opens) return `${text.slice(0, end)}**`;
  return /\s/.test(outside[end] ?? "") || end === 0 ? text.slice(0, end) : text;
}

/** Return the address of a link that may be followed, or null. The browser's parser decides, as when it is followed. */
function targetOf(address) {
  try {
    const target = new URL(address);
    return PROTOCOLS.includes(target.protocol) ? target : null;
  } catch {
    return null; // It is relative: a model knows no page of this server.
  }
}

function offsetOfLine(text, line) {
  const ends = /\r\n?|\n/g;
  for (; line > 0; line--) ends.exec(text);
  return ends.lastIndex;
}

/** Return the elements of the top-level blocks of `tokens`. */
function elementsOf(tokens) {
  const root = element("div");
  fill(root, tokens);
  return [...root.children];
}

/** Add what `tokens` stand for to `root`. */
function fill(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === 1) {
      open.push(token.hidden ? parent : opened(token)); // The text of a list without empty lines has no paragraphs.
      if (token.type === "table_open") parent.append(element("div", { className: "table", tabIndex: 0 }, open.at(-1)));
      else if (!token.hidden) parent.append(open.at(-1));
    } else if (token.nesting === -1) {
      const complete = open.pop();
      if (token.type === "link_close") showTarget(complete);
    } else {
      addLeaf(parent, token);
    }
  }
}

function opened(token) {
  switch (token.type) {
    case "heading_open":
      return element(`h${Math.min(Number(token.tag[1]) + FIRST_HEADING - 1, 6)}`);
    case "link_open":
      return link(token.attrGet("href"));
    case "ordered_list_open":
      return element("ol", { start: Number(token.attrGet("start") ?? 1) });
    case "th_open":
    case "td_open":
      return element(token.tag, { className: /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1] ?? "left" });
    default:
      return element(token.tag); // The parser knows a few tags; the text has no part in them.
  }
}

function addLeaf(parent, token) {
  switch (token.type) {
    case "inline":
      fill(parent, token.children);
      break;
    case "fence":
    case "code_block":
      parent.append(codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/, 1)[0]));
      break;
    case "code_inline":
      parent.append(element("code", {}, token.content));
      break;
    case "image":
      addImage(parent, token);
      break;
    case "hr":
      parent.append(element("hr"));
      break;
    case "softbreak":
    case "hardbreak":
      parent.append(element("br"));
      break;
    default:
      parent.append(token.content);
  }
}

/** Add a link to an image: loading the image would tell its host who reads the answer. */
function addImage(parent, token) {
  const words = `Image: ${token.content || "no description"}`;
  if (parent.closest("a")) {
    parent.append(words);
    return;
  }
  const image = link(token.attrGet("src"));
  image.append(words);
  parent.append(image);
  showTarget(image);
}

/** Return a link without its text; without an address if that must not be followed. */
function link(address) {
  const target = targetOf(address);
  if (target === null) return element("a");
  return element("a", { href: target.href, title: target.href, target: "_blank", rel: "noopener noreferrer" });
}

/** Add where a link leads, unless its text says so. */
function showTarget(made) {
  const target = targetOf(made.href);
  if (target === null) return;
  const words = made.textContent;
  const place = target.host || target.pathname; // Of `mailto` addresses, the mailbox.
  const isTarget = words === place || (targetOf(words)?.href === target.href && words.includes(place));
  if (isTarget && !target.username) return;
  made.append(element("span", { className: "target" }, ` (${place})`));
}

function codeBlock(text, language) {
  const head = element("div", { className: "code-head" }, language || "code");
  head.append(element("button", { className: "quiet copy-code", type: "button" }, "Copy"));
  // A long line scrolls, with the keyboard too.
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, element("code", {}, text)));
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Make `shown` the same as `made`, with as few changes as possible: what is selected or scrolled stays so. */
function update(shown, made) {
  if (shown.nodeName !== made.nodeName) {
    shown.replaceWith(made);
  } else if (shown.nodeType === Node.TEXT_NODE) {
    if (made.data.startsWith(shown.data)) shown.appendData(made.data.slice(shown.data.length));
    else shown.data = made.data;
  } else {
    for (const { name } of [...shown.attributes]) if (!made.hasAttribute(name)) shown.removeAttribute(name);
    for (const { name, value } of made.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
    const children = [...made.childNodes];
    children.forEach((child, index) => {
      if (shown.childNodes[index]) update(shown.childNodes[index], child);
      else shown.append(child);
    });
    while (shown.childNodes.length > children.length) shown.lastChild.remove();
  }
}
