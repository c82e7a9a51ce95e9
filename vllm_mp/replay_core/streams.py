"""The live requests of one client of a replay core, as arrays with an entry for each request."""

import numpy as np
import numpy.typing as npt

from vllm_mp import wire
from vllm_mp.replay_core.answers import Answer, Answers


class Streams:
    """The requests of a client that have not ended. A step gives each of them its next token."""

    def __init__(self, answers: Answers) -> None:
        self._flat = answers.tokens.reshape(-1)
        self._answer_length = answers.tokens.shape[1]
        self._answer_of: dict[int, Answer] = {}
        """By slot."""
        self._slots = np.zeros(0, np.int64)
        """[n], as are the next two."""
        self._starts = np.zeros(0, np.int64)
        """Where each recorded answer begins in `_flat`."""
        self._positions = np.zeros(0, np.int64)
        """The position of each request's next token."""
        self._steps_until_end = 0
        """Steps until the first request ends."""
        self._packed_slots = b""
        self._added: list[tuple[int, int, int]] = []
        """(slot, start, position) of requests that are not in the arrays yet."""
        self._new: list[int] = []
        """Slots whose first token is in the next step."""
        self._num_logprobs: dict[int, int] = {}
        """By slot of a request with log-probabilities: the number of tokens beside the chosen token that have any."""
        self._vocab_size = int(answers.tokens.max()) + 1

    def __len__(self) -> int:
        return len(self._answer_of)

    def __contains__(self, slot: int) -> bool:
        return slot in self._answer_of

    def add(self, slot: int, answer: Answer, position: int, num_logprobs: int | None = None) -> None:
        """Add a request whose next token is at `position`, which is below `answer.length`.

        Unless `num_logprobs` is None, each token gets made-up log-probabilities, and so do that many other tokens.
        """
        self._answer_of[slot] = answer
        if num_logprobs is not None:
            self._num_logprobs[slot] = num_logprobs
        self._added.append((slot, answer.number * self._answer_length, position))
        if position == 0:
            self._new.append(slot)

    def abort(self, slots: list[int]) -> list[wire.Finished]:
        """End the requests in `slots`, and return their ends; slots that are free are ignored."""
        self._merge()
        for slot in slots:
            self._num_logprobs.pop(slot, None)
        ends = [
            wire.Finished(slot, int(self._positions[self._slots == slot][0]), "abort")
            for slot in slots
            if self._answer_of.pop(slot, None) is not None
        ]
        self._keep(np.asarray([slot in self._answer_of for slot in self._slots.tolist()], np.bool_))
        return ends

    def abort_all(self) -> list[wire.Finished]:
        """End every request, and return their ends."""
        return self.abort(list(self._answer_of))

    def step(self, incarnation: int, number: int) -> wire.StepOutput:
        """Return the message with the next token of each request, and forget the requests that end with it."""
        if self._added:
            self._merge()
            self._keep(np.ones(len(self._slots), np.bool_))
        positions = self._positions
        tokens = self._flat[self._starts + positions % self._answer_length]
        message = wire.StepOutput(
            incarnation, number, self._packed_slots, tokens.tobytes(), (positions & 0xFFFF).astype("<u2").tobytes()
        )
        if self._num_logprobs:
            message.logprobs = self._logprobs(tokens)
        if self._new:
            message.queued = [(slot, 0.0) for slot in self._new if slot in self._answer_of]
            self._new.clear()
        positions += 1
        self._steps_until_end -= 1
        if self._steps_until_end == 0:
            has_ended = positions == self._lengths()
            message.finished = [self._end(slot) for slot in self._slots[has_ended].tolist()]
            self._keep(~has_ended)
        return message

    def _logprobs(self, tokens: npt.NDArray[np.uint32]) -> list[wire.TokenLogprobs]:
        """Return log-probabilities for the requests that want any; the chosen token is the most likely."""
        width = 1 + max(self._num_logprobs.values())
        ranks = np.maximum(np.arange(width), 1)
        token_ids = ((tokens.astype(np.int64)[:, None] + ranks - 1) % self._vocab_size).astype("<i4")
        values = (-0.5 * ranks).astype("<f4")
        rank = np.ones(1, "<u4").tobytes()
        messages = []
        for i, (slot, position) in enumerate(zip(self._slots.tolist(), self._positions.tolist(), strict=True)):
            count = self._num_logprobs.get(slot)
            if count is not None:
                ids = token_ids[i, : count + 1].tobytes()
                messages.append(wire.TokenLogprobs(slot, position, ids, values[: count + 1].tobytes(), rank))
        return messages

    def _end(self, slot: int) -> wire.Finished:
        self._num_logprobs.pop(slot, None)
        answer = self._answer_of.pop(slot)
        return wire.Finished(slot, answer.length, answer.reason, answer.stop_reason)

    def _lengths(self) -> npt.NDArray[np.int64]:
        return np.asarray([self._answer_of[slot].length for slot in self._slots.tolist()], np.int64)

    def _merge(self) -> None:
        """Bring the requests in `_added` into the arrays."""
        if self._added:
            slots, starts, positions = np.asarray(self._added, np.int64).T
            self._slots = np.concatenate([self._slots, slots])
            self._starts = np.concatenate([self._starts, starts])
            self._positions = np.concatenate([self._positions, positions])
            self._added.clear()

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Remove the entries that are not `kept` [n], and compute what follows from the entries."""
        self._slots, self._starts, self._positions = self._slots[kept], self._starts[kept], self._positions[kept]
        self._packed_slots = wire.pack_slots(self._slots)
        self._steps_until_end = int((self._lengths() - self._positions).min(initial=2**62))
