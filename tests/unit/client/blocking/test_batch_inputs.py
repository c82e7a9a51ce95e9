"""The forms in which a batch may be given, and the parameters of each prompt."""

import numpy as np
import pytest

from vllm_mp.client.blocking.batch_inputs import BatchInputs, conversations_of, prompts_of

USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("prompt", ["text", [1, 2], (1, 2), {"prompt": "text"}, {"prompt_token_ids": [1]}, b"bytes"])
def test_single_prompt_is_a_batch_of_one(prompt):
    assert list(prompts_of(prompt)) == [prompt]


def test_array_of_token_ids_is_a_prompt_and_a_matrix_is_several():
    assert len(list(prompts_of(np.array([1, 2, 3])))) == 1
    assert [row.tolist() for row in prompts_of(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("prompts", [[], ["a", "b"], [[1, 2], [3]], ["a", [1], {"prompt": "b"}]])
def test_list_of_prompts_is_a_batch(prompts):
    assert list(prompts_of(prompts)) == prompts


def test_conversation_is_told_from_a_list_of_conversations():
    assert list(conversations_of([USER])) == [[USER]]
    assert list(conversations_of([[USER], [USER, USER]])) == [[USER], [USER, USER]]
    assert list(conversations_of(iter([[USER]]))) == [[USER]]
    for wrong in ("Hello", USER, 5):
        with pytest.raises(TypeError, match="messages must be a list of messages"):
            conversations_of(wrong)


def test_iterator_is_taken_one_prompt_at_a_time():
    taken = []
    inputs = BatchInputs((taken.append(number) or str(number) for number in range(5)), "params", None, None)
    assert (inputs.total, taken) == (None, [])
    first = next(iter(inputs))
    assert (first.prompt_index, first.prompt, first.params, first.priority, taken) == (0, "0", "params", 0, [0])


def test_lists_give_each_prompt_its_own_parameters_also_beside_an_iterator():
    inputs = BatchInputs(iter("ab"), ["x", "y"], "adapter", None)
    assert inputs.total == 2
    assert [(each.prompt_index, each.prompt, each.params, each.lora_request) for each in inputs] == [
        (0, "a", "x", "adapter"),
        (1, "b", "y", "adapter"),
    ]


@pytest.mark.parametrize("name", ["params", "lora_request", "priority"])
def test_list_of_another_length_than_the_prompts_is_refused_by_name(name):
    given = {"params": None, "lora_request": None, "priority": None, name: [1]}
    with pytest.raises(ValueError, match=f"{name} must have an entry for each of the 2 prompts, got 1"):
        BatchInputs(["a", "b"], **given)


def test_prompts_come_in_the_order_of_their_priorities_and_keep_their_places():
    inputs = BatchInputs(["late", "soon", "also soon"], None, None, [5, -1, -1])
    assert [(each.prompt_index, each.priority) for each in inputs] == [(1, -1), (2, -1), (0, 5)]
