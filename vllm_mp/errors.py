"""The errors that the engine raises about itself.

For the caller's input it raises ValueError, TypeError or NotImplementedError: correct the value that the message names.
"""

from typing import Any


class EngineError(RuntimeError):
    """The base class of the errors below: the engine, not the caller's input, is at fault."""


class EngineStartError(EngineError):
    """The core did not start, or made no progress in its start for `start_timeout_s`.

    Raised by `AsyncLLM.from_engine_args` and `AsyncLLM.connect`. The message carries the cause and the last log lines:
    remove the cause and start the engine again.
    """


class EngineDeadError(EngineError):
    """The core is dead for good: recovery is off, the restarts are used up, or the engine was shut down.

    Raised by every running stream and by every later call of the `AsyncLLM`. The message carries the signal or exit
    code, the last log lines and the path of the log: make a new `AsyncLLM`.

    Also raised for requests while the background loop is stopped and does not start by itself. Then `AsyncLLM.errored`
    is False: call `start_background_loop`.
    """


class BatchDeadError(EngineDeadError):
    """The core died for good while `LLM` ran a batch of prompts.

    Raised by `LLM.generate` and the other calls with prompts. `outputs` has an entry for each prompt, in order: its
    output if it was finished, else a `RequestFailure`. Prompts of an iterator that were not yet taken have none.
    """

    def __init__(self, message: str, outputs: list[Any]) -> None:
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (str(self), self.outputs), self.__dict__


class EngineGenerateError(EngineError):
    """A request failed in the core, for example because it alone caused the deaths of two cores.

    Raised by the stream of that request. The engine serves all other requests: do not send the same request again
    before the cause in the message is removed.
    """


class ConstraintError(EngineGenerateError, ValueError):
    """The constraint of a request cannot be compiled, or not be followed within the limits of the core.

    Raised by the stream of that request. The message says where and why: correct `structured_outputs`.
    """


class NoRoomError(EngineGenerateError):
    """The core has no memory for a request beside the live requests of this client, its tenant and others.

    Raised by the stream of that request: send it again when some of them have ended.
    """


class TooManyConstraintsError(EngineGenerateError):
    """The constraint of a request was not compiled, because too many others of this client, or of all, wait for that.

    Raised by the stream of that request: send it again later.
    """


class RequestInterruptedError(EngineGenerateError):
    """A request that is not at fault cannot be continued or begun, for example because the model's files have changed.

    Raised by the stream of that request. The message carries the cause: send the request again.
    """


class NotOperatorError(EngineError, PermissionError):
    """The call, or request, changes a shared core for all its clients, and this client is not an operator of it.

    Raised by pauses, sleeps, their ends, the profiler, `reset_prefix_cache`, `collective_rpc`, `add_lora`,
    `remove_lora`, `pin_lora` and requests with an adapter that is not loaded, of a client from `AsyncLLM.connect`
    without `operator_key_file`. Nothing has changed: connect with the operator key file of the core.
    """


class DuplicateRequestIdError(ValueError, KeyError):
    """A live request has the id that a new request names: choose another id, or leave it None."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return Exception.__str__(self)


AsyncEngineDeadError = EngineDeadError
"""The same class under its older name."""
