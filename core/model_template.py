"""The template process with the model: a fork of a core that has loaded the weights and has no other threads yet.

It shares the memory of the weights with that core, and the cores that it forks have nothing to load. So a core that
leaves one loads its model first, in a thread that ends; only then it starts threads of its own. On a CPU only: the
state of another device does not survive a fork.
"""

import contextlib
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.sibling_fork import ForkRefused, end_idle_threads, fork_sibling, reset_signals
from vllm_mp.core.template import become_template, fork_on_request, tell_parent
from vllm_mp.core.torch_threads import limit_this_thread
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.core.weights.packed_cache import fork_writer
from vllm_mp.core.weights.packed_file import PackedWeights
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.core.worker.memory.plan import cache_dtype
from vllm_mp.core_link.fork_messages import ForkRefusal
from vllm_mp.machine.loading_thread import run_in_thread

_held: LoadedModel | None = None
"""The model of the template process that has forked this process."""


def held_model(config: VllmConfig, dtype: torch.dtype, progress: Callable[[float], None]) -> LoadedModel | None:
    """Return the model that this process has from its template; None: none, or another one than `config` asks for.

    `progress` is called with 0 and 1, as by a load.
    """
    global _held
    held, _held = _held, None
    if held is None or held.identity != _identity(config, dtype):
        return None
    progress(0.0)
    progress(1.0)
    return held


def load_with_template(
    config: VllmConfig,
    dtype: torch.dtype,
    num_threads: int,
    progress: Callable[[float], None],
    look: Callable[[], None],
    control: socket.socket,
    run_core: Callable[[], NoReturn],
    niceness: int = 0,
) -> LoadedModel:
    """Load the model on the CPU, and fork a template process, a sibling that holds it too, for the socket `control`.

    It is loaded with `num_threads` of this `niceness`. `progress` is called by the loading thread, `look` often by this
    one, and `run_core` in each core that the template forks. Raises what `load_model`, `progress` and `look` raise.
    Without a template the parent learns why.
    """

    unwritten: list[tuple[Path, PackedWeights]] = []

    def load(model_config: ModelConfig, progress: Callable[[float], None]) -> LoadedModel:
        model = load_model(
            model_config,
            dtype,
            torch.device("cpu"),
            progress,
            cache_dtype(config, dtype),
            keep_packed=lambda path, weights: unwritten.append((path, weights)),
        )
        return LoadedModel(_identity(config, dtype), model, model_digest(model_config))

    def load_all() -> LoadedModel:
        limit_this_thread(num_threads)
        model, *drafts = config.models
        loaded = load(model, progress)
        if config.images is not None:
            loaded.encoder = ImageEncoder(model, dtype, torch.device("cpu"))
        for draft in drafts:
            loaded.draft = load(draft, lambda _: progress(1.0))
        return loaded

    with control:
        parent = os.getppid()
        loaded = run_in_thread(load_all, look, niceness)
        gc.freeze()  # a collection in a fork would copy all pages
        try:
            end_idle_threads()
            pid = fork_sibling()
        except (ForkRefused, OSError) as error:
            tell_parent(control, ForkRefusal(reason=f"no template process can hold the model: {error}"))
            return loaded
        if pid == 0:
            _serve_as_template(loaded, unwritten, control, parent, run_core)
        loaded.share_with(pid)
    unwritten.clear()  # a sleep must be able to release the weights
    return loaded


def _serve_as_template(
    loaded: LoadedModel,
    unwritten: list[tuple[Path, PackedWeights]],
    control: socket.socket,
    parent: int,
    run_core: Callable[[], NoReturn],
) -> NoReturn:
    """Be the template process, and have the packed weights `unwritten` written.

    In each core that it forks, what the frames below have open is closed.
    """
    global _held
    reset_signals()
    become_template(control, parent)
    template = os.getpid()
    with contextlib.suppress(OSError):  # the next core packs the weights again
        fork_writer(unwritten)
    unwritten.clear()
    fork_on_request(control, parent)
    loaded.share_with(template)
    _held = loaded
    run_core()


def _identity(config: VllmConfig, dtype: torch.dtype) -> bytes:
    """Return what decides which models are loaded, and in which form."""
    return msgspec.json.encode([config.models, str(dtype), str(cache_dtype(config, dtype))])
