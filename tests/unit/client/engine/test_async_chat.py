"""`AsyncLLM.chat`: a conversation becomes a prompt, whose completions stream as `generate` streams them."""

import asyncio

import pytest

from vllm_mp.testing.engines import ENDLESS, eventually, greedy, is_empty, rest

QUESTION = {"role": "user", "content": "Why is the sky blue?"}
BEGUN = {"role": "assistant", "content": "Because of"}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up a word", "parameters": {}}}


def prompt_of(llm, messages, **options):
    """Return text and token ids of the prompt that `chat` makes."""

    async def run():
        async for output in llm.chat(messages, greedy(1), **options):
            last = output
        return last.prompt, last.prompt_token_ids

    return asyncio.run(run())


def test_prompt_is_the_rendered_template_with_its_own_special_tokens_alone(llm):
    tokenizer = llm.get_tokenizer()
    text, token_ids = prompt_of(llm, [QUESTION])
    assert text == tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([QUESTION], {"add_generation_prompt": False}, "[user]Why is the sky blue?"),
        ([QUESTION], {}, "[user]Why is the sky blue?[assistant]"),
        ([QUESTION, BEGUN], {"add_generation_prompt": False, "continue_final_message": True}, "Because of"),
        ([QUESTION], {"tools": [TOOL]}, "(look_up)[user]Why is the sky blue?[assistant]"),
        ([QUESTION], {"chat_template_kwargs": {"mood": "calm"}}, "[user]Why is the sky blue?[assistant]calm"),
    ],
    ids=["no generation prompt", "generation prompt", "continued", "tools", "variables"],
)
def test_template_reads_each_argument(llm, messages, options, text):
    template = (
        "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood or '' }}"
    )
    assert prompt_of(llm, messages, chat_template=template, **options)[0].endswith(text)


def test_tools_that_the_template_does_not_know_are_described_in_a_message(llm):
    text, _ = prompt_of(llm, [QUESTION], tools=[TOOL])
    assert "Look up a word" in text
    assert text.index("Look up a word") < text.index("Why is the sky blue?")
    assert "Look up a word" not in prompt_of(llm, [QUESTION])[0]


def test_request_has_its_id_and_leaving_the_loop_aborts_it(llm):
    async def run():
        async for output in llm.chat([QUESTION], ENDLESS, 7, priority=0):
            assert output.request_id == "7"
            break
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_request_can_be_aborted_while_its_prompt_is_rendered(llm, monkeypatch):
    render = llm.chat_template.render

    async def run():
        begun, aborted = asyncio.Event(), asyncio.Event()

        async def render_slowly(*args, **options):
            begun.set()
            await aborted.wait()
            return await render(*args, **options)

        monkeypatch.setattr(llm.chat_template, "render", render_slowly)
        chat = asyncio.create_task(rest(llm.chat([QUESTION], ENDLESS, "rendered")))
        await begun.wait()
        await llm.abort("rendered")
        aborted.set()
        completion = await chat
        assert (completion.finish_reason, completion.token_ids) == ("abort", [])
        assert await is_empty(llm)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "messages is empty"),
        (["Hello"], {}, r"messages\[0\] must be a dict"),
        ([QUESTION], {"chat_template": "{{ nothing.at.all }}"}, "the chat template failed"),
        ([QUESTION], {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not hold 'messages'"),
    ],
)
def test_messages_and_templates_that_cannot_be_used_are_refused(llm, messages, options, words):
    async def run():
        with pytest.raises(ValueError, match=words):
            await rest(llm.chat(messages, greedy(1), **options))
        assert await is_empty(llm)

    asyncio.run(run())
