"""From logits to tokens, for a whole batch at once: logits processors, sampling filters, draw.

Every logits processor changes the logits of a few tokens of the vocabulary. So a step gathers these logits of all its
rows, changes them with one operation of each kind, and puts them back. A request without processors costs nothing.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.logits_processors import Ids, as_ids
from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.structured_output.grammar import Matcher
from vllm_mp.core.structured_output.masks import fill_masks
from vllm_mp.core.worker.sampling.host_copies import all_to_device, to_device
from vllm_mp.core.worker.sampling.random_numbers import uniform_draws
from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import DrawParams, TokenMasks

NO_TOKEN = ops.NO_PLACE
"""Negative: the token of a row for which no token could be sampled."""
_DRAW_COLUMNS = ("temperature", *(sampling_filter.name for sampling_filter in ops.SAMPLING_FILTERS))


class Sampler:
    """Greedy and random choice under each row's own parameters.

    The order of operations is vLLM's: the logits processors, the temperature, the sampling filters, the draw. The
    random number of a draw is a function of the request's seed and the token's position alone. So the numbers of a
    request do not depend on the rest of the batch, and a request that a new core continues goes on as if it had never
    stopped.
    """

    def __init__(self, batch: Batch, device: torch.device, registered: RegisteredProcessors | None = None) -> None:
        """`registered`: the logits processors of the operator, if there are any."""
        self._batch = batch
        self._device = device
        self._registered = registered
        self._repeated: RepeatedDraws | None = None
        """The latest draws from logits that nothing changes."""

    def sample(self, logits: Tensor, rows: Rows, num_tokens: Counts | None = None) -> Tensor:
        """Return token ids int64 [n] for `logits` [n, vocab] of the batch's `rows` [n]; may overwrite `logits`.

        `num_tokens` [n] counts the tokens of each row before the token that is sampled; by default, all known tokens.
        A row that comes several times in succession has drafts: each time it has one token more before it.
        A row gets `NO_TOKEN` if its logits are not finite numbers, or if all its tokens are barred.
        """
        batch = self._batch
        if num_tokens is None:
            num_tokens = batch.num_tokens[rows]
        if self.repeats(rows):
            return ops.sample(logits, self.repeated_params(num_tokens))
        masks = self.token_masks(rows, num_tokens, logits.shape[-1])
        if masks is not None:
            logits = logits.contiguous()
            ops.apply_token_masks(logits, *masks)
        if changes := self._changes_logits(rows, num_tokens):
            logits = logits.float().contiguous()
            apply_logits_processors(logits, batch, rows, num_tokens, self._registered)
        if not self._draws(rows):
            return ops.argmax(logits)
        params = self._draw_params(rows, num_tokens)
        if self._registered is not None:
            params = self._registered.apply_to_random(logits, batch, rows, params)
        elif masks is None and not changes:
            self._repeated = RepeatedDraws(batch, rows, params)
        return ops.sample(logits, params)

    def repeats(self, rows: Rows) -> bool:
        """Return whether `sample` draws for `rows`, the very array, as in the step before, with other random numbers.

        Once a row's minimum number of tokens is reached, nothing changes its logits until it leaves.
        """
        repeated = self._repeated
        return repeated is not None and rows is repeated.rows and self._batch.num_changes == repeated.num_changes

    def repeated_params(self, num_tokens: Counts) -> DrawParams:
        """Return with what `sample` draws where `repeats` is true; only the random numbers are others in each step.

        `num_tokens` [n] is as for `sample`.
        """
        assert self._repeated is not None
        return self._repeated.params(num_tokens)

    def draw(self, logits: Tensor, rows: Rows, num_tokens: Counts) -> Tensor:
        """Return what `sample` does for `logits` that no logits processor and no grammar changes.

        So draft models choose: the random number is that with which the token after `num_tokens` [n] is chosen.
        """
        if not self._draws(rows):
            return ops.argmax(logits)
        return ops.sample(logits, self._draw_params(rows, num_tokens))

    def is_argmax(self, rows: Rows, num_tokens: Counts | None = None) -> bool:
        """Return whether `sample` would give each of `rows` [n] the highest logit that its token mask allows."""
        counts = self._batch.num_tokens[rows] if num_tokens is None else num_tokens
        return not self._changes_logits(rows, counts) and not self._draws(rows)

    def token_masks(self, rows: Rows, num_tokens: Counts, vocab_size: int) -> TokenMasks | None:
        """Return the masks of the tokens that grammars allow in `rows` [n]; None without a constrained row.

        `num_tokens` [n] counts the known tokens of each row. The mask of a row whose grammar fails allows no token.
        """
        batch = self._batch
        outputs: list[ConstrainedOutput] = []
        matchers: dict[int, Matcher] = {}  # by index into `outputs`
        indices: list[int] = []
        drafts: dict[int, list[int]] = {}  # by index into `outputs` of the mask before them
        previous, first, is_masked = -1, 0, False
        for i in np.flatnonzero(batch.is_constrained[rows]).tolist():
            row = int(rows[i])
            constrained, start = batch.request(row).constrained, int(batch.num_prompt_tokens[row])
            assert constrained is not None
            if row == previous:
                if is_masked:
                    drafts.setdefault(first, []).append(int(batch.token_ids[row, num_tokens[i] - 1]))
                    outputs.append(constrained)
                    indices.append(i)
                continue
            matcher = constrained.matcher_after(batch.token_ids[row, start : num_tokens[i]])
            previous, first = row, len(outputs)
            is_masked = matcher is not None or constrained.error is not None
            if matcher is not None:
                matchers[first] = matcher
            if is_masked:
                outputs.append(constrained)
                indices.append(i)
        if not outputs:
            return None
        masks = np.zeros((len(outputs), -(-vocab_size // 32)), np.int32)
        errors = fill_masks(matchers, masks, may_use_threads=self._device.type != "cpu")
        for i, output in enumerate(outputs):
            if i in errors:
                output.error = str(errors[i])
                masks[i] = 0
            elif i in matchers and (token := output.also_allowed) is not None:
                masks.view(np.uint32)[i, token // 32] |= np.uint32(1 << token % 32)
        for first, tokens in drafts.items():
            if first in matchers and first not in errors:
                matchers[first].fill_ahead(tokens, masks[first + 1 : first + 1 + len(tokens)])
        return TokenMasks(*all_to_device([masks, np.array(indices)], self._device))

    def _changes_logits(self, rows: Rows, num_tokens: Counts) -> bool:
        batch = self._batch
        if self._registered is not None and batch.is_processed[rows].any():
            return True
        return bool((batch.has_logits_processors[rows] | (num_tokens < batch.min_total_tokens[rows])).any())

    def _draws(self, rows: Rows) -> bool:
        return bool((self._batch.sampling["temperature"][rows] > 0).any())

    def _draw_params(self, rows: Rows, num_tokens: Counts) -> DrawParams:
        """Return the parameters of `rows` [n] on the device, without waiting for the device."""
        batch = self._batch
        values = batch.sampling[rows]
        seeds = values["seed"].astype(np.uint64)
        columns = {name: np.ascontiguousarray(values[name]) for name in _DRAW_COLUMNS}
        columns["uniform"] = uniform_draws(seeds, num_tokens - batch.num_prompt_tokens[rows])
        is_random = columns["temperature"] > 0
        filters = [
            sampling_filter
            for sampling_filter in ops.SAMPLING_FILTERS
            if (sampling_filter.is_on(columns[sampling_filter.name]) & is_random).any()
        ]
        tensors = all_to_device(list(columns.values()), self._device)
        return DrawParams(**dict(zip(columns, tensors, strict=True)), filters=tuple(filters))


class RepeatedDraws:
    """The parameters of draws for the same rows in one step after another, while the batch does not change.

    Each step has other random numbers. These are computed for many steps at once.
    """

    _NUM_STEPS = 64

    def __init__(self, batch: Batch, rows: Rows, params: DrawParams) -> None:
        """`params` are the parameters of `rows` [n] in the first step."""
        self.rows = rows
        self.num_changes = batch.num_changes
        self._params = params
        self._seeds = batch.sampling["seed"][rows].astype(np.uint64)
        self._num_prompt_tokens = batch.num_prompt_tokens[rows]
        self._begin: Counts = batch.num_tokens[rows]
        """The `num_tokens` [n] of the first step of `_uniforms`."""
        self._uniforms: Tensor | None = None
        """[_NUM_STEPS, n] the random numbers of the steps from `_begin` on."""

    def params(self, num_tokens: Counts) -> DrawParams:
        """Return the parameters of the step before whose tokens each row has `num_tokens` [n]."""
        step = int(num_tokens[0] - self._begin[0])
        is_known = 0 <= step < self._NUM_STEPS and np.array_equal(num_tokens, self._begin + step)
        if self._uniforms is None or not is_known:
            self._begin, step = num_tokens, 0
            positions = num_tokens - self._num_prompt_tokens + np.arange(self._NUM_STEPS)[:, np.newaxis]
            numbers = uniform_draws(self._seeds, positions)
            self._uniforms = to_device(numbers, self._params.uniform.device)
        return self._params._replace(uniform=self._uniforms[step])


def apply_logits_processors(
    logits: Tensor,
    batch: Batch,
    rows: Rows,
    num_tokens: Counts | None = None,
    registered: RegisteredProcessors | None = None,
) -> None:
    """Change `logits` float32 [n, vocab], contiguous, of the batch's `rows` [n] in place.

    `num_tokens` [n] counts the known tokens of each row; by default, all of them. The order is as in `SamplingParams`:
    allowed tokens, barred tokens, biases, `registered` processors, penalties.
    """
    if num_tokens is None:
        num_tokens = batch.num_tokens[rows]
    flat, vocab_size = logits.view(-1), logits.shape[-1]
    allowed, barred, biased, penalized = _Entries(), _Entries(), _Entries(), _Entries()
    restricted: list[int] = []  # indexes into `rows` of the requests with `allowed_token_ids`
    for i in np.flatnonzero(num_tokens < batch.min_total_tokens[rows]).tolist():
        barred.add(i, _stop_tokens(batch, int(rows[i])))
    previous, num_certain = -1, 0
    for i in np.flatnonzero(batch.has_logits_processors[rows]).tolist():
        row = int(rows[i])
        if row != previous:
            previous, num_certain = row, int(num_tokens[i])  # what comes after them are drafts
        processors = batch.request(row).logits_processors
        assert processors is not None
        tokens, num_prompt_tokens = batch.token_ids[row, : num_tokens[i]], int(batch.num_prompt_tokens[row])
        if processors.allowed is not None:
            restricted.append(i)
            allowed.add(i, processors.allowed)
        if barred_ids := processors.barred(tokens[num_prompt_tokens:]):
            barred.add(i, as_ids(barred_ids))
        if len(processors.bias_ids):
            biased.add(i, processors.bias_ids, processors.bias)
        if processors.counts is not None:
            ids, counts = processors.counts.catch_up(tokens[:num_certain], num_prompt_tokens)
            if len(tokens) > num_certain:
                ids, counts = processors.counts.ahead(tokens[num_certain:])
            terms = np.empty((3, len(ids)), np.float32)
            # Only the repetition penalty counts the tokens of the prompt.
            terms[0] = processors.repetition
            terms[1], terms[2] = processors.frequency * counts, processors.presence * (counts > 0)
            penalized.add(i, ids, terms)
    if restricted:
        index = allowed.index(vocab_size, logits.device)
        allowed_logits = flat[index]
        logits[to_device(np.array(restricted), logits.device)] = -torch.inf
        flat[index] = allowed_logits
    if barred:
        flat[barred.index(vocab_size, logits.device)] = -torch.inf
    if biased:
        # No token occurs twice among the entries of a row, so this sum loses no term.
        index = biased.index(vocab_size, logits.device)
        flat[index] = flat[index] + biased.terms(logits.device)
    if registered is not None:
        registered.apply(logits, batch, rows, num_tokens)
    if penalized:
        index = penalized.index(vocab_size, logits.device)
        repetition, frequency, presence = penalized.terms(logits.device)
        value = flat[index]
        value = torch.where(value > 0, value / repetition, value * repetition)
        flat[index] = value - frequency - presence


class _Entries:
    """The logits that a kind of processor changes, collected row by row, with the terms of the change."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[Ids] = []
        self._terms: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, row: int, ids: Ids, terms: npt.NDArray[np.float32] | None = None) -> None:
        """Add the tokens `ids` [n] of `row` of the logits, with `terms` [..., n]."""
        self._rows.append(row)
        self._ids.append(ids)
        if terms is not None:
            self._terms.append(terms)

    def index(self, vocab_size: int, device: torch.device) -> Tensor:
        """Return the indexes of the entries into the flattened logits, int64 [total]."""
        starts = np.repeat(np.array(self._rows, np.int64) * vocab_size, [len(ids) for ids in self._ids])
        return to_device(starts + np.concatenate(self._ids), device)

    def terms(self, device: torch.device) -> Tensor:
        """Return the terms of all entries, float32 [..., total]."""
        return to_device(np.concatenate(self._terms, axis=-1), device)


def _stop_tokens(batch: Batch, row: int) -> Ids:
    """Return the ids [n] of the tokens that end the request of `row`."""
    stop = as_ids(batch.request(row).sampling.stop_token_ids or ())
    return np.concatenate([stop, batch.eos_token_ids]) if batch.stops_at_eos[row] else stop
