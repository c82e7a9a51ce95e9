"""The counters and histograms of an engine."""

from vllm_mp.client.stats.cells import Cells
from vllm_mp.client.stats.iteration_stats import FinishReason
from vllm_mp.client.stats.metrics import Counter, Histogram
from vllm_mp.client.stats.restart_counter import RestartCounter

FINISH_REASONS = tuple(map(str, FinishReason))
# The bounds are vLLM's. Where these begin late, there are finer ones below.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COMPLETIONS = (1, 2, 5, 10, 20)


class EngineCounters:
    """Counters of the requests of a client and of its cores."""

    def __init__(self, max_model_len: int) -> None:
        """`max_model_len` is in tokens."""
        cells = self.cells = Cells(self.settle)
        lengths = _one_two_five(max_model_len)
        self.prompt_tokens = Counter(cells)
        self.generation_tokens = Counter(cells)
        self.prefix_cache_queries = Counter(cells)
        self.prefix_cache_hits = Counter(cells)
        self.finished_requests = Counter(cells, FINISH_REASONS)
        self.first_token_s = Histogram(cells, _FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(cells, _BETWEEN_TOKENS_S)
        self.token_s = Histogram(cells, _BETWEEN_TOKENS_S)
        """Mean time per output token after the first, of each finished request."""
        self.e2e_s = Histogram(cells, _REQUEST_S)
        self.queue_s = Histogram(cells, _REQUEST_S)
        self.inference_s = Histogram(cells, _REQUEST_S)
        self.prefill_s = Histogram(cells, _REQUEST_S)
        self.decode_s = Histogram(cells, _REQUEST_S)
        self.tokenize_s = Histogram(cells, _REQUEST_S)
        self.request_prompt_tokens = Histogram(cells, lengths)
        self.request_generation_tokens = Histogram(cells, lengths)
        self.longest_completion_tokens = Histogram(cells, lengths)
        self.params_max_tokens = Histogram(cells, lengths)
        self.params_n = Histogram(cells, _COMPLETIONS)
        self.step_tokens = Histogram(cells, _STEP_TOKENS)
        self.core_restarts = RestartCounter()
        self.recovered_requests = Counter(cells)
        self.recovery_s = Histogram(cells, _RECOVERY_S)
        self.dropped_messages = Counter(cells)

    def settle(self) -> None:
        """Count what waits to be counted; called before the numbers are read."""


def _one_two_five(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `limit`."""
    steps = [factor * 10**exponent for exponent in range(len(str(limit))) for factor in (1, 2, 5)]
    return [step for step in steps if step <= limit]
