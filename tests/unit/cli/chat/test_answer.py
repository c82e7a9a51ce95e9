"""How a chat samples by default, where its answers end, and what it says about their end."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm_mp import CompletionOutput, SamplingParams
from vllm_mp.cli.chat.answer import Answer
from vllm_mp.cli.chat.sampling_defaults import MAX_TOKENS, chat_defaults
from vllm_mp.cli.generate import stream_completion
from vllm_mp.cli.terminal.repetition import repeated_block, without_repetition
from vllm_mp.cli.terminal.screen import Screen

REFRAIN = "A place where the soul is lost,\n"
TABLE = "| name | town |\n| --- | --- |\n" + "".join(f"| person {number} | Bern |\n" for number in range(60))
POEM = "".join(f"Verse {number} of the song.\n{REFRAIN}{REFRAIN}" for number in range(20))


class Engine:
    """A stand-in whose model writes `pieces`, of one token each, and ends for `reason`."""

    model_config = SimpleNamespace(max_model_len=100, images=None)

    def __init__(self, pieces, reason="stop"):
        self._pieces, self._reason = pieces, reason
        self.num_written = 0

    def last_core_status(self):
        return {"incarnation": 1}

    async def generate(self, _prompt, _params, lora_request=None):
        for piece in self._pieces:
            self.num_written += 1
            reason = self._reason if self.num_written == len(self._pieces) else None
            yield SimpleNamespace(outputs=[CompletionOutput(0, piece, [1], finish_reason=reason)])


def answer_of(engine, capsys, **params):
    """Return the answer of `engine`, and what the user has seen of it."""
    answer = Answer(Screen())
    asyncio.run(answer.stream(engine, [1], SamplingParams(**{"max_tokens": None, **params}), None))
    return answer, capsys.readouterr().out


def test_model_without_settings_is_sampled_with_the_settings_of_the_chat():
    defaults = chat_defaults({})
    assert 0 < defaults["temperature"] < 1 > defaults["top_p"]
    assert defaults["max_tokens"] == MAX_TOKENS
    SamplingParams(**defaults)


@pytest.mark.parametrize("settings", [{"temperature": 0.2, "top_p": 0.9}, {"temperature": 0.0, "max_tokens": 9}])
def test_settings_of_the_model_replace_those_of_the_chat(settings):
    defaults = chat_defaults(settings)
    assert settings.items() <= defaults.items()
    assert ("top_p" in defaults) == ("top_p" in settings)


def test_model_with_a_penalty_gets_no_other_penalty():
    assert "frequency_penalty" in chat_defaults({})
    assert "frequency_penalty" not in chat_defaults({"repetition_penalty": 1.05})


def test_model_with_a_filter_but_no_temperature_gets_temperature_1():
    assert chat_defaults({"top_k": 40})["temperature"] == 1.0


@pytest.mark.parametrize("text", ["", "Hello", "-" * 300, TABLE, POEM, REFRAIN * 5, "x = 0\n" * 60])
def test_text_with_some_repetition_is_no_loop(text):
    assert repeated_block(text) == 0
    assert without_repetition(text) == text


@pytest.mark.parametrize("block", ["no ", REFRAIN, POEM[:1500]], ids=["word", "line", "stanzas"])
def test_block_that_is_repeated_to_the_end_is_found_and_kept_once(block):
    text = "It begins well. " + block * max(3, 450 // len(block)) + block[: len(block) // 2]
    assert repeated_block(text) == len(block)
    assert without_repetition(text).rstrip() == "It begins well. " + block.rstrip()


def test_answer_that_repeats_itself_is_stopped_with_a_notice_and_kept_once(capsys):
    engine = Engine(["Once. ", *[REFRAIN] * 1000])
    answer, shown = answer_of(engine, capsys)
    assert engine.num_written < 20
    assert "repeats itself" in answer.notice
    assert answer.text == "Once. " + REFRAIN
    assert shown.startswith(answer.text + REFRAIN)
    assert answer_of(Engine([REFRAIN] * 50), capsys, ignore_eos=True)[1] == REFRAIN * 50


def test_generate_stops_a_completion_that_repeats_itself_if_asked_to(capsys):
    def run(**options):
        engine = Engine(["Once. ", *[REFRAIN] * 1000])
        completion = stream_completion(engine, [1], SamplingParams(), None, Screen(), **options)
        return asyncio.run(completion), engine.num_written

    is_loop, num_written = run(stops_loops=True)
    assert is_loop
    assert num_written < 20
    assert capsys.readouterr().out == "Once. " + REFRAIN * (num_written - 1)
    assert run(stops_loops=False) == (False, 1001)


def test_answer_that_the_model_ends_has_no_notice(capsys):
    answer, shown = answer_of(Engine(["Good ", "day."]), capsys)
    assert (answer.text, answer.num_tokens, answer.notice, shown) == ("Good day.", 2, "", "Good day.")


def test_answer_that_a_limit_ends_has_a_notice_with_the_limit(capsys):
    for max_tokens, notice in [(2, "cut off at 2 tokens; /set max_tokens"), (3, "end of the context of 100 tokens")]:
        answer, _ = answer_of(Engine(["Good ", "day"], "length"), capsys, max_tokens=max_tokens)
        assert notice in answer.notice
