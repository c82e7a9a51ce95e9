"""The output of a request depends on that request alone; `tools/quality/differential.py` tries more random requests."""

import pytest
from transformers import AutoTokenizer

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.differential import PRIVATE_OPTIONS, Judge, play, random_cases, shared_options
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import num_preemptions
from vllm_mp.testing.random_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_cores")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
        {"async_scheduling": True},
        pytest.param({"spec_method": "suffix"}, marks=pytest.mark.extended),
    ],
    ids=["one step at a time", "overlapping steps", "drafts"],
)
def played(request, default_model, tmp_path_factory):
    """The arguments of a `Judge`, and 40 cases with their outcomes in company and alone.

    With overlapping steps, the shared engine schedules the next step while the pending step is computed. With drafts,
    it verifies several tokens of a request in a step.
    """
    folder = tmp_path_factory.mktemp("small")
    with one_thread():
        model = save_small_model(folder, default_model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bytes_per_token = read_architecture(model.config.to_dict()).kv_bytes_per_token(4)
        with (
            running_engine(folder, **shared_options(bytes_per_token), num_threads=1, **request.param) as shared,
            running_engine(folder, **PRIVATE_OPTIONS, num_threads=1) as private,
        ):
            plays = play(shared, private, random_cases(1, 40, tokenizer))
            assert num_preemptions(shared) > 0
            yield (model, tokenizer, shared.model_config.eos_token_ids), plays


def test_completions_in_company_equal_those_alone_and_follow_from_the_logits(played):
    judge_args, plays = played
    judge = Judge(*judge_args)
    for case, together, lone in plays:
        judge.compare(case, together, lone)
        judge.verify(case, lone)
    assert not judge.differences, "\n\n".join(
        f"{difference.completion_index}: {difference.what}\n{difference.case}" for difference in judge.differences
    )
    for what in (
        "ended by length",
        "ended by stop string",
        "completions with logprobs",
        "prompts with logprobs",
        "aborted",
        "prompts found in the cache",
        "prompts computed in chunks",
    ):
        assert judge.counts[what], f"no case covers: {what}"
    assert judge.counts["refused"] == 0
    assert judge.counts["ends verified"] > 0.8 * judge.counts["completions"]


def test_every_change_of_a_completion_is_noticed(played):
    judge_args, plays = played

    def num_differences(case, completion, other):
        judge = Judge(*judge_args)
        judge.compare(case, [completion], [other])
        found = len(judge.differences)
        judge.verify(case, [completion])
        return found, len(judge.differences) - found

    def end_is_verified(case, completion):
        judge = Judge(*judge_args)
        judge.verify(case, [completion])
        return judge.counts["ends verified"] == 1

    case, (right,) = next(
        (case, lone)
        for case, _, lone in plays
        if len(lone) == 1
        and lone[0].logprobs
        and len(lone[0].token_ids) > 2
        and lone[0].text
        and end_is_verified(case, lone[0])
    )
    other_token = (right.token_ids[1] + 1) % 49152
    entry = right.logprobs[1][right.token_ids[1]]
    wrong = {
        **right.logprobs[1],
        right.token_ids[1]: type(entry)(entry.logprob + 3e-4, entry.rank, entry.decoded_token),
    }
    assert num_differences(case, right, right) == (0, 0)
    assert all(
        num_differences(case, right._replace(token_ids=[right.token_ids[0], other_token, *right.token_ids[2:]]), right)
    )
    assert all(num_differences(case, right._replace(token_ids=right.token_ids[:-1]), right))
    assert all(num_differences(case, right._replace(text=right.text[:-1]), right))
    assert all(num_differences(case, right._replace(finish_reason="other"), right))
    assert all(num_differences(case, right._replace(stop_reason="other"), right))
    assert all(num_differences(case, right._replace(logprobs=[right.logprobs[0], wrong, *right.logprobs[2:]]), right))
    assert num_differences(case, right._replace(cumulative_logprob=right.cumulative_logprob + 1), right)[0]
