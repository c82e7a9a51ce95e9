"""Which group of suspects runs isolated, and until when.

Any request in the step during which a core died may have caused the death. A client that searches for the culprit
among these suspects divides them into groups. A group runs isolated: its suspects share steps with one another and with
no other request until they are past that step. So a group with a culprit dies alone, and the status page names it. The
groups run one after the other, in at most every second step as long as other requests can run.
"""

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import GroupKey
from vllm_mp.core.scheduler.waiting.isolated_groups import IsolatedGroups


class Isolation:
    """The isolated group that runs, and the turns that it takes with other requests."""

    def __init__(self, batch: Batch, waiting: IsolatedGroups) -> None:
        self._batch = batch
        self._waiting = waiting
        self.group: GroupKey | None = None
        """The isolated group that runs: the only group whose suspects have rows."""
        self.latest_is_isolated = False
        """The latest scheduled step is a step of an isolated group."""

    def has_group(self) -> bool:
        """Return whether an isolated group runs; the next group begins when the last is past the death."""
        if self.group is not None and self.group not in self._waiting and not self._batch.is_isolated.any():
            self.group = None
        if self.group is None:
            self.group = self._waiting.next_group()
        return self.group is not None

    def release_suspects(self) -> None:
        """Let suspects that are past the step of the death run with other requests."""
        if self.group is None:
            return
        batch = self._batch
        rows = batch.order[batch.is_isolated[batch.order]]
        counts = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
        for row, num_output_tokens in zip(rows.tolist(), counts.tolist(), strict=True):
            request = batch.request(row)
            if num_output_tokens >= max(1, request.isolate_until_num_tokens):
                request.isolate_until_num_tokens = 0
                batch.is_isolated[row] = False
