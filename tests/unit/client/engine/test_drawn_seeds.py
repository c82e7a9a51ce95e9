"""Seeds of requests that have none: drawn by the client, from the engine's seed if it has one."""

import asyncio

import pytest

from vllm_mp import SamplingParams
from vllm_mp.client.prompts.request import CallerRequest


@pytest.fixture
def seeds_of(input_processor):
    """A function that returns the seeds of the completions of requests to a new client, in their order."""

    def seeds(engine_seed, *requests):
        inputs = input_processor(**({} if engine_seed == "default" else {"seed": engine_seed}))

        async def seeds_of_request(params):
            stream = await inputs.generation(CallerRequest("id", None, [1, 2], 0, 0.0, {}), params)
            return [completion.params.seed for completion in stream.completions]

        return [asyncio.run(seeds_of_request(params)) for params in requests]

    return seeds


def test_engine_with_a_seed_gives_the_same_seeds_again_and_another_engine_seed_gives_others(seeds_of):
    requests = [SamplingParams(), SamplingParams(n=2), None]
    first = seeds_of(7, *requests)
    assert seeds_of(7, *requests) == first
    drawn = [seed for seeds in first for seed in seeds]
    assert len(set(drawn)) == len(drawn) == 4
    assert set(drawn).isdisjoint(seed for seeds in seeds_of(8, *requests) for seed in seeds)


def test_default_seed_of_the_engine_gives_the_same_seeds_in_each_run(seeds_of):
    assert seeds_of("default", None) == seeds_of("default", None) == seeds_of(0, None)


def test_engine_without_a_seed_gives_other_seeds_in_each_run(seeds_of):
    assert seeds_of(None, None) != seeds_of(None, None)


def test_seed_of_a_request_is_kept_and_draws_no_seed_from_the_engine(seeds_of):
    ((alone,),) = seeds_of(7, None)
    assert seeds_of(7, SamplingParams(seed=3, n=2), None) == [[3, 4], [alone]]
