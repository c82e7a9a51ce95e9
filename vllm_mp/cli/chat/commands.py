"""The commands of a chat: lines that begin with "/"."""

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_mp.arguments.counted import counted
from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.cli.chat.images import image_file
from vllm_mp.cli.chat.prompt_line import PromptLine
from vllm_mp.cli.flags.sampling import SWITCH, parameter_names, parse_parameter
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.cli.chat.session import ChatSession

_OF_FILES = ("/image", "/save", "/load")
_MAX_ENTRIES = 1000
"""Bound on the entries of a folder that are looked at while the user types."""
_COMMAND = re.compile(r"/(?!/)[^\s/]*(?=\s|$)")
"""A path such as /etc/hosts is not a command."""


class EndOfChat(Exception):
    """The user has left the chat."""


class Command(NamedTuple):
    """What a command is called with, and what it does."""

    arguments: str
    meaning: str
    run: Callable[["ChatSession", str, PromptLine], None]


def run_if_command(session: "ChatSession", line: str, prompt_line: PromptLine) -> bool:
    """Carry out `line` if it is a command; return whether it is.

    Raises ValueError for an unknown command or arguments that it does not take, and EndOfChat at the end.
    """
    if (match := _COMMAND.match(line)) is None:
        return False
    name, arguments = match[0], line[match.end() :].strip()
    if (command := COMMANDS.get(_ALIASES.get(name, name))) is None:
        hint = did_you_mean(name, [*COMMANDS, *_ALIASES]) or "; /help lists the commands"
        raise ValueError(f"there is no command {name}{hint} (// begins a message that begins with /)")
    if arguments and not command.arguments:
        raise ValueError(f"{name} takes no arguments, got {arguments!r:.100}")
    command.run(session, arguments, prompt_line)
    return True


def message_in(line: str) -> str:
    """Return the message in a line that is not a command: "//" stands for a "/" at its beginning."""
    return line[1:] if line.startswith("//") else line


def completions(text: str) -> Sequence[str]:
    """Return the words that may replace the last word of `text`: commands and their arguments."""
    words = text.split(" ")
    if not text.startswith("/") or "\n" in text:
        return []
    if len(words) == 1:
        candidates: list[str] = [*COMMANDS]
    elif words[0] == "/set" and len(words) == 2:
        candidates = [*parameter_names(), "system", "verbose"]
    elif words[0] in _OF_FILES:
        begin = text.removeprefix(f"{words[0]} ")
        # The name of a file may have spaces.
        return [path[len(begin) - len(words[-1]) :] for path in _paths(begin, is_image=words[0] == "/image")]
    else:
        return []
    return [word for word in candidates if word.startswith(words[-1])]


def _paths(begin: str, is_image: bool) -> list[str]:
    """Return the paths that begin so, hidden ones only if asked for: folders, and files (`is_image`: of images)."""
    folder, name = os.path.split(begin)
    try:
        with os.scandir(os.path.expanduser(folder or ".")) as entries:
            found = [
                os.path.join(folder, f"{entry.name}/" if entry.is_dir() else entry.name)
                for entry in itertools.islice(entries, _MAX_ENTRIES)
                if entry.name.startswith(name)
                and (name or not entry.name.startswith("."))
                and (not is_image or entry.is_dir() or (guess_type(entry.name)[0] or "").startswith("image/"))
            ]
    except OSError:
        return []
    return sorted(found)


def _help(session: "ChatSession", _arguments: str, _prompt_line: PromptLine) -> None:
    rows = [(f"{name} {command.arguments}".rstrip(), command.meaning) for name, command in COMMANDS.items()]
    rows += [('"""', "begins and ends a message of several lines")]
    rows += [("Alt-Enter", "begins a new line of the message, as \\ before Enter does")]
    rows += [("Ctrl-C", "stops an answer"), ("Ctrl-D", "leaves the chat")]
    session.screen.table(rows)


def _bye(_session: "ChatSession", _arguments: str, _prompt_line: PromptLine) -> None:
    raise EndOfChat


def _clear(session: "ChatSession", _arguments: str, _prompt_line: PromptLine) -> None:
    session.conversation.messages.clear()
    session.images.clear()
    session.screen.note("(the conversation is forgotten)")


