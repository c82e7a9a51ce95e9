"""Runs the operations that clients call, and sends their results back."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import zmq

from vllm_mp import wire
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.suspension_record import SuspensionRecord
from vllm_mp.core_link.core_status import OutsideTask

MAX_ERROR_CHARACTERS: Final = 2000
_MAX_CALL_ID: Final = 2**63


class StepFailedError(Exception):
    """Raised by an operation if a pending step has failed, so that the core cannot continue."""


class OperatorCall(NamedTuple):
    """An operation that changes the core for all clients, so that only operators may call it."""

    run: Callable[..., Any]
    record: SuspensionRecord | None = None
    """Where the call is noted if it must not be carried out again when it is repeated."""
    only_waits: bool = False
    """Nothing is done for the call any more while its future is not done, so no death of the core is due to it then."""

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


Operation = Callable[..., Any] | OperatorCall


class CallHandler:
    """Carries out calls. An error of an operation is the answer to its call, and harms no other client."""

    def __init__(
        self,
        operations: Mapping[str, Operation],
        outside: OutsideWork,
        alone: Callable[[], contextlib.AbstractContextManager[None]],
        send: Callable[[int, wire.Reply], None],
        incarnation: int,
    ) -> None:
        """`operations` are those that clients may name, or operators for `OperatorCall`.

        `outside` publishes the calls. `alone` lets neither a step nor other work be under way in a block. `send` sends
        the reply to a client.
        """
        self._operations = operations
        self._outside = outside
        self._alone = alone
        self._send = send
        self._incarnation = incarnation

    def handle(self, client: int, call: wire.Call, is_operator: bool, is_suspect: bool) -> bool:
        """Carry out a call and answer it, when its future is done if its result is one.

        `is_suspect`: an earlier core died during the call, so it is alone. Return False if the call must be completed
        before later messages are read. Raises what an operation raises beside ValueError.
        """
        operation = self._operations.get(call.name)
        try:
            if operation is None:
                known = ", ".join(sorted(self._operations))
                raise ValueError(f"the core has no operation {call.name[:100]!r}; it has {known}")
            if isinstance(operation, OperatorCall) and not is_operator:
                self._refuse(client, call)
                return True
            work = operation if isinstance(operation, OperatorCall) else OperatorCall(operation)
            try:
                inspect.signature(work.run).bind(*call.args)
            except TypeError as error:
                raise ValueError(f"operation {call.name}: {error}") from error
            result = self._carry_out(client, call, work, is_suspect)
        except ValueError as error:
            self.reply(client, call.call_id, error=str(error))
            return True
        if isinstance(result, Future):
            is_done = result.done()
            result.add_done_callback(lambda done: self._reply_with(client, call.call_id, done))
            return is_done
        self.reply(client, call.call_id, result)
        return True

    def reply(self, client: int, call_id: int, result: Any = None, error: str | None = None) -> None:
        """Answer a call with its result or with an `error`."""
        self._send(client, wire.Reply(self._incarnation, call_id, result, error and shortened(error)))

    def _carry_out(self, client: int, call: wire.Call, work: OperatorCall, is_suspect: bool) -> Any:
        """Return the result of a call, which is on the status page while the core works for it.

        A call that only waits must leave the page: it would take part in all deaths until then, so that no request
        would be alone in one. A suspect is alone until this returns; so is what threads do for it after that.
        """
        is_known = -_MAX_CALL_ID <= call.call_id < _MAX_CALL_ID  # else the page has no room for the id
        with self._alone() if is_suspect else contextlib.nullcontext():
            number = self._outside.begin([OutsideTask(client, call.call_id)] if is_known else [], is_suspect)
            try:
                result = self._run(call, work)
            except (zmq.ZMQError, WorkerFailedError):
                raise  # they end the core, whose page then says what it was doing
            except BaseException:
                self._outside.end(number)
                raise
        if isinstance(result, Future) and not work.only_waits:
            result.add_done_callback(lambda _: self._outside.end(number))
        else:
            self._outside.end(number)
        return result

    def _run(self, call: wire.Call, work: OperatorCall) -> Any:
        return work.record.carry_out(call.call_id, work.run, *call.args) if work.record else work.run(*call.args)

    def _refuse(self, client: int, call: wire.Call) -> None:
        error = (
            f"{call.name} is for operators, because it affects all clients of this core: give the core's operator "
            "key file to AsyncLLM.connect(operator_key_file=FILE); `vllm-mp engine --operator-key-file FILE` makes it"
        )
        self._send(client, wire.Reply(self._incarnation, call.call_id, None, error, needs_operator=True))

    def _reply_with(self, client: int, call_id: int, done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            self.reply(client, call_id, done.result())
        else:
            self.reply(client, call_id, error=str(error))


def shortened(error: str) -> str:
    """Return `error` without most of a value that fills megabytes."""
    return error if len(error) <= MAX_ERROR_CHARACTERS else error[:MAX_ERROR_CHARACTERS] + "..."
