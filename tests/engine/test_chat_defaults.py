"""What the default model answers in a chat without flags."""

import asyncio

import pytest

from vllm_mp import RequestOutputKind, SamplingParams
from vllm_mp.cli.chat.answer import Answer
from vllm_mp.cli.chat.sampling_defaults import chat_defaults
from vllm_mp.cli.chat_text import chat_prompt
from vllm_mp.cli.terminal.screen import Screen
from vllm_mp.model_config.generation import default_sampling_params
from vllm_mp.model_store import DEFAULT_MODEL, recommended_generation_config


@pytest.mark.slow
def test_default_model_ends_its_answer_to_a_line_on_which_it_loops_when_it_is_greedy(real_llm, capsys):
    model_defaults = default_sampling_params(recommended_generation_config(DEFAULT_MODEL), {})
    params = chat_defaults(model_defaults) | {"seed": 1, "output_kind": RequestOutputKind.DELTA}
    prompt = chat_prompt(real_llm, [{"role": "user", "content": "My name is Dieter and I live in Bern."}])
    answer = Answer(Screen())
    asyncio.run(answer.stream(real_llm, prompt, SamplingParams(**params), None))
    assert answer.notice == "", capsys.readouterr().out
    assert "Dieter" in answer.text
