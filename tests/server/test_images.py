"""Images in prompts, conversations and HTTP requests, as far as the core: which tokens and images it is sent."""

import asyncio
import base64
import contextlib

import httpx
import pytest
from support.image_core import ImageCore
from support.image_models import IMAGE_TOKEN, TILED, TOKENS_PER_TILE, file_of, picture, save_processor

from vllm_mp import AsyncLLM, PoolingParams, SamplingParams
from vllm_mp.cli.chat.commands import run_if_command
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.session import ChatSession
from vllm_mp.cli.terminal.screen import Screen
from vllm_mp.client.images.process_pool import ImageProcesses
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions

pytestmark = pytest.mark.extended
CAT, DOG = picture(50, 40), picture(20, 20, seed=1)
NUM_TOKENS = 5 * TOKENS_PER_TILE
"""Image tokens of either image: four tiles and the whole."""


def url_of(image):
    return f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"


URL = url_of(CAT)


class Served:
    """An engine that is connected to a core of a small SmolVLM."""

    def __init__(self, folder, model):
        save_processor(folder, "smolvlm")
        address = f"ipc://{folder}/core.sock"
        self.core = ImageCore(address, model, folder, "smolvlm", limit_mm_per_prompt={"image": 2})
        self.llm = AsyncLLM.connect(address)
        self.token_id = self.llm.model_config.images.token_id

    def ask(self, *prompts, call=None):
        """Return the requests that the core got, for prompts that were answered one after the other."""
        before = len(self.core.requests)

        async def answers():
            for prompt in prompts:
                async for output in (call or self.llm.generate)(prompt, SamplingParams(max_tokens=1)):
                    assert len(output.outputs[0].token_ids) == 1

        asyncio.run(answers())
        return self.core.requests[before:]

    def post(self, path, body, keys=(), key=""):
        """Return the answer of a server with API keys `keys` to a request with `key`."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        async def ask():
            app = build_app(self.llm, ServerOptions(api_key=keys))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
                return await client.post(path, json={"model": self.llm.model_config.served_model_name, **body})

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def served(tmp_path_factory, default_model):
    served = Served(tmp_path_factory.mktemp("images"), str(default_model))
    yield served
    served.llm.shutdown()
    assert served.llm._engine.images.process_ids == []
    served.core.close()


def image_prompt(*images, text=None, **fields):
    text = f"See {IMAGE_TOKEN * len(images)}." if text is None else text
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **fields}


def num_image_tokens(request):
    return [sum(length for _, length in image.spans) for image in request.images]


def test_text_starts_no_image_process(served):
    """Run first: the processes live until the end."""
    [request] = served.ask("Hello")
    assert request.images == []
    assert served.llm._engine.images.process_ids == []


def test_image_crosses_once_and_its_tokens_are_placed(served):
    first, second, third = served.ask(image_prompt(CAT), image_prompt(CAT, DOG), image_prompt(file_of(CAT)))
    assert [num_image_tokens(request) for request in (first, second, third)] == [
        [NUM_TOKENS],
        [NUM_TOKENS, NUM_TOKENS],
        [NUM_TOKENS],
    ]
    cat, dog = [image.digest for image in second.images]
    assert (first.images[0].digest, third.images[0].digest) == (cat, cat)
    assert served.core.put.count(cat) == served.core.put.count(dog) == 1
    ids = list(memoryview(first.prompt).cast("i"))
    [placed] = first.images
    assert {ids[start + offset] for start, length in placed.spans for offset in range(length)} == {served.token_id}
    assert ids.count(served.token_id) == NUM_TOKENS


def test_core_gets_an_image_again_after_it_has_lost_it(served):
    [request] = served.ask(image_prompt(CAT))
    served.core.images.clear()  # as a core does that needs the memory
    again = served.ask(image_prompt(CAT))
    assert len(again) == 1
    asyncio.run(served.llm.reset_mm_cache())
    assert served.core.images == set()
    put = len(served.core.put)
    served.ask(image_prompt(CAT))
    assert served.core.put[put:] == [request.images[0].digest]


def test_image_that_was_named_may_be_left_out_by_those_who_know_it(served):
    def named(image, name="cat", **fields):
        return image_prompt(image, multi_modal_uuids={"image": [name]}, **fields)

    first, second, again = served.ask(named(CAT), named(None), named(None))
    assert {image.digest for request in (second, again) for image in request.images} == {first.images[0].digest}
    [other] = served.ask(named(DOG))
    [latest] = served.ask(named(None))
    assert latest.images[0].digest == other.images[0].digest != first.images[0].digest
    unknown = r"\['image'\]\[0\] cannot be used: it is left out, and this client has no image of its name '(cat|dog)'"
    for prompt in (
        named(None, "dog"),
        named(None, cache_salt="another"),
        named(None, mm_processor_kwargs={"do_image_splitting": False}),
    ):
        with pytest.raises(ValueError, match=unknown):
            served.ask(prompt)
    asyncio.run(served.llm.reset_mm_cache())
    with pytest.raises(ValueError, match=unknown):
        served.ask(named(None))


def test_options_of_a_request_reach_the_processor(served):
    [request] = served.ask(image_prompt(CAT, mm_processor_kwargs={"do_image_splitting": False}))
    assert num_image_tokens(request) == [TOKENS_PER_TILE]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (image_prompt(CAT, text="no placeholder"), "0 times '<image>' for 1 images"),
        (image_prompt(CAT, text=IMAGE_TOKEN * 2), "2 times '<image>' for 1 images"),
        (IMAGE_TOKEN, "1 image tokens .'<image>'. and no image"),
        (image_prompt(CAT, DOG, CAT), "at most 2 images .limit_mm_per_prompt., got 3"),
        (image_prompt(b"x"), "no image in the format"),
        (image_prompt(file_of(CAT)[:300]), "truncated"),
        (image_prompt(CAT, mm_processor_kwargs={"crop": 1}), "'crop'; correct mm_processor_kwargs"),
        (image_prompt(CAT, mm_processor_kwargs={"return_tensors": "pt"}), "return_tensors.*which the engine sets"),
        (
            image_prompt(CAT, mm_processor_kwargs={"size": {"longest_edge": 100_000}}),
            r"mm_processor_kwargs: size\.longest_edge must be at most 8192, got 100000; lower it",
        ),
        (
            image_prompt(CAT, mm_processor_kwargs={"rescale_factor": 1e30}),
            r"cannot be used: .* values beyond 32768, .* in mm_processor_kwargs",
        ),
        (image_prompt(CAT, multi_modal_uuids={"image": []}), None),
        (image_prompt(CAT, multi_modal_uuids={"image": ["a", "b"]}), "2 entries for 1 images"),
        ({"prompt_embeds": [[0.0]], "multi_modal_data": {"image": CAT}}, "prompt_embeds and multi_modal_data"),
    ],
)
def test_prompt_that_cannot_be_used_is_refused_before_the_core_hears_of_it(served, prompt, said):
    if said is None:
        assert len(served.ask(prompt)) == 1
        return
    before = len(served.core.requests), len(served.core.put)
    with pytest.raises(ValueError, match=said):
        served.ask(prompt)
    assert (len(served.core.requests), len(served.core.put)) == before


def test_vectors_of_images_are_refused(served):
    async def encode():
        async for _ in served.llm.encode(image_prompt(CAT), PoolingParams()):
            pass

    with pytest.raises(ValueError, match="vectors are made of text"):
        asyncio.run(encode())


def test_conversation_has_images_where_its_parts_stand(served):
    parts = [
        {"type": "text", "text": "A "},
        {"type": "image_pil", "image_pil": CAT},
        {"type": "text", "text": " b "},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    [request] = served.ask([{"role": "user", "content": parts}], call=served.llm.chat)
    assert num_image_tokens(request) == [NUM_TOKENS, NUM_TOKENS]
    assert len({image.digest for image in request.images}) == 1
    [plain] = served.ask([{"role": "user", "content": "A  b "}], call=served.llm.chat)
    assert plain.images == []


def chat_body(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **fields}


def url_part(url=URL):
    return {"type": "image_url", "image_url": {"url": url}}


def test_server_answers_conversations_with_images_and_counts_their_tokens(served):
    text = {"type": "text", "text": "Say."}
    bare = served.post("/v1/chat/completions", chat_body(text)).json()["usage"]["prompt_tokens"]
    answer = served.post("/v1/chat/completions", chat_body(url_part(), text))
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > bare + NUM_TOKENS
    assert num_image_tokens(served.core.requests[-1]) == [NUM_TOKENS]
    first = served.core.requests[-1].images[0].digest
    for named in ({**url_part(), "uuid": "a cat"}, {"type": "image_url", "image_url": {}, "uuid": "a cat"}):
        assert served.post("/v1/chat/completions", chat_body(named, text)).status_code == 200
        assert served.core.requests[-1].images[0].digest == first
    unsplit = chat_body(url_part(), text, mm_processor_kwargs={"do_image_splitting": False})
    assert served.post("/v1/chat/completions", unsplit).status_code == 200
    assert num_image_tokens(served.core.requests[-1]) == [TOKENS_PER_TILE]


def test_responses_take_input_images(served):
    parts = [{"type": "input_text", "text": "Say."}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
    answer = served.post("/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 1})
    assert answer.status_code == 200
    assert num_image_tokens(served.core.requests[-1]) == [NUM_TOKENS]


def source(**fields):
    return {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]} | fields


def image_block(**fields):
    return {"type": "image", "source": source(**fields)}


def test_messages_of_anthropic_take_images_and_count_them(served):
    call = {"type": "tool_use", "id": "call", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call", "content": [{"type": "text", "text": "It:"}, image_block()]}
    url_block = {"type": "image", "source": {"type": "url", "url": URL}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "text", "text": "So?"}, url_block, result]},
    ]
    answer = served.post("/v1/messages", {"messages": messages, "system": "Be short.", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    request = served.core.requests[-1]
    assert num_image_tokens(request) == [NUM_TOKENS, NUM_TOKENS]
    counted = served.post("/v1/messages/count_tokens", {"messages": messages, "system": "Be short."}).json()
    assert counted == {"input_tokens": len(request.prompt) // 4}


def test_tokens_of_conversations_with_images_are_those_of_the_request(served):
    body = chat_body(url_part(), {"type": "text", "text": "Say."}, mm_processor_kwargs={"do_image_splitting": False})
    assert served.post(CHAT, body).status_code == 200
    request = served.core.requests[-1]
    tokens = memoryview(request.prompt).cast("i").tolist()
    assert num_image_tokens(request) == [TOKENS_PER_TILE]
    for path, field in (("/tokenize", "tokens"), (f"{CHAT}/render", "token_ids")):
        asked = {name: body[name] for name in ("messages", "mm_processor_kwargs")}
        answer = served.post(path, asked)
        assert answer.json()[field] == tokens, path
    parts = [{"type": "input_text", "text": "Say."}, {"type": "input_image", "image_url": URL}]
    asked = {"input": [{"role": "user", "content": parts}]}
    answer = served.post("/v1/responses", {**asked, "max_output_tokens": 1, "truncation": "auto"})
    num_tokens = answer.json()["usage"]["input_tokens"]
    assert num_tokens > NUM_TOKENS
    call = {"type": "function_call", "call_id": "call", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call", "output": parts}
    of_tool = {"input": [{"role": "user", "content": "Look."}, call, result], "max_output_tokens": 1}
    assert served.post("/v1/responses", of_tool).status_code == 200
    assert num_image_tokens(served.core.requests[-1]) == [NUM_TOKENS]
    assert served.post("/v1/responses/input_tokens", asked).json()["input_tokens"] == num_tokens


def test_images_wait_for_a_process_in_the_turns_of_their_api_key(served, monkeypatch):
    tenants, run = [], ImageProcesses.run

    async def run_and_note(processes, job, key, tenant):
        tenants.append(tenant)
        return await run(processes, job, key, tenant)

    monkeypatch.setattr(ImageProcesses, "run", run_and_note)
    for number, path in enumerate((CHAT, "/tokenize")):
        body = chat_body(url_part(url_of(picture(50, 40, seed=90 + number))))
        assert served.post(path, body, ("a", "b"), "b").status_code == 200
    assert tenants == [1, 1]


CHAT = "/v1/chat/completions"
PART = "messages[0].content[0]"


def input_with_image(url):
    content = [{"type": "input_text", "text": "Say."}, {"type": "input_image", "image_url": url}]
    return {"input": [{"role": "system", "content": "Be short."}, {"role": "user", "content": content}]}


NO_IMAGE = "data:image/png;base64,eHg="


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, chat_body(url_part("file:///etc/passwd")), PART, "a data URL"),
        (CHAT, chat_body(url_part(), url_part("http://127.0.0.1/")), "messages[0].content[1]", "not fetched from"),
        (CHAT, chat_body(*[url_part()] * 3), PART, "at most 2 images"),
        (CHAT, chat_body({"type": "image_url"}), f"{PART}.image_url", "must hold a URL"),
        (CHAT, chat_body(url_part(NO_IMAGE)), PART, f"{PART} cannot be used: it is no image in the format"),
        (CHAT, chat_body({"type": "input_audio"}), f"{PART}.type", "audio"),
        (CHAT, chat_body({"type": "prompt_embeds", "prompt_embeds": "gAJ9"}), f"{PART}.type", "would be a pickle"),
        ("/tokenize", chat_body(url_part(NO_IMAGE)), PART, "no image in the format"),
        ("/v1/responses", input_with_image(NO_IMAGE), "input[1].content[1]", "input[1].content[1] cannot be used"),
        ("/v1/responses", input_with_image("http://127.0.0.1/"), "input[1].content[1]", "not fetched from"),
    ],
)
def test_server_refuses_images_by_field(served, path, body, param, said):
    answer = served.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"media_type": "text/plain"}, "content[1].source.media_type must be the type of an image"),
        ({"media_type": "image/png;x,"}, "content[1].source.media_type must be the type of an image"),
        ({"media_type": None}, "content[1].source.media_type is missing"),
        ({"data": None}, "content[1].source.data is missing"),
        ({"data": "???"}, "content[1]: the data URL holds no valid base64"),
        ({"data": "eHg="}, "content[1] cannot be used: it is no image in the format"),
        ({"type": "file"}, "content[1].source.type must be 'base64' or 'url'"),
        ({"type": "url", "url": "http://127.0.0.1/"}, "content[1]: images are not fetched from"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_of_anthropic_refuse_images_by_field(served, path, fields, said):
    blocks = [{"type": "text", "text": "Say."}, image_block(**fields)]
    messages = [{"role": "user", "content": blocks}]
    limit = {"max_tokens": 1} if path == "/v1/messages" else {}
    answer = served.post(path, {"system": "Be short.", "messages": messages, **limit})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert f"messages[0].{said}" in answer.json()["error"]["message"]


def test_settings_of_the_processor_are_those_of_the_core(served):
    assert served.llm._engine.images._files()["preprocessor_config.json"]["size"] == TILED["size"]


class Lines:
    """Stands in for the line of a chat's user."""

    def while_busy(self):
        return contextlib.nullcontext()


