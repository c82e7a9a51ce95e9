"""What a model holds on its device: weights, the slots of adapters, the KV cache, and graphs of its steps."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.lora.slots import AdapterSlots
from vllm_mp.core.models import PreparedStep
from vllm_mp.core.models.attention_layer import bind_attention
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.weights.code_digest import code_digest
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.core.worker.cuda_graphs import (
    Capture,
    CaptureError,
    StepGraphs,
    StepShape,
    cuda_capture,
    first_shapes,
    step_shapes,
)
from vllm_mp.core.worker.device import choose_attention
from vllm_mp.core.worker.late_captures import LateCaptures
from vllm_mp.core.worker.memory.kept_memory import KeptMemory
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.core.worker.memory.offload import OffloadedWeights, release_memory
from vllm_mp.core.worker.memory.plan import (
    available_memory,
    cache_dtype,
    check_adapter_memory,
    free_cuda_memory,
)
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.int8_cache import stored_shapes
from vllm_mp.kernels.triton import available
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.pipeline_parallel import stage_of
from vllm_mp.model_config.tensor_parallel import shard_of
from vllm_mp.version import __version__
from vllm_mp.wire import ModelDigest

logger = logging.getLogger(__name__)

_SPARE_BYTES = 64 * 2**20
"""What stays free beside a late graph, for what the driver and its libraries allocate."""


class _NoModel(NamedTuple):
    """Stands in for a model whose weights are dropped."""

    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]


class ModelMemory:
    """Loads the model, and allocates and releases what it needs to run.

    It is a `vllm_mp.core.worker.memory.sleep.Memory`: weights and cache can be released while there is no step to run.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[float], None],
        beat: Callable[[], None],
        make_capture: Callable[[torch.device], Capture] | None,
        group: RankGroup,
        stage: tuple[int, int],
        captures_late: bool = False,
        loaded: LoadedModel | None = None,
    ) -> None:
        """Load the weights; the cache is allocated by `allocate_cache`. The arguments are those of `ModelRunner`.

        `stage` is the number of the stage of a pipeline, and of how many. Raises ValueError for weights that are
        missing or do not fit.
        """
        self._config = config
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._beat = beat
        self._group = group
        self._stage = stage
        self._cache_dtype = cache_dtype(config, dtype)
        self._loaded = loaded
        """The model that was loaded before; None: it is loaded here."""
        self._wrap: Callable[[Any], Any] | None = None
        """Applied to each model that is loaded."""
        self._offloaded: OffloadedWeights | None = None
        """None unless the weights are in host memory."""
        self.num_parameters = 0
        """Number of parameters of the loaded model."""
        self.adapters: AdapterSlots | None = None
        """The slots of LoRA adapters; None if they are not enabled."""
        if config.lora_config is not None:
            arch = cast("NativeArchitecture", config.model_config.architecture)
            arch = shard_of(stage_of(arch, *stage), group.rank, group.size)
            check_adapter_memory(config, arch, device, dtype)
            self.adapters = AdapterSlots(arch, config.lora_config.max_loras, config.lora_config.max_lora_rank)
        available.prepare(device.type)  # while the weights are read
        self.model: Any = self._load()
        self.kept: KeptMemory | None = None
        """Where the KV cache lies; None: it ends with this process."""
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        """(keys, values) of each layer, [num_blocks, block_size, heads, dim] each; empty for an encoder or in sleep.

        In 8 bits, `dim` includes the scale (`int8_cache.stored_shapes`)."""
        self.prepared: PreparedStep | None = None
        """The step that was prepared last; None if it could not be, or its memory was dropped."""
        self.graphs: StepGraphs | None = None
        """Captured steps; None if there are none."""
        self.late_captures: LateCaptures | None = None
        """Captures the graphs that the start left out; None if it left none out."""
        self._captures_late = captures_late
        self._bytes_of_a_graph = 0
        self._make_capture = make_capture or self._default_capture()

    def wrap_model(self, wrap: Callable[[Any], Any]) -> None:
        """Call `wrap(model)` instead of the model in every step, which no graph and no `PreparedStep` replaces."""
        self._wrap = wrap
        self.model = wrap(self.model)
        self.graphs = self.late_captures = self._make_capture = None

    def keep_cache(self, kept: KeptMemory | None) -> None:
        """Let the KV cache lie in `kept`, if the model has one; call this before it is allocated."""
        self.kept = kept if self.model.kv_shapes else None

    def give_up_cache(self) -> None:
        """Let the next core have the KV cache after the last step, if it outlives this core."""
        if self.kept is not None:
            self.kept.unlock()

    def cover_ahead(self) -> bool:
        """Prepare some of the KV cache for later steps, in up to 5 ms; return whether there is more to prepare."""
        return self.kept is not None and self.kept.cover_ahead()

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache.

        It is not zeroed: no operation reads a cell before it is written, and untouched pages take no memory.
        """
        block_size = self._config.cache_config.block_size
        if self.kept is not None:
            try:
                self.kv_caches = self.kept.caches(num_blocks, self._stored_shapes(), self._cache_dtype)
                return
            except OSError as error:
                if self.kept.is_in_use:
                    raise
                logger.warning(
                    "no memory can be shared with the next core (%s): the KV cache ends with this one", error
                )
                self.kept = None

        def cache(shape: tuple[int, int]) -> Tensor:
            return torch.empty((num_blocks, block_size, *shape), dtype=self._cache_dtype, device=self._device)

        self.kv_caches = [(cache(keys), cache(values)) for keys, values in self._stored_shapes()]

    def prepare_step(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> None:
        """Set `prepared` to the step as the model prepares it."""
        prepare = None if self._wrap is not None else getattr(self.model, "prepare_step", None)
        self.prepared = None if prepare is None else prepare(input_ids, positions, self.kv_caches, metadata)

    def use_cells(self, cells: Tensor) -> None:
        """Prepare the memory of the cells `cells` [n], int64, for a step that writes them."""
        if self.kept is not None:
            self.kept.use_cells(cells)

    def num_kept_blocks(self, digest: ModelDigest) -> int:
        """Return how many blocks an earlier core has left for a model with this digest; 0 if there are none to use."""
        if self.kept is None:
            return 0
        return self.kept.num_blocks(self._config.cache_config.block_size, self._cache_identity(digest))

    def _cache_identity(self, digest: ModelDigest) -> list[object]:
        """Return all that decides what the KV cache of a model with this digest holds."""
        return [
            __version__,
            digest,
            self._dtype,
            self._cache_dtype,
            self._config.model_config.quantization,
            self._config.model_config.batch_invariant,
            self._config.model_config.max_model_len,  # on which the rotation of some models depends
            self.attention.name,
            _code_of(self._device),
            self.model.kv_shapes,
            (self._group.rank, self._group.size, *self._stage),
        ]

    def empty_kept(self) -> None:
        """Give back what an earlier core has left."""
        if self.kept is not None:
            self.kept.empty()

    def token_bytes(self) -> int:
        """Return the bytes of KV cache of one token over all layers."""
        elements: int = sum(heads * dim for layer in self._stored_shapes() for heads, dim in layer)
        return self._cache_dtype.itemsize * elements

    def _stored_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return stored_shapes(self.model.kv_shapes, self._cache_dtype)

    def offload_weights(self) -> None:
        try:
            if self._device.type != "cpu" and self._offloaded is None:
                self._offloaded = OffloadedWeights(self.model, self._beat)
        finally:
            release_memory(self._device)

    def drop_weights(self) -> None:
        if self.kept is not None:
            self.kept.forget_model()  # the files of the model may hold other weights by then
        self._offloaded, self.prepared, self.model = None, None, _NoModel(self.model.kv_shapes)
        if self._loaded is not None:
            self._loaded.forget()
            self._loaded = None
        if self.adapters is not None:
            self.adapters.unbind()
        release_memory(self._device)

    def restore_weights(self) -> None:
        if isinstance(self.model, _NoModel):
            self._progress(0.0)
            self.model = self._load()
            if self.kept is not None:
                self.kept.identify(self._cache_identity(model_digest(self._config.model_config)))
        elif self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        release_memory(self._device)  # the memory of the host's copy, or of the weight files

    def drop_cache(self) -> None:
        self.graphs, self.late_captures, self.prepared, self.kv_caches = None, None, None, []
        release_memory(self._device)
        if self.kept is not None:
            self.kept.release()

    def restore_cache(self) -> None:
        cache = self._config.cache_config
        num_bytes = cache.num_blocks * cache.block_size * self.token_bytes()
        if self._device.type == "cpu" and num_bytes > (free := available_memory()):
            raise MemoryError(f"the KV cache does not fit: it takes {num_bytes:,} bytes, and {free:,} are free")
        self.allocate_cache(cache.num_blocks)

    def prepare(self) -> None:
        self.graphs = self._capture(*self._now_and_late())

    def make_graphs(self) -> None:
        """Capture steps on the current cache, if device and kernels allow it."""
        self.graphs = self._try_capture(*self._now_and_late())

    def _now_and_late(self) -> tuple[list[StepShape], list[StepShape]]:
        """Return the shapes to capture now, and those to capture while the core serves, the small ones first."""
        shapes = step_shapes(self._config)
        now = first_shapes(shapes) if self._captures_late else shapes
        late = sorted((shape for shape in shapes if shape not in now), key=lambda s: (not s.only_decodes, s.num_tokens))
        return now, late

    def graph_bytes(self) -> int:
        """Estimate the bytes of all graphs, which share memory, from the two largest of decodes and of prefills.

        The graphs themselves are bound to the cache, so they can only be captured after it is allocated.
        """
        shapes = step_shapes(self._config)
        kinds = [[shape for shape in shapes if shape.only_decodes == kind] for kind in (True, False)]
        taken = []
        trials = [[shape for of_kind in kinds for shape in of_kind[:count]] for count in (1, 2)]
        for trial in trials:
            torch.cuda.empty_cache()
            before = free_cuda_memory(self._device)
            graphs = self._try_capture(trial)
            taken.append(before - free_cuda_memory(self._device))
            del graphs
        torch.cuda.empty_cache()
        largest, both = taken
        num_largest, num_both = map(len, trials)
        of_others = max(0, both - largest) / max(1, num_both - num_largest)
        self._bytes_of_a_graph = math.ceil(of_others)
        return max(0, largest) + math.ceil((len(shapes) - num_largest) * of_others)

    def _load(self) -> Any:
        """Return the model with its weights, its attention bound to the chosen backend, and a beat at each layer."""
        model_config = self._config.model_config
        model = None if self._loaded is None else self._loaded.model
        if model is None:
            model = load_model(
                model_config, self._dtype, self._device, self._progress, self._cache_dtype, self._group, *self._stage
            )
        self.num_parameters = model.num_parameters
        module = cast("nn.Module", model)
        if self.adapters is not None:
            self.adapters.bind(model)
        self.attention = choose_attention(self._config, self._device, self._dtype, model.kv_shapes)
        bind_attention(module, self.attention.attend)
        for layer in _layers(module):
            layer.register_forward_pre_hook(lambda *_: self._beat())
        return model if self._wrap is None else self._wrap(model)

    def _default_capture(self) -> Callable[[torch.device], Capture] | None:
        """Return the capture in CUDA graphs for native models; None if steps are launched one operation at a time."""
        model = self._config.model_config
        if model.enforce_eager or self._device.type != "cuda" or not isinstance(model.architecture, NativeArchitecture):
            return None
        _, num_stages = self._stage
        if num_stages > 1:
            logger.info("steps are not captured: the model is divided into stages")
            return None
        if not self.attention.captures:
            logger.info("steps are not captured: this attention backend reads lengths on the host")
            return None
        return cuda_capture

    def _try_capture(self, shapes: Sequence[StepShape], late: Sequence[StepShape] = ()) -> StepGraphs | None:
        """Return what `_capture` does, or None if it fails; later steps are then not captured either."""
        try:
            return self._capture(shapes, late)
        except CaptureError as error:
            self._make_capture = None
            logger.warning("steps are not captured: %s", error)
            return None

    @torch.inference_mode()
    def _capture(self, shapes: Sequence[StepShape], late: Sequence[StepShape] = ()) -> StepGraphs | None:
        """Return graphs of steps of these shapes on the current cache; None if none are captured.

        `late_captures` will capture the shapes `late`. Raises CaptureError.
        """
        if self._make_capture is None or not self.kv_caches:
            return None
        started = time.monotonic()
        model, block_size = self._config.model_config, self._config.cache_config.block_size
        graphs = StepGraphs(
            lambda input_ids, positions, metadata: self.model(input_ids, positions, self.kv_caches, metadata),
            -(-model.max_model_len // block_size),
            model.max_model_len,
            self._device,
            has_adapters=self.adapters is not None,
        )
        capture = self._make_capture(self._device)
        graphs.capture(shapes, capture, self._beat, self._group, late)
        self.late_captures = LateCaptures(graphs, capture, self._has_room) if late else None
        seconds, num_late = time.monotonic() - started, len(graphs.late)
        logger.info(
            "%d graphs of steps captured in %.1f s, %d shapes left for later", graphs.num_graphs, seconds, num_late
        )
        return graphs

    def _has_room(self) -> bool:
        """Whether the device can hold one more graph; memory was kept for all, but others may have taken it."""
        if self._device.type != "cuda":
            return True
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free_cuda_memory(self._device) + unused >= self._bytes_of_a_graph + _SPARE_BYTES


def _code_of(device: torch.device) -> str:
    """Return what says which code computes on `device`, and for a GPU which one it is."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.uuid} {code_digest()}"
    build = library()
    return device.type if build is None else build.name


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: the members of its outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)
