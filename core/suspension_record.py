"""The pause and the sleep in force, on the status page, from which the successor of the core learns of them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_mp.core_link.core_status import SleepState, Suspension
from vllm_mp.core_link.status_page import MAX_NOTED_CALLS, StatusPage

_MAX_CALL_ID = 2**63


class SuspensionRecord:
    """Owns the pause and the sleep in force, and the calls that were carried out; publishes every change on the page.

    A client repeats a call that a core has not answered, to its successor or to the same core. The call may have been
    carried out, and others may have changed the state since. So each call is carried out once.
    """

    def __init__(self, page: StatusPage, inherited: Suspension, tell_pause: Callable[[bool], None]) -> None:
        """`inherited` is that of the predecessor. `tell_pause` tells all clients whether there is a pause."""
        self._page = page
        self._tell_pause = tell_pause
        self.state = inherited
        page.note_suspension(inherited)
        tell_pause(bool(inherited.pause))

    def note_pause(self, mode: str, num_draining: int) -> None:
        """Note the mode of the pause, empty for none, and the requests that it lets run to their ends."""
        before = self.state
        is_change = mode != before.pause
        if is_change or num_draining != before.num_draining:
            generation = before.generation + is_change
            self._note(before._replace(pause=mode, num_draining=num_draining, generation=generation))
        if bool(mode) != bool(before.pause):
            self._tell_pause(bool(mode))

    def note_sleep(self, sleep: SleepState) -> None:
        """Note the memory that the core has released."""
        if sleep != self.state.sleep:
            self._note(self.state._replace(sleep=sleep, generation=self.state.generation + 1))

    def carry_out(self, call_id: int, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `call(*args)`, or None if it was carried out before under this id.

        Raises ValueError if it has failed before.
        """
        if call_id in self.state.calls:
            return None
        if ~call_id in self.state.calls:
            raise ValueError("the call has failed, or another call has ended it, before its answer was sent; repeat it")
        result = call(*args)
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._note_call(~call_id if done.exception() else call_id))
        else:
            self._note_call(call_id)
        return result

    def _note_call(self, call_id: int) -> None:
        if -_MAX_CALL_ID <= call_id < _MAX_CALL_ID:
            self._note(self.state._replace(calls=(*self.state.calls, call_id)[-MAX_NOTED_CALLS:]))

    def _note(self, state: Suspension) -> None:
        self.state = state
        self._page.note_suspension(state)
