"""The commands of the chat, and the file that keeps a conversation."""

import errno
import json
import logging
import os
from types import SimpleNamespace

import pytest

from vllm_mp import cli
from vllm_mp.arguments.counted import counted
from vllm_mp.cli.chat.commands import EndOfChat, completions, message_in, run_if_command
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.images import content_with_images
from vllm_mp.cli.chat.prompt_line import _Editor, _is_open, _unquoted, prompt_line
from vllm_mp.cli.flags import connect as connect_flags

URL = "data:image/png;base64,AAAA"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é"}]


@pytest.mark.parametrize("name", ["x" * 300, "~no such user/chat.json", "/dev/zero"])
@pytest.mark.parametrize("command", ["/save", "/load"])
def test_path_that_cannot_be_used_is_refused_by_its_name(command, name):
    with pytest.raises(ValueError, match=f"(cannot (write|read) )?{name}(: .*| is not a file); "):
        run_if_command(Session(), f"{command} {name}", None)
    assert completions(f"{command} ~no such user/") == []


def test_prompt_goes_where_the_answers_do_not(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: f"{prompt} Hi ")
    assert prompt_line(completions, "help").read() == "Hi"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "> ")


def test_history_that_cannot_be_written_costs_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_mp.cli.chat.prompt_line._history_file", lambda: tmp_path)  # a folder
    history = _Editor(completions, "help")._session.history
    history.append_string("Hi")
    assert history.get_strings() == ["Hi"]


class Session:
    """Stands in for a session without an engine; it notes what is shown, and what is answered again."""

    class Screen:
        def __init__(self):
            self.notes = []

        def note(self, text):
            self.notes.append(text)

        def table(self, rows):
            self.notes += [" ".join(row) for row in rows]

    def __init__(self):
        self.conversation = Conversation("Be short.", {"temperature": 0.5}, list(MESSAGES))
        self.screen = self.Screen()
        self.llm = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="some-model", max_model_len=64, images=None),
        )
        self.is_verbose = False
        self.images = []
        self.retries = 0

    def add_image(self, path, prompt_line):
        self.images.append(str(path))
        return 20

    def retry(self, prompt_line):
        self.retries += 1


@pytest.fixture
def session():
    return Session()


@pytest.mark.parametrize("line", ["Hi", "/etc/hosts is what?", "//clear", "a /clear", "/usr/bin"])
def test_text_that_is_no_command_is_a_message(session, line):
    assert not run_if_command(session, line, None)


def test_two_slashes_begin_a_message_with_one():
    assert message_in("//clear it") == "/clear it"
    assert message_in("Hi // there") == "Hi // there"


@pytest.mark.parametrize(
    ("line", "words"), [("/cler", "did you mean .?/clear"), ("/x", "/help lists"), ("/", "no command /")]
)
def test_unknown_command_is_refused_with_a_hint(session, line, words):
    with pytest.raises(ValueError, match=words):
        run_if_command(session, line, None)
    assert session.conversation.messages == MESSAGES


