"""The counters of an engine as metrics of Prometheus, with vLLM's names for what means the same."""

import itertools
import time
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.client.stats import CoreReading, Counter, Histogram
from vllm_mp.client.stats.cells import Values

_ENGINE_LABELS = ("model_name", "engine")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names of being awake and of the levels of sleep 1 and 2."""


class EngineMetrics:
    """Reads the statistics of an engine's clients and the last known load of its cores.

    The load of each core has a label `engine` of its own; all else, which the client counts over all cores, has that of
    the first core.
    """

    def __init__(self, engine: EngineReadings, number: int = 0) -> None:
        """`number` is the label `engine` of the first core, and tells engines of the same model apart."""
        stats = engine.stats
        self._engine = engine
        self.labels = (engine.vllm_config.model_config.served_model_name, str(number))
        self._counters: dict[str, tuple[str, Counter]] = {
            "vllm:prompt_tokens": ("Tokens of prompts whose first output token has arrived", stats.prompt_tokens),
            "vllm:generation_tokens": ("Output tokens received from the core", stats.generation_tokens),
            "vllm:prefix_cache_queries": (
                "Tokens of prompts that were looked up in the prefix cache",
                stats.prefix_cache_queries,
            ),
            "vllm:prefix_cache_hits": ("Tokens of prompts that the prefix cache held", stats.prefix_cache_hits),
            "vllm:prompt_tokens_cached": ("The same as prefix_cache_hits", stats.prefix_cache_hits),
            "vllm_mp:recovered_requests": (
                "Requests that were continued on the next core, once for each death",
                stats.recovered_requests,
            ),
            "vllm_mp:client_dropped_messages": (
                "Messages from cores that were dropped: invalid, or of an earlier core",
                stats.dropped_messages,
            ),
        }
        self._histograms: dict[str, tuple[str, Histogram]] = {
            "vllm:time_to_first_token_seconds": ("Time from arrival to the first token", stats.first_token_s),
            "vllm:inter_token_latency_seconds": (
                "Time between two tokens of a completion, as they arrive from the core",
                stats.between_tokens_s,
            ),
            "vllm:time_per_output_token_seconds": (
                "The same as inter_token_latency_seconds, under the name of older versions",
                stats.between_tokens_s,
            ),
            "vllm:request_time_per_output_token_seconds": (
                "Mean time for each output token after the first, of finished requests",
                stats.token_s,
            ),
            "vllm:e2e_request_latency_seconds": ("Time from arrival to the end, of finished requests", stats.e2e_s),
            "vllm:request_queue_time_seconds": ("Time in the core's waiting queue", stats.queue_s),
            "vllm:request_inference_time_seconds": ("Time from the first step to the end", stats.inference_s),
            "vllm:request_prefill_time_seconds": ("Time from the first step to the first token", stats.prefill_s),
            "vllm:request_decode_time_seconds": ("Time from the first token to the end", stats.decode_s),
            "vllm:request_prompt_tokens": ("Tokens of the prompt, of finished requests", stats.request_prompt_tokens),
            "vllm:request_generation_tokens": (
                "Tokens of all completions, of finished requests",
                stats.request_generation_tokens,
            ),
            "vllm:request_max_num_generation_tokens": (
                "Tokens of the longest completion, of finished requests",
                stats.longest_completion_tokens,
            ),
            "vllm:request_params_n": ("The parameter n of requests sent to the core", stats.params_n),
            "vllm:request_params_max_tokens": (
                "The parameter max_tokens of requests sent to the core that set it",
                stats.params_max_tokens,
            ),
            "vllm:iteration_tokens_total": (
                "Tokens in the client's part of a step: prompts that it completed, and output",
                stats.step_tokens,
            ),
            "vllm_mp:request_tokenize_time_seconds": (
                "Time from arrival until the tokenized request was sent to the core",
                stats.tokenize_s,
            ),
            "vllm_mp:recovery_time_seconds": (
                "Time from a death of the core to the next token, if requests were live",
                stats.recovery_s,
            ),
        }

    def used_labels(self) -> list[tuple[str, str]]:
        """Return the labels of each core."""
        model, first = self.labels
        return [(model, str(int(first) + rank)) for rank in self._engine.core_loads()]

    def read(self) -> Iterator[Metric]:
        """Yield every metric."""
        values = self._engine.stats.cells.total()
        for name, (meaning, counter) in self._counters.items():
            yield self._counter(name, meaning, counter.read(values)[""])
        for name, (meaning, histogram) in self._histograms.items():
            family = HistogramMetricFamily(name, meaning, labels=_ENGINE_LABELS)
            add_histogram(family, self.labels, histogram, values)
            yield family
        yield from self._by_label(values)
        yield from self._core_load()
        yield self._cache_config()
        if self._engine.vllm_config.lora_config is not None:
            yield self._adapters(self._engine.vllm_config.lora_config.max_loras)

    def _by_label(self, values: Values) -> Iterator[Metric]:
        stats = self._engine.stats
        finished = stats.finished_requests.read(values)
        yield self._labelled(
            "vllm:request_success", "Requests that have ended, by the reason", "finished_reason", finished
        )
        yield self._counter("vllm_mp:aborted_requests", "Requests that ended by an abort", finished["abort"])
        yield self._counter("vllm_mp:failed_requests", "Requests that ended with an error", finished["error"])
        restarts = stats.core_restarts.read()
        yield self._labelled(
            "vllm_mp:core_restarts", "Restarts of the core, by the cause of the death before", "cause", restarts
        )

    def _core_load(self) -> Iterator[Metric]:
        """Yield what each core said last; without samples before its first answer."""
        model, first = self.labels
        cores = {
            (model, str(int(first) + rank)): core
            for rank, core in self._engine.core_loads().items()
            if core is not None
        }
        gauges = {
            "vllm:num_requests_running": ("Requests in the core's batch", "num_running"),
            "vllm:num_requests_waiting": ("Requests that wait in the core, also for the end of a pause", "num_waiting"),
            "vllm:kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1", "kv_cache_usage"),
            "vllm:gpu_cache_usage_perc": (
                "The same as kv_cache_usage_perc, under the name of older versions",
                "kv_cache_usage",
            ),
            "vllm_mp:core_incarnation": ("Number of the core among those that served in turn", "incarnation"),
            "vllm_mp:core_paused": ("1 while generation is paused", "is_paused"),
            "vllm_mp:core_sleeping": ("1 while the core sleeps", "is_sleeping"),
        }
        for name, (meaning, attribute) in gauges.items():
            gauge = GaugeMetricFamily(name, meaning, labels=_ENGINE_LABELS)
            for labels, core in cores.items():
                gauge.add_metric(labels, getattr(core, attribute))
            yield gauge
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state of the core: awake, weights_offloaded (level 1) or discard_all (level 2)",
            labels=[*_ENGINE_LABELS, "sleep_state"],
        )
        for labels, core in cores.items():
            for level, state in enumerate(_SLEEP_STATES):
                sleep.add_metric([*labels, state], level == (core.sleep_level if core.is_sleeping else 0))
        yield sleep
        counters = {
            "vllm:num_preemptions": ("Preemptions by the present core", "num_preemptions"),
            "vllm_mp:core_dropped_messages": (
                "Messages from clients that the present core dropped",
                "num_dropped_messages",
            ),
        }
        for name, (meaning, attribute) in counters.items():
            family = CounterMetricFamily(name, meaning, labels=_ENGINE_LABELS)
            for labels, core in cores.items():
                family.add_metric(labels, getattr(core, attribute))
            yield family

        if self._engine.vllm_config.speculative_config is not None:
            yield from self._speculation(cores)

    def _speculation(self, cores: Mapping[tuple[str, str], CoreReading]) -> Iterator[Metric]:
        """Yield what the `cores` have drafted."""
        counters = {
            "vllm:spec_decode_num_drafts": ("Requests in steps with draft tokens, once for each step", "num_drafts"),
            "vllm:spec_decode_num_draft_tokens": ("Draft tokens that were verified", "num_draft_tokens"),
            "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted", "num_accepted_tokens"),
        }
        for name, (meaning, attribute) in counters.items():
            family = CounterMetricFamily(name, f"{meaning}, by the present core", labels=_ENGINE_LABELS)
            for labels, core in cores.items():
                family.add_metric(labels, getattr(core, attribute))
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their position among the drafts of a step, by the present core",
            labels=[*_ENGINE_LABELS, "position"],
        )
        for labels, core in cores.items():
            for position, count in enumerate(core.num_accepted_tokens_per_pos):
                family.add_metric([*labels, str(position)], count)
        yield family

    def _cache_config(self) -> Metric:
        cache = self._engine.vllm_config.cache_config
        info = {
            "block_size": cache.block_size,
            "cache_dtype": cache.cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            # A block of padding is not for requests.
            "num_gpu_blocks": max(0, cache.num_blocks - 1),
        }
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's configuration, as labels", labels=[*_ENGINE_LABELS, *info]
        )
        gauge.add_metric([*self.labels, *map(str, info.values())], 1)
        return gauge

    def _adapters(self, max_loras: int) -> Metric:
        """Return the LoRA adapters of this client's live requests, as labels; the value is the time, as vLLM has it."""
        waiting, running = self._engine.stats.live_adapters()
        names = {
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
            "max_lora": str(max_loras),
        }
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of live requests, with output and without, as labels; the value is the time of the scrape",
            labels=[*_ENGINE_LABELS, *names],
        )
        gauge.add_metric([*self.labels, *names.values()], time.time())
        return gauge

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(name, meaning, labels=_ENGINE_LABELS)
        family.add_metric(self.labels, value)
        return family

    def _labelled(self, name: str, meaning: str, label: str, counts: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, meaning, labels=[*_ENGINE_LABELS, label])
        for value, count in counts.items():
            family.add_metric([*self.labels, value], count)
        return family


