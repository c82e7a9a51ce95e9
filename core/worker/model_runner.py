"""Runs the model over the rows that the scheduler chose."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import ALONE, RankGroup
from vllm_mp.core.collectives.pipeline import Pipeline
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.pages.weight_pages import map_pages_of_weights
from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.cache.prefix_reader import PrefixReader
from vllm_mp.core.scheduler.cache.seal_table import SealTable
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import OutputHandle, ScheduledStep
from vllm_mp.core.start_times import StartTimes
from vllm_mp.core.torch_threads import threads_for
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.core.worker.cuda_graphs import Capture
from vllm_mp.core.worker.draft_runner import DraftRunner
from vllm_mp.core.worker.image_encodings import ImageEncodings
from vllm_mp.core.worker.leader import Leader
from vllm_mp.core.worker.memory.encoder_memory import EncoderMemory
from vllm_mp.core.worker.memory.kept_memory import kept_memory, map_early
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.memory.paired_memory import PairedMemory
from vllm_mp.core.worker.memory.plan import cache_blocks
from vllm_mp.core.worker.memory.sleep import Memory
from vllm_mp.core.worker.pending_output import ChosenTokens, PendingOutput
from vllm_mp.core.worker.repeated_decodes import RepeatedDecodes
from vllm_mp.core.worker.sampling.host_copies import HostCopies, all_to_device, to_device
from vllm_mp.core.worker.sampling.logprobs import Owned, StepLogprobs, prompt_logprobs, wants_logprobs
from vllm_mp.core.worker.sampling.pooler import Pooler
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.core.worker.sampling.sampler_profile import profile_sampler
from vllm_mp.core.worker.staged_output import StagedOutput, returns_all
from vllm_mp.core.worker.staged_steps import StagedSteps
from vllm_mp.core.worker.step_embeds import StepEmbeds, step_embeds
from vllm_mp.core.worker.step_inputs import StepRows, step_inputs, token_types
from vllm_mp.core.worker.step_message import ARGMAX, LOGITS, NO_LOGITS, StepMessage
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.machine.loading_thread import BESIDE_A_CORE, run_in_thread
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.wire import ModelDigest

logger = logging.getLogger(__name__)

_NO_TOKENS = torch.zeros(0, dtype=torch.int64)
_WARM_ROWS = 8
"""Rows of a step that only makes the next ones faster."""


class ModelRunner:
    """Computes steps, and has the memory that they need."""

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
        pipeline: Pipeline | None = None,
        take_turn: Callable[[Callable[[], None]], KeptCache | None] = lambda _: None,
        captures_late: bool = False,
        times: StartTimes | None = None,
        loaded: LoadedModel | None = None,
        former_cache: KeptCache | None = None,
        note_model: Callable[[ModelDigest], None] = lambda _: None,
    ) -> None:
        """Load the model, measure the memory that steps take, allocate the KV cache and capture small steps.

        `progress` is called with the loaded share of the weights, 0 to 1. `beat` is called often during a step, so that
        a long step can be told from one that hangs. `make_capture` says how steps are captured; the default is
        CUDA graphs, if device and kernels allow it. In a `group` of several ranks the runner holds its rank's share of
        the model; the runner of rank 0 has a `leader`, and the others call `follow`. In a `pipeline` it has the layers
        of its stage, and `group` is that of the stage. `take_turn` is called when the weights are there; on rank 0 it
        waits for the end of a core from which this one takes over, and often calls its argument meanwhile. It returns
        where the KV cache lies, which may be that of an earlier core; None: it ends with this process. With
        `captures_late` the start captures only the graphs that the first steps need; the caller has the others captured
        by `memory.late_captures`. `times` gets the parts of this start. `loaded` is the model if it was loaded before.
        `former_cache` is where the KV cache lies of the core that serves until the turn; None: there is no such core.
        `note_model` is called before the turn, with the digests of what was loaded.

        Raises ValueError for weights that are missing or do not fit, and if the cache has no space.
        """
        scheduler_config = config.scheduler_config
        times = times or StartTimes()
        self._config = config
        self._device = device
        self._dtype = dtype
        self._beat = beat
        self._group = group
        self._pipeline = pipeline
        architecture = config.model_config.architecture
        self._hidden_size = architecture.hidden_size
        self._all_ranks = group if pipeline is None else pipeline.all_ranks
        self._leader: Leader | None = None
        """Set at the end, because all ranks make the steps below by themselves."""
        self._staged: StagedSteps | None = None
        if pipeline is not None:
            self._staged = StagedSteps(pipeline, self._hidden_size, dtype, self._to_device, self._compute_checked)
        self._host_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The stream in which results are copied to the host; None if the device is the host."""
        self._pooler = Pooler(architecture.class_activation)
        self._has_classes = architecture.num_classes > 0
        self._has_token_types = getattr(architecture, "num_token_types", 0) > 1
        self._nan_check_required = False
        """Attention isolates values that are not finite only if it is asked to, so the host must look for them."""
        self._launched: ScheduledStep | None = None
        """The step that was launched last."""
        self._repeated: RepeatedDecodes | None = None
        """What computes `_launched` again; None if it was not repeated, or is computed on a GPU."""
        self._is_argmax_again = False
        """If `_launched` is repeated, all its tokens are those with the highest logits."""
        self._is_draw_again = False
        """If `_launched` is repeated, its tokens are drawn from logits that nothing changes (`Sampler.repeats`)."""
        self._latest: Tensor | None = None
        """Int64 [n] on the device: the tokens that were sampled last; None if no step reads them.

        All ranks have `max_num_seqs` elements, because those that do not sample must know the number.
        """
        if scheduler_config.async_scheduling:
            self._latest = torch.zeros(scheduler_config.max_num_seqs, dtype=torch.int64, device=device)
        progress = progress or (lambda _: None)
        attention = config.attention_config.backend  # before the choice for this model replaces it
        self.memory = ModelMemory(
            config,
            device,
            dtype,
            progress,
            beat,
            make_capture,
            group,
            self._stage,
            captures_late,
            loaded,
        )
        self.draft: DraftRunner | None = None
        """The draft model, with its memory; None if there is none."""
        if config.speculative_config is not None and config.speculative_config.draft_model_config is not None:
            held = None if loaded is None else loaded.draft
            self.draft = DraftRunner(config, attention, device, dtype, progress, beat, held)
        self.images: ImageEncoder | None = None
        """Makes embeddings of images; None if the model takes none, or another rank makes them."""
        self.encodings: ImageEncodings | None = None
        """The tiles that `images` is encoding."""
        self._encoder_memory: EncoderMemory | None = None
        if config.images is not None and self._all_ranks.rank == 0:
            held_encoder = None if loaded is None else loaded.encoder
            self.images = held_encoder or ImageEncoder(config.model_config, dtype, device)
            self.encodings = ImageEncodings(self.images, beat)
            self._encoder_memory = EncoderMemory(self.images, device, beat, loaded, self.encodings)
        self.digest = model_digest(config.model_config) if loaded is None else loaded.digest
        note_model(self.digest)
        times.end("weights")
        graph_bytes = self._profile() if device.type == "cuda" else 0
        times.end("largest steps")
        early = None
        if former_cache is not None and device.type == "cpu" and self._all_ranks.rank == 0:
            if self._all_ranks.size == 1:
                run_in_thread(self._warm_up, niceness=BESIDE_A_CORE)
            # The warm-up does not read all weights: not a draft model's, for example.
            run_in_thread(map_pages_of_weights, niceness=BESIDE_A_CORE)
            early = map_early(former_cache.descriptors[0])
        kept_cache = take_turn(early.map_new_pages if early is not None else lambda: None)
        # The other ranks wait here for the turn of rank 0, which alone knows what may be adopted.
        adopts = self._all_ranks.minimum(int(kept_cache is not None and kept_cache.adopts))
        if kept_cache is not None:
            kept_cache = msgspec.structs.replace(kept_cache, adopts=bool(adopts))
        if kept_cache is not None and kept_cache.adopts and device.type == "cpu" and early is None:
            # Streams wait for this core, which needs no more than one processor before its first step.
            early = map_early(kept_cache.descriptors[self._all_ranks.rank])
            if early is not None:
                early.map_pages_beside(map_pages_of_weights)
        self.memory.keep_cache(kept_memory(kept_cache, self._all_ranks.rank, device, early))
        times.end("turn")
        num_blocks = self._all_ranks.minimum(self.memory.num_kept_blocks(self.digest))
        self._adopts = num_blocks > 0
        """All ranks have the KV cache of an earlier core."""
        if not self._adopts:
            self.memory.empty_kept()
            num_blocks = self._all_ranks.minimum(cache_blocks(config, device, self.token_bytes(), graph_bytes))
        config.cache_config.num_blocks = num_blocks
        self.memory.allocate_cache(num_blocks)
        if self.draft is not None:
            self.draft.memory.allocate_cache(num_blocks)
        self._nan_check_required = not self.memory.attention.isolates
        times.end("KV cache")
        self.memory.make_graphs()
        times.end("graphs")
        self._leader = leader

    @property
    def _stage(self) -> tuple[int, int]:
        """The stage of this rank, and the number of stages."""
        return (0, 1) if self._pipeline is None else (self._pipeline.stage, self._pipeline.num_stages)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state of a token."""
        return self._hidden_size * self._dtype.itemsize

    def token_bytes(self) -> int:
        """Return the bytes of KV cache of one token, those of the draft model included."""
        return self.memory.token_bytes() + (0 if self.draft is None else self.draft.memory.token_bytes())

    @property
    def released_memory(self) -> Memory:
        """The memory that this process releases in a sleep."""
        memory: Memory = self.memory
        if self.draft is not None:
            memory = PairedMemory(memory, self.draft.memory, "draft model", self.draft.forget)
        if self._encoder_memory is not None:
            memory = PairedMemory(memory, self._encoder_memory, "image encoder")
        return memory

    def seal_table(self) -> SealTable | None:
        """Return the table of what the blocks of the KV cache hold; None if the cache ends with this process."""
        if self.memory.kept is None:
            return None
        table = self.memory.kept.table()
        if not self._adopts:
            table.clear()
        return table

    def prefix_reader(self) -> PrefixReader | None:
        """Return what reads the prefix cache file; None if there is none. Raises ValueError if it is too small."""
        if self.memory.kept is None:
            return None
        return self.memory.kept.prefix_reader(self._config.cache_config.prefix_cache_file_bytes, self._beat)

    def launch(self, step: ScheduledStep, batch: Batch, sampler: Sampler) -> OutputHandle:
        """Start the computation of `step` on the device and return its output, which is pending and not sampled yet.

        The host waits for the device only if it must look for values that are not finite. If the step awaits tokens
        (`step.awaits`), the step that samples them must be the latest launched, and it must be sampled.
        """
        if step is self._launched and self._leader is None:
            return self._launch_again(step, batch, sampler)
        self._launched, self._repeated = step, None
        self._is_argmax_again = self._is_draw_again = False
        return self._launch_first(step, batch, sampler)

    @torch.inference_mode()
    def _launch_first(self, step: ScheduledStep, batch: Batch, sampler: Sampler) -> OutputHandle:
        """Launch a step that is not the one before."""
        embeds = step_embeds(step, batch, self._dtype, self._to_device)
        if self._staged is not None:
            return self._launch_stage(self._staged, step, batch, sampler, embeds)
        firsts = batch.num_computed_tokens[step.rows]
        checks = self._nan_check_required and step.num_decodes < len(step.rows)
        announced = NO_LOGITS
        if self._leader is not None:
            announced = NO_LOGITS if checks else self._sampling_of(step, batch, sampler, firsts)
            self._leader.step(step, batch, announced, False, embeds)
        hidden = self._compute(step, batch, embeds)
        if checks and not _is_finite(hidden):
            # A token that overflows would corrupt earlier tokens of its prompt, and blocks that other requests share.
            if self._leader is not None:
                self._leader.step(step, batch, NO_LOGITS, True, embeds)
            hidden = self._compute(step, batch, embeds, isolates=True)
        return self._output(batch, sampler, announced, step, firsts, hidden)

    def _launch_again(self, step: ScheduledStep, batch: Batch, sampler: Sampler) -> OutputHandle:
        """Launch the step before once more (`RepeatedStep`). It has no tokens of prompts, and no vectors."""
        num_tokens = batch.num_computed_tokens[step.rows] + 1
        if self._device.type == "cpu" and batch.rope_positions is None and self.memory.graphs is None:
            if self._repeated is None:
                self._repeated = RepeatedDecodes(step, self._config.cache_config.block_size, self.memory)
            hidden = self._repeated.compute(batch)
            if self._is_argmax_again or self._is_draw_again:
                self._beat()
                if self._is_argmax_again:
                    tokens = self._repeated.argmax()
                else:
                    tokens = self._repeated.draw(sampler.repeated_params(num_tokens))
                if tokens is not None:
                    return ChosenTokens(tokens)
        else:
            with torch.inference_mode():
                hidden = self._compute(step, batch, None)
        copies, choices = HostCopies(self._host_stream), (step.rows, num_tokens)
        sample = functools.partial(self._sample, hidden, step, choices, batch, sampler, copies, NO_LOGITS)
        return PendingOutput(sample, list, list, copies)

    def _launch_stage(
        self, staged: StagedSteps, step: ScheduledStep, batch: Batch, sampler: Sampler, embeds: StepEmbeds | None
    ) -> StagedOutput:
        """Compute the first stage of `step`, and return its output, which is finished when it is processed."""
        needs_all = returns_all(step, batch)
        if self._leader is not None:
            self._leader.step(step, batch, NO_LOGITS, False, embeds, needs_all)
        staged.run(step, batch, embeds, needs_all)
        finish = functools.partial(self._output, batch, sampler, NO_LOGITS)
        return StagedOutput(step, batch, needs_all, self._take, finish)

    def _compute_checked(
        self, step: ScheduledStep, batch: StepRows, embeds: StepEmbeds | None, received: Tensor | None = None
    ) -> Tensor:
        """Return what `_compute` does; repeat it at once if values are not finite that attention does not isolate.

        All ranks of the stage have the same hidden states, and so decide the same. `received` is overwritten.
        """
        if not self._nan_check_required or step.num_decodes == len(step.rows):
            return self._compute(step, batch, embeds, received=received)
        copy = None if received is None else received.clone()
        hidden = self._compute(step, batch, embeds, received=received)
        if _is_finite(hidden):
            return hidden
        return self._compute(step, batch, embeds, isolates=True, received=copy)

    def _take(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Wait for the next hidden states from the last stage; return those at `indices`, on all ranks of the stage."""
        if (leader := self._logits_leader) is not None:
            leader.take(indices)
        return self.follow_take(indices)

    @torch.inference_mode()
    def follow_take(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Do what rank 0 does in `_take`."""
        assert self._staged is not None
        return self._staged.take(indices)

    def _output(
        self, batch: Batch, sampler: Sampler, announced: int, step: ScheduledStep, firsts: Counts, hidden: Tensor
    ) -> PendingOutput:
        """Return the output of `step`, which is not sampled yet.

        `firsts` [num_rows] counts the tokens that were computed before it. `hidden` are the hidden states of all
        tokens, or in a pipeline of those after which tokens are chosen if no others are needed. `announced` as for
        `_sample`.
        """
        copies = HostCopies(self._host_stream)
        choices = step.choices(firsts)
        classify = self.memory.model.classify if self._has_classes else None
        vectors = self._pooler.pool(hidden, step, batch, copies.take, classify, firsts)
        vocab_size = self._config.model_config.architecture.vocab_size
        prompts = prompt_logprobs(step, batch, hidden, self._range_logits, vocab_size, copies.take, firsts)
        sample = functools.partial(self._sample, hidden, step, choices, batch, sampler, copies, announced)
        return PendingOutput(sample, prompts, vectors, copies)

    @torch.inference_mode()
    def follow(self, message: StepMessage, rows: StepRows) -> Tensor:
        """Compute a step that rank 0 has sent; return its hidden states [num_tokens, hidden_size]."""
        step, is_first = message.step, self._pipeline is None or self._pipeline.is_first
        embeds = None
        if is_first and len(message.embeds):
            shape = (len(message.embeds), self._hidden_size)
            values = torch.empty(shape, dtype=self._dtype, device=self._device)
            embeds = StepEmbeds(self._to_device(message.embeds), values)
        if self._staged is not None:
            return self._staged.run(step, rows, embeds, message.returns_all)
        hidden = self._compute(step, rows, embeds, message.isolates)
        if message.sampling != NO_LOGITS:
            self.follow_logits(hidden, message.sampling, step.chosen_indices())
        return hidden

    @torch.inference_mode()
    def follow_logits(self, hidden: Tensor, sampling: int, indices: npt.NDArray[np.int64]) -> None:
        """Compute this rank's share of logits, or of their argmax, for the tokens at `indices` of a step."""
        self._beat()
        of_tokens = hidden if len(indices) == len(hidden) else hidden[self._to_device(indices)]
        (self.memory.model.argmax if sampling == ARGMAX else self.memory.model.compute_logits)(of_tokens)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put `adapter` into `slot` on all ranks, to which rank 0 sends its factors; see `AdapterSlots.load`."""
        assert self.memory.adapters is not None
        if self._leader is not None:
            self._leader.load_adapter(slot, adapter)
        if self._all_ranks.size > 1:
            for factors in adapter.factors.values():
                for factor in factors:
                    shared = self._all_ranks.broadcast(factor.to(self._device))
                    if self._all_ranks.rank:
                        factor.copy_(shared)
        self.memory.adapters.load(slot, adapter)

    def _compute(
        self,
        step: ScheduledStep,
        batch: StepRows,
        embeds: StepEmbeds | None,
        isolates: bool = False,
        received: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of `step`; all ranks of a stage call it together.

        `received` are the hidden states of the stage before; None in the first stage.
        """
        input_ids, positions, metadata = step_inputs(
            step, batch, self._config.cache_config.block_size, self._all_to_device
        )
        if len(step.awaits) and self._latest is not None:
            self._latest = self._group.broadcast(self._latest)  # only rank 0 has sampled them
        if isolates:
            metadata = metadata._replace(isolates=True)
        if self._has_token_types:
            metadata = metadata._replace(token_types=token_types(step, batch, self._to_device))
        if embeds is not None:
            embeds = embeds._replace(values=self._group.broadcast(embeds.values))
        graphs = self.memory.graphs
        is_plain = embeds is None and step.attention_ends is None and positions.dim() == 1 and not isolates
        if graphs is not None and is_plain and (shape := graphs.shape_of(step)) is not None:
            hidden = graphs.run(shape, input_ids, positions, metadata, self._latest)
            if hidden is not None:
                return hidden
        if len(step.awaits) and self._latest is not None:
            ops.fill_awaited(input_ids, self._latest)
        return self._forward(input_ids, positions, metadata, embeds, received)

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        embeds: StepEmbeds | None,
        received: Tensor | None,
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of the model, which gets `embeds` for their tokens."""
        inputs: list[Tensor] = [] if received is None else [received]
        if embeds is not None:
            inputs.append(self.memory.model.embed_input_ids(input_ids).index_copy_(0, embeds.indices, embeds.values))
        self.memory.use_cells(metadata.cell_mapping)
        hidden: Tensor = self.memory.model(input_ids, positions, self.memory.kv_caches, metadata, *inputs)
        return hidden

    def latest_token(self, index: int) -> int:
        """Return token `index` of those that were sampled last; wait for the device, which may not have them yet."""
        assert self._latest is not None, "without async_scheduling no step reads it"
        return max(0, int(self._latest[index]))

    def _sample(
        self,
        hidden: Tensor,
        step: ScheduledStep,
        choices: tuple[Rows, Counts],
        batch: Batch,
        sampler: Sampler,
        copies: HostCopies,
        announced: int,
    ) -> tuple[Tensor, Callable[[], list[Owned]]]:
        """Return the tokens [num_chosen], under way to the host, and a function for their log-probabilities.

        `choices` are those of the step. `announced` is what the other ranks were told to compute of the logits.
        """
        rows, num_tokens = choices
        if not len(rows):
            return _NO_TOKENS, list
        leader, picks = self._logits_leader, len(rows) < len(hidden)
        announces = leader is not None and announced == NO_LOGITS
        if picks or announces:
            indices = step.chosen_indices() if picks else np.arange(len(rows))
            if leader is not None and announces:
                announced = self._sampling(rows, batch, sampler, num_tokens)
                leader.logits(announced, indices)
            if picks:
                hidden = hidden[self._to_device(indices)]
        is_known = announced == ARGMAX or (self._is_argmax_again and step is self._launched)
        may_be_argmax = leader is None and not sampler.repeats(rows)
        if is_known or (may_be_argmax and self._is_argmax(rows, batch, sampler, num_tokens)):
            self._beat()
            masks = None
            if not is_known:
                vocab_size = self._config.model_config.architecture.vocab_size
                masks = sampler.token_masks(rows, num_tokens, vocab_size)
                # Once a row's minimum number of tokens is reached, nothing changes its logits until it leaves.
                self._is_argmax_again = masks is None and step is self._launched
            tokens = self.memory.model.argmax(hidden, masks)
            messages: Callable[[], list[Owned]] = list
        else:
            logits = self._compute_logits(hidden)
            logprobs = StepLogprobs(logits, batch, rows, num_tokens, step)
            tokens = sampler.sample(logits, rows, num_tokens)
            messages = logprobs.messages(tokens, copies.take)
            is_alone = step is self._launched and leader is None and self._latest is None
            self._is_draw_again = is_alone and sampler.repeats(rows) and not wants_logprobs(batch, rows)
        if self._latest is not None:
            # A row that got no token continues with token 0 until its end is processed; that output is discarded.
            assert step.drafts is None, "the next step reads one token of each row"
            missing = 0 if self._group.size == 1 else self._config.scheduler_config.max_num_seqs - len(tokens)
            self._latest = F.pad(tokens, (0, missing)) if missing else tokens
        return copies.take(tokens), messages

    @property
    def _logits_leader(self) -> Leader | None:
        """What tells the ranks that share the head of the model; None if this rank has all of it."""
        return self._leader if self._group.size > 1 else None

    def _sampling_of(self, step: ScheduledStep, batch: Batch, sampler: Sampler, num_computed: Counts) -> int:
        """Return what the other ranks can be told at the launch of `step` to compute of its logits.

        `num_computed` [num_rows] counts the tokens that were computed before it.
        """
        rows, num_tokens = step.choices(num_computed)
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
        if (leader := self._logits_leader) is not None:
            leader.logits(LOGITS, np.arange(first, last))
        return self._compute_logits(hidden[first:last])

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        self._beat()
        logits: Tensor = self.memory.model.compute_logits(hidden)  # no request asks an encoder for logits
        return logits

    def _to_device(self, array: npt.NDArray[np.integer]) -> Tensor:
        return to_device(array, self._device)

    def _all_to_device(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        return all_to_device(arrays, self._device)

    def _profile(self) -> int:
        """Run the largest prefill, decodes and the largest draw once; return the bytes that graphs will take.

        A model that generates no tokens makes vectors instead, an encoder without decodes. torch records their peak of
        memory, for which the cache leaves room (`cache_blocks`). They also load and compile the kernels before the
        first steps need them.
        """
        scheduler, model = self._config.scheduler_config, self._config.model_config
        generates, is_encoder = "generate" in model.supported_tasks, model.architecture.is_encoder
        params: SamplingParams | PoolingParams = SamplingParams()
        if not generates:
            params = PoolingParams(
                pooling_type="last", normalize=False, task="classify" if self._has_classes else "embed"
            )
        block_size = self._config.cache_config.block_size
        most = scheduler.max_num_batched_tokens + self._config.num_excess_tokens
        num_tokens = min(most, scheduler.max_num_seqs * model.max_model_len)
        num_rows = -(-num_tokens // model.max_model_len)
        count = -(-num_tokens // num_rows)
        num_blocks = -(-count // block_size)
        batch = Batch(num_rows, count + 1, block_size, [], model.architecture.has_rope_positions)
        blocks = np.arange(1, num_rows * num_blocks + 1, dtype=np.int32).reshape(num_rows, num_blocks)
        for slot in range(num_rows):
            prompt = np.zeros(count, np.int32)
            request = Request(0, slot, "profile", params, prompt, count, count + 1, (0, slot))
            batch.add(request, blocks[slot])
        self.memory.allocate_cache(blocks.size + 1)
        for num_computed in (0,) if is_encoder else (0, count - 1):
            batch.num_computed_tokens[:] = num_computed
            counts = np.full(num_rows, count - num_computed)
            step = ScheduledStep.of(batch, batch.order, counts, num_rows if num_computed else 0)
            if self._pipeline is None:
                self.launch(step, batch, Sampler(batch, self._device)).wait()
            else:
                self._profile_stage(self._pipeline, step, batch)
        if self.images is not None:
            self.images.encode_largest()
        self._compile_steps(None if is_encoder else step, batch)
        graph_bytes = self.memory.graph_bytes()
        self.memory.kv_caches = []
        if self.draft is not None:
            self.draft.compile_steps()
        if self._latest is not None:
            ops.fill_awaited(self._latest, self._latest)  # compiles it
        if generates:
            profile_sampler(self._config, self._dtype, self._device)
        torch.cuda.synchronize(self._device)
        return graph_bytes

    def _warm_up(self) -> None:
        """Compute steps of a few rows on a cache of their own, and draw tokens for them.

        The first step of a process takes up to twice as long as the next ones: it touches all pages of the weights,
        and runs all code for the first time. Beside a core that serves this costs its streams nothing.
        """
        model = self._config.model_config
        if model.architecture.is_encoder or "generate" not in model.supported_tasks:
            return
        block_size = self._config.cache_config.block_size
        self.memory.allocate_cache(_WARM_ROWS + 1)
        for temperature in (0.0, 1.0):
            batch = Batch(_WARM_ROWS, 2, block_size, [], model.architecture.has_rope_positions)
            for slot in range(_WARM_ROWS):
                params = SamplingParams(temperature=temperature)
                request = Request(0, slot, "warm-up", params, np.zeros(1, np.int32), 1, 2, (0, slot))
                batch.add(request, np.array([slot + 1], np.int32))
            step = ScheduledStep.of(batch, batch.order, np.ones(_WARM_ROWS, np.int64), _WARM_ROWS)
            self.launch(step, batch, Sampler(batch, self._device)).wait()
        self.memory.kv_caches = []
        self._launched = None

    @torch.inference_mode()
    def _compile_steps(self, decodes: ScheduledStep | None, batch: Batch) -> None:
        """Compute steps of other sizes than the largest, and `decodes`, with all kernels that a step may need.

        Graphs need fewer kernels for decodes, and steps that are not captured need the same as graphs. An encoder has
        no `decodes`.
        """

        def compute(step: ScheduledStep, **changes: Any) -> None:
            block_size = self._config.cache_config.block_size
            input_ids, positions, metadata = step_inputs(step, batch, block_size, self._all_to_device)
            self._forward(input_ids, positions, metadata._replace(**changes), None, self._received_of(step))

        if decodes is not None:
            for splits in self.memory.attention.decode_splits:
                # The context bounds the number of parts from below.
                compute(decodes, decode_splits=splits, max_seq_len=1)
        batch.num_computed_tokens[:] = 0
        for size in ops.PRODUCT_SIZES:
            count = min(size, int(batch.num_tokens[0]))
            step = ScheduledStep.of(batch, batch.order[:1], np.array([count]), 0)
            compute(step)
            if self.memory.adapters is not None:
                compute(step, adapter_slots=torch.full((count,), -1, dtype=torch.int32, device=self._device))
            if self._config.num_excess_tokens:
                ends = torch.full((count,), count, dtype=torch.int32, device=self._device)
                compute(step, attention_ends=ends)

    def _received_of(self, step: ScheduledStep) -> Tensor | None:
        """Return a stand-in for what the stage before gives to `step`; None in the first stage."""
        if self._pipeline is None or self._pipeline.is_first:
            return None
        shape = (int(step.counts.sum()), self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    @torch.inference_mode()
    def _profile_stage(self, pipeline: Pipeline, step: ScheduledStep, batch: Batch) -> None:
        """Compute a step without other stages."""
        hidden = self._compute(step, batch, None, received=self._received_of(step))
        if pipeline.is_first and self._config.model_config.architecture.has_head:
            self.memory.model.compute_logits(hidden[-len(step.rows) :])


def _is_finite(hidden: Tensor) -> bool:
    """Return whether all values of `hidden` are finite; wait for the device."""
    with threads_for(hidden.numel()):
        return bool(hidden.sum(dtype=torch.float32).isfinite())
