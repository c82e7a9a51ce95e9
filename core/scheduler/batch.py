"""The running requests as arrays.

A running request owns one row; its tokens, counters, block table and sampling parameters stay in that row from
its admission to its end, and each step reads and updates whole columns at once. Nothing is rebuilt from step to
step, and no cost grows with the length of a sequence.
"""

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.request import NO_ROW, Request
from vllm_mp.sampling_params import PARAMETERS

Rows = npt.NDArray[np.int64]
NO_ROWS: Rows = np.zeros(0, np.int64)
Vector = npt.NDArray[np.float32]
_SAMPLING_COLUMNS = np.dtype(
    [(name, parameter.column) for name, parameter in PARAMETERS.items() if parameter.column is not None], align=True
)


class Batch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens.

    The arrays are public: the scheduler owns the counters and block tables, the runner and the sampler read.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, eos_token_ids: list[int]) -> None:
        max_blocks = -(-max_model_len // block_size)
        # Pages of these two that no request has reached take no memory.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Prompt and answer, with the token that a step in flight samples."""
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens whose keys and values are in the cache, or will be after the step in flight."""
        self.num_registered = np.zeros(max_num_seqs, np.int64)
        """Full blocks that the pool has been told of, or more than there can be where it is told of none."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.max_total_tokens = np.zeros(max_num_seqs, np.int64)
        self.min_total_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens below which no stop token is allowed."""
        self.stops_at_eos = np.zeros(max_num_seqs, np.bool_)
        self.has_stop_ids = np.zeros(max_num_seqs, np.bool_)
        self.has_logits_processors = np.zeros(max_num_seqs, np.bool_)
        self.reads_answer = np.zeros(max_num_seqs, np.bool_)
        """Rows with a logits processor that reads the tokens of the answer."""
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.sampling = np.zeros(max_num_seqs, _SAMPLING_COLUMNS)
        """The sampling parameters that the sampler reads for each row, by name; -1 stands for None."""
        self.is_pooled = np.zeros(max_num_seqs, np.bool_)
        """Rows of which a vector is made, and no token drawn."""
        self.client = np.zeros(max_num_seqs, np.uint32)
        self.slot = np.zeros(max_num_seqs, np.uint32)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.eos_token_ids = np.array(sorted(eos_token_ids), np.int64)
        self.order: Rows = np.zeros(0, np.int64)
        """The rows in use, first to run first."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def is_full(self) -> bool:
        return not self._free_rows

    def add(self, request: Request, blocks: npt.NDArray[np.int32], num_computed_tokens: int = 0) -> int:
        """Give `request` a row and the blocks [n] that hold, or will hold, its keys and values.

        `blocks` already hold the first `num_computed_tokens` tokens. There must be a free row.
        """
        row = self._free_rows.pop()
        params, count = request.params, len(request.tokens)
        self.token_ids[row, :count] = request.tokens
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.num_tokens[row] = count
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_registered[row] = 0
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.max_total_tokens[row] = request.max_total_tokens
        self.min_total_tokens[row] = request.num_prompt_tokens + params.min_tokens
        self.stops_at_eos[row] = not params.ignore_eos
        self.has_stop_ids[row] = bool(params.stop_token_ids)
        self.has_logits_processors[row] = request.logits_processors is not None
        self.reads_answer[row] = request.logits_processors is not None and request.logits_processors.reads_answer
        self.num_logprobs[row] = request.num_logprobs
        self.num_prompt_logprobs[row] = request.num_prompt_logprobs
        values = (getattr(params, name) for name in _SAMPLING_COLUMNS.names or ())
        self.sampling[row] = tuple(-1 if value is None else value for value in values)
        self.is_pooled[row] = request.pooling is not None
        self.client[row] = request.client
        self.slot[row] = request.slot
        self.requests[row] = request
        request.row = row
        at = len(self.order)
        while at and self.request(int(self.order[at - 1])).order > request.order:
            at -= 1
        self.order = np.insert(self.order, at, row)
        return row

    def remove(self, row: int) -> npt.NDArray[np.int32]:
        """End the use of `row`; returns its blocks [n], which the caller gives back to the pool."""
        request = self.request(row)
        request.tokens = self.token_ids[row, : self.num_tokens[row]].copy()
        request.row = NO_ROW
        self.requests[row] = None
        blocks = self.block_table[row, : self.num_blocks[row]].copy()
        self.block_table[row, : len(blocks)] = 0
        self.num_blocks[row] = 0
        self.order = self.order[self.order != row]
        self._free_rows.append(row)
        return blocks

    def request(self, row: int) -> Request:
        """The request in `row`, which must be in use."""
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} is not in use")
        return request
