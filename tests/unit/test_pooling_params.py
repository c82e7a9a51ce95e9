"""What may be asked of the pooler, and what is refused."""

import numpy as np
import pytest

from vllm_mp import PoolingParams


def test_everything_may_be_left_to_the_model() -> None:
    params = PoolingParams()
    assert (params.pooling_type, params.normalize, params.dimensions, params.truncate_prompt_tokens) == (None,) * 4


def test_letters_of_any_case_and_numbers_of_numpy_are_taken_for_what_they_are() -> None:
    params = PoolingParams(pooling_type="CLS", dimensions=np.int64(8), truncate_prompt_tokens=-1, task="embed")
    assert params.pooling_type == "cls"
    assert type(params.dimensions) is int


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("pooling_type", "max", ValueError),
        ("pooling_type", 3, ValueError),
        ("normalize", 1, TypeError),
        ("dimensions", 0, ValueError),
        ("dimensions", -1, ValueError),
        ("dimensions", 2**31, ValueError),
        ("dimensions", 1.0, TypeError),
        ("dimensions", True, TypeError),
        ("truncate_prompt_tokens", 0, ValueError),
        ("truncate_prompt_tokens", -2, ValueError),
        ("truncate_prompt_tokens", "8", TypeError),
        ("task", "classify", ValueError),
    ],
)
def test_a_bad_value_is_refused_by_its_fields_name(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field) as caught:
        PoolingParams(**{field: value})
    assert repr(value) in str(caught.value)
