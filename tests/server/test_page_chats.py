"""The chats that a browser keeps for the page at `/`, in headless Chromium."""

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from support.chromium import expect
from support.page_stand_in import PageStandIn, ask

if TYPE_CHECKING:
    from playwright.sync_api import Page

KEY = "a-secret-key"


def entries(page: "Page") -> dict[str, str]:
    """Return the chats in the browser's storage, by name."""
    kept = page.evaluate("({ ...localStorage })")
    return {name: entry for name, entry in kept.items() if name.startswith("vllm_mp.chat.")}


def prompts(page: "Page") -> list[str]:
    return page.locator(".prompt").all_inner_texts()


def set_setting(page: "Page", name: str, value: str) -> None:
    if page.locator("#settings").is_hidden():
        page.get_by_role("button", name="Settings").click()
    page.locator(f"#settings [name={name}]").fill(value)


def another_tab(stand_in: PageStandIn, page: "Page") -> "Page":
    """Open a duplicate of a tab, as a browser makes it: with the values of its session."""
    other = stand_in.open()
    session = page.evaluate("({ ...sessionStorage })")
    other.evaluate("(session) => Object.assign(sessionStorage, session)", session)
    other.reload()
    return other


def fill_storage(page: "Page", num_chats: int, characters: int) -> None:
    """Write chats of the given length to the browser's storage; the first is the oldest."""
    page.evaluate(
        """([count, characters]) => {
          for (let index = 0; index < count; index++) {
            const head = { version: "1", changed: 1000 + index, title: `chat ${index}` };
            const turn = { prompt: `chat ${index}`, text: "x".repeat(characters), thought: "", calls: [], speeds: [] };
            const content = { settings: {}, turns: [turn] };
            localStorage[`vllm_mp.chat.${index}`] = `${JSON.stringify(head)}\n${JSON.stringify(content)}`;
          }
        }""",
        [num_chats, characters],
    )


def test_reload_keeps_the_conversation_its_settings_and_what_the_model_is_told(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    set_setting(page, "system", "Be brief.")
    set_setting(page, "temperature", "0.5")
    stand_in.deltas = [{"reasoning_content": "Hm."}, {"content": "# Fine\n"}, {"content": "**thanks**"}]
    ask(page, "How are you?")
    stats = page.locator(".stats").inner_text()
    page.reload()
    assert prompts(page) == ["How are you?"]
    expect(page.locator(".answer h3")).to_have_text("Fine")
    expect(page.locator(".answer strong")).to_have_text("thanks")
    expect(page.locator(".thought-text")).to_have_text("Hm.")
    assert page.locator(".stats").inner_text() == stats
    expect(page.locator("#welcome")).to_be_hidden()
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    ask(page, "And now?")
    assert stand_in.bodies[-1]["temperature"] == 0.5
    assert stand_in.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "# Fine\n**thanks**"},
        {"role": "user", "content": "And now?"},
    ]


def test_new_chat_is_empty_and_the_old_one_can_be_chosen_and_deleted(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    ask(page, "First question")
    page.get_by_role("button", name="New chat").click()
    assert prompts(page) == []
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.get_by_role("button", name="Delete")).to_be_hidden()
    page.reload()
    assert prompts(page) == []
    ask(page, "Second question")
    assert stand_in.bodies[-1]["messages"] == [{"role": "user", "content": "Second question"}]

    chats = page.get_by_label("Kept chats")
    assert chats.locator("option").all_inner_texts() == ["Second question", "First question"]
    chats.select_option("First question")
    assert prompts(page) == ["First question"]
    page.get_by_role("button", name="Delete").click()
    assert prompts(page) == []
    assert chats.locator("option").all_inner_texts() == ["New chat", "Second question"]
    assert "First question" not in json.dumps(page.evaluate("[{ ...localStorage }, { ...sessionStorage }]"))
    page.reload()
    assert prompts(page) == []


