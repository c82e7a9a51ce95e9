"""The errors that a user of the engine can meet."""


class EngineError(Exception):
    """Base of every error that this engine raises about itself, not about its input."""


class EngineStartError(EngineError, RuntimeError):
    """The core did not come up; the message carries the cause and the last log lines."""


class EngineDeadError(EngineError):
    """The core is gone for good; the message carries signal or exit code, last log lines and log path."""


class EngineGenerateError(EngineError):
    """One request failed; the engine goes on serving the others."""


AsyncEngineDeadError = EngineDeadError
