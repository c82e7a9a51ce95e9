"""Which cores, and ranks of cores, do without the rare parts of torch."""

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.torch_import.rare_parts_of_torch import needs_all_of_torch


@pytest.mark.parametrize(
    ("device", "options", "needs_all"),
    [
        ("cpu", {}, False),
        ("cpu", {"pipeline_parallel_size": 2}, False),
        ("cpu", {"load_format": "dummy"}, True),
        ("cuda", {}, True),
    ],
)
def test_native_models_on_a_cpu_need_no_rare_parts_unless_their_weights_are_random(
    default_model, device, options, needs_all
):
    config = AsyncEngineArgs(str(default_model), **options).create_engine_config()
    assert needs_all_of_torch(config, device) is needs_all
