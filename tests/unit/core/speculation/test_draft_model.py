"""A draft model changes no answer, and its KV cache follows the rows: with the weights of the model it is right."""

import json

import pytest
import torch
from support.answers import PROMPTS, answers, answers_with_slot
from support.drafts import EagerPace
from support.local_engine import LocalEngine

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import CONFIGS, save_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OPTIONS = {"load_format": "dummy", "max_model_len": 80}
TIGHT = {"max_num_batched_tokens": 16, "max_num_seqs": 5, "max_num_partial_prefills": 2}
"""Options under which prompts take several steps, some of them beside rows with drafts."""
SAMPLED = {"temperature": 1.0, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with the same vocabulary and other layers."""
    return save_config(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))


def drafted(folder, draft, **options):
    """Return an engine in which the model in the folder `draft` drafts up to 4 tokens whatever they cost."""
    speculation = {"model": str(draft), "num_speculative_tokens": 4}
    engine = LocalEngine(folder, **{**OPTIONS, "speculative_config": speculation, **options})
    engine.scheduler.drafting._pace = EagerPace()
    return engine


def figures(engine):
    """Return how many drafts were accepted, and how many there were."""
    counters = engine.scheduler.drafting.counters
    return counters.num_accepted_tokens, counters.num_draft_tokens


def play(engine, **params):
    return answers(engine, **{"num_tokens": 24, **params})


@pytest.mark.parametrize(
    "params",
    [
        {},
        SAMPLED,
        {**SAMPLED, "min_p": 0.01, "top_k": 40, "typical_p": 0.95},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"stop_token_ids": list(range(0, 97, 5)), "min_tokens": 9},
        {"logit_bias": {3: 4.0, 9: 4.0, 11: 4.5, 40: 4.5}, **SAMPLED},
        {"num_prompt_logprobs": 1},
    ],
    ids=lambda params: "-".join(params) or "greedy",
)
def test_answers_and_log_probabilities_are_those_without_drafts(folder, other, params):
    expected = play(LocalEngine(folder, **OPTIONS, **TIGHT), **params)
    for draft in (folder, other):
        engine = drafted(folder, draft, **TIGHT)
        assert play(engine, **params) == expected
        assert figures(engine)[1] > 10


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "random"])
@pytest.mark.parametrize("options", [{}, TIGHT, {"quantization": "int8"}], ids=["wide", "tight", "int8"])
def test_draft_model_that_equals_the_model_is_always_right(folder, params, options):
    speculation = {"model": str(folder), "num_speculative_tokens": 4, "quantization": options.get("quantization")}
    engine = drafted(folder, folder, **options, speculative_config=speculation)
    play(engine, **params)
    accepted, total = figures(engine)
    assert accepted > 60
    assert accepted == total


def test_another_draft_model_is_mostly_wrong(folder, other):
    engine = drafted(folder, other)
    play(engine, **SAMPLED)
    accepted, total = figures(engine)
    assert accepted < 0.6 * total


def test_preempted_requests_answer_the_same(folder):
    block_bytes = 4 * drafted(folder, folder).runner.token_bytes()
    options = {**TIGHT, "kv_cache_memory_bytes": 26 * block_bytes}
    expected = play(LocalEngine(folder, **OPTIONS, **TIGHT), **SAMPLED)
    engine = drafted(folder, folder, **options)
    assert play(engine, **SAMPLED) == expected
    assert engine.scheduler.num_preemptions > 0
    accepted, total = figures(engine)
    assert 10 < total == accepted


def test_memory_plan_counts_both_caches(folder, other):
    plain = LocalEngine(folder, **OPTIONS, kv_cache_memory_bytes=2**18)
    engine = drafted(folder, other, kv_cache_memory_bytes=2**18)
    both = plain.runner.memory.token_bytes() + engine.runner.draft.memory.token_bytes()
    assert engine.runner.token_bytes() == both
    assert engine.config.cache_config.num_blocks * both * 4 <= 2**18
    assert engine.config.cache_config.num_blocks < plain.config.cache_config.num_blocks
    keys, _ = engine.runner.draft.memory.kv_caches[0]
    assert len(keys) == engine.config.cache_config.num_blocks


class Watched:
    """A model that calls `watch` with the number of tokens of each of its runs."""

    def __init__(self, model, watch):
        self._model, self._watch = model, watch

    def __call__(self, input_ids, *args):
        self._watch(len(input_ids))
        return self._model(input_ids, *args)

    def __getattr__(self, name):
        return getattr(self._model, name)


def count_computed(engine):
    """Return a list that gets the numbers of tokens of the runs of the draft model."""
    counted = []
    engine.runner.draft.memory.wrap_model(lambda model: Watched(model, counted.append))
    return counted


def test_start_computes_the_largest_step_of_the_draft_model(folder):
    """The KV cache gets what this step leaves of a GPU's memory: a late prompt beside drafts for all other rows."""
    engine = drafted(folder, folder, max_num_seqs=7)
    computed = count_computed(engine)
    cache = engine.runner.draft.memory.kv_caches
    engine.runner.draft.compile_steps()
    assert max(computed) == OPTIONS["max_model_len"] + 6 * 5
    assert not engine.runner.draft._contents
    engine.runner.draft.memory.kv_caches = cache
    play(engine)
    accepted, total = figures(engine)
    assert 20 < total == accepted


def test_blocks_that_the_draft_model_has_filled_serve_later_requests(folder):
    engine = drafted(folder, folder)
    prompt = PROMPTS[0]
    engine.add(0, prompt, 12)
    engine.run()
    computed, before = count_computed(engine), figures(engine)
    engine.add(1, [*prompt, *engine.tokens[0]], 12)
    engine.run()
    assert sum(computed) < 24 < len(prompt), "the draft model has not read the prompt again"
    accepted, total = (now - then for now, then in zip(figures(engine), before, strict=True))
    assert 5 < total == accepted


def test_requests_are_named_while_the_draft_model_computes_for_them(folder):
    class Page:
        tasks = ()

        def note_outside(self, tasks):
            self.tasks = tasks

    page, seen = Page(), []
    engine = drafted(folder, folder)
    engine.scheduler.drafting.outside = OutsideWork(page)
    memory = engine.runner.draft.memory

    def note(_):
        seen.append({task.id: task.progress for task in page.tasks})

    memory.wrap_model(lambda model: Watched(model, note))
    engine.add(3, PROMPTS[0], 8)
    engine.add(5, PROMPTS[1], 8)
    engine.run()
    assert seen[0] == {3: 1}
    assert any(each.keys() == {3, 5} for each in seen)
    assert not page.tasks

    def fail(_):
        raise RuntimeError("the draft model fails")

    memory.wrap_model(lambda model: Watched(model, fail))
    engine.add(7, PROMPTS[2], 8)
    with pytest.raises(RuntimeError, match="the draft model fails"):
        engine.run()
    assert [(task.id, task.progress) for task in page.tasks] == [(7, 1)]


def test_other_tokens_in_a_block_are_computed_again(folder):
    """Blocks pass from request to request; what the draft model had computed for the former ones is not taken."""
    block_bytes = 4 * drafted(folder, folder).runner.token_bytes()
    engine = drafted(folder, folder, max_num_seqs=2, max_num_batched_tokens=80, kv_cache_memory_bytes=40 * block_bytes)
    for round_ in range(4):
        for slot, prompt in enumerate(PROMPTS[:4]):
            engine.add(10 * round_ + slot, [(token + round_) % 97 for token in prompt], 12)
        engine.run()
    accepted, total = figures(engine)
    assert 60 < total == accepted


def test_a_block_that_another_request_has_begun_to_overwrite_is_computed_again(folder):
    """Each request takes all blocks, in the reverse order of the one before: the last block of the second request,
    which it never fills, is the first of the others."""
    block_bytes = 4 * drafted(folder, folder).runner.token_bytes()
    engine = drafted(folder, folder, max_model_len=40, kv_cache_memory_bytes=11 * block_bytes)
    prompt, other = PROMPTS[0][:20], PROMPTS[2][:20]
    for slot, tokens in enumerate((prompt, other, prompt)):
        engine.add(slot, tokens, 20)
        engine.run()
    accepted, total = figures(engine)
    assert 30 < total == accepted


def test_requests_with_an_adapter_answer_the_same_and_the_draft_model_runs_without(folder, tmp_path):
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    plain, engine = LocalEngine(folder, **OPTIONS, **lora), drafted(folder, folder, **lora)
    arch = plain.config.model_config.architecture
    path = save_adapter(tmp_path / "adapter", adapter_tensors(arch, 8), r=8)
    for each in (plain, engine):
        each.runner.load_adapter(0, read_adapter(path, arch, torch.float32, 8))
    expected = answers_with_slot(plain, 0)
    assert expected != answers(plain), "the adapter changes the answers"
    assert answers_with_slot(engine, 0) == expected
    accepted, total = figures(engine)
    assert accepted < total


def test_long_prompts_are_computed_a_part_at_a_time(folder, monkeypatch):
    monkeypatch.setattr("vllm_mp.core.worker.draft_runner._MAX_LATE_TOKENS", 10)
    engine = drafted(folder, folder)
    computed = count_computed(engine)
    play(engine)
    assert max(computed) <= 10 + len(PROMPTS) * 5
    accepted, total = figures(engine)
    assert 20 < total == accepted


@pytest.mark.parametrize("level", [1, 2])
def test_requests_go_on_after_a_sleep(folder, level):
    expected = play(LocalEngine(folder, **OPTIONS))
    engine = drafted(folder, folder)
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, 24, num_logprobs=2)
    for _ in range(4):
        engine.step()
    engine.process_all_but(0)
    before, memory = figures(engine), engine.runner.released_memory
    (memory.offload_weights if level == 1 else memory.drop_weights)()
    engine.scheduler.fall_asleep()
    memory.drop_cache()
    assert not engine.runner.draft.memory.kv_caches
    assert not engine.runner.draft._contents
    memory.restore_weights()
    memory.restore_cache()
    for keys, values in engine.runner.draft.memory.kv_caches:  # new memory holds anything
        keys.fill_(3.0)
        values.fill_(3.0)
    memory.prepare()
    engine.scheduler.wake_up()
    engine.run()
    assert [(engine.tokens[slot], engine.logprobs[slot]) for slot in range(len(PROMPTS))] == expected
    accepted, total = (now - then for now, then in zip(figures(engine), before, strict=True))
    assert 10 < total == accepted