def test_chat_in_a_terminal_sends_images_with_the_next_message(served, tmp_path, capsys):
    cat, dog = tmp_path / "my cat.png", tmp_path / "dog.jpg"
    cat.write_bytes(file_of(CAT))
    dog.write_bytes(file_of(DOG, "JPEG"))
    (tmp_path / "notes.txt").write_bytes(b"my notes")
    with asyncio.Runner() as runner:
        chat = ChatSession(runner, served.llm, Conversation(None, {"max_tokens": 1}), Screen())

        def image(path):
            run_if_command(chat, f"/image {path}", Lines())

        for path, said in (("absent.png", "No such file"), ("notes.txt", "notes.txt cannot be used: it is no image")):
            with pytest.raises(ValueError, match=said):
                image(tmp_path / path)
        image(cat)
        image(dog)
        with pytest.raises(ValueError, match=r"at most 2 images \(limit_mm_per_prompt\), and this one has 2; /clear"):
            image(cat)
        chat.ask("What is different?", Lines())
        assert num_image_tokens(served.core.requests[-1]) == [NUM_TOKENS, NUM_TOKENS]
        before = len(served.core.requests)
        chat.ask("Sure?", Lines())  # the images of the conversation go with it
        chat.retry(Lines())
        run_if_command(chat, f"/save {tmp_path / 'chat.json'}", Lines())
        run_if_command(chat, "/clear", Lines())
        run_if_command(chat, f"/load {tmp_path / 'chat.json'}", Lines())
        chat.retry(Lines())
        requests = served.core.requests[before:]
        assert [num_image_tokens(request) for request in requests] == [[NUM_TOKENS, NUM_TOKENS]] * 3
        assert len({request.prompt for request in requests}) == 1
        assert chat.num_tokens() > 2 * NUM_TOKENS
        chat.conversation.parameters["logit_bias"] = {-1: 1.0}
        run_if_command(chat, "/clear", Lines())
        image(cat)
        chat.ask("Refused", Lines())
        assert (chat.conversation.messages, len(chat.images)) == ([], 1)
    shown = capsys.readouterr()
    assert "1 image of the next message; /image without FILE drops them" in shown.err + shown.out


def test_chat_with_a_model_without_images_refuses_them(replay_engine, tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(file_of(CAT))
    with asyncio.Runner() as runner:
        chat = ChatSession(runner, replay_engine, Conversation(None, {}), Screen())
        with pytest.raises(ValueError, match="smollm2-135m-instruct takes no images; chat with a model that does"):
            run_if_command(chat, f"/image {path}", Lines())
