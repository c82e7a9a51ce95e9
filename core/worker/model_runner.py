"""Runs the model over the rows that the scheduler chose, and owns its weights and its KV cache."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_mp.config import VllmConfig
from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.lora.slots import AdapterSlots
from vllm_mp.core.models.attention import bind_attention
from vllm_mp.core.parallel.group import ALONE, RankGroup
from vllm_mp.core.parallel.leader import Leader
from vllm_mp.core.parallel.step_message import ARGMAX, LOGITS, NO_LOGITS, StepMessage, sampled_places
from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.weights.loader import load_model
from vllm_mp.core.worker.cuda_graphs import Capture, CaptureError, DecodeGraphs, batch_sizes, cuda_capture
from vllm_mp.core.worker.device import choose_attention
from vllm_mp.core.worker.host_copies import HostCopies, to_device
from vllm_mp.core.worker.logprobs import Owned, StepLogprobs, prompt_logprobs, wants_logprobs
from vllm_mp.core.worker.memory import available_memory, cache_blocks, check_adapter_memory, free_cuda_memory
from vllm_mp.core.worker.offload import OffloadedWeights, release_memory
from vllm_mp.core.worker.pending_output import PendingOutput
from vllm_mp.core.worker.pooler import Pooler
from vllm_mp.core.worker.prompt_embeds import StepEmbeds, step_embeds
from vllm_mp.core.worker.sampler import Sampler
from vllm_mp.core.worker.sampler_profile import profile_sampler
from vllm_mp.core.worker.step_inputs import StepRows, step_inputs, token_types
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.tensor_parallel import shard_of
from vllm_mp.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_NO_TOKENS = torch.zeros(0, dtype=torch.int64)


class _NoModel(NamedTuple):
    """Stands in for a model whose weights are dropped."""

    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]


class ModelRunner:
    """Owns the weights and the KV cache; computes steps.

    It is a `vllm_mp.core.worker.sleep.Memory`: weights and cache can be released while there is no step to run.
    """

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[float], None] | None = None,
        beat: Callable[[], None] = lambda: None,
        make_capture: Callable[[torch.device], Capture] | None = None,
        group: RankGroup = ALONE,
        leader: Leader | None = None,
    ) -> None:
        """Load the model, measure the memory that steps take, allocate the KV cache and capture decode steps.

        `progress` is called with the loaded share of the weights, 0 to 1. `beat` is called often during a step, so that
        a long step can be told from one that hangs. `make_capture` says how decode steps are captured; the default is
        CUDA graphs, if device and kernels allow it. In a `group` of several ranks the runner holds its rank's share of
        the model; the runner of rank 0 has a `leader`, and the others call `follow`.

        Raises ValueError for weights that are missing or do not fit, and if the cache has no space.
        """
        scheduler_config, cache_config = config.scheduler_config, config.cache_config
        self._config = config
        self._device = device
        self._dtype = dtype
        self._cache_dtype = ops.FLOAT8 if cache_config.cache_dtype == "fp8" else dtype
        self._progress = progress or (lambda _: None)
        self._beat = beat
        self._group = group
        self._leader: Leader | None = None
        """Set at the end, because all ranks make the steps below by themselves."""
        self.num_parameters = 0
        """Number of parameters of the loaded model."""
        self._wrap: Callable[[Any], Any] = lambda model: model
        """Applied to each model that is loaded."""
        architecture = config.model_config.architecture
        self._pooler = Pooler(architecture.class_activation)
        self._has_classes = architecture.num_classes > 0
        self._has_token_types = getattr(architecture, "num_token_types", 0) > 1
        self._offloaded: OffloadedWeights | None = None
        """None unless the weights are in host memory."""
        self._graphs: DecodeGraphs | None = None
        self._nan_check_required = False
        """Attention isolates values that are not finite only if it is asked to, so the host must look for them."""
        self._latest: Tensor | None = None
        """Int64 [max_num_seqs] on the device: the latest sampled token of each row; None if no step reads it."""
        if scheduler_config.async_scheduling:
            self._latest = torch.zeros(scheduler_config.max_num_seqs, dtype=torch.int64, device=device)
        self.adapters: AdapterSlots | None = None
        """The slots of LoRA adapters; None if they are not enabled."""
        if config.lora_config is not None:
            arch = shard_of(cast("NativeArchitecture", config.model_config.architecture), group.rank, group.size)
            check_adapter_memory(config, arch, device, dtype)
            self.adapters = AdapterSlots(arch, config.lora_config.max_loras, config.lora_config.max_lora_rank)

        self._model: Any = self._load()
        self._make_capture = make_capture or self._default_capture()
        needs_profile = device.type == "cuda" and not config.model_config.architecture.is_encoder
        graph_bytes = self._profile() if needs_profile else 0
        cache_config.num_blocks = group.minimum(cache_blocks(config, device, self.token_bytes(), graph_bytes))
        self._kv_caches = self._allocate(cache_config.num_blocks)
        self._nan_check_required = not self._attention.isolates
        self._graphs = self._make_graphs(batch_sizes(scheduler_config.max_num_seqs))
        self._leader = leader

    @torch.inference_mode()
    def launch(self, step: ScheduledStep, batch: Batch, sampler: Sampler) -> PendingOutput:
        """Start the computation of `step` on the device and return its output, which is pending and not sampled yet.

        The host waits for the device only if it must look for values that are not finite. If the step awaits tokens
        (`step.awaits`), the step that samples them must be the latest launched, and it must be sampled.
        """
        copies = HostCopies(self._device)
        embeds = step_embeds(step, batch, self._dtype, self._to_device)
        num_tokens = (batch.num_computed_tokens[step.rows] + step.counts)[step.samples]
        checks = self._nan_check_required and step.num_decodes < len(step.rows)
        announced = NO_LOGITS
        if self._leader is not None:
            announced = NO_LOGITS if checks else self._sampling_of(step, batch, sampler, num_tokens)
            self._leader.step(step, batch, announced, False, embeds)
        hidden = self._compute(step, batch, embeds)
        if checks and not hidden.sum(dtype=torch.float32).isfinite():
            # A token that overflows would corrupt earlier tokens of its prompt, and blocks that other requests share.
            if self._leader is not None:
                self._leader.step(step, batch, NO_LOGITS, True, embeds)
            hidden = self._compute(step, batch, embeds, isolates=True)
        vectors = self._pooler.pool(
            hidden, step, batch, copies.take, self._model.classify if self._has_classes else None
        )
        vocab_size = self._config.model_config.architecture.vocab_size
        prompts = prompt_logprobs(step, batch, hidden, self._range_logits, vocab_size, copies.take)
        sample = functools.partial(self._sample, hidden, step, num_tokens, batch, sampler, copies, announced)
        return PendingOutput(sample, prompts, vectors, copies)

    @torch.inference_mode()
    def follow(self, message: StepMessage, rows: StepRows) -> Tensor:
        """Compute a step that rank 0 has sent; return its hidden states [num_tokens, hidden_size]."""
        embeds = None
        if len(message.embeds):
            shape = (len(message.embeds), self._config.model_config.architecture.hidden_size)
            values = torch.empty(shape, dtype=self._dtype, device=self._device)
            embeds = StepEmbeds(self._to_device(message.embeds), values)
        hidden = self._compute(message.step, rows, embeds, message.isolates)
        if message.sampling != NO_LOGITS:
            self.follow_logits(hidden, message.sampling, sampled_places(message.step))
        return hidden

    @torch.inference_mode()
    def follow_logits(self, hidden: Tensor, sampling: int, places: npt.NDArray[np.int64]) -> None:
        """Compute this rank's share of logits, or of their argmax, for the tokens at `places` of a step."""
        self._beat()
        of_tokens = hidden if len(places) == len(hidden) else hidden[self._to_device(places)]
        (self._model.argmax if sampling == ARGMAX else self._model.compute_logits)(of_tokens)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put `adapter` into `slot` on all ranks, to which rank 0 sends its factors; see `AdapterSlots.load`."""
        assert self.adapters is not None
        if self._leader is not None:
            self._leader.load_adapter(slot, adapter)
        if self._group.size > 1:
            for factors in adapter.factors.values():
                for factor in factors:
                    shared = self._group.broadcast(factor.to(self._device))
                    if self._group.rank:
                        factor.copy_(shared)
        self.adapters.load(slot, adapter)

    def _compute(
        self, step: ScheduledStep, batch: StepRows, embeds: StepEmbeds | None, isolates: bool = False
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of `step`; all ranks call it together."""
        shares = self._group.size > 1
        if shares and self._latest is not None and len(step.awaits):
            # Only rank 0 has sampled them.
            awaited = self._to_device(step.rows[step.awaits])
            self._latest.index_copy_(0, awaited, self._group.broadcast(self._latest.index_select(0, awaited)))
        input_ids, positions, metadata = step_inputs(
            step, batch, self._config.cache_config.block_size, self._to_device, self._latest
        )
        metadata = metadata._replace(isolates=isolates)
        if self._has_token_types:
            assert isinstance(batch, Batch), "encoders are not shared among ranks"
            metadata = metadata._replace(token_types=token_types(step, batch, self._to_device))
        if embeds is not None:
            embeds = embeds._replace(values=self._group.broadcast(embeds.values))
        if self._graphs is not None and embeds is None and not isolates and self._graphs.fits(step):
            hidden = self._graphs.run(input_ids, positions, metadata)
            if hidden is not None:
                return hidden
        return self._forward(input_ids, positions, metadata, embeds)

    @property
    def has_cache(self) -> bool:
        """The KV cache is allocated."""
        return bool(self._kv_caches)

    def _forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, embeds: StepEmbeds | None
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of the model, which gets `embeds` for their tokens."""
        inputs: list[Tensor] = []
        if embeds is not None:
            inputs.append(self._model.embed_input_ids(input_ids).index_copy_(0, embeds.places, embeds.values))
        hidden: Tensor = self._model(input_ids, positions, self._kv_caches, metadata, *inputs)
        return hidden

    def wrap_model(self, wrap: Callable[[Any], Any]) -> None:
        """Call `wrap(model)` instead of the model in every step, without CUDA graphs."""
        self._wrap = wrap
        self._model = wrap(self._model)
        self._graphs = self._make_capture = None

    def offload_weights(self) -> None:
        try:
            if self._device.type != "cpu" and self._offloaded is None:
                self._offloaded = OffloadedWeights(self._model, self._beat)
        finally:
            release_memory(self._device)

    def drop_weights(self) -> None:
        self._offloaded, self._model = None, _NoModel(self._model.kv_shapes)
        if self.adapters is not None:
            self.adapters.unbind()
        release_memory(self._device)

    def restore_weights(self) -> None:
        if isinstance(self._model, _NoModel):
            self._progress(0.0)
            self._model = self._load()
        elif self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        release_memory(self._device)  # the memory of the host's copy, or of the weight files

    def drop_cache(self) -> None:
        self._graphs, self._kv_caches = None, []
        release_memory(self._device)

    def restore_cache(self) -> None:
        cache = self._config.cache_config
        num_bytes = cache.num_blocks * cache.block_size * self.token_bytes()
        if self._device.type == "cpu" and num_bytes > (free := available_memory()):
            raise MemoryError(f"the KV cache does not fit: it takes {num_bytes:,} bytes, and {free:,} are free")
        self._kv_caches = self._allocate(cache.num_blocks)

    def prepare(self) -> None:
        self._graphs = self._capture_graphs(batch_sizes(self._config.scheduler_config.max_num_seqs))

    def _load(self) -> Any:
        """Return the model with its weights, its attention bound to the chosen backend, and a beat at each layer."""
        model_config = self._config.model_config
        model = load_model(model_config, self._dtype, self._device, self._progress, self._cache_dtype, self._group)
        self.num_parameters = model.num_parameters
        module = cast("nn.Module", model)
        if self.adapters is not None:
            self.adapters.bind(model)
        self._attention = choose_attention(self._config, self._device, self._dtype, model.kv_shapes)
        bind_attention(module, self._attention.attend)
        for layer in _layers(module):
            layer.register_forward_pre_hook(lambda *_: self._beat())
        return self._wrap(model)

    def _default_capture(self) -> Callable[[torch.device], Capture] | None:
        """Return the capture in CUDA graphs for native models; None if steps are launched one operation at a time."""
        model = self._config.model_config
        if model.enforce_eager or self._device.type != "cuda" or not isinstance(model.architecture, NativeArchitecture):
            return None
        if not self._attention.captures:
            logger.info("decode steps are not captured: this attention backend reads lengths on the host")
            return None
        return cuda_capture

    def _make_graphs(self, sizes: Sequence[int]) -> DecodeGraphs | None:
        """Return graphs of decode steps with these numbers of rows on the current cache; None if capturing fails."""
        try:
            return self._capture_graphs(sizes)
        except CaptureError as error:
            self._make_capture = None
            logger.warning("decode steps are not captured: %s", error)
            return None

    @torch.inference_mode()
    def _capture_graphs(self, sizes: Sequence[int]) -> DecodeGraphs | None:
        """Return graphs as `_make_graphs` does, or None if steps are not captured; raise CaptureError on failure."""
        if self._make_capture is None or not self._kv_caches:
            return None
        started = time.monotonic()
        model, block_size = self._config.model_config, self._config.cache_config.block_size
        graphs = DecodeGraphs(
            lambda input_ids, positions, metadata: self._model(input_ids, positions, self._kv_caches, metadata),
            -(-model.max_model_len // block_size),
            model.max_model_len,
            self._device,
            has_adapters=self.adapters is not None,
        )
        graphs.capture(sizes, self._make_capture(self._device), self._beat)
        logger.info("decode steps of up to %d rows captured in %.1f s", max(sizes), time.monotonic() - started)
        return graphs

    def latest_token(self, row: int) -> int:
        """Return the latest sampled token of `row`; wait for the device, which may not have sampled it yet."""
        assert self._latest is not None, "without async_scheduling no step reads it"
        return int(self._latest[row])

    def _sample(
        self,
        hidden: Tensor,
        step: ScheduledStep,
        num_tokens: Counts,
        batch: Batch,
        sampler: Sampler,
        copies: HostCopies,
        announced: int,
    ) -> tuple[Tensor, Callable[[], list[Owned]]]:
        """Return the tokens [num_sampled], under way to the host, and a function for their log-probabilities.

        `num_tokens` [num_sampled] counts the tokens of each row before the token that is sampled. `announced` is what
        the other ranks were told to compute of the logits.
        """
        if not step.samples.any():
            return _NO_TOKENS, list
        rows = step.rows[step.samples]
        if self._leader is not None and announced == NO_LOGITS:
            announced = self._sampling(rows, batch, sampler, num_tokens)
            self._leader.logits(announced, sampled_places(step))
        if len(rows) < len(hidden):
            hidden = hidden[self._to_device(sampled_places(step))]
        vocab_size = self._config.model_config.architecture.vocab_size
        if announced == ARGMAX or (self._leader is None and self._is_argmax(rows, batch, sampler, num_tokens)):
            self._beat()
            masks = None if announced == ARGMAX else sampler.token_masks(rows, num_tokens, vocab_size)
            tokens = self._model.argmax(hidden, masks)
            messages: Callable[[], list[Owned]] = list
        else:
            logits = self._compute_logits(hidden)
            logprobs = StepLogprobs(logits, batch, rows, num_tokens)
            tokens = sampler.sample(logits, rows, num_tokens)
            messages = logprobs.messages(tokens, copies.take)
        if self._latest is not None:
            # A row that got no token continues with token 0 until its end is processed; that output is discarded.
            self._latest.index_copy_(0, self._to_device(rows), tokens.clamp(min=0))
        return copies.take(tokens), messages

    def _sampling_of(self, step: ScheduledStep, batch: Batch, sampler: Sampler, num_tokens: Counts) -> int:
        """Return what the other ranks can be told at the launch of `step` to compute of its logits."""
        rows = step.rows[step.samples]
        if step.samples_after_update or not len(rows) or (batch.num_prompt_logprobs[step.rows] >= 0).any():
            return NO_LOGITS
        return self._sampling(rows, batch, sampler, num_tokens)

    def _sampling(self, rows: Rows, batch: Batch, sampler: Sampler, num_tokens: Counts) -> int:
        """Return what the ranks compute of the logits of `rows`, where rank 0 alone knows the token masks."""
        is_masked = batch.is_constrained[rows].any()
        return ARGMAX if not is_masked and self._is_argmax(rows, batch, sampler, num_tokens) else LOGITS

    def _is_argmax(self, rows: Rows, batch: Batch, sampler: Sampler, num_tokens: Counts) -> bool:
        return sampler.is_argmax(rows, num_tokens) and not wants_logprobs(batch, rows)

    def _range_logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """Return the logits of the tokens [first, last) of the latest step, whose hidden states are `hidden`."""
        if self._leader is not None:
            self._leader.logits(LOGITS, np.arange(first, last))
        return self._compute_logits(hidden[first:last])

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        self._beat()
        logits: Tensor = self._model.compute_logits(hidden)  # no request asks an encoder for logits
        return logits

    def _to_device(self, array: npt.NDArray[np.integer]) -> Tensor:
        return to_device(array, self._device)

    def _allocate(self, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """Return (keys, values) of each layer, [num_blocks, block_size, heads, dim] each; none for an encoder.

        They are not zeroed: no operation reads a cell before it is written, and untouched pages take no memory.
        """
        block_size = self._config.cache_config.block_size

        def cache(shape: tuple[int, int]) -> Tensor:
            return torch.empty((num_blocks, block_size, *shape), dtype=self._cache_dtype, device=self._device)

        return [(cache(keys), cache(values)) for keys, values in self._model.kv_shapes]

    def token_bytes(self) -> int:
        """Return the bytes of KV cache of one token over all layers."""
        elements: int = sum(heads * dim for layer in self._model.kv_shapes for heads, dim in layer)
        return self._cache_dtype.itemsize * elements

    def _profile(self) -> int:
        """Run the largest prefill, a decode and the largest draw once; return the bytes that graphs will take.

        torch records their peak of memory, for which the cache leaves room (`cache_blocks`). They also load and
        compile the kernels before the first steps need them.
        """
        scheduler, model = self._config.scheduler_config, self._config.model_config
        block_size = self._config.cache_config.block_size
        count = min(scheduler.max_num_batched_tokens, model.max_model_len)
        num_blocks = -(-count // block_size)
        batch = Batch(1, count, block_size, [])
        prompt = np.zeros(count, np.int32)
        request = Request(0, 0, "profile", SamplingParams(), prompt, count, count + 1, (0, 0))
        batch.add(request, np.arange(1, num_blocks + 1, dtype=np.int32))
        self._kv_caches = self._allocate(num_blocks + 1)
        for num_computed in (0, count - 1):
            batch.num_computed_tokens[0] = num_computed
            is_decode = int(num_computed > 0)
            step = ScheduledStep(
                np.array([0]), np.array([count - num_computed]), is_decode, np.array([True]), np.array([False])
            )
            self.launch(step, batch, Sampler(batch, self._device)).wait()
        graph_bytes = self._graph_bytes()
        self._kv_caches = []
        profile_sampler(self._config, self._dtype, self._device)
        torch.cuda.synchronize(self._device)
        return graph_bytes

    def _graph_bytes(self) -> int:
        """Estimate the bytes of all graphs from the largest graph, and from the two largest, which share memory.

        The graphs themselves are bound to the cache, so they can only be captured after it is allocated.
        """
        sizes = batch_sizes(self._config.scheduler_config.max_num_seqs)
        taken = []
        for trial in (sizes[-1:], sizes[-2:]):
            torch.cuda.empty_cache()
            before = free_cuda_memory(self._device)
            graphs = self._make_graphs(trial)
            taken.append(before - free_cuda_memory(self._device))
            del graphs
        torch.cuda.empty_cache()
        largest, both = taken
        return max(0, largest) + (len(sizes) - 1) * max(0, both - largest)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: the members of its outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)
