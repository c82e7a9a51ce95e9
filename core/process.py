"""The life of a core process: start, loading, serving, a clean end.

This module imports no torch, which takes a second or more: the address is bound first.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_mp.core.start.core_start import CoreStart, parent_has_died
from vllm_mp.core.start.launch_line import forget_unread, read_launch_line
from vllm_mp.core.start.lossy_output import make_output_lossy
from vllm_mp.core.start_times import StartTimes
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.torch_import.rare_parts_of_torch import defer_rare_parts_of_torch, needs_all_of_torch
from vllm_mp.core_link.core_launch import STACKS_SIGNAL, CoreLaunch
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.deferred_modules import load_deferred_modules
from vllm_mp.machine.host_cpus import bind_process
from vllm_mp.machine.loading_thread import BESIDE_A_CORE
from vllm_mp.machine.log_setup import set_up_core_log

if TYPE_CHECKING:
    import torch

    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.ranks import Ranks
    from vllm_mp.core.worker.memory.loaded_model import LoadedModel

logger = logging.getLogger("vllm_mp.core")

_LINGER_MS = 1000
"""Time that unsent messages have to leave when the socket is closed."""
_FAILED_LINGER_MS = 200
"""The same for a core that failed while it served: the supervisor waits for its end before it starts the next."""
_kept: list[Exception] = []
"""The error that ended the core. Its frames keep all objects of the core alive until the process is gone: after an
error of the device, an object that holds device memory may hang when it is destroyed."""


def main() -> int:
    """Run the core that the launch line on standard input describes; return the exit code, 1 if the core failed.

    A core that a signal stops dies by that signal, so that the parent learns the cause. A core with a public address
    finishes its requests first if the signal is SIGINT.
    """
    make_output_lossy()
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr.fileno(), all_threads=True)
    gc.disable()  # until `_load` has imported everything
    launch = read_launch_line()
    set_up_core_log("core")
    stop = StopSignal()
    stop.listen(drains=launch.public is not None)
    start = CoreStart(launch, stop)
    try:
        failed = _serve(start)
    finally:
        start.stopped.set()
    if parent_has_died(launch, stop):
        start.remove_files()
    if stop.signal is not None:
        signal.signal(stop.signal, signal.SIG_DFL)
        signal.raise_signal(stop.signal)
    return 1 if failed else 0


def _serve(start: CoreStart) -> bool:
    """Bind the address, load the model and run; return True if that failed.

    The reason is then logged, and sent to the clients if the address was bound.
    """
    core, page, ranks = None, None, None
    try:
        start.check_version()
        page = start.make_page()
        ranks = _start_ranks(start.launch, page)
        if start.template_socket is None:
            start.start_threads()
        core = _load(start, page, ranks)
        if core is not None:
            if start.wait_to_serve():
                core.run()
            core.close()
        if ranks is not None:
            ranks.close()
        page.enter(CoreState.STOPPED)
        start.close_address(_LINGER_MS)
        return False
    except Exception as error:
        _kept.append(error)
        gc.disable()  # for the same reason as `_kept`
        if isinstance(error, ValueError) and core is None:
            reason = str(error)  # a mistake in the configuration, explained to the user
            logger.error("%s", reason)
        else:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the core failed")
        start.refuse(reason)
        # The page of a core that failed while it served still says what the core was doing.
        if page is not None and core is None:
            page.enter(CoreState.STOPPED)
        return True
    finally:
        if ranks is not None:
            ranks.close(at_once=True)
        start.close_address(_LINGER_MS if core is None else _FAILED_LINGER_MS)


def _start_ranks(launch: CoreLaunch, page: StatusPage) -> "Ranks | None":
    """Start the processes of the other ranks, which import and load beside the core; None for a core of one rank."""
    if launch.config.parallel_config.world_size == 1:
        return None
    from vllm_mp.core.parallel.ranks import Ranks

    folder = Path(launch.runtime_dir or tempfile.gettempdir())
    return Ranks(launch.config, folder, page.beat, launch.kept_cache, page.note_outside_signal)


def _load(start: CoreStart, page: StatusPage, ranks: "Ranks | None") -> "EngineCore | None":
    """Return the core with its weights loaded; None if it was told to stop in the meantime.

    `ranks` are the other ranks; None if there are none.

    Raises ValueError, with the remedy, if the configuration does not suit the model or the machine.
    """
    started = time.monotonic()
    times = StartTimes()
    config, stop = start.launch.config, start.stop
    if config.device_config.cpus:  # before the imports, which must not take the CPUs of another core
        bind_process(config.device_config.cpus)
    defer_rare_parts_of_torch()
    import torch

    from vllm_mp.core.collectives.group import ALONE
    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.followers import lead
    from vllm_mp.core.worker.device import prepare_device
    from vllm_mp.core.worker.memory.plan import memory_to_start
    from vllm_mp.core.worker.model_runner import ModelRunner
    from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors
    from vllm_mp.kernels.triton.available import kernel_counts

    # Imported objects stay. A garbage collection that visits them would take 0.1 s, now or within a step.
    gc.freeze()
    gc.enable()
    times.end("imports")
    device, dtype, num_threads = prepare_device(config)
    if needs_all_of_torch(config, device.type):
        load_deferred_modules()
    times.end("device")
    page.enter(CoreState.LOADING)
    processors = RegisteredProcessors(config, device) if config.model_config.logits_processors else None
    faults = None
    if config.liveness_config.fault_injection:
        from vllm_mp.core.fault_hooks.hooks import FaultHooks

        faults = FaultHooks(start.launch)

    def progress(share: float) -> None:
        if stop.is_set:
            raise StopSignal.Stopped
        page.enter(CoreState.LOADING, share)
        if faults is not None:
            faults.while_loading(share)

    try:
        group, pipeline, followers = (ALONE, None, None) if ranks is None else lead(config, ranks, device, stop)
        with memory_to_start(config):
            leader = None if followers is None else followers.leader
            loaded = _loaded_model(start, device, dtype, num_threads, progress)
            torch.set_num_threads(num_threads)
            start.start_threads()
            runner = ModelRunner(
                config,
                device,
                dtype,
                progress,
                page.beat,
                group=group,
                leader=leader,
                pipeline=pipeline,
                take_turn=start.take_turn,
                captures_late=ranks is None,  # all ranks capture the same shapes in the same order
                times=times,
                loaded=loaded,
                former_cache=start.launch.kept_cache if start.launch.waits else None,
                note_model=page.note_model,
            )
        if ranks is not None:
            ranks.wait_until_ready(config.model_config, stop.raise_if_set)
    except StopSignal.Stopped:
        return None
    launch, bound, handler = start.launch, start.bound, start.handler
    assert bound is not None
    assert handler is not None
    if faults is not None:
        from vllm_mp.core.ipc.call_handler import CallHandler
        from vllm_mp.core.lora.adapter_cache import AdapterCache
        from vllm_mp.core.scheduler.cache.seal_table import SealTable
        from vllm_mp.core.structured_output.trial_compilation import TrialCompilation

        faults.install(runner, handler)
        faults.install_sealing(SealTable)
        faults.install_outside(handler, CallHandler, TrialCompilation, AdapterCache)
    has_slow_faults = faults is not None and faults.slow_down
    if device.type != "cpu" or ranks is not None or processors is not None or has_slow_faults:
        page.note_waits()
    handler.greeting.model_digest = runner.digest
    handler.processors = processors
    logger.info("the start took: %s%s", times, kernel_counts)
    logger.info(
        "%s in %s on %s, %d KV blocks of %d tokens, ready after %.1f s, listening on %s",
        config.model_config.model,
        config.model_config.dtype,
        device,
        config.cache_config.num_blocks - 1,
        config.cache_config.block_size,
        time.monotonic() - started,
        launch.address if launch.public is None else launch.public.address,
    )
    return EngineCore(
        config,
        device,
        runner,
        handler,
        bound.socket,
        stop,
        page,
        launch.suspension,
        processors,
        launch.adapters,
        followers,
        launch.tried_constraints,
    )


def _loaded_model(
    start: CoreStart,
    device: "torch.device",
    dtype: "torch.dtype",
    num_threads: int,
    progress: Callable[[float], None],
) -> "LoadedModel | None":
    """Return the model of the template that has forked this core, or load it to leave such a template; None: neither.

    Raises what loading raises.
    """
    from vllm_mp.core.model_template import held_model, load_with_template

    config, control = start.launch.config, start.template_socket
    if device.type == "cpu" and config.parallel_config.world_size == 1:
        if (held := held_model(config, dtype, progress)) is not None:
            return held
        if control is not None:
            niceness = BESIDE_A_CORE if start.launch.waits else 0
            return load_with_template(
                config, dtype, num_threads, progress, start.look_at_parent, control, _run_forked, niceness
            )
    if control is not None:
        control.close()
    return None


def _run_forked() -> NoReturn:
    """Run the core that a template process has forked, above the frames of the core that has left the template."""
    forget_unread()
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)