def test_commands_change_what_they_name(session):
    for line in ("/system  Be long. ", "/set top_p 0.5", "/set max-tokens 9", "/set parameter seed 3", "/retry"):
        assert run_if_command(session, line, None)
    assert session.conversation.system == "Be long."
    parameters = {"temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "seed": 3}
    assert session.conversation.parameters == parameters
    assert session.retries == 1
    run_if_command(session, "/set verbose", None)
    assert session.is_verbose
    run_if_command(session, "/set verbose off", None)
    assert not session.is_verbose
    run_if_command(session, "/clear", None)
    assert session.conversation == Conversation("Be long.", parameters)
    assert session.screen.notes[-1] == "(the conversation is forgotten)"


@pytest.mark.parametrize("line", ["/bye", "/exit", "/quit"])
def test_every_word_of_farewell_ends_the_chat(session, line):
    with pytest.raises(EndOfChat):
        run_if_command(session, line, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set", "needs a parameter and a value"),
        ("/set top_p", "needs a parameter and a value"),
        ("/set top_p much", "top_p must be a number, got 'much'"),
        ("/set top_p 7", "top_p must be"),
        ("/set max_tokens 1.5", "max_tokens must be an integer, got '1.5'"),
        ("/set temprature 1", "did you mean .?temperature"),
        ("/set ignore_eos maybe", "ignore_eos must be on or off, got 'maybe'"),
        ("/set verbose loud", "verbose must be on or off, got 'loud'"),
        ("/clear all", "/clear takes no arguments, got 'all'"),
        ("/save", "name of a file"),
        ("/image", "name of a file"),
        ("/load /nowhere/at/all", "cannot read /nowhere/at/all: No such file"),
        ("/save /nowhere/at/all", "cannot write /nowhere/at/all: No such file"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(session, line, words):
    with pytest.raises(ValueError, match=words):
        run_if_command(session, line, None)
    assert session.conversation == Conversation("Be short.", {"temperature": 0.5}, MESSAGES)


def test_saved_chat_is_loaded_as_it_was(session, tmp_path):
    path = tmp_path / "a chat.json"
    run_if_command(session, f"/save {path}", None)
    other = Session()
    other.conversation = Conversation(None, {})
    run_if_command(other, f"/load {path}", None)
    assert other.conversation == session.conversation
    assert other.screen.notes == [f"(loaded 2 messages from {path})"]
    other.llm.model_config.served_model_name = "other-model"
    run_if_command(other, f"/load {path}", None)
    assert other.screen.notes[-1] == (
        f"(loaded 2 messages from {path}; they are of a chat with some-model, and other-model continues it)"
    )
    run_if_command(other, f"/save {path}", None)  # a saved chat may be replaced
    assert [each.name for each in tmp_path.iterdir()] == ["a chat.json"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"my notes", "is not a saved chat"),
        (b'{"vllm_mp_chat": 1}', "is not a saved chat"),
        (b"\xff", "is not a saved chat"),
        ({"vllm_mp_chat": 9}, "has version 9"),
        ({"parameters": {"top_p": 7}}, "top_p"),
        ({"messages": [{"role": "user"}]}, "without role or content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "is not a saved chat"),
        ({"messages": [{"role": "user", "content": content_with_images("Hi", ["http://host/"])}]}, "cannot be used"),
        ({"messages": [{"role": "user", "content": content_with_images("Hi", [URL])}]}, "the model takes none"),
    ],
)
def test_file_that_is_no_saved_chat_is_refused_and_changes_nothing(session, tmp_path, content, words):
    path = tmp_path / "file"
    if isinstance(content, dict):
        chat = {"vllm_mp_chat": 1, "model": "m", "system": None, "parameters": {}, "messages": []} | content
        content = json.dumps(chat).encode()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        run_if_command(session, f"/load {path}", None)
    assert session.conversation.messages == MESSAGES


@pytest.mark.parametrize("name", ["~/my cat.png", '"{home}/my cat.png"', "{home}/my\\ cat.png"])
def test_image_goes_with_the_next_message_however_a_terminal_writes_its_path(session, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my cat.png").write_bytes(b"x")
    for _ in range(2):
        run_if_command(session, f"/image {name.format(home=tmp_path)}", None)
    path = str(tmp_path / "my cat.png")
    assert session.images == [path, path]
    assert session.screen.notes == [
        "(my cat.png goes with the next message: 20 tokens)",
        "(my cat.png goes with the next message, image 2 of it: 20 tokens)",
    ]
    run_if_command(session, "/image", None)
    assert session.images == []


def test_saved_chat_has_its_images(session, tmp_path):
    path = tmp_path / "chat.json"
    session.conversation.messages[0]["content"] = content_with_images("Hi", [URL])
    session.llm.model_config.images = "some"
    run_if_command(session, f"/save {path}", None)
    assert json.loads(path.read_text())["vllm_mp_chat"] == 2
    other = Session()
    other.llm.model_config.images = "some"
    run_if_command(other, f"/load {path}", None)
    assert other.conversation == session.conversation


def test_save_that_fails_leaves_no_file_behind(session, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="Input/output error; choose another file"):
        run_if_command(session, f"/save {tmp_path / 'chat.json'}", None)
    assert list(tmp_path.iterdir()) == []


def test_save_replaces_no_other_file(session, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is not a saved chat"):
        run_if_command(session, f"/save {path}", None)
    assert path.read_text() == "my notes"


def test_commands_and_parameters_are_completed():
    assert completions("/s") == ["/system", "/set", "/show", "/save"]
    assert set(completions("/set top")) == {"top_p", "top_k"}
    assert completions("hello /s") == []


def test_files_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my photos").mkdir()
    for name in ("my cat.png", "my notes.txt", ".hidden.png", "my photos/dog.jpg"):
        (tmp_path / name).touch()
    assert completions("/image ") == ["my cat.png", "my photos/"]
    assert completions("/image my p") == ["photos/"]
    assert completions(f"/image {tmp_path}/my photos/d") == ["photos/dog.jpg"]
    assert completions("/image .h") == [".hidden.png"]
    assert completions("/load my n") == ["notes.txt"]
    assert completions("/load missing/x") == []


def test_triple_quotes_hold_a_message_of_several_lines():
    assert _is_open('"""a\nb')
    assert not _is_open('"""a\nb"""')
    assert not _is_open("a")
    assert _unquoted('"""a\nb\n"""') == "a\nb"
    assert _unquoted("a") == "a"
    assert _is_open('/set system """')
    assert not _is_open('/system """a\nb"""')
    assert _unquoted('/system """a\nb"""') == "/system a\nb"


def test_one_thing_is_named_in_the_singular():
    assert [counted(number, "request") for number in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]


def test_chat_leaves_the_log_level_of_the_process_as_it_was(capsys, monkeypatch):
    monkeypatch.setattr(connect_flags, "_ABSENT_TIMEOUT_S", 0.05)
    before = logging.getLogger("vllm_mp").level
    assert cli.main(["chat", "/nowhere/at/all"]) != 0
    assert "/nowhere/at/all" in capsys.readouterr().err
    assert logging.getLogger("vllm_mp").level == before
