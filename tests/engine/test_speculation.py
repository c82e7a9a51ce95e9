"""Speculation changes no answer: an engine with drafts beside one without, in float32."""

import asyncio
import json
import shutil

import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import SamplingParams
from vllm_mp.sampling_params import StructuredOutputsParams
from vllm_mp.testing.engines import answer, running_engine

pytestmark = pytest.mark.usefixtures("forked_ranks")

LINES = "\n".join(f"{name} = read(path / '{name}.txt', encoding='utf-8')" for name in ("first", "second", "third"))
COPY = f"Write this code again, with no change:\n{LINES}\n{LINES}\n{LINES}\nHere it is:\n{LINES[:40]}"
LIST = "A list of numbers: one, two, three, one, two, three, one, two,"
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
    "maxItems": 4,
}
KINDS = {
    "greedy": (COPY, {}),
    "log-probabilities": (COPY, {"logprobs": 3, "prompt_logprobs": 1}),
    "seeded": (LIST, {"temperature": 0.8, "seed": 7}),
    "several": (LIST, {"temperature": 0.9, "n": 3, "top_p": 0.9, "seed": 3}),
    "without a seed": (COPY, {"temperature": 0.5, "min_p": 0.05}),
    "penalties": (LIST, {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "temperature": 0.7, "seed": 1}),
    "stop string": (COPY, {"stop": ["third ="], "include_stop_str_in_output": True}),
    "stop string with a minimum": (LIST, {"stop": ["two"], "min_tokens": 12}),
    "stop token": (LIST, {"ignore_eos": False}),
    "bad words and biases": (COPY, {"bad_words": ["second"], "logit_bias": {28: 1.0}}),
    "JSON": ("People in JSON:", {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "logprobs": 0}),
    "forced JSON": (
        "People in JSON:",
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "temperature": 0.9},
    ),
    "no drafts": (COPY, {"extra_args": {"num_speculative_tokens": 0}}),
}


def params(kind):
    settings = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, **KINDS[kind][1]}
    return SamplingParams(**settings)


def content(output):
    return [
        (completion.text, completion.token_ids, completion.logprobs, completion.finish_reason, completion.stop_reason)
        for completion in output.outputs
    ], output.prompt_logprobs


async def answers(engine):
    """Return the content of all kinds of requests, which run together."""
    outputs = (answer(engine, KINDS[kind][0], params(kind)) for kind in KINDS)
    return dict(zip(KINDS, map(content, await asyncio.gather(*outputs)), strict=True))


@pytest.fixture(scope="module")
def expected(default_model):
    """The answers without drafts, of an engine with the seed 0."""
    with running_engine(default_model, seed=0) as engine:
        return asyncio.run(answers(engine))


@pytest.mark.parametrize(
    "options",
    [
        {"spec_method": "suffix", "block_size": 4, "kv_cache_memory_bytes": 60 * 2**20},
        {
            "async_scheduling": False,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 6,
            "enable_prefix_caching": False,
            "recover_kv_cache": "never",
        },
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_requests_of_all_kinds_answer_the_same_with_drafts(default_model, expected, options):
    # Drafts may seem too costly if steps are fast or take irregular times; so all are slow, and some drafts suffice.
    options = {"spec_method": "ngram", "fault_injection": SLOW_STEPS, **options}
    with running_engine(default_model, seed=0, **options) as engine:

        async def run():
            found = await answers(engine)
            return found, await engine.core_status()

        found, status = asyncio.run(run())
    for kind in KINDS:
        assert found[kind] == expected[kind], kind
    assert 0 < status["num_accepted_tokens"] <= status["num_draft_tokens"]
    assert sum(status["num_accepted_tokens_per_pos"]) == status["num_accepted_tokens"]
    assert status["num_drafts"] <= status["num_draft_tokens"]


@pytest.fixture(scope="module")
def expected_of_small_model(small_model):
    with running_engine(small_model, seed=0) as engine:
        return asyncio.run(answers(engine))


@pytest.mark.parametrize("draft", ["the same model", "another model"])
def test_requests_of_all_kinds_answer_the_same_with_a_draft_model(
    small_model, expected_of_small_model, draft, tmp_path
):
    """The steps of the model are slow, so that drafts pay however long the small draft model takes."""
    folder = small_model
    if draft == "another model":
        folder = shutil.copytree(small_model, tmp_path / "other")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 300.0, "rms_norm_eps": 0.1}))
    options = {"spec_model": str(folder), "spec_tokens": 4, "fault_injection": SLOW_STEPS}
    with running_engine(small_model, seed=0, **options) as engine:

        async def figures():
            status = await engine.core_status()
            return status["num_accepted_tokens"], status["num_draft_tokens"]

        async def run():
            plain = (SamplingParams(temperature=heat, seed=7, max_tokens=60, ignore_eos=True) for heat in (0, 0.8))
            await asyncio.gather(*(answer(engine, LIST, params) for params in plain))
            accepted, drafted = await figures()
            if draft == "the same model":
                assert drafted > 30
                assert accepted > 0.9 * drafted
            else:
                assert accepted < drafted
            assert await answers(engine) == expected_of_small_model
            for level in (1, 2) if draft == "the same model" else ():
                await engine.sleep(level)
                await engine.wake_up()
                found = await answers(engine)
                for kind in KINDS.keys() - {"without a seed", "forced JSON"}:  # which draw others each time
                    assert found[kind] == expected_of_small_model[kind], kind
            assert (await figures())[1] > drafted

        asyncio.run(run())


def test_answers_are_drafted_from_earlier_ones_of_the_same_salt(make_engine):
    engine = make_engine(spec_method="suffix", seed=0)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def num_accepted(salt):
        before = (await engine.core_status())["num_accepted_tokens"]
        prompt = {"prompt": "My favourite books are", "cache_salt": salt}
        output = await answer(engine, prompt, greedy)
        return (await engine.core_status())["num_accepted_tokens"] - before, output.outputs[0].token_ids

    async def run():
        for _ in range(3):  # while the first steps are measured, nothing is drafted
            _, first = await num_accepted("a")
        again, second = await num_accepted("a")
        other, third = await num_accepted("b")
        assert first == second == third
        assert again > 20
        assert other < again / 2

    asyncio.run(run())
