"""What the page at `/` makes of a model's Markdown, in headless Chromium."""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.chromium import expect
from support.page_stand_in import PageStandIn, ask

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SHOW = """
async ({ parts, isComplete }) => {
  const { MarkdownView } = await import("/static/markdown.js");
  const container = document.createElement("div");
  document.body.append(container);
  const view = new MarkdownView(container);
  let text = "";
  for (const part of parts) view.show((text += part), false);
  if (isComplete) view.show(text, true);
  return container.innerHTML;
}
"""
"""Returns the elements of a text that arrived in parts, as HTML."""

DOCUMENT = """# A *title*

Words with **bold**, *italic*, ~~gone~~, `code` and a [link](https://example.org/a).
A second line.

1. first
2. second
   - nested **one**

     its paragraph
   - nested `two`
10. tenth

> quoted
> > twice
>
> - a list

| name | count |
|:-----|------:|
| `a|b` | 1 |
| b | 2 |
Text after it.

```python
def f(x):

    return x  # ** not bold
```

    indented code
***
Last words, 2 ** 3, **bold**"""


@pytest.fixture(scope="module")
def shared_page(browser: "Browser") -> "Iterator[Page]":
    stand_in = PageStandIn(browser)
    yield stand_in.open()
    stand_in.context.close()
    assert stand_in.problems == []


@pytest.fixture
def page(shared_page: "Page") -> "Page":
    """The page without what an earlier test has shown; the chat itself stays empty."""
    shared_page.evaluate("document.querySelectorAll('body > div').forEach((container) => container.remove())")
    return shared_page


def shown(page: "Page", *parts: str, is_complete: bool = True) -> str:
    return page.evaluate(SHOW, {"parts": parts, "isComplete": is_complete})


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("# One\n### Three", "<h3>One</h3><h5>Three</h5>"),
        ("a **b** *c* ~~d~~ `e*f*`", "<p>a <strong>b</strong> <em>c</em> <s>d</s> <code>e*f*</code></p>"),
        ("snake_case_name 2*3*4 5 * 6", "<p>snake_case_name 2<em>3</em>4 5 * 6</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("Rule:\n---", "<p>Rule:</p><hr>"),
        ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"),
        (
            "|a|b|\n|-|-:|\n|1|2|",
            '<div class="table" tabindex="0"><table>'
            '<thead><tr><th class="left">a</th><th class="right">b</th></tr></thead>'
            '<tbody><tr><td class="left">1</td><td class="right">2</td></tr></tbody></table></div>',
        ),
        (
            "```py\n<b>\n```",
            '<div class="code"><div class="code-head">py'
            '<button class="quiet copy-code" type="button">Copy</button></div>'
            '<pre tabindex="0"><code>&lt;b&gt;</code></pre></div>',
        ),
    ],
)
def test_markdown_becomes_elements(page: "Page", text: str, elements: str) -> None:
    assert shown(page, text) == elements


@pytest.mark.parametrize(
    ("text", "words", "address"),
    [
        ("[words](https://example.org/a?b=1#c)", "words (example.org)", "https://example.org/a?b=1#c"),
        ("https://example.org/a, say", "https://example.org/a", "https://example.org/a"),
        ("<https://example.org>", "https://example.org", "https://example.org/"),
        ("[https://good.example](https://bad.example)", "https://good.example (bad.example)", "https://bad.example/"),
        ("<https://good.example@bad.example>", "https://good.example@bad.example (bad.example)", None),
        ("[аpple.com](http://аpple.com)", "аpple.com (xn--pple-43d.com)", "http://xn--pple-43d.com/"),
        ("[write](mailto:a@b.example)", "write (a@b.example)", "mailto:a@b.example"),
        ("<a@b.example>", "a@b.example", "mailto:a@b.example"),
        ("![a cat](https://example.org/cat.png)", "Image: a cat (example.org)", "https://example.org/cat.png"),
        ("[words][1]\n\n# Sources\n\n[1]: https://example.org", "words (example.org)", "https://example.org/"),
    ],
)
def test_link_says_where_it_leads(page: "Page", text: str, words: str, address: str | None) -> None:
    shown(page, text)
    link = page.locator("body > div a")
    expect(link).to_have_text(words)
    if address is not None:
        expect(link).to_have_attribute("href", address)
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(link).to_have_attribute("target", "_blank")


