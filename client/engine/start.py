"""The ways to get an engine: start cores of its own, or attach to cores that run."""

import asyncio
import contextlib
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_mp.arguments.unserved_arguments import tell_without_effect
from vllm_mp.client.cores.endpoint import endpoint
from vllm_mp.client.cores.placement import config_of_place
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.cores.sources.remote_core import RemoteCore
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.engine import Engine
from vllm_mp.client.engine.tokenizer_data import processor_files_of_connected, tokenizer_of_connected
from vllm_mp.client.images.processor import read_processor_files
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.prompts.tokenizer import load_model_tokenizer
from vllm_mp.client.stat_loggers import StatLoggerArgument, requested_loggers
from vllm_mp.client.stats.tracing import RequestTracer
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.keys.operator_key import read_operator_key
from vllm_mp.machine.log_setup import log_settings

if TYPE_CHECKING:
    from vllm_mp.client.ray import RayCore

MakeSource = Callable[[int], "CoreLauncher | RayCore"]
"""Makes the source of the core at a place of an engine."""


def start_engine(
    vllm_config: VllmConfig,
    start_engine_loop: bool,
    stat_loggers: StatLoggerArgument,
    *,
    disable_log_stats: bool | None,
    disable_log_requests: bool | None,
) -> Engine:
    """Start the cores of a configuration, which stays unchanged, and return their engine when all are ready.

    Unless they are None, `disable_log_stats` and `disable_log_requests` take precedence over the configuration. Raises
    what `AsyncLLM.from_vllm_config` raises.
    """
    makers = requested_loggers(stat_loggers)
    given = {"disable_log_requests": disable_log_requests, "disable_log_stats": disable_log_stats}
    changes = {name: value for name, value in given.items() if value is not None}
    observability = msgspec.structs.replace(vllm_config.observability_config, **changes)
    engine = launch_cores(msgspec.structs.replace(vllm_config, observability_config=observability), lambda: None)
    engine.stat_loggers.add_all(makers)
    if not start_engine_loop:
        engine.starts_loop_for_requests = False
        engine.shutdown_background_loop()
    return engine


async def start_engine_in_thread(engine_args: EngineArgs, stat_loggers: StatLoggerArgument) -> Engine:
    """Start an engine without blocking the running loop; cancelling the call ends its cores.

    Raises what `AsyncLLM.from_engine_args` raises.
    """
    makers = requested_loggers(stat_loggers)
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise _Cancelled

    def launch() -> Engine:
        config = engine_args.create_engine_config()
        check()
        return launch_cores(config, check)

    starting = call_in_thread(launch)
    try:
        engine = await asyncio.shield(starting)
        engine.stat_loggers.add_all(makers)
        return engine
    except asyncio.CancelledError:
        is_cancelled.set()
        with contextlib.suppress(Exception):  # the start has failed, because of the cancellation or on its own
            await (await starting).aclose()
        raise


def launch_cores(vllm_config: VllmConfig, check: Callable[[], None]) -> Engine:
    """Start the cores and return their engine when all are ready; `check` is called meanwhile, and may raise."""
    log_settings()  # a wrong one is refused here rather than by each core
    tracer = _tracer(vllm_config, vllm_config.observability_config.otlp_traces_endpoint)
    size = vllm_config.parallel_config.data_parallel_size
    sources: list[CoreLauncher | RayCore] = []
    cores: list[Core] = []
    try:
        make_source = _source_maker(vllm_config)
        for rank in range(size):
            sources.append(make_source(rank))
            sources[rank].begin()
        # The tokenizer loads while the cores start.
        prompt_tokenizer = _load_prompt_tokenizer(vllm_config.model_config)
        cores.extend(source.finish(check) for source in sources)
        supervisors = [
            CoreSupervisor(source, core, _restart_limit(vllm_config))
            for source, core in zip(sources, cores, strict=True)
        ]
        _tell_of_memory_options(cores[0].config)
        return Engine(
            supervisors,
            prompt_tokenizer,
            tracer,
            functools.partial(_start_core, make_source, vllm_config),
            functools.partial(read_processor_files, vllm_config.model_config.folder),
        )
    except BaseException:
        for source, core in itertools.zip_longest(sources, cores):
            source.close(None, core)
        if tracer is not None:
            tracer.close()
        raise


def _tell_of_memory_options(config: VllmConfig) -> None:
    """Write to the log what is set of vLLM's options for the size of the KV cache that a CPU does not use.

    `config` names the device that the core has chosen.
    """
    if config.device_config.device != "cpu" or config.cache_config.kv_cache_memory_bytes is not None:
        return
    given: dict[str, object] = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE")}
    share = config.cache_config.gpu_memory_utilization
    if share != EngineArgs.gpu_memory_utilization:
        given["gpu_memory_utilization"] = share
    for name, value in given.items():
        if value:
            tell_without_effect(name, value, "on a CPU kv_cache_memory_bytes sets the size of the KV cache, in bytes")


