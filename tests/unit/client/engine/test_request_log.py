"""Lines of the log about requests: none unless asked for, and no texts unless asked for these too."""

import logging
from types import SimpleNamespace

import pytest

from vllm_mp import AsyncEngineArgs, SamplingParams
from vllm_mp.client.engine.request_log import log_request
from vllm_mp.config import ObservabilityConfig

STREAM = SimpleNamespace(
    request_id="mine", prompt="my secret", prompt_token_ids=[1, 2, 3], params=SamplingParams(stop=["password"])
)


@pytest.mark.parametrize(
    ("options", "shown", "hidden"),
    [
        ({}, (), ("mine", "secret", "password")),
        ({"disable_log_requests": False}, ("mine", "3 tokens"), ("secret", "password")),
        ({"disable_log_requests": False, "max_log_len": 4}, ("mine", "'my s'", "password"), ("secret",)),
    ],
)
def test_texts_of_requests_are_in_the_log_only_if_asked_for(caplog, options, shown, hidden):
    args = AsyncEngineArgs(disable_log_stats=True, **options)
    config = ObservabilityConfig(
        disable_log_stats=True, disable_log_requests=args.disable_log_requests, max_log_len=args.max_log_len
    )
    with caplog.at_level(logging.INFO):
        log_request(config, STREAM)
    assert all(text in caplog.text for text in shown)
    assert not any(text in caplog.text for text in hidden)
