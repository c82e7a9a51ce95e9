// A model's text as elements: paragraphs, fenced code, `code` and **bold**. The text never becomes markup.

/** Show `text` in `container`. Only the blocks that changed since the last call are made again. */
export function showText(container, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const key = `${block.kind}:${block.text}`;
    const shown = container.children[index];
    if (shown?.source === key) return;
    const element = block.kind === "code" ? codeBlock(block.text) : paragraph(block.text);
    element.source = key;
    if (shown) shown.replaceWith(element);
    else container.append(element);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function blocksOf(text) {
  const blocks = [];
  text.split(/^[ \t]*```[^\n`]*(?:\n|$)/m).forEach((part, index) => {
    if (index % 2 === 1) {
      blocks.push({ kind: "code", text: part.replace(/\n$/, "") });
    } else {
      const paragraphs = part.split(/\n\s*\n/).map((each) => each.replace(/^\n+|\s+$/g, ""));
      blocks.push(...paragraphs.filter(Boolean).map((each) => ({ kind: "paragraph", text: each })));
    }
  });
  return blocks;
}

function codeBlock(text) {
  const block = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = text;
  block.tabIndex = 0; // A long line scrolls, with the keyboard too.
  block.append(code);
  return block;
}

function paragraph(text) {
  const element = document.createElement("p");
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`.+`$/.test(part)) element.append(wrapped("code", part.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(part)) element.append(wrapped("strong", part.slice(2, -2)));
    else element.append(part);
  }
  return element;
}

function wrapped(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}