ELEMENTS = {
    *("p", "h3", "strong", "em", "s", "code", "pre", "br", "ul", "li", "blockquote"),
    *("table", "thead", "tbody", "tr", "th", "td", "div", "span", "button", "a"),
}
ATTACKS = [
    "<script>window.attacked = 1</script>",
    "<img src=x onerror=window.attacked=1>",
    "<svg onload=window.attacked=1><style>*{display:none}</style></svg>",
    "<a href='javascript:window.attacked=1'>x</a><iframe src=//evil.example></iframe>",
    "[x](javascript:window.attacked=1)",
    "[x](JaVaScRiPt:window.attacked=1)",
    "[x]( javascript:window.attacked=1)",
    "[x](<java\tscript:window.attacked=1>)",
    "[x](<\x01javascript:window.attacked=1>)",
    "[x](javascript&colon;window.attacked=1)",
    "[x](&#106;avascript:window.attacked=1)",
    "[x](&#x6A&#x61;vascript:window.attacked=1)",
    "[x](vbscript:window.attacked=1)",
    "[x](data:text/html,<script>window.attacked=1</script>)",
    "[x](file:///etc/passwd)",
    "[x](/v1/models) [x](//evil.example) [x](#top) [x](?a)",
    "[x][1]\n\n[1]: javascript:window.attacked=1",
    "<javascript:window.attacked=1> <data:text/html,x>",
    '[x](https://a.example "t\\" onclick=window.attacked=1 x=")',
    '[x](https://a.example/"onmouseover="window.attacked=1)',
    "![x](javascript:window.attacked=1) ![x](data:image/svg+xml,<svg/onload=window.attacked=1>)",
    "![x](https://evil.example/pixel.png) [![x](https://evil.example/a.png)](https://evil.example)",
    '```"><img src=x onerror=window.attacked=1>\n</code></pre><script>window.attacked=1</script>',
    "|<b onclick=window.attacked=1>|\n|:-:|\n|<img src=https://evil.example/x>|",
    "# <style>@import 'https://evil.example/x.css'</style>",
    "> - **[`<x>`](<javascript:window.attacked=1>) ~~[a](https://a.example/**",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_text_of_the_model_becomes_no_markup_of_its_own(page: "Page", text: str) -> None:
    shown(page, text)
    shown(page, *text)
    links = page.locator("body > div a")
    links.evaluate_all("(links) => links.forEach((link) => link.dispatchEvent(new Event('click')))")
    found = page.locator("body > div *").evaluate_all(
        """(elements) => elements.map(({ localName, attributes }) => [
          localName, Object.fromEntries([...attributes].map(({ name, value }) => [name, value]))
        ])"""
    )
    for name, attributes in found:
        assert name in ELEMENTS
        assert set(attributes) <= {"class", "tabindex", "type", "href", "title", "target", "rel"}
        if "href" in attributes:
            assert re.match(r"https://[a-z.]+/", attributes["href"])
            assert attributes["title"] == attributes["href"]
    assert page.evaluate("window.attacked") is None


@pytest.mark.parametrize("size", [1, 7, 60])
def test_text_that_arrives_in_parts_ends_as_if_it_had_arrived_at_once(page: "Page", size: int) -> None:
    parts = [DOCUMENT[at : at + size] for at in range(0, len(DOCUMENT), size)]
    assert shown(page, *parts) == shown(page, DOCUMENT)


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("Some **bold wor", "<p>Some <strong>bold wor</strong></p>"),
        ("Some **bold*", "<p>Some <strong>bold</strong></p>"),
        ("Some **", "<p>Some</p>"),
        ("Some `co", "<p>Some <code>co</code></p>"),
        ("Some `", "<p>Some </p>"),
        ("2 ** 3 and 2**10 and `2 ** 3", "<p>2 ** 3 and 2**10 and <code>2 ** 3</code></p>"),
        ("Items:\n-", "<p>Items:</p>"),
        ("Items:\n\n1", "<p>Items:</p>"),
        ("A table:\n\n| a | b", "<p>A table:</p>"),
        ("A table:\n\n| a | b |\n|--", "<p>A table:</p>"),
    ],
)
def test_end_of_an_incomplete_text_shows_no_marks_that_vanish_later(page: "Page", text: str, elements: str) -> None:
    assert shown(page, text, is_complete=False) == elements


def test_code_whose_end_has_not_arrived_is_code(page: "Page") -> None:
    expected = '<p>See:</p><div class="code"><div class="code-head">py'
    assert shown(page, "See:\n```py\nx = `1` # <b>\n\n\ny", is_complete=False).startswith(expected)
    assert page.locator("body > div code").inner_text() == "x = `1` # <b>\n\n\ny"


def test_growing_text_makes_only_its_last_block_again(page: "Page") -> None:
    text = DOCUMENT * 20
    made, kept = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/static/markdown.js");
          const container = document.createElement("div");
          document.body.append(container);
          let made = 0;
          document.createElement = (name) => (made++, Document.prototype.createElement.call(document, name));
          const view = new MarkdownView(container);
          const first = [];
          for (let end = 0; end <= text.length; end += 50) {
            view.show(text.slice(0, end), false);
            [...container.children].slice(0, -1).forEach((block, index) => (first[index] ??= block));
          }
          delete document.createElement;
          return [made, first.every((block, index) => container.children[index] === block)];
        }""",
        text,
    )
    assert kept
    assert made < 10 * page.locator("body > div *").count()


UNITS = [
    *("*", "[", "|", "`", "<", "&", "~~", "\\", "**a", "a**b", "_a", "[a](", "![", "a|", "http://"),
    *("> ", "- ", "\n|", " "),
]


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=json.dumps)
def test_time_to_show_a_text_grows_in_proportion_to_it(page: "Page", unit: str) -> None:
    """Four times the text may take at most ten times as long; if the time were quadratic, it would take 16 times."""
    short, long = page.evaluate(
        """async (unit) => {
          const { MarkdownView } = await import("/static/markdown.js");
          const time = (length) => {
            const text = unit.repeat(length / unit.length);
            const times = [1, 2, 3].map(() => {
              const view = new MarkdownView(document.createElement("div"));
              const begunAt = performance.now();
              view.show(text, false);
              view.show(text + "a", false);
              view.show(text + "a", true);
              return performance.now() - begunAt;
            });
            return Math.min(...times);
          };
          time(1000);
          return [time(25_000), time(100_000)];
        }""",
        unit,
    )
    assert long < 10 * max(short, 20)


def test_code_is_copied_by_its_button_without_its_marks(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    stand_in.deltas = [{"content": "Run:\n```sh\nls -l\n"}, {"content": "pwd\n```\nDone."}]
    ask(page, "<b>hello</b> **not bold**")
    expect(page.locator(".prompt")).to_have_text("<b>hello</b> **not bold**")
    page.evaluate("document.execCommand = (name) => { window.copied = document.activeElement.value; return true; }")
    button = page.locator(".answer .copy-code")
    button.click()
    expect(button).to_have_text("Copied")
    assert page.evaluate("window.copied") == "ls -l\npwd"
    expect(button).to_have_text("Copy")