def test_new_tab_begins_a_chat_of_its_own(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    ask(page, "In the first tab")
    other = stand_in.open()
    assert prompts(other) == []
    ask(other, "In the second tab")
    page.reload()
    assert prompts(page) == ["In the first tab"]
    assert len(entries(page)) == 2


def test_two_tabs_with_the_same_chat_lose_nothing(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    ask(page, "Together")
    other = another_tab(stand_in, page)
    other.bring_to_front()
    assert prompts(other) == ["Together"]
    ask(other, "Only here")
    # The first tab shows what the second has added: the latest of both.
    page.bring_to_front()
    expect(page.locator(".prompt")).to_have_text(["Together", "Only here"])
    assert len(entries(page)) == 1

    # A tab that has not seen the change keeps its own version beside that of the other tab.
    page.evaluate(
        """() => {
          const name = Object.keys(localStorage).find((key) => key.startsWith("vllm_mp.chat."));
          const [head, content] = localStorage[name].split("\\n");
          localStorage[name] = `${JSON.stringify({ ...JSON.parse(head), version: "of another tab" })}\\n${content}`;
        }"""
    )
    ask(page, "Not seen by the other")
    expect(page.locator("#chat-note")).to_contain_text("Another tab went on with this chat")
    contents = sorted(
        [turn["prompt"] for turn in json.loads(entry.partition("\n")[2])["turns"]] for entry in entries(page).values()
    )
    assert contents == [["Together", "Only here"], ["Together", "Only here", "Not seen by the other"]]
    page.reload()
    expect(page.locator(".prompt")).to_have_text(["Together", "Only here", "Not seen by the other"])


def test_answer_that_another_tab_gets_is_interrupted_once_it_grows_no_more(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    ask(page, "Hello")
    page.clock.install()
    page.evaluate(
        """() => {
          const name = Object.keys(localStorage).find((key) => key.startsWith("vllm_mp.chat."));
          const [head, content] = localStorage[name].split("\\n").map((line) => JSON.parse(line));
          Object.assign(head, { changed: Date.now(), version: "of the other tab" });
          Object.assign(content.turns[0], { isAnswering: true, finishReason: null });
          localStorage[name] = `${JSON.stringify(head)}\\n${JSON.stringify(content)}`;
        }"""
    )
    page.reload()
    expect(page.locator(".stats")).to_contain_text("(in another tab)")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    page.clock.fast_forward(6000)
    expect(page.locator(".stats")).to_contain_text("(interrupted)")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_chat_that_another_tab_deletes_disappears(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    ask(page, "Together")
    other = another_tab(stand_in, page)
    other.bring_to_front()
    other.get_by_role("button", name="Delete").click()
    page.bring_to_front()
    expect(page.locator(".prompt")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    assert entries(page) == {}


@pytest.mark.parametrize(("num_chats", "characters", "num_left"), [(40, 10, 29), (5, 900_000, 2)])
def test_oldest_chats_make_room_for_a_new_one(
    stand_in: PageStandIn, num_chats: int, characters: int, num_left: int
) -> None:
    page = stand_in.open()
    fill_storage(page, num_chats, characters)
    ask(page, "A new chat")
    titles = page.get_by_label("Kept chats").locator("option").all_inner_texts()
    assert titles == ["A new chat", *(f"chat {num_chats - 1 - index}" for index in range(num_left))]
    page.get_by_label("Kept chats").select_option(titles[-1])
    assert prompts(page) == [titles[-1]]


def test_full_storage_costs_old_chats_and_then_says_that_nothing_is_kept(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    fill_storage(page, 2, 10)
    page.evaluate(
        """() => {
          for (let size = 4_000_000; size >= 1; size /= 2) {
            try { for (let index = 0; ; index++) localStorage[`${size} ${index}`] = "x".repeat(size); } catch {}
          }
        }"""
    )
    ask(page, "First")
    ask(page, "Second " * 100)
    expect(page.locator("#chat-note")).to_contain_text("does not keep this chat")
    assert entries(page).keys() & {"vllm_mp.chat.0", "vllm_mp.chat.1"} == set()
    expect(page.locator(".answer")).to_have_text(["Hello.", "Hello."])


def test_page_works_where_the_browser_forbids_storage(stand_in: PageStandIn) -> None:
    stand_in.context.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });"
    )
    page = stand_in.open()
    ask(page, "Hello")
    ask(page, "Again")
    assert [message["role"] for message in stand_in.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    expect(page.locator("#chat-note")).to_contain_text("does not keep this chat")


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "{",
        '{"version": "1"}',
        '{"version": "1"}\n{"turns": 3}',
        '{"version": "1"}\n{"turns": [null]}',
        '{"version": "1"}\n{"turns": [{"prompt": "a", "text": 3}]}',
        "[]\nnull",
    ],
)
def test_entry_that_cannot_be_read_is_passed_over(stand_in: PageStandIn, entry: str) -> None:
    page = stand_in.open()
    page.evaluate("(entry) => { localStorage['vllm_mp.chat.7'] = entry; sessionStorage['vllm_mp.chat'] = '7'; }", entry)
    page.reload()
    assert prompts(page) == []
    ask(page, "Hello")
    page.reload()
    assert prompts(page) == ["Hello"]


def test_api_key_is_kept_in_the_session_alone(stand_in: PageStandIn) -> None:
    stand_in.api_key = KEY
    page = stand_in.open()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="API key").get_by_role("textbox").fill(KEY)
    page.get_by_role("button", name="Continue").first.click()
    expect(page.locator(".answer")).to_have_text("Hello.")
    assert KEY in json.dumps(page.evaluate("({ ...sessionStorage })"))
    assert KEY not in json.dumps(page.evaluate("({ ...localStorage })"))
    stand_in.problems.clear()  # the browser logs the status 401


def test_answer_that_reached_its_limit_can_go_on(stand_in: PageStandIn) -> None:
    page = stand_in.open()
    stand_in.finish_reason = "length"
    stand_in.deltas = [{"content": "One, "}, {"content": "two, "}]
    ask(page, "Count.")
    page.reload()
    stand_in.finish_reason = "stop"
    stand_in.deltas = [{"content": "three."}]
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer")).to_have_text("One, two, three.")
    expect(page.locator(".stats")).to_contain_text(re.compile(r"3 tokens$"))
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    body: dict[str, Any] = stand_in.bodies[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1] == {"role": "assistant", "content": "One, two, "}
    page.reload()
    expect(page.locator(".answer")).to_have_text("One, two, three.")
    stand_in.finish_reason = "length"
    ask(page, "And on?")
    ask(page, "And on?")
    expect(page.get_by_role("button", name="Continue")).to_have_count(1)  # the latest answer only


def test_restored_turns_are_not_announced_and_an_answer_is_announced_once(stand_in: PageStandIn) -> None:
    """Screen readers announce what is added to a live region, but not while it is busy."""
    page = stand_in.open()
    ask(page, "Hello")
    turns = page.locator("#turns")
    expect(turns).to_have_attribute("aria-live", "polite")
    page.reload()
    expect(turns).to_have_attribute("aria-live", "off")
    page.evaluate(
        """() => {
          window.busy = [];
          const turns = document.querySelector("#turns");
          const note = () => busy.push([turns.ariaBusy, turns.lastElementChild.querySelector(".answer").textContent]);
          new MutationObserver(note).observe(turns, { attributeFilter: ["aria-busy"] });
        }"""
    )
    ask(page, "Again")
    expect(turns).to_have_attribute("aria-live", "polite")
    expect(turns).to_have_attribute("aria-busy", "false")
    assert page.evaluate("busy") == [["true", ""], ["false", "Hello."]]
