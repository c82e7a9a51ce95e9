"""Contrast of texts and controls in Chromium, as WCAG 2.2 (1.4.3 and 1.4.11, level AA) defines it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_MEASURE = """
() => {
  const parsed = (color) => {
    const numbers = (color.match(/-?[\\d.]+(e-?\\d+)?%?/g) ?? []).map(parseFloat);
    if (!/^(rgba?|color)\\(/.test(color) || numbers.length < 3) throw new Error(`unknown color: ${color}`);
    const scale = color.startsWith("color(srgb ") ? 1 : 255;
    return { rgb: numbers.slice(0, 3).map((value) => value / scale), alpha: numbers[3] ?? 1 };
  };
  const over = ({ rgb, alpha }, below) => rgb.map((value, index) => alpha * value + (1 - alpha) * below[index]);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const background = (element) => {
    const below = element.parentElement ? background(element.parentElement) : [1, 1, 1];
    return over(parsed(getComputedStyle(element).backgroundColor), below);
  };
  const opacity = (element) =>
    element ? Number(getComputedStyle(element).opacity) * opacity(element.parentElement) : 1;
  const contrast = (element, color, surface = background(element)) => {
    const { rgb, alpha } = parsed(color);
    return ratio(over({ rgb, alpha: alpha * opacity(element) }, surface), surface);
  };

  const found = [];
  const note = (kind, element, value, least) => {
    const words = (element.textContent || element.placeholder || "").trim().slice(0, 30);
    found.push({ name: `${kind} of ${element.localName}#${element.id}.${element.classList} ${words}`, value, least });
  };
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility({ visibilityProperty: true }) || element.closest("svg[aria-hidden]")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const isField = element.matches("input, textarea, select");
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if ((hasText && element.localName !== "option") || element.value) {
      note("text", element, contrast(element, element instanceof SVGElement ? style.fill : style.color), least);
    }
    if (element.placeholder) {
      note("placeholder", element, contrast(element, getComputedStyle(element, "::placeholder").color), least);
    }
    if (isField && !element.matches("select")) {
      const frame = element.closest("#composer") ?? element;
      const around = background(frame.parentElement);
      note("border", element, contrast(frame, getComputedStyle(frame).borderTopColor, around), 3);
    }
    if (element.matches(".curve")) note("curve", element, contrast(element, style.stroke), 3);
    const icon = element.querySelector?.(":scope > svg[aria-hidden]");
    if (icon) note("icon", element, contrast(element, getComputedStyle(icon).stroke), 3);
  }
  return found;
}
"""


def weak_contrasts(page: "Page") -> list[str]:
    """Return the visible texts below a contrast of 4.5 (large ones 3), and fields, icons and curves below 3.

    Raises AssertionError if the page shows fewer than ten texts, which means that they were not found.
    """
    found = page.evaluate(_MEASURE)
    assert sum(each["name"].startswith("text") for each in found) >= 10
    weak = [f"{each['name']}: {each['value']:.2f}" for each in found if each["value"] < each["least"]]
    return sorted(set(weak))


def without_focus_ring(page: "Page") -> list[str]:
    """Go through the page with Tab. Return the elements that look the same with the focus as without it.

    Raises AssertionError if fewer than ten elements get the focus.
    """
    without = []
    seen = set()
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    while True:
        page.keyboard.press("Tab")
        name, is_marked = page.evaluate(
            """() => {
              const look = (element) => {
                const { outlineStyle, outlineWidth, borderTopColor } = getComputedStyle(element);
                return outlineStyle === "none" ? borderTopColor : outlineWidth;
              };
              const element = document.activeElement;
              const marked = element.closest("#composer") && element.localName === "textarea"
                ? element.parentElement : element;
              const focused = look(marked);
              element.blur();
              const isMarked = focused !== look(marked);
              element.focus({ focusVisible: true });
              const index = [...document.querySelectorAll("*")].indexOf(element);
              return [`${element.localName}#${element.id}.${element.classList} (${index})`, isMarked];
            }"""
        )
        if name in seen or name.startswith("body"):
            assert len(seen) >= 10
            return without
        seen.add(name)
        if not is_marked:
            without.append(name)
