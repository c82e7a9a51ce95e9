"""The running requests as arrays.

A running request owns one row. Its tokens, counters, block table and sampling parameters stay in that row from its
admission to its end, and each step reads and updates whole columns at once. Nothing is rebuilt from step to step, and
no cost grows with the length of a sequence.
"""

import math
import mmap

import numpy as np
import numpy.typing as npt

from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.request import NO_ROW, Request
from vllm_mp.requests.sampling_params import PARAMETERS, SamplingParams

Rows = npt.NDArray[np.int64]
NO_ROWS: Rows = np.zeros(0, np.int64)
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float32]
NEVER_REGISTERS = np.iinfo(np.int64).max
"""Number of registered blocks of a request that shares nothing: no number of full blocks exceeds it."""
_SAMPLING_COLUMNS = np.dtype(
    [(name, parameter.column) for name, parameter in PARAMETERS.items() if parameter.column is not None], align=True
)


class Batch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens.

    The arrays are public. The scheduler writes the counters and the KV cache manager the block tables; the model runner
    and the sampler only read.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: list[int],
        has_rope_positions: bool = False,
        unnamed_eos_token_id: int | None = None,
    ) -> None:
        """`block_size` is in tokens; `has_rope_positions` is for models with `Rope.sections`."""
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.rope_positions = _lazy_zeros((3, max_num_seqs, max_model_len)) if has_rope_positions else None
        """The positions in time, rows and columns by which each token is rotated; None: all are its index."""
        self.token_ids = _lazy_zeros((max_num_seqs, max_model_len))
        self.block_table = _lazy_zeros((max_num_seqs, max_blocks))
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.tenancy = np.zeros(max_num_seqs, np.int64)
        """Number of requests that have got the row so far; while it stays the same, blocks are only appended."""
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Known tokens: prompt and output, and the token that a pending step samples."""
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens whose keys and values are in the KV cache, or will be after the pending steps."""
        self.num_registered = np.zeros(max_num_seqs, np.int64)
        """Full blocks that are registered with the pool; `NEVER_REGISTERS` if the request registers none."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_forced_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens at the end of the known tokens that a grammar has forced in the latest step."""
        self.max_total_tokens = np.zeros(max_num_seqs, np.int64)
        self.min_total_tokens = np.zeros(max_num_seqs, np.int64)
        """Number of tokens, prompt included, below which stop tokens are barred."""
        self.stops_at_eos = np.zeros(max_num_seqs, np.bool_)
        self.has_stop_ids = np.zeros(max_num_seqs, np.bool_)
        self.has_logits_processors = np.zeros(max_num_seqs, np.bool_)
        self.reads_output = np.zeros(max_num_seqs, np.bool_)
        """Rows whose logits are changed by what the output tokens so far are."""
        self.is_processed = np.zeros(max_num_seqs, np.bool_)
        """Rows with a registered logits processor."""
        self.may_draft = np.zeros(max_num_seqs, np.bool_)
        """Rows that may have draft tokens."""
        self.is_constrained = np.zeros(max_num_seqs, np.bool_)
        """Rows whose output must match a grammar."""
        self.has_embeds = np.zeros(max_num_seqs, np.bool_)
        """Rows whose prompt is given as embeddings, in the place of all tokens or, of images, of some."""
        self.has_whole_images = np.zeros(max_num_seqs, np.bool_)
        """Rows of whose images a step computes all tokens or none, because these attend to one another."""
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.sampling = np.zeros(max_num_seqs, _SAMPLING_COLUMNS)
        """Sampling parameters of each row, by the name of the parameter; -1 stands for None."""
        self.is_pooled = np.zeros(max_num_seqs, np.bool_)
        """Rows of pooling requests: a vector is made and no token is sampled. Their sampling columns are neutral."""
        self.second_text_at = np.zeros(max_num_seqs, np.int64)
        """Place of the first token of the second text of a pair; 0 for rows that hold no pair."""
        self.is_isolated = np.zeros(max_num_seqs, np.bool_)
        """Rows of suspects that are not past the step of the death."""
        self.adapter_slot = np.full(max_num_seqs, NO_SLOT, np.int32)
        """The slot of each row's LoRA adapter; `NO_SLOT` for the base model, and for rows that are free."""
        self.client = np.zeros(max_num_seqs, np.uint32)
        self.slot = np.zeros(max_num_seqs, np.uint32)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.eos_token_ids = np.array(sorted(eos_token_ids), np.int64)
        self.unnamed_eos_token_id = -1 if unnamed_eos_token_id is None else unnamed_eos_token_id
        """The end-of-sequence token that `stop_reason` does not name; -1: there is none."""
        self.order: Rows = np.zeros(0, np.int64)
        """[num_running] rows in use, in the order of their requests."""
        self.num_changes = 0
        """Changes of the batch other than the new tokens of a step: requests that joined or left, blocks forgotten."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def is_full(self) -> bool:
        return not self._free_rows

    def add(self, request: Request, blocks: npt.NDArray[np.int32], num_computed_tokens: int = 0) -> int:
        """Give `request` a row, with the `blocks` [n] that hold or will hold its keys and values; return the row.

        `blocks` already hold the first `num_computed_tokens` tokens. There must be a free row.
        """
        row = self._free_rows.pop()
        self.num_changes += 1
        count = len(request.tokens)
        self.token_ids[row, :count] = request.tokens
        if self.rope_positions is not None:
            total, images = request.max_total_tokens, request.images
            self.rope_positions[:, row, :total] = np.arange(total) if images is None else images.rope_positions(total)
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.tenancy[row] += 1
        self.num_tokens[row] = count
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_registered[row] = num_computed_tokens // self.block_size if request.hashes else NEVER_REGISTERS
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_forced_tokens[row] = 0
        self.max_total_tokens[row] = request.max_total_tokens
        self.has_logits_processors[row] = request.logits_processors is not None
        self.is_processed[row] = request.processed is not None
        self.may_draft[row] = request.max_drafts > 0 and request.processed is None and request.prompt_embeds is None
        self.is_constrained[row] = request.constrained is not None
        self.reads_output[row] = (
            request.processed is not None
            or request.constrained is not None
            or (request.logits_processors is not None and request.logits_processors.reads_output)
        )
        self.has_embeds[row] = request.prompt_embeds is not None or request.images is not None
        self.has_whole_images[row] = request.images is not None and request.images.are_whole
        self.num_logprobs[row] = request.num_logprobs
        self.num_prompt_logprobs[row] = request.num_prompt_logprobs
        if isinstance(request.params, SamplingParams):
            self._set_sampling_columns(row, request.params)
        else:
            self._clear_sampling_columns(row)
        pooling = request.pooling
        self.is_pooled[row] = pooling is not None
        self.second_text_at[row] = 0 if pooling is None else pooling.second_text_at or 0
        self.is_isolated[row] = request.isolate_until_num_tokens != 0
        if request.adapter is not None:
            self.adapter_slot[row] = request.adapter.slot
        self.client[row] = request.client
        self.slot[row] = request.slot
        self.requests[row] = request
        request.row = row
        at = len(self.order)
        while at and self.request(int(self.order[at - 1])).order > request.order:
            at -= 1
        self.order = np.concatenate((self.order[:at], [row], self.order[at:]))
        return row

    def remove(self, row: int) -> npt.NDArray[np.int32]:
        """Free `row`; return its blocks [n], which the caller must give back to the pool."""
        request = self.request(row)
        self.num_changes += 1
        request.tokens = self.token_ids[row, : self.num_tokens[row]].copy()
        request.row = NO_ROW
        self.requests[row] = None
        blocks = self.block_table[row, : self.num_blocks[row]].copy()
        self.block_table[row, : len(blocks)] = 0
        self.num_blocks[row] = 0
        # A step that is not sampled yet may have the row; nothing of the request changes its logits any more.
        self.has_logits_processors[row] = self.is_processed[row] = self.is_constrained[row] = False
        self.reads_output[row] = False
        self.min_total_tokens[row] = 0
        self.num_logprobs[row] = -1
        self.is_isolated[row] = False
        self.adapter_slot[row] = NO_SLOT
        self.order = self.order[self.order != row]
        self._free_rows.append(row)
        return blocks

    def request(self, row: int) -> Request:
        """Return the request in `row`; raise RuntimeError if the row is free."""
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} is not in use")
        return request

    def _set_sampling_columns(self, row: int, params: SamplingParams) -> None:
        self.min_total_tokens[row] = self.num_prompt_tokens[row] + params.min_tokens
        self.stops_at_eos[row] = not params.ignore_eos
        self.has_stop_ids[row] = bool(params.stop_token_ids)
        values = (getattr(params, name) for name in _SAMPLING_COLUMNS.names or ())
        self.sampling[row] = tuple(-1 if value is None else value for value in values)

    def _clear_sampling_columns(self, row: int) -> None:
        """Set neutral values for `row`, as no token is sampled for it."""
        self.min_total_tokens[row] = 0
        self.stops_at_eos[row] = self.has_stop_ids[row] = False
        self.sampling[row] = 0


def _lazy_zeros(shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Return zeros, int32 `shape`, whose pages take neither memory nor time before they are written.

    `np.zeros` does not promise this: what it gets of memory that was used before it fills with zeros.
    """
    memory = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.int32).reshape(shape)
