"""The messages about a step: what belongs together is in one message."""

import numpy as np

from vllm_mp import wire
from vllm_mp.core.ipc import step_messages
from vllm_mp.core.scheduler.step import ModelOutput, StepUpdate


def test_tokens_of_a_request_and_their_log_probabilities_are_in_one_message(monkeypatch):
    monkeypatch.setattr(step_messages, "MAX_PART_BYTES", 60)
    # Accepted drafts come first, then the last token of each request.
    slots, positions = np.array([1, 1, 2, 0, 1, 2], np.uint32), np.array([5, 6, 3, 9, 7, 4])
    update = StepUpdate(
        clients=np.zeros(6, np.uint32),
        slots=slots,
        tokens=10 * slots.astype(np.int64) + positions,
        positions=positions,
        finished=[(0, wire.Finished(2, 5, "stop"))],
        cached=[],
        vectors=[],
        gone=set(),
    )

    def logprobs(slot, position, count):
        return 0, wire.TokenLogprobs(slot, position, bytes(8 * count), bytes(8 * count), bytes(4 * count))

    output = ModelOutput(update.tokens, logprobs=[logprobs(0, 9, 1), logprobs(1, 5, 3), logprobs(2, 3, 2)])
    messages = [message for _, message in step_messages.step_outputs(1, 1, update, output)]
    assert len(messages) > 1
    found = {}
    for message in messages:
        columns = list(zip(*wire.unpack_tokens(message), strict=True))
        for each in message.logprobs:
            own = [(token, position) for slot, token, position in columns if slot == each.slot]
            first = each.position
            assert own == [(10 * each.slot + p, p) for p in range(first, first + len(each.ranks) // 4)]
            found[each.slot] = len(own)
        assert {slot for slot, _, _ in columns} == {each.slot for each in message.logprobs}
        assert all(end.slot in {slot for slot, _, _ in columns} for end in message.finished)
    assert found == {0: 1, 1: 3, 2: 2}
    assert sum(len(message.finished) for message in messages) == 1
