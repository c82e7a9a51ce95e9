"""The stat loggers of an engine, as its user adds and removes them."""

from typing import Any

from vllm_mp.client.engine.lifecycle import EngineLifecycle
from vllm_mp.client.threads.completed_call import CompletedCall


class EngineLoggers(EngineLifecycle):
    """The part of `AsyncLLM` that concerns stat loggers."""

    async def do_log_stats(self, scheduler_outputs: Any = None, model_output: Any = None) -> None:
        """Have all stat loggers log now, and return when they have; without a call, they do so every 10 seconds.

        The arguments are accepted for older callers and have no effect: the engine counts by itself.
        """
        self._check_process()
        await self._stat_loggers.log()

    def add_logger(self, logger_name: str, logger: Any) -> CompletedCall:
        """Call the stat logger `logger` from now on; `await` is optional.

        Raises KeyError if a logger has the name, and TypeError if `logger` is none.
        """
        self._check_process()
        self._stat_loggers.add(logger_name, logger)
        return CompletedCall()

    def remove_logger(self, logger_name: str) -> CompletedCall:
        """Call a stat logger no more; `await` is optional.

        Raises KeyError, with the names that there are, if no logger has the name.
        """
        self._check_process()
        self._stat_loggers.remove(logger_name)
        return CompletedCall()