def _retry(session: "ChatSession", _arguments: str, prompt_line: PromptLine) -> None:
    session.retry(prompt_line)


def _system(session: "ChatSession", text: str, _prompt_line: PromptLine) -> None:
    session.conversation.system = text or None
    session.screen.note("(the system message is set)" if text else "(there is no system message of this chat)")


def _set(session: "ChatSession", arguments: str, prompt_line: PromptLine) -> None:
    name, _, value = arguments.removeprefix("parameter ").strip().partition(" ")
    value = value.strip()
    if name == "system":
        _system(session, value, prompt_line)
    elif name in ("verbose", "quiet"):
        if value not in ("", *SWITCH):
            raise ValueError(f"{name} must be on or off, got {value!r}")
        session.is_verbose = SWITCH.get(value, True) == (name == "verbose")
        session.screen.note(f"(verbose is {'on' if session.is_verbose else 'off'})")
    elif not name or not value:
        raise ValueError(f"/set needs a parameter and a value; parameters are {', '.join(parameter_names())}")
    else:
        field, parsed = parse_parameter(name, value)
        changed = session.conversation.parameters | {field: parsed}
        SamplingParams(**changed)  # refuses a value out of range
        session.conversation.parameters = changed
        session.screen.note(f"({field} is {json.dumps(parsed)})")


def _show(session: "ChatSession", _arguments: str, _prompt_line: PromptLine) -> None:
    conversation, config = session.conversation, session.llm.model_config
    chosen = {name: value for name, value in sorted(conversation.parameters.items()) if value is not None}
    parameters = ", ".join(f"{name} {json.dumps(value)}" for name, value in chosen.items())
    session.screen.table(
        [
            ("model", config.served_model_name),
            ("system", conversation.system or "(the chat template's own)"),
            ("parameters", parameters or "(defaults)"),
            ("messages", str(len(conversation.messages))),
            *([("images", f"{len(session.images)} of the next message")] if session.images else []),
            ("context", f"{session.num_tokens()} of {config.max_model_len} tokens"),
        ]
    )


def _save(session: "ChatSession", file: str, _prompt_line: PromptLine) -> None:
    path = _file(file)
    session.conversation.save(path, session.llm.model_config.served_model_name)
    session.screen.note(f"(saved in {path})")


def _load(session: "ChatSession", file: str, _prompt_line: PromptLine) -> None:
    path = _file(file)
    config = session.llm.model_config
    model, takes_images = config.served_model_name, config.images is not None
    author = session.conversation.load(path, takes_images=takes_images)
    change = "" if author == model else f"; they are of a chat with {author}, and {model} continues it"
    session.screen.note(f"(loaded {counted(len(session.conversation.messages), 'message')} from {path}{change})")


def _image(session: "ChatSession", file: str, prompt_line: PromptLine) -> None:
    if not file:
        if not session.images:
            raise ValueError("give the name of a file, as in /image cat.png")
        session.images.clear()
        session.screen.note("(no image goes with the next message)")
        return
    path = image_file(file)
    num_tokens = session.add_image(path, prompt_line)
    number = f", image {len(session.images)} of it" if len(session.images) > 1 else ""
    session.screen.note(f"({path.name} goes with the next message{number}: {counted(num_tokens, 'token')})")


def _file(file: str) -> Path:
    if not file:
        raise ValueError("give the name of a file, as in /save chat.json")
    return Path(os.path.expanduser(file))


COMMANDS = {
    "/help": Command("", "lists the commands", _help),
    "/bye": Command("", "leaves the chat", _bye),
    "/clear": Command("", "forgets the conversation", _clear),
    "/retry": Command("", "answers the last message again", _retry),
    "/system": Command("TEXT", "sets the system message; without TEXT there is none", _system),
    "/set": Command("NAME VALUE", "sets a sampling parameter, system, or verbose (on, off)", _set),
    "/image": Command("FILE", "adds an image to the next message; without FILE it has none", _image),
    "/show": Command("", "shows the model, the parameters, and how full the context is", _show),
    "/save": Command("FILE", "keeps the conversation in a file", _save),
    "/load": Command("FILE", "continues the conversation in a file", _load),
}
_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
