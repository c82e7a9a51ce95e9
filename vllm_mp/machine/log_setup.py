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
    `$VLLM_MP_LOG_LEVEL` sets another level for all loggers. Raises ValueError if there is no such level or format.
    """
    if log_format is not None:
        os.environ[FORMAT_VARIABLE] = log_format
    level = os.environ.get(LEVEL_VARIABLE)
    form = "%(levelname)s %(name)s: %(message)s"
    _configure(level or "WARNING", f"%(asctime)s {form}" if is_service else form, "")
    if is_service and not level:
        logging.getLogger("vllm_mp").setLevel(logging.INFO)


def set_up_core_log(program: str) -> None:
    """Write what a process of a core does to standard error; `program` names it in each line, as "core"."""
    level = os.environ.get(LEVEL_VARIABLE, "INFO")
    _configure(level, f"%(asctime)s %(levelname)s {program}: %(message)s", program)


def _configure(level: str, form: str, program: str) -> None:
    chosen = os.environ.get(FORMAT_VARIABLE, FORMATS[0])
    if chosen not in FORMATS:
        raise ValueError(f"{FORMAT_VARIABLE} must be one of {', '.join(FORMATS)}, got {chosen!r:.100}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(program) if chosen == "json" else logging.Formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
