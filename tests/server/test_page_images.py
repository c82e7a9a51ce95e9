"""Images in the chat of the page at `/`, in headless Chromium."""

import base64
import io
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from support.chromium import expect
from support.image_models import file_of, picture
from support.page_stand_in import PageStandIn, ask

if TYPE_CHECKING:
    from playwright.sync_api import Page

LIMITS = {"max_images": 3, "max_file_bytes": 2**20, "max_pixels": 10**6, "max_body_bytes": 2**20}
CAT = file_of(picture(50, 40))
GIVE = """([name, type, content, how]) => {
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = how === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: data })
    : new DragEvent("drop", { ...options, dataTransfer: data });
  document.getElementById(how === "paste" ? "message" : "turns").dispatchEvent(event);
}"""


def give(page: "Page", how: str, name: str, content: bytes, kind: str = "image/png") -> None:
    """Paste or drop a file."""
    page.evaluate(GIVE, [name, kind, base64.b64encode(content).decode(), how])


def choose(page: "Page", name: str, content: bytes) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add images").click()
    chooser.value.set_files({"name": name, "mimeType": "image/png", "buffer": content})


def images_of(message: dict[str, Any]) -> list[bytes]:
    """Return the images of a message that the page sent."""
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def open_chat(stand_in: PageStandIn, limits: dict[str, int] | None = LIMITS) -> "Page":
    stand_in.images = limits
    page = stand_in.open()
    expect(page.locator("#model")).to_have_text("a-model")
    return page


def test_images_are_pasted_dropped_and_chosen_removed_sent_and_kept(stand_in: PageStandIn) -> None:
    page = open_chat(stand_in)
    attached = page.get_by_role("list", name="Images of the message").get_by_role("img")
    contents = [file_of(picture(50, 40, seed)) for seed in range(3)]
    give(page, "paste", "cat.png", contents[0])
    give(page, "drop", "dog.png", contents[1])
    expect(attached).to_have_count(2)
    choose(page, "owl.png", contents[2])
    expect(attached).to_have_count(3)
    give(page, "paste", "fox.png", CAT)
    expect(page.locator("#image-note")).to_have_text("The model takes at most 3 images in a conversation.")
    page.get_by_role("button", name="Remove dog.png").click()
    assert [image.get_attribute("alt") for image in attached.all()] == ["cat.png", "owl.png"]
    expect(page.locator("#image-note")).to_be_hidden()

    ask(page, "What is it?")
    expect(attached).to_have_count(0)
    [message] = stand_in.bodies[-1]["messages"]
    assert images_of(message) == [contents[0], contents[2]]
    assert message["content"][-1] == {"type": "text", "text": "What is it?"}
    shown = page.locator(".prompt").first.get_by_role("img")
    assert [image.get_attribute("alt") for image in shown.all()] == ["cat.png", "owl.png"]
    assert shown.first.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 50

    page.reload()
    expect(page.locator("#model")).to_have_text("a-model")
    ask(page, "Sure?")
    assert [images_of(each) for each in stand_in.bodies[-1]["messages"][:1]] == [[contents[0], contents[2]]]
    assert stand_in.bodies[-1]["messages"][-1]["content"] == "Sure?"


def test_image_over_a_limit_of_the_server_is_made_smaller_and_other_files_are_refused(stand_in: PageStandIn) -> None:
    page = open_chat(stand_in, {**LIMITS, "max_pixels": 10_000, "max_body_bytes": 20_000})
    note = page.locator("#image-note")
    give(page, "drop", "notes.txt", b"my notes", "text/plain")
    expect(note).to_have_text("notes.txt is no image that this browser can read.")
    # The server does not decode this format.
    give(page, "paste", "photo.avif", file_of(picture(50, 40), "AVIF"), "image/avif")
    ask(page, "What is it?")
    [sent] = images_of(stand_in.bodies[-1]["messages"][0])
    assert Image.open(io.BytesIO(sent)).format == "JPEG"
    expect(note).to_be_hidden()
    page.get_by_role("button", name="New chat").click()
    large = file_of(picture(400, 300))
    give(page, "paste", "large.png", large)
    expect(note).to_contain_text("large.png was made smaller")
    page.get_by_role("button", name="Send").click()  # an image needs no words
    page.locator(".turn[data-state=done]").wait_for()
    [sent] = images_of(stand_in.bodies[-1]["messages"][0])
    width, height = Image.open(io.BytesIO(sent)).size
    assert width * height <= 10_000
    assert len(sent) * 4 / 3 < 20_000
    assert width / height == pytest.approx(4 / 3, rel=0.05)


def test_model_without_images_is_sent_none(stand_in: PageStandIn) -> None:
    page = open_chat(stand_in)
    give(page, "paste", "cat.png", CAT)
    ask(page, "What is it?")
    stand_in.images = None
    page.reload()
    expect(page.locator("#model")).to_have_text("a-model")
    expect(page.get_by_role("button", name="Add images")).to_be_hidden()
    for how in ("paste", "drop"):
        give(page, how, "cat.png", CAT)
        expect(page.locator("#image-note")).to_have_text("This model takes no images.")
    num_sent = len(stand_in.bodies)
    ask(page, "Sure?")
    expect(page.locator(".turn").last.locator(".error-text")).to_contain_text("begin a new chat")
    assert len(stand_in.bodies) == num_sent
