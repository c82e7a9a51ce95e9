"""What the programs of this folder share: their arguments, and how a check is reported.

A program registers its checks with `@check("what a user does")` and ends in `run()`. Each check prints a line: `ok` or
`FAILED`, its name, and the error. A check that hangs fails after a minute.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

TIMEOUT_S = 60

_parser = argparse.ArgumentParser()
_parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
_parser.add_argument("--model", default="smollm2-135m-instruct")
_args = _parser.parse_args()
URL = _args.url
BASE_URL = f"{URL}/v1"
MODEL = _args.model
KEY = os.environ.get("VLLM_MP_API_KEY", "none")
TEXT = "Anna is a baker, 30 years old."
JOBS = Literal["baker", "teacher"]

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as the check `name`. It fails if it raises."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((name, function))
        return function

    return register


def run() -> None:
    """Run all checks and end the program, with exit code 1 if one failed."""
    failed = False

    def on_alarm(*_: object) -> None:
        raise TimeoutError(f"no answer within {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, on_alarm)
    for name, function in _checks:
        signal.alarm(TIMEOUT_S)
        try:
            function()
        except Exception as error:
            failed = True
            text = " ".join(str(error).split())[:300]
            print(f"FAILED {name}: {type(error).__name__}: {text}", flush=True)
            traceback.print_exc(limit=-3)
        else:
            print(f"ok {name}", flush=True)
        finally:
            signal.alarm(0)
    sys.stdout.flush()
    os._exit(failed)  # some clients leave threads that never end
