"""A request answers with drafts what it answers without, token for token, whatever else it asks for."""

import itertools

import pytest
from support.answers import PROMPTS, answers
from support.drafts import EagerPace, draft_known_answers
from support.local_engine import LocalEngine

from vllm_mp.testing.random_models import CONFIGS, save_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "check_invariants": True}
LONGER = {"load_format": "dummy", "max_model_len": 80}
TIGHT = {"max_num_batched_tokens": 16, "max_num_seqs": 5, "max_num_partial_prefills": 2}
"""Options under which prompts take several steps, some of them beside rows with drafts."""
SAMPLED = {"temperature": 1.0, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


def play(engine, num_tokens=24, **params):
    """Return (tokens, log-probabilities, reason of the end) of each of `PROMPTS`."""
    found = answers(engine, num_tokens=num_tokens, **params)
    return [(*answer, engine.ends[slot].reason) for slot, answer in enumerate(found)]


def play_with_drafts(folder, expected, options, wrong_every=3, **params):
    """Return what `play` does with drafts, and how many were accepted and rejected."""
    engine = LocalEngine(folder, **LONGER, **DRAFTS, **options)
    known = zip(PROMPTS, (tokens for tokens, *_ in expected), strict=True)
    draft_known_answers(engine.scheduler, known, wrong_every)
    found = play(engine, **params)
    counters = engine.scheduler.drafting.counters
    return found, engine, counters.num_accepted_tokens, counters.num_draft_tokens - counters.num_accepted_tokens


@pytest.mark.parametrize(
    "params",
    [
        {},
        SAMPLED,
        {**SAMPLED, "min_p": 0.01, "top_k": 40, "typical_p": 0.95},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {**SAMPLED, "frequency_penalty": 0.5},
        {"stop_token_ids": list(range(0, 97, 5)), "min_tokens": 9},
        {"bad_words": [[5], [7, 9], *([a, b] for a in range(90) for b in range(0, 90, 7))], **SAMPLED},
        {"logit_bias": {3: 4.0, 9: 4.0, 11: 4.5, 40: 4.5}, **SAMPLED},
        {"allowed_token_ids": [3, 5, 9, 12, 60, 61], **SAMPLED},
        {"num_prompt_logprobs": 1},
    ],
    ids=lambda params: "-".join(params) or "greedy",
)
@pytest.mark.parametrize("wrong_every", [3, 100])
def test_answers_log_probabilities_and_ends_are_those_without_drafts(folder, params, wrong_every):
    expected = play(LocalEngine(folder, **LONGER, **TIGHT), **params)
    found, _, num_accepted, num_rejected = play_with_drafts(folder, expected, TIGHT, wrong_every, **params)
    assert found == expected
    assert num_accepted > 10
    assert (num_rejected > 10) == (wrong_every == 3)


class RestingPace(EagerPace):
    """Drafts in every sixth step of a request."""

    def is_resting(self, request):
        request.rest = (request.rest + 1) % 6
        return request.rest > 0


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "random"])
def test_steps_between_those_with_drafts_are_repeated(folder, params):
    expected = play(LocalEngine(folder, **LONGER), **params)
    engine = LocalEngine(folder, **LONGER, **DRAFTS)
    draft_known_answers(engine.scheduler, zip(PROMPTS, (tokens for tokens, *_ in expected), strict=True))
    engine.scheduler.drafting._pace = RestingPace()
    steps, step = [], engine.step
    engine.step = lambda: steps.append(step())
    assert play(engine, **params) == expected
    assert sum(step is before for before, step in itertools.pairwise(steps) if step is not None) > 5
    counters = engine.scheduler.drafting.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_preempted_requests_answer_the_same(folder):
    block_bytes = 4 * LocalEngine(folder, **LONGER).runner.memory.token_bytes()
    options = {**TIGHT, "kv_cache_memory_bytes": 26 * block_bytes}
    expected = play(LocalEngine(folder, **LONGER, **options), **SAMPLED)
    found, engine, num_accepted, _ = play_with_drafts(folder, expected, options, **SAMPLED)
    assert found == expected
    assert engine.scheduler.num_preemptions > 0
    assert num_accepted > 10


def test_requests_that_a_higher_priority_preempts_answer_the_same(folder):
    block_bytes = 4 * LocalEngine(folder, **LONGER).runner.memory.token_bytes()
    options = {**TIGHT, "kv_cache_memory_bytes": 26 * block_bytes, "scheduling_policy": "priority"}
    expected = answers(LocalEngine(folder, **LONGER), num_tokens=24, **SAMPLED)
    engine = LocalEngine(folder, **LONGER, **DRAFTS, **options)
    draft_known_answers(engine.scheduler, zip(PROMPTS, (tokens for tokens, _ in expected), strict=True), 3)
    for slot, prompt in enumerate(PROMPTS):  # each arrives while those before run, and goes before them
        engine.add(slot, prompt, 24, num_logprobs=2, priority=-slot, **SAMPLED)
        engine.step()
    engine.run()
    assert [(engine.tokens[slot], engine.logprobs[slot]) for slot in range(len(PROMPTS))] == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.drafting.counters.num_accepted_tokens > 10


def test_blocks_that_drafts_have_filled_are_found_by_later_requests(folder):
    plain = LocalEngine(folder, **LONGER)
    expected = play(plain)
    follow_up = [[*prompt, *tokens] for prompt, (tokens, *_) in zip(PROMPTS, expected, strict=True)]
    again = answers(plain, follow_up, num_tokens=4)
    _, engine, num_accepted, _ = play_with_drafts(folder, expected, {})
    before = engine.scheduler.cache.num_cached_tokens
    assert answers(engine, follow_up, num_tokens=4) == again
    assert num_accepted > 10
    num_full = sum((len(prompt) - 1) // 4 * 4 for prompt in follow_up)
    assert engine.scheduler.cache.num_cached_tokens - before == num_full


def test_a_request_that_allows_no_drafts_gets_none(folder):
    engine = LocalEngine(folder, **LONGER, **DRAFTS)
    draft_known_answers(engine.scheduler, [([1, 2], [3] * 20)])
    engine.max_drafts = 0
    engine.add(0, [1, 2], 12)
    engine.run()
    assert engine.scheduler.drafting.counters.num_draft_tokens == 0
    engine.max_drafts = 2
    engine.add(1, [1, 2], 12)
    engine.run()
    assert engine.scheduler.drafting.counters.num_draft_tokens > 0
    assert len(engine.scheduler.drafting.counters.accepted_per_position) == 4


def test_drafts_never_reach_beyond_the_length_of_a_request(folder):
    expected = play(LocalEngine(folder, **LONGER), num_tokens=5)
    found, _, num_accepted, _ = play_with_drafts(folder, expected, {}, wrong_every=100, num_tokens=5)
    assert found == expected
    assert num_accepted == len(PROMPTS) * 3, "the first and the last token are no drafts"