class EngineCollector(Collector):
    """The metrics of the engines of a registry: each metric once, with the samples of all engines."""

    def __init__(self) -> None:
        self._metrics: dict[EngineReadings, EngineMetrics] = {}

    def engines(self) -> list[EngineReadings]:
        """Return the engines whose metrics are shown."""
        return list(self._metrics)

    def add(self, engine: EngineReadings) -> None:
        """Show the metrics of `engine` too, with labels `engine` that no other engine of the same model has."""
        used = {label for metrics in self._metrics.values() for label in metrics.used_labels()}
        candidates = (EngineMetrics(engine, number) for number in itertools.count())
        self._metrics[engine] = next(metrics for metrics in candidates if used.isdisjoint(metrics.used_labels()))

    def remove(self, engine: EngineReadings) -> None:
        """Show the metrics of `engine` no more."""
        self._metrics.pop(engine, None)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        families: dict[str, Metric] = {}
        for metrics in list(self._metrics.values()):
            for metric in metrics.read():
                families.setdefault(metric.name, metric)
                if families[metric.name] is not metric:
                    families[metric.name].samples += metric.samples
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        """Yield every metric, so that a registry refuses other metrics of these names."""
        yield from self.collect()


def add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram, values: Values) -> None:
    """Add the samples of `histogram` in a reading of the cells."""
    reading = histogram.read(values)
    buckets, total = [], 0.0
    for bound, count in zip([*reading.bounds, float("inf")], reading.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    family.add_metric(labels, buckets, reading.sum)
