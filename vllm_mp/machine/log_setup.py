"""The log of the programs of this package, on standard error: lines of text, or JSON objects."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

LEVEL_VARIABLE = "VLLM_MP_LOG_LEVEL"
FORMAT_VARIABLE = "VLLM_MP_LOG_FORMAT"
FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object on a line of its own."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "program": self._program,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in entry.items() if value != ""})


def set_up_log(is_service: bool = False, log_format: str | None = None) -> None:
    """Write warnings to standard error; of a service also what this package does, with the time of each line.

    `log_format` is one of `FORMATS`, for this process and those that it starts; None: as `$VLLM_MP_LOG_FORMAT` says.
    `$VLLM_MP_LOG_LEVEL` sets another level for all loggers. Raises ValueError as `log_settings` does.
    """
    if log_format is not None:
        os.environ[FORMAT_VARIABLE] = log_format
    form = "%(levelname)s %(name)s: %(message)s"
    _configure("WARNING", f"%(asctime)s {form}" if is_service else form, "")
    if is_service and not os.environ.get(LEVEL_VARIABLE):
        logging.getLogger("vllm_mp").setLevel(logging.INFO)


def set_up_core_log(program: str) -> None:
    """Write what a process of a core does to standard error; `program` names it in each line, as "core".

    Raises ValueError as `log_settings` does.
    """
    _configure("INFO", f"%(asctime)s %(levelname)s {program}: %(message)s", program)


def log_settings() -> tuple[str | None, str]:
    """Return the level, None if it is not set, and the format of the log that the environment of this process sets.

    Raises ValueError, which names the variable, if there is no such level or format.
    """
    level, log_format = os.environ.get(LEVEL_VARIABLE), os.environ.get(FORMAT_VARIABLE)
    if level and level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r:.100}")
    if log_format and log_format not in FORMATS:
        raise ValueError(f"{FORMAT_VARIABLE} must be one of {', '.join(FORMATS)}, got {log_format!r:.100}")
    return level.upper() if level else None, log_format or FORMATS[0]


def _configure(default_level: str, form: str, program: str) -> None:
    level, log_format = log_settings()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(program) if log_format == "json" else logging.Formatter(form))
    logging.basicConfig(level=level or default_level, handlers=[handler])
