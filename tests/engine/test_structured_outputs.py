"""Structured output of a core: each completion matches its constraint, whatever happens to the core."""

import asyncio
import json
import os
import re
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import EngineGenerateError, SamplingParams, StructuredOutputsParams
from vllm_mp.testing.engines import answer, eventually, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "Describe a person as JSON:"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["astronomer", "shoemaker", "translator"]},
    },
    "required": ["name", "age", "occupation"],
    "additionalProperties": False,
}
COMPACT = {"json": PERSON, "disable_any_whitespace": True}
RANDOM = {"temperature": 1.0, "max_tokens": 60}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(small_model, request):
    """An engine whose core may die often."""
    with running_engine(
        small_model,
        async_scheduling=request.param,
        check_invariants=True,
        fault_injection=SLOW_STEPS,
        max_core_restarts=1000,
    ) as engine:
        yield engine


def constrained(name="structured_outputs", **fields):
    form = {key: value for key, value in fields.items() if key in StructuredOutputsParams.__struct_fields__}
    return SamplingParams(**{**RANDOM, name: form, **{k: v for k, v in fields.items() if k not in form}})


def ask(engine, *all_params):
    """Return the completion of each request."""

    async def run():
        outputs = await asyncio.gather(*(answer(engine, PROMPT, params) for params in all_params))
        return [completion for output in outputs for completion in output.outputs]

    return asyncio.run(run())


def is_person(text):
    person = json.loads(text)
    assert person.keys() == {"name", "age", "occupation"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert isinstance(person["age"], int)
    assert 0 <= person["age"] <= 120
    return person["occupation"] in PERSON["properties"]["occupation"]["enum"]


@pytest.mark.essential
def test_each_form_of_output_is_matched(engine):
    patterns = {
        r"\d{3}-\d{4}": {"regex": r"\d{3}-\d{4}"},
        "positive|négative": {"choice": ["positive", "négative"]},
        "ab+c": {"grammar": 'start: "a" "b"+ "c"'},
        "(yes|no)": {"grammar": 'root ::= "yes" | "no"', "name": "guided_decoding"},
    }
    completions = ask(
        engine,
        *(constrained(**fields, seed=seed) for seed, fields in enumerate(patterns.values())),
        *(constrained(**COMPACT, seed=seed) for seed in range(6)),
        constrained(**COMPACT, n=3, seed=4),
        constrained(**COMPACT, temperature=0.0),
    )
    for pattern, completion in zip(patterns, completions, strict=False):
        assert re.fullmatch(pattern, completion.text), (pattern, completion.text)
    persons = completions[len(patterns) :]
    assert len(persons) == 10
    assert all(is_person(completion.text) for completion in persons)
    assert {completion.finish_reason for completion in completions} == {"stop"}


def test_constraints_go_together_with_the_other_parameters(engine):
    longest, barred, scored, stopped, free = ask(
        engine,
        constrained(json_object=True, max_tokens=7, temperature=0.0),
        constrained(choice=["0", "1"], bad_words=["0"]),
        constrained(**COMPACT, logprobs=2, temperature=0.0, repetition_penalty=1.2),
        constrained(**COMPACT, stop=['"age"'], temperature=0.0),
        SamplingParams(temperature=0.0, max_tokens=8),
    )
    assert (longest.finish_reason, len(longest.token_ids)) == ("length", 7)
    assert longest.text.lstrip()[0] == "{"
    assert barred.text == "1"
    assert is_person(scored.text)
    assert len(scored.logprobs) == len(scored.token_ids)
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(('"', " ", ",", "\n"))
    assert '"age"' not in stopped.text
    [alone] = ask(engine, SamplingParams(temperature=0.0, max_tokens=8))
    assert free.token_ids == alone.token_ids


def test_constrained_streams_continue_after_the_core_is_killed(engine):
    seeds = range(6)

    async def run():
        def all_answers():
            return asyncio.gather(*(answer(engine, PROMPT, constrained(**COMPACT, seed=seed)) for seed in seeds))

        calm = await all_answers()
        restarts = (await engine.core_status())["restarts"]
        killed = asyncio.ensure_future(all_answers())

        async def is_under_way():
            live = engine.cores.first.requests.live()
            return len(live) == len(seeds) and all(len(completion.token_ids) > 2 for _, completion in live)

        await eventually(is_under_way)
        os.kill((await engine.core_status())["pid"], signal.SIGKILL)
        return calm, await killed, (await engine.core_status())["restarts"] - restarts

    calm, killed, num_restarts = asyncio.run(run())
    assert num_restarts == 1
    assert [output.outputs[0].token_ids for output in killed] == [output.outputs[0].token_ids for output in calm]


@pytest.mark.essential
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"type": "foo"}}, "foo"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": 'start: "a'}, "lexer error"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_constraint_that_cannot_be_compiled_fails_alone(engine, fields, words):
    async def run():
        good = asyncio.create_task(answer(engine, PROMPT, constrained(**COMPACT)))
        with pytest.raises(EngineGenerateError, match=words):
            await answer(engine, PROMPT, constrained(**fields))
        return (await good).outputs[0].text

    assert is_person(asyncio.run(run()))