def connect_engine(
    address: str | Sequence[str],
    *,
    key_file: str | Sequence[str] | None,
    core_owner: str | None,
    operator_key_file: str | Sequence[str] | None,
    timeout: float,
    tokenizer: str | None,
    trust_remote_code: bool,
    reconnect_timeout: float,
    disable_log_requests: bool,
    max_log_len: int | None,
    otlp_traces_endpoint: str | None,
    seed: int | None,
) -> Engine:
    """Attach to cores that run, and return their engine; `AsyncLLM.connect` documents the arguments.

    Raises what `AsyncLLM.connect` raises.
    """
    addresses = [each.strip() for each in address.split(",")] if isinstance(address, str) else list(address)
    if not addresses or len(set(map(endpoint, addresses))) < len(addresses):
        raise ValueError(f"address={address!r} must name at least one core, and each core once")
    key_files = _one_for_each(addresses, "key_file", key_file)
    operator_key_files = _one_for_each(addresses, "operator_key_file", operator_key_file)
    sources = [
        RemoteCore(
            each,
            key_file,
            timeout,
            b"" if operator_key_file is None else read_operator_key(operator_key_file),
            core_owner,
            reconnect_timeout,
        )
        for each, key_file, operator_key_file in zip(addresses, key_files, operator_key_files, strict=True)
    ]
    cores: list[Core] = []
    try:
        cores.extend(source.finish(lambda: None) for source in sources)
        for source in sources[1:]:
            source.check_same_model(sources[0])
    except BaseException:
        for core in cores:
            core.connection.close()
        raise
    core = cores[0]
    core.config.observability_config.disable_log_requests = disable_log_requests
    core.config.observability_config.max_log_len = max_log_len
    model = core.config.model_config
    if seed is None and model.seed is not None:
        seed = random.Random(f"{model.seed} {core.client}").getrandbits(63)
    model.seed = seed
    try:
        loaded = tokenizer_of_connected(core, timeout, tokenizer, trust_remote_code)
        prompt_tokenizer = PromptTokenizer(loaded) if loaded is not None else None
        processor_files = processor_files_of_connected(core, timeout, tokenizer)
        tracer = _tracer(core.config, otlp_traces_endpoint)
        supervisors = [CoreSupervisor(source, core, None) for source, core in zip(sources, cores, strict=True)]
        open_core = functools.partial(
            _connect_core, key_files[0], operator_key_files[0], timeout, core_owner, reconnect_timeout
        )
        return Engine(supervisors, prompt_tokenizer, tracer, open_core, processor_files)
    except BaseException:
        for core in cores:
            core.connection.close()
        raise


def _source_maker(config: VllmConfig) -> MakeSource:
    """Return what makes the source of the core at each place. Raises ValueError if Ray is needed and missing."""
    if config.parallel_config.data_parallel_backend == "ray":
        from vllm_mp.client.ray import DriverProcess, RayCore

        return functools.partial(RayCore, DriverProcess(config))
    return lambda place: CoreLauncher(config_of_place(config, place))


def _start_core(
    make_source: MakeSource, vllm_config: VllmConfig, place: int, address: str | None, page: StatusPage | None
) -> CoreSupervisor:
    """Start a further core and return its supervisor when it is ready; `address` must be None.

    `page` is that of a core whose pause, sleep and adapters it must have too.

    Raises ValueError for an address, and EngineStartError, with the cause, if the core does not start.
    """
    if address is not None:
        raise ValueError(f"address={address!r}: this engine starts its cores itself; leave it None")
    source = make_source(place)
    try:
        if page is not None and isinstance(source, CoreLauncher):
            source.inherit(page)
        source.begin()
        return CoreSupervisor(source, source.finish(lambda: None), _restart_limit(vllm_config))
    except BaseException:
        source.close(None, None)
        raise


def _connect_core(
    key_file: str | None,
    operator_key_file: str | None,
    timeout: float,
    core_owner: str | None,
    reconnect_timeout: float,
    rank: int,
    address: str | None,
    page: StatusPage | None,
) -> CoreSupervisor:
    """Attach to a further core and return its supervisor. Its pause, sleep and adapters are its own.

    Raises ValueError without an address, and EngineStartError if the core does not serve.
    """
    if address is None:
        raise ValueError("address=None: this engine uses cores that others have started; give the address of another")
    operator_key = b"" if operator_key_file is None else read_operator_key(operator_key_file)
    source = RemoteCore(address, key_file, timeout, operator_key, core_owner, reconnect_timeout)
    return CoreSupervisor(source, source.finish(lambda: None), None)


def _restart_limit(config: VllmConfig) -> RestartLimit | None:
    """Return the limit for one core; None without recovery."""
    limits = config.liveness_config
    return RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None


def _one_for_each(addresses: list[str], name: str, files: str | Sequence[str] | None) -> list[str | None]:
    """Return a file for each address. Raises ValueError if the argument `name` has another number of files."""
    if isinstance(files, str) and "," in files and len(addresses) > 1:
        files = files.split(",")
    if files is None or isinstance(files, str):
        return [files] * len(addresses)
    if len(files) != len(addresses):
        raise ValueError(f"{name}={list(files)!r} must be one file, or one for each of {len(addresses)} addresses")
    return list(files)


def _load_prompt_tokenizer(config: ModelConfig) -> PromptTokenizer | None:
    """Return the model's tokenizer; None with skip_tokenizer_init. Raises what `load_tokenizer` raises."""
    tokenizer = load_model_tokenizer(config)
    return PromptTokenizer(tokenizer) if tokenizer is not None else None


class _Cancelled(Exception):
    """The start of an engine was cancelled."""


def _tracer(config: VllmConfig, endpoint: str | None) -> RequestTracer | None:
    return None if endpoint is None else RequestTracer(endpoint, config.model_config.served_model_name)
