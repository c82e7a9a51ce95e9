"""`EngineArgs` and `AsyncEngineArgs`: what a caller constructs, and what makes the configuration of an engine."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from vllm_mp.arguments.options import option
from vllm_mp.arguments.unserved_arguments import accepts_unserved
from vllm_mp.arguments.unserved_table import ENGINE_ARGUMENTS
from vllm_mp.arguments.usage_context import UsageContext
from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.config.engine_options import EngineOptions
from vllm_mp.config.resolution import resolve_config

Args = TypeVar("Args", bound="EngineArgs")


def _accepts_unserved_options(kind: type[Args]) -> type[Args]:
    """Let a class of options accept the options of vLLM that it does not have."""
    kind.__init__ = accepts_unserved(kind.__name__, ENGINE_ARGUMENTS)(kind.__init__)  # type: ignore[method-assign]
    return kind


@_accepts_unserved_options
@dataclasses.dataclass
class EngineArgs(EngineOptions):
    """The options of an engine, each also a flag of the shell commands (`--max-model-len`, ...).

    None stands for an option's default. Options of vLLM that this engine does not have are accepted at their
    defaults, and those that change no result with any value (`vllm_mp/arguments/unserved_table.py` lists them).
    Construction raises TypeError for an unknown field or a value of the wrong type, ValueError for a value out of
    range, and NotImplementedError for a value that this version does not serve. The message names the field, the value
    and what is allowed.
    """

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        """Find the model, fetching and converting it if need be, and return the engine's configuration.

        `usage_context` is accepted for callers of vLLM and has no effect.

        Raises ValueError, naming field, value and remedy, for a model that cannot be found or read, an
        architecture that is not known, or settings that contradict each other or the model. Raises what
        `resolve_model` raises.
        """
        return resolve_config(self)

    def create_model_config(self) -> ModelConfig:
        """Return the section of `create_engine_config` that describes the model."""
        return self.create_engine_config().model_config


@_accepts_unserved_options
@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` and the options that concern only the asyncio client."""

    CLIENT_OPTIONS: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "trust_remote_code",
        "disable_log_requests",
        "max_log_len",
        "otlp_traces_endpoint",
        "seed",
    )
    """The options that a client of a running core has too, as arguments of `AsyncLLM.connect`."""

    disable_log_requests: bool = option(
        True,
        "Write no lines to the log about requests; else each has a line when it is added and a line when it ends, with "
        "id and number of tokens.",
    )
    enable_log_requests: bool | None = option(
        None, "Write lines to the log about requests; this sets disable_log_requests. Default: as that option says."
    )
    max_log_len: int | None = option(
        None,
        "Show N characters of each prompt, and the request's parameters, in the lines of disable_log_requests=False. "
        "Default: none, because readers of a log need not be the authors of prompts.",
        low=0,
    )
    otlp_traces_endpoint: str | None = option(
        None, "Send traces of requests to the OpenTelemetry collector at this URL. Default: no traces."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_log_requests is not None:
            self.disable_log_requests = not self.enable_log_requests

    def client_options(self) -> dict[str, Any]:
        """Return the options of `CLIENT_OPTIONS` by name; the default seed becomes None, the core's seed."""
        options = {name: getattr(self, name) for name in self.CLIENT_OPTIONS}
        return options | {"seed": None if self.seed == type(self).seed else self.seed}
