"""Lines in the log about requests: one for each when it is sent, if asked for."""

import logging

from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.config import ObservabilityConfig

logger = logging.getLogger(__name__)


def log_request(config: ObservabilityConfig, stream: RequestStream) -> None:
    """Write a line about a request that was sent, unless `disable_log_requests`.

    What the caller wrote is in it only with `max_log_len`: prompts, stop strings and other texts may be private.
    """
    if config.disable_log_requests or not logger.isEnabledFor(logging.INFO):
        return
    length, num_tokens = config.max_log_len, len(stream.prompt_token_ids)
    if length is None:
        logger.info("request %s: %d tokens", stream.request_id, num_tokens)
    else:
        prompt = None if stream.prompt is None else stream.prompt[:length]
        logger.info("request %s: %d tokens, prompt %r, %s", stream.request_id, num_tokens, prompt, stream.params)
