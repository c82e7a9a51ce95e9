"""The logger that shows an engine's metrics in a registry of Prometheus."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric

from vllm_mp.client.stat_loggers.base import CounterLogger
from vllm_mp.client.stat_loggers.engine_metrics import EngineCollector
from vllm_mp.client.stat_loggers.readings import EngineReadings
from vllm_mp.config import VllmConfig

_LOAD_TIMEOUT_S = 1.0
"""Time for which a scrape waits for the load of a core."""


class _AskingCollector(EngineCollector):
    """Asks the cores for their load at each scrape; waits for the answers, except in an event loop."""

    def collect(self) -> Iterator[Metric]:
        answers = [answer for engine in self.engines() if (answer := engine.begin_to_ask_core()) is not None]
        if asyncio._get_running_loop() is None:
            with contextlib.suppress(TimeoutError, CancelledError):
                for answer in answers:
                    answer.result(_LOAD_TIMEOUT_S)
        yield from super().collect()

    def describe(self) -> Iterator[Metric]:
        yield from super().collect()


_collectors: WeakKeyDictionary[CollectorRegistry, _AskingCollector] = WeakKeyDictionary()
"""The collector of each registry that shows engines."""
_lock = threading.Lock()
"""Held while collectors get and lose engines."""


class PrometheusStatLogger(CounterLogger):
    """Shows the metrics of an engine in a registry, until the logger is removed or the engine ends.

    The server's `/metrics` shows the same metrics of an engine. Each scrape reads them; between scrapes the
    logger costs nothing. Engines of the same model in one registry differ in the label `engine`: "0", "1" and so on.
    """

    default_name = "prometheus"

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: int | Sequence[int] = 0,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`engine_indexes` is accepted for older callers and has no effect."""
        super().__init__(vllm_config)
        self.registry = registry
        self._shown: EngineReadings | None = None
        """The engine whose metrics the registry shows."""

    def attach(self, engine: EngineReadings) -> None:
        """Show the metrics of `engine`.

        Raises ValueError if the logger shows another engine, or if the registry has metrics of the same names that are
        not an engine's.
        """
        if self._shown is not None:
            raise ValueError("this PrometheusStatLogger belongs to another engine; make one for each engine")
        with _lock:
            collector = _collectors.get(self.registry)
            if collector is None:
                collector = _AskingCollector()
                collector.add(engine)
                self.registry.register(collector)
                _collectors[self.registry] = collector
            else:
                collector.add(engine)
            self._shown = engine
        super().attach(engine)

    def detach(self) -> None:
        """Show the metrics no more; the registry is as before if it shows no other engine."""
        with _lock:
            shown, self._shown = self._shown, None
            if shown is None:
                return
            collector = _collectors[self.registry]
            collector.remove(shown)
            if not collector.engines():
                del _collectors[self.registry]
                self.registry.unregister(collector)
