"""Lines in the log about requests: one when each is added and one when it ends, if asked for."""

import logging

from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.stats.finished_request import FinishedRequest
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
        logger.info("Added request %s: %d tokens", stream.request_id, num_tokens)
    else:
        prompt = None if stream.prompt is None else stream.prompt[:length]
        logger.info("Added request %s: %d tokens, prompt %r, %s", stream.request_id, num_tokens, prompt, stream.params)


def log_end(request: FinishedRequest) -> None:
    """Write a line about a request that has ended, without texts."""
    end = {"abort": "Aborted", "error": "Failed"}.get(request.finish_reason, "Finished")
    logger.info("%s request %s: %d tokens generated", end, request.request_id, request.num_output_tokens)