def test_rows_beyond_the_context_of_the_draft_model_go_on_without(folder, tmp_path):
    draft = save_config(CONFIGS["llama"], tmp_path / "short")
    path = draft / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 48}))
    expected = play(LocalEngine(folder, **OPTIONS))
    engine = drafted(folder, draft)
    assert engine.runner.draft.max_model_len == 48
    assert play(engine) == expected
    accepted, total = figures(engine)
    assert 10 < total == accepted


def test_the_time_of_the_draft_model_decides_how_often_it_is_asked(folder):
    def num_drafted(cost):
        """Return how many tokens are drafted if a run of the draft model takes the share `cost` of a step."""
        engine = LocalEngine(folder, **OPTIONS, speculative_config={"model": str(folder), "num_speculative_tokens": 2})
        now = [0.0]

        def take(seconds):
            now[0] += seconds

        engine.runner.memory.wrap_model(lambda model: Watched(model, lambda _: take(1.0)))
        engine.runner.draft.memory.wrap_model(lambda model: Watched(model, lambda _: take(cost)))
        engine.scheduler._pace.clock = engine.scheduler.drafting._clock = lambda: now[0]
        for slot in range(3):
            engine.add(slot, PROMPTS[1], 60)
            engine.run()
        return figures(engine)[1]

    cheap, dear = num_drafted(0.1), num_drafted(1.5)
    assert cheap > 90
    assert 0 < dear < cheap / 2
