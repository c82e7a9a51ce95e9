"""Ranks that share a model answer like one process that has the whole model, up to near-ties."""

import pytest
from support.answers import PROMPTS, Poison, answers, assert_near
from support.local_engine import LocalEngine
from support.rank_threads import local_group

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_sampled_answers_of_steps_launched_ahead_are_those_of_one_process(model_of):
    folder = model_of("llama")
    params = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = answers(LocalEngine(folder, async_scheduling=True), **params)
    with local_group(folder, 2, async_scheduling=True) as group:
        found = answers(group.engine, **params)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_greedy_decodes_take_one_message_a_step(model_of):
    with local_group(model_of("llama"), 2) as group:
        engine = group.engine
        engine.add(0, PROMPTS[1], 8, num_logprobs=-1)
        engine.step()
        before = group.processes.num_messages
        for _ in range(5):
            engine.step()
        assert group.processes.num_messages == before + 5
        engine.run()
    assert len(engine.tokens[0]) == 8


def test_steps_launched_ahead_read_the_tokens_that_rank_0_has_sampled(model_of):
    folder = model_of("qwen3")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2, async_scheduling=True) as group:
        assert_near(answers(group.engine), expected)


@pytest.mark.parametrize("refused", [None, 32])
def test_ranks_replay_the_same_graphs_even_if_one_of_them_cannot_capture_all(refused, model_of):
    """A graph sums padding too, so ranks with different graphs would sum hidden states of different sizes."""

    def capture(rank):
        def run_first(compute):
            if len(compute()) == refused and rank == 1:
                raise RuntimeError("refused")
            return compute

        return lambda device: run_first

    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    captures = [capture(0), capture(1)]
    with local_group(folder, 2, async_scheduling=True, make_captures=captures) as group:
        runners = [group.engine.runner, group.followers[1]._runner]
        own, others = (set(runner.memory.graphs._replays) for runner in runners)
        assert own == others
        assert {shape.only_decodes for shape in own} == ({True} if refused else {True, False})
        assert_near(answers(group.engine), expected)


def test_steps_whose_values_are_not_finite_are_repeated_by_all_ranks(model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2) as group:
        group.engine.runner.memory.wrap_model(Poison)
        assert_near(answers(group.engine), expected)
