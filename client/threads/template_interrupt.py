"""Ends a chat template that another thread runs, at a moment when nothing but the template is interrupted.

An exception that is raised into a thread can arrive between any two steps of it. In an import, in a logger or in a
finalizer it would leave a lock held for ever, on which the whole process then waits.
"""

import ctypes
import sys
from types import FrameType
from typing import Final

_LIBRARY: Final = "jinja2"
_FILTERS: Final = frozenset(
    {
        "_collections_abc",
        "json",
        "json.decoder",
        "json.encoder",
        "pprint",
        "random",
        "string",
        "textwrap",
        "transformers.utils.chat_template_utils",
        "urllib.parse",
        "vllm_mp.client.prompts.template_text",
    }
)
"""Modules that a template calls and that hold no lock."""
_IMPORT: Final = "<frozen importlib"
"""The code of an import has a file name that begins so."""


def raise_in_template(thread: int, error: type[BaseException]) -> bool:
    """Raise `error` in a thread if it runs a template and nothing that must not be interrupted; return whether it does.

    False: try it again later. The exception may be lost if the template's code calls a finalizer just then.

    Call it right after a sleep: this thread then has the interpreter's lock for its switch interval, 5 ms, far longer
    than this function takes, so the other thread stays where it is.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or not _is_template(frame):
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
    return True


def _is_template(top: FrameType) -> bool:
    """Return whether the function that runs now is the template, Jinja or a filter, and is not part of an import."""
    frame: FrameType | None = top
    is_template = False
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return False
        if not is_template:
            name = frame.f_globals.get("__name__")  # compiled templates have no module name
            is_template = name is None or name.partition(".")[0] == _LIBRARY
            if not is_template and name not in _FILTERS:
                return False
        frame = frame.f_back
    return is_template
