"""The logits processors that the operator has registered: loaded at start, applied to the rows that a step samples.

Each processor has a batch of its own: the requests that it is for and that the step samples. A request that a step does
not sample leaves the batch, and enters it later with the tokens that it then has. So preemption, isolation and recovery
need nothing of a processor.

A processor that raises, or returns something else than logits, is called again for each request alone, by an instance
that knows no other request. The requests that fail alone end with the error; the others go on.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_mp.config import VllmConfig
from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.processed_request import ProcessedRequest
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampling.host_copies import to_device
from vllm_mp.kernels.ops import DrawParams
from vllm_mp.logits_processor import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from vllm_mp.requests.processor_registration import ENTRY_POINTS, Registration, registered
from vllm_mp.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_METHODS = ("apply", "is_argmax_invariant", "update_state")


class RegisteredProcessors:
    """All registered processors, in the order of their registration."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        """Load the classes that `config` names, and make an instance of each.

        Raises ValueError, naming the processor, the cause and the remedy, for a class that cannot be loaded.
        """
        model = config.model_config
        for folder in model.logits_processor_folders:
            if folder not in sys.path:
                sys.path.append(folder)
        self._processors = [
            _Processor(registration, _load(registration), config, device)
            for registration in registered(model.logits_processors)
        ]

    def enter(self, request: Request) -> None:
        """Note in `request`, which generates, the processors that are for it.

        Raises ValueError if a processor refuses its parameters.
        """
        named = request.sampling.logits_processors or ()
        own = [
            processor
            for processor in self._processors
            if not processor.registration.is_opt_in or processor.registration.name in named
        ]
        for processor in own:
            processor.validate(request.sampling)
        if own:
            names = frozenset(processor.registration.name for processor in own)
            is_embedded = request.prompt_embeds is not None
            request.processed = ProcessedRequest(request.sampling, names, is_embedded)

    def apply(self, logits: Tensor, batch: Batch, rows: Rows, num_tokens: Counts) -> None:
        """Change `logits` float32 [n, vocab] of the batch's `rows` [n] in place, as processors of all draws do.

        Rows of requests that a processor fails become NaN.
        """
        row_of = {}
        for i in np.flatnonzero(batch.is_processed[rows]).tolist():
            request = batch.request(int(rows[i]))
            assert request.processed is not None
            request.processed.catch_up(batch.token_ids[request.row, : num_tokens[i]], request.num_prompt_tokens)
            row_of[request.processed] = i
        self._run(logits, row_of, is_argmax_invariant=False)

    def apply_to_random(self, logits: Tensor, batch: Batch, rows: Rows, params: DrawParams) -> DrawParams:
        """Divide `logits` by the temperature and change them in place, as processors of random draws alone do.

        Only rows with such a processor are divided. `apply` must have been called in this step. Return the parameters
        with which tokens are drawn from the result.
        """
        if not any(processor.is_argmax_invariant for processor in self._processors):
            return params
        row_of = {}
        for i in np.flatnonzero(batch.is_processed[rows] & (batch.sampling["temperature"][rows] > 0)).tolist():
            processed = batch.request(int(rows[i])).processed
            assert processed is not None
            if any(p.is_argmax_invariant and p.registration.name in processed.processors for p in self._processors):
                row_of[processed] = i
        if not row_of:
            return params
        index = to_device(np.array([*row_of.values()]), logits.device)
        own, temperature = logits[index], params.temperature.clone()
        # The highest logit becomes 0, so that the lowest temperatures do not overflow.
        logits[index] = (own - own.amax(dim=-1, keepdim=True)) / temperature[index].unsqueeze(-1)
        temperature[index] = 1.0
        self._run(logits, row_of, is_argmax_invariant=True)
        return params._replace(temperature=temperature)

    def _run(self, logits: Tensor, row_of: Mapping[ProcessedRequest, int], is_argmax_invariant: bool) -> None:
        for processor in self._processors:
            if processor.is_argmax_invariant == is_argmax_invariant:
                name = processor.registration.name
                own = {r: i for r, i in row_of.items() if name in r.processors and r.error is None}
                if own:
                    processor.run(logits, own)


class _Processor:
    """A registered class, its instance, and the batch that the instance knows."""

    def __init__(self, registration: Registration, kind: Any, config: VllmConfig, device: torch.device) -> None:
        self.registration = registration
        self._kind = kind
        self._make: Callable[[], Any] = lambda: kind(config, device, device.type == "cuda")
        self._instance: Any = None
        """None: it has failed, and the next step makes another."""
        self._members: list[ProcessedRequest] = []
        """By index, the requests in the batch of the instance."""
        try:
            self._instance = self._make()
            self.is_argmax_invariant = bool(self._instance.is_argmax_invariant())
        except Exception as error:
            raise ValueError(
                f"logits_processors: {registration.target} cannot be constructed ({error!r:.500}); correct the class, "
                "or leave it out"
            ) from error

    def validate(self, params: SamplingParams) -> None:
        """Raise ValueError if the class refuses `params`."""
        try:
            getattr(self._kind, "validate_params", lambda _: None)(params)
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"logits processor {self.registration.name!r} refuses the request: {why:.500}") from error

    def run(self, logits: Tensor, row_of: Mapping[ProcessedRequest, int]) -> None:
        """Change `logits` float32 [n, vocab] in place, in the row `row_of[request]` of each request."""
        try:
            if self._instance is None:
                self._instance, self._members = self._make(), []
            self._instance.update_state(self._update(row_of))
            index = to_device(np.array([row_of[member] for member in self._members]), logits.device)
            changed = _checked(self._instance.apply(logits.index_select(0, index)), len(index), logits)
        except Exception as error:
            logger.warning("logits processor %s failed in a step: %.500r", self.registration.name, error)
            self._instance = None
            for request, row in row_of.items():
                self._run_alone(logits, request, row)
            return
        self._store(logits, self._members, index, changed)

    def _run_alone(self, logits: Tensor, request: ProcessedRequest, row: int) -> None:
        """Change `row` of `logits` with an instance of its own, or fail the request."""
        index = to_device(np.array([row]), logits.device)
        try:
            instance = self._make()
            added = [(0, request.params, request.prompt, request.output)]
            instance.update_state(BatchUpdate(1, removed=[], added=added, moved=[]))
            changed = _checked(instance.apply(logits.index_select(0, index)), 1, logits)
        except Exception as error:
            self._fail(request, f"failed: {error!r:.500}")
            logits[row] = torch.nan
            return
        self._store(logits, [request], index, changed)

    def _store(self, logits: Tensor, members: Sequence[ProcessedRequest], index: Tensor, changed: Tensor) -> None:
        """Write the rows `changed` of `members` [n] to `logits` at `index` int64 [n]; fail those without a choice."""
        is_bad = ~changed.amax(dim=-1).isfinite()  # NaN is the highest of all
        if is_bad.any():
            is_bad &= logits.index_select(0, index).amax(dim=-1).isfinite()  # else the model is to blame
            for i in is_bad.nonzero().flatten().tolist():
                self._fail(members[i], "returned values that are not finite, or allows no token")
        logits.index_copy_(0, index, changed)

    def _fail(self, request: ProcessedRequest, why: str) -> None:
        request.error = f"logits processor {self.registration.name!r} {why}; correct it, or change the request"

    def _update(self, wanted: Mapping[ProcessedRequest, int]) -> BatchUpdate | None:
        """Make `wanted` the batch, and return what has changed.

        Requests that enter take the indices of requests that left. The last requests then move to indices that are
        still free, so that no index stays free.
        """
        members: list[ProcessedRequest | None] = [m if m in wanted else None for m in self._members]
        free = [i for i, member in enumerate(members) if member is None]
        known = set(members)
        added: list[AddedRequest] = []
        for request in wanted:
            if request not in known:
                if free:
                    index = free.pop(0)
                    members[index] = request
                else:
                    index = len(members)
                    members.append(request)
                added.append((index, request.params, request.prompt, request.output))
        moved: list[MovedRequest] = []
        for index in free:
            while members and members[-1] is None:
                members.pop()
            if index < len(members):
                members[index] = members.pop()
                moved.append((len(members), index, MoveDirectionality.UNIDIRECTIONAL))
        self._members = [member for member in members if member is not None]
        if not (added or free):
            return None
        return BatchUpdate(len(self._members), removed=free, added=added, moved=moved)


def _load(registration: Registration) -> Any:
    """Return the class that is registered. Raises ValueError if there is none, or if it is not a logits processor."""
    target = registration.target
    try:
        if ":" in target:
            module, _, path = target.partition(":")
            kind: Any = importlib.import_module(module)
            for name in path.split("."):
                kind = getattr(kind, name)
        else:
            kind = entry_points(group=ENTRY_POINTS)[target].load()
    except Exception as error:  # a module may raise anything when it is imported
        known = sorted(entry_points(group=ENTRY_POINTS).names)
        remedy = f"name 'module:Class', or an entry point of the group {ENTRY_POINTS}: {', '.join(known) or 'none'}"
        raise ValueError(
            f"logits_processors: {target} cannot be loaded ({error!r:.500}); {remedy}. The module must be installed, "
            "on PYTHONPATH or beside the program"
        ) from error
    lacking = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    if not isinstance(kind, type) or lacking:
        raise ValueError(
            f"logits_processors: {target} is not a logits processor, a class with {', '.join(_METHODS)}; derive it "
            "from vllm_mp.logits_processor.LogitsProcessor"
        )
    return kind


def _checked(result: Any, count: int, logits: Tensor) -> Tensor:
    """Return `result` as float32 if it is logits [count, vocab]; raise TypeError if it is something else."""
    shape = [count, logits.shape[-1]]
    if not isinstance(result, Tensor) or list(result.shape) != shape or not result.is_floating_point():
        found = f"{list(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"apply must return logits {shape}, got {found}")
    return result.to(logits)
