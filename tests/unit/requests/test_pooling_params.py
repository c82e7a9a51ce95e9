"""Pooling parameters that are invalid are refused with field, value and range."""

import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.requests.pooling_params import PoolingParams


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"pooling_type": "max"}, ValueError, "pooling_type must be one of last, mean, cls, got 'max'"),
        ({"pooling_type": 5}, TypeError, "pooling_type must be a string or None, got 5"),
        ({"normalize": 1}, TypeError, "normalize must be True, False or None, got 1"),
        ({"dimensions": 0}, ValueError, "dimensions must be in [1, 2**31), got 0"),
        ({"dimensions": -1}, ValueError, "dimensions must be in [1, 2**31), got -1"),
        ({"dimensions": 2**31}, ValueError, "dimensions must be in [1, 2**31), got 2147483648"),
        ({"dimensions": True}, TypeError, "dimensions must be an integer, got True"),
        ({"dimensions": 8.0}, TypeError, "dimensions must be an integer, got 8.0"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be -1 or in [1, 2**31), got 0"),
        ({"truncate_prompt_tokens": -2}, ValueError, "truncate_prompt_tokens must be -1 or in [1, 2**31), got -2"),
        ({"truncate_prompt_tokens": "5"}, TypeError, "truncate_prompt_tokens must be an integer, got '5'"),
        ({"task": "score"}, ValueError, "task must be 'embed', 'classify' or None, got 'score'; call score()"),
        (
            {"task": "token_embed"},
            ValueError,
            "task must be 'embed', 'classify' or None, got 'token_embed'; a prompt has one vector, not one for each of "
            "its tokens",
        ),
        ({"use_activation": 1}, TypeError, "use_activation must be True, False or None, got 1"),
        ({"second_text_at": 0}, ValueError, "second_text_at must be in [1, 2**31), got 0"),
        ({"task": 5}, TypeError, "task must be a string or None, got 5"),
    ],
    ids=str,
)
def test_invalid_parameter_is_refused_with_field_value_and_range(fields, error, words):
    with pytest.raises(error) as caught:
        PoolingParams(**fields)
    assert str(caught.value) == words


def test_pooling_type_in_any_case_and_numpy_integers_are_accepted():
    params = PoolingParams(pooling_type="CLS", dimensions=np.int64(8), truncate_prompt_tokens=-1, task="embed")
    assert params == PoolingParams(pooling_type="cls", dimensions=8, truncate_prompt_tokens=-1, task="embed")
    assert (params.pooling_type, type(params.dimensions)) == ("cls", int)


def test_parameters_cross_the_wire_unchanged():
    for params in (PoolingParams(), PoolingParams("mean", False, 3, -1, "embed", True, 4)):
        message = wire.AddPooling(1, 0, "id", b"", params)
        assert wire.decode_client_message(wire.encode(message)).params == params
