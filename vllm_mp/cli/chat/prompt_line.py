"""Where the user's messages come from: a line editor on a terminal, or the lines of standard input."""

import codecs
import contextlib
import os
import re
import select
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_mp.machine.file_owner import open_own_file

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

_QUOTES = '"""'
"""A message, or the argument of a command, may begin and end with these and have any number of lines between them."""
_OPENING = re.compile(rf"(?P<command>(?:/\S+\s+(?:\S+\s+)?)?){_QUOTES}")
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")


class PromptLine(Protocol):
    """Reads the user's messages."""

    def read(self) -> str | None:
        """Return the next message without surrounding white space; None at the end of the input."""

    def while_busy(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the time of a start or an answer; keys of the user do not appear on the screen then."""


def prompt_line(completions: Callable[[str], Sequence[str]], help_line: str) -> PromptLine:
    """Return what reads from standard input.

    `completions` returns the words that may replace the last word of a text. `help_line` is shown when
    Ctrl-C is pressed at an empty prompt.
    """
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return _Editor(completions, help_line)
    return _Lines(help_line)


class _Lines:
    """Each line of standard input is a message."""

    def __init__(self, help_line: str) -> None:
        self._help_line = help_line

    def read(self) -> str | None:
        while True:
            try:
                prompt = "> " if sys.stdin.isatty() else ""
                if not sys.stdout.isatty():  # the answers go elsewhere
                    print(prompt, end="", file=sys.stderr, flush=True)
                    prompt = ""
                return input(prompt).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                print("\n" + self._help_line)

    def while_busy(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Editor:
    """A line editor with history, completion, and messages of several lines.

    Enter sends the message, unless it begins with triple quotes that do not end yet; Alt-Enter, or a backslash before
    Enter, begins a new line. A pasted text of several lines is one message.
    """

    def __init__(self, completions: Callable[[str], Sequence[str]], help_line: str) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        class OptionalHistory(FileHistory):
            """What cannot be written, such as on a full disk, is known to this chat alone."""

            def store_string(self, string: str) -> None:
                with contextlib.suppress(OSError):
                    super().store_string(string)

        self._help_line = help_line
        self._typed = ""
        """What the user typed during the start or the last answer; the next prompt begins with it."""
        path = _history_file()
        history: History = InMemoryHistory() if path is None else OptionalHistory(path)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=history,
            completer=_completer(completions),
            complete_while_typing=True,
            multiline=True,
            prompt_continuation=lambda width, _number, _wraps: "… ".ljust(width)[:width],
            key_bindings=_key_bindings(),
            enable_history_search=False,
            reserve_space_for_menu=4,
        )

    def read(self) -> str | None:
        while True:
            typed, self._typed = self._typed, ""
            try:
                text = self._session.prompt(default=typed)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    print(self._help_line)
                continue
            return _unquoted(text.strip())

    @contextlib.contextmanager
    def while_busy(self) -> Iterator[None]:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        silent = [*before[:6], list(before[6])]
        # Ctrl-C still is a signal, but does not discard what was typed before it.
        silent[3] = (silent[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH
        silent[6][termios.VMIN], silent[6][termios.VTIME] = 1, 0
        termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        try:
            yield
        finally:
            self._typed = _pending_text(descriptor)
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _pending_text(descriptor: int) -> str:
    """Return what was typed and not read, without the keys that are no text."""
    pending = b""
    while select.select([descriptor], [], [], 0)[0]:
        chunk = os.read(descriptor, 4096)
        if not chunk:
            break
        pending += chunk
    text = _ESCAPE_SEQUENCE.sub("", codecs.decode(pending, "utf-8", "ignore")).replace("\r", "\n")
    return "".join(character for character in text if character == "\n" or character.isprintable()).strip("\n")


def _unquoted(text: str) -> str:
    """Return `text` without triple quotes at its beginning, or after its command, and at its end."""
    opening = _OPENING.match(text)
    if opening and text.endswith(_QUOTES, opening.end()):
        return opening["command"] + text[opening.end() : -len(_QUOTES)].strip("\n")
    return text


def _is_open(text: str) -> bool:
    """Return whether `text` has triple quotes at its beginning, or after its command, and no others at its end."""
    text = text.strip()
    opening = _OPENING.match(text)
    return opening is not None and not text.endswith(_QUOTES, opening.end())


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _completer(completions: Callable[[str], Sequence[str]]) -> "Completer":
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, _event: object) -> Iterator[Completion]:
            text = document.text_before_cursor
            last_word = text.rsplit(" ", 1)[-1]
            for word in completions(text):
                yield Completion(word, start_position=-len(last_word))

    return Commands()


def _history_file() -> Path | None:
    """Return the file of earlier messages, which only its owner can read; None if it cannot be made.

    It is in `$XDG_STATE_HOME/vllm_mp`, by default `~/.local/state/vllm_mp`.
    """
    try:
        base = os.environ.get("XDG_STATE_HOME")
        folder = (Path(os.path.expanduser(base)) if base else Path.home() / ".local/state") / "vllm_mp"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        os.close(open_own_file(path))
    except (OSError, RuntimeError, ValueError):  # ValueError: a trap in a folder that others may write
        return None
    return path
