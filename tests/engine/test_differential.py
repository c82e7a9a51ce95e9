"""An answer depends on its request alone, whatever else the engine does; `tools/differential.py` tries more of this."""

import pytest
from transformers import AutoTokenizer

from vllm_mp.model_config.architecture import Architecture
from vllm_mp.testing.differential import ALONE, Judge, company, play, random_cases, save_small_model
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import num_preemptions
from vllm_mp.testing.random_models import one_thread


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def played(request, default_model, tmp_path_factory):
    """A judge's means, and 60 cases with what was answered to them, in company and alone.

    In company also with the next step scheduled while one is computed.
    """
    folder = tmp_path_factory.mktemp("small")
    with one_thread():
        model = save_small_model(folder, default_model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bytes_per_token = Architecture.from_hf_config(model.config.to_dict()).kv_bytes_per_token(4)
        with (
            running_engine(folder, **company(bytes_per_token), num_threads=1, async_scheduling=request.param) as shared,
            running_engine(folder, **ALONE, num_threads=1) as private,
        ):
            plays = play(shared, private, random_cases(1, 60, tokenizer))
            assert num_preemptions(shared) > 0
            yield (model, tokenizer, shared.model_config.eos_token_ids), plays


def test_answers_in_company_are_those_given_alone_and_those_that_the_logits_call_for(played):
    means, plays = played
    judge = Judge(*means)
    for case, together, lone in plays:
        judge.compare(case, together, lone)
        judge.verify(case, lone)
    assert not judge.differences, "\n\n".join(f"{one.index}: {one.what}\n{one.case}" for one in judge.differences)
    for what in (
        "ended by length",
        "ended by stop string",
        "answers with logprobs",
        "prompts with logprobs",
        "aborted",
        "prompts found in the cache",
        "prompts read in chunks",
    ):
        assert judge.counts[what], f"no case has shown {what!r}"
    assert judge.counts["refused"] == 0
    assert judge.counts["ends verified"] > 0.8 * judge.counts["answers"]


def test_whatever_is_changed_in_an_answer_is_noticed(played):
    means, plays = played

    def differences(case, one, other):
        judge = Judge(*means)
        judge.compare(case, [one], [other])
        found = len(judge.differences)
        judge.verify(case, [one])
        return found, len(judge.differences) - found

    def end_is_verified(case, one):
        judge = Judge(*means)
        judge.verify(case, [one])
        return judge.counts["ends verified"] == 1

    case, (one,) = next(
        (case, lone)
        for case, _, lone in plays
        if len(lone) == 1
        and lone[0].logprobs
        and len(lone[0].token_ids) > 2
        and lone[0].text
        and end_is_verified(case, lone[0])
    )
    other_token = (one.token_ids[1] + 1) % 49152
    entry = one.logprobs[1][one.token_ids[1]]
    wrong = {**one.logprobs[1], one.token_ids[1]: type(entry)(entry.logprob + 3e-4, entry.rank, entry.decoded_token)}
    assert differences(case, one, one) == (0, 0)
    assert all(differences(case, one._replace(token_ids=[one.token_ids[0], other_token, *one.token_ids[2:]]), one))
    assert all(differences(case, one._replace(token_ids=one.token_ids[:-1]), one))
    assert all(differences(case, one._replace(text=one.text[:-1]), one))
    assert all(differences(case, one._replace(finish_reason="other"), one))
    assert all(differences(case, one._replace(stop_reason="other"), one))
    assert all(differences(case, one._replace(logprobs=[one.logprobs[0], wrong, *one.logprobs[2:]]), one))
    assert differences(case, one._replace(cumulative_logprob=one.cumulative_logprob + 1), one)[0]
