// Copying to the clipboard, and the buttons that do it.

const COPIED_MS = 1500;

/** Copy `text`, and say on `button` for a moment whether that worked. */
export async function copyWithButton(button, text) {
  button.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

/** Copy `text` to the clipboard; return whether that worked. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have this interface on https and localhost only; elsewhere the older command works.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
