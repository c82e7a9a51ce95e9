"""The `vllm-mp` command as a shell runs it: output, exit codes, Ctrl-C, and the death of the core."""

import asyncio
import codecs
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.engine_fixtures import PLAIN_POPEN, SLOW_STEPS, starting_from
from support.forked_cores import HELPER_NAMES

from vllm_mp import AsyncLLM, __version__, cli
from vllm_mp.cli.chat_text import chat_prompt
from vllm_mp.cli.running_engines import running_engines
from vllm_mp.machine import cpu_info
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty
from vllm_mp.testing.terminal import Terminal

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = [sys.executable, "-m", "vllm_mp.cli"]
LIGHT = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27), "--num-threads", "1"]
COMMANDS = [*cli.COMMANDS, *(f"bench {name}" for name in cli.BENCHMARKS)]
LONG_STORY = "Write a long story about a dragon and a knight."
CAPITAL = "What is the capital of France?"
GREEDY = ["--temperature", "0", "--frequency-penalty", "0"]
"""Flags by which chat and generate answer as `chat_text` does."""
CUT = "(cut off at 12 tokens; /set max_tokens N)\n"
"""What a chat says about an answer that --max-tokens 12 has ended."""


def run(*arguments, **options):
    """Run a command to its end, by default with an empty stdin."""
    options = {"input": "", "text": True, "timeout": 120, **options}
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, check=False, **options)


@contextlib.contextmanager
def running(*arguments):
    """Run a command with its outputs in pipes. Kill it at the end of the block."""
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def core_of(process):
    """Wait for the core of a running command and return its process."""
    deadline = time.monotonic() + 60
    while not (cores := children(process)):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no core was started"
    (core,) = cores
    return core


def children(process):
    """Return the children of a running command that it would have without the fixture `forked_programs`."""
    return [child for child in psutil.Process(process.pid).children() if child.name() not in HELPER_NAMES]


@pytest.fixture
def temporary(monkeypatch):
    """A folder with a short path for the temporary files of the test's commands."""
    with tempfile.TemporaryDirectory(prefix="cli-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def options(default_model):
    return ["--model", str(default_model), *LIGHT]


@pytest.fixture(scope="module")
def small_options(small_model):
    """Options of an engine whose streams last long enough for a signal."""
    return ["--model", str(small_model), *LIGHT, "--fault-injection", SLOW_STEPS]


@pytest.fixture(scope="module")
def core(options, tmp_path_factory):
    """A client of a stand-alone core, for tests that need not start a core."""
    address = f"ipc://{tmp_path_factory.mktemp('core')}/core.sock"
    with contextlib.ExitStack() as stack:
        with starting_from(PLAIN_POPEN):  # `vllm-mp ps` knows processes by their command lines
            command = running("engine", "--listen", address, *options, "--max-model-len", "256")
            process = stack.enter_context(command)
        client = AsyncLLM.connect(address, timeout=120)
        yield client
        asyncio.run(eventually(lambda: is_empty(client)))
        client.shutdown()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert b"finishing" not in process.stderr.read(), "the core has no requests"


@pytest.fixture(scope="module")
def address(core):
    return core.cores.first.supervisor.core.connection.address


def greedy_text(client, prompt, max_tokens=None):
    return asyncio.run(answer(client, prompt, greedy(max_tokens))).outputs[0].text


def chat_text(client, *contents, max_tokens=None):
    """Return the answer to the last of `contents`, the messages of user and assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    tokenizer = client.get_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return greedy_text(client, tokenizer(text, add_special_tokens=False).input_ids, max_tokens)


class PlainTerminal(Terminal):
    """A command on a terminal that cannot move its cursor."""

    CTRL_C, CTRL_D = "\x03", "\x04"

    def __init__(self, *arguments):
        super().__init__(arguments, TERM="dumb")
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._unseen = ""

    def until(self, pattern, timeout=60.0):
        """Return the text on the screen since the last call, up to the end of `pattern`."""
        deadline = time.monotonic() + timeout
        while not (match := re.search(pattern, self._unseen)):
            try:
                data = self.read(deadline)
            except OSError:
                raise AssertionError(f"the command ended before {pattern!r} came: {self._unseen!r}") from None
            assert data is not None, f"{pattern!r} did not appear in {self._unseen!r}"
            self._unseen += self._decode(data)
        seen, self._unseen = self._unseen[: match.end()], self._unseen[match.end() :]
        return seen.replace("\r\n", "\n")

    def until_prompt(self):
        """Return the text up to the prompt, at which the command now waits for a line."""
        seen = self.until(r"(?m)^> ")
        # Between printing the prompt and waiting for a line, Python notices Ctrl-C only after the next line.
        process = psutil.Process(self.process.pid)
        deadline = time.monotonic() + 60
        while process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline
        return seen

    def ask(self, question):
        """Type a question at the prompt; the answer begins after the returned text."""
        self.type(f"{question}\n")
        return self.until(rf"{re.escape(question)}\r\n")

    def end(self):
        """Return the exit code and the rest of the text on the screen."""
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 65_536):
                self._unseen += self._decode(data)
        return self.process.wait(60), self._unseen


def test_help_of_each_command_loads_no_slow_package():
    """One process shows all of them: what one loads, those after it have loaded too."""
    code = (
        "import contextlib, io, json, sys\nfrom vllm_mp.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        try: main([*command.split(), '--help'])\n"
        "        except SystemExit as end: status = end.code\n"
        "    slow = {'torch', 'transformers', 'numpy', 'zmq', 'tokenizers', 'huggingface_hub'} & sys.modules.keys()\n"
        "    print(json.dumps([status, sorted(slow), shown.getvalue()]))\n"
    )
    commands = ["", *COMMANDS, "bench"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        status, slow, shown = json.loads(line)
        assert (status, slow) == (0, []), command
        assert shown.startswith(f"usage: vllm-mp {command}".rstrip())


def test_program_names_its_commands_and_its_version():
    shown = run("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^ +{command.split()[0]}( |$)", shown, re.MULTILINE)
    assert run("--version").stdout == f"vllm-mp {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "x", "--top-p", "nan"], "top_p must be in"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be in"),
        (["generate", "x", "--max-model-len", "0"], "max_model_len must be"),
        (["generate", "x", "--pipeline-parallel-size", "99"], "pipeline_parallel_size=99: "),
        (["generate", "x", "--no-such-flag"], "--no-such-flag"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere"),
        (["generate", "--prompts", "/nowhere"], "--prompts /nowhere: No such file or directory; name a file"),
        (["generate", "x", "--lora", "a=/nowhere"], "--lora: /nowhere has no adapter_config.json; give the folder"),
        (["engine"], "--listen"),
        (["engine", "--listen", "foo"], "must be ipc:///PATH/TO/SOCKET or tcp://HOST:PORT, got 'foo'"),
        (["engine", "--listen", "tcp://localhost:99999"], "tcp://localhost:99999"),
        (["engine", "--listen", "tcp://localhost:0"], "--key-file"),
        (["pull", "./nowhere"], "./nowhere"),
        (["chat", "--connect", "http://localhost"], "ipc://"),
        (["chat", "--connect", "ipc:///nowhere", "--dtype", "float32"], "--dtype"),
        (["chat", "--key-file", "key"], "--connect"),
        (["bench", "startup", "--rounds", "0"], "--rounds"),
        (["bench", "startup", "--idle-seconds", "0"], "--idle-seconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_named_in_one_line_and_exit_code_is_2(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_file_that_cannot_be_read_is_named_with_the_reason(capsys):
    assert cli.main(["serve", "--api-key-file", "/nowhere"]) == 1
    reason = "cannot use '/nowhere': No such file or directory; check the path and its permissions"
    assert capsys.readouterr().err == f"vllm-mp: {reason}\n"


def test_chat_template_that_fails_is_refused_with_the_reason(core, monkeypatch):
    monkeypatch.setattr(core.get_tokenizer(), "chat_template", "{% for")
    with pytest.raises(ValueError, match=r"the chat template failed: .*; give another with --chat-template"):
        chat_prompt(core, [{"role": "user", "content": "Hi"}])


def test_bad_environment_variable_is_named_and_exit_code_is_2():
    done = run("env", env={**os.environ, "VLLM_MP_LOG_LEVEL": "loud"})
    assert done.returncode == 2
    levels = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
    assert f"VLLM_MP_LOG_LEVEL must be one of {levels}, got 'loud'" in done.stderr
    assert "Traceback" not in done.stderr


def test_core_that_does_not_start_gives_its_reason_and_exit_code_1(small_options):
    done = run("generate", "x", *small_options, "--kv-cache-memory-bytes", "1000")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no space for the cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_env_prints_versions_machine_and_settings(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_MP_SOMETHING", "some value")
    monkeypatch.setenv("VLLM_API_KEY", "hidden-1")
    monkeypatch.setenv("HF_TOKEN", "hidden-2")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:hidden-3@mirror.example/path")
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "hidden" not in printed.out
    rows = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    for package in ("torch", "transformers", "pyzmq", "msgspec"):
        assert rows[package] == importlib.metadata.version(package)
    assert rows["python"].startswith(platform.python_version())
    assert f"{len(os.sched_getaffinity(0))} cores" in rows["cpu"]
    assert rows["VLLM_MP_SOMETHING"] == "some value"
    assert rows["VLLM_API_KEY"] == rows["HF_TOKEN"] == "***"
    assert rows["HF_ENDPOINT"] == "https://***@mirror.example/path"
    assert {"platform", "features", "kernels", "memory", "gpu", "cache"} <= rows.keys()


def test_env_names_the_kernels_that_a_core_uses_and_why_it_uses_no_faster_ones(monkeypatch, capsys, tmp_path):
    for build in cpu_info.KERNEL_BUILDS:
        (tmp_path / f"_{build}.so").touch()
    monkeypatch.setattr("vllm_mp.cli.env._FOLDER_OF_BUILDS", tmp_path)
    flags = frozenset({"avx2", "fma", "f16c", "avx512f"})
    for module in ("cli.env", "machine.cpu_info"):
        monkeypatch.setattr(f"vllm_mp.{module}.cpu_flags", lambda: flags)
    assert cli.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cpu"]["features"] == {"AVX2": True, "AVX-512": True, "VNNI": False, "BF16": False, "AMX": False}
    assert report["kernels"]["build"] == "avx2"
    assert report["kernels"]["others"]["avx512"].startswith("avx512 needs avx512_bf16, ")
    assert report["kernels"]["others"]["amx"].startswith("amx needs amx_bf16, amx_int8, amx_tile, avx512_bf16, ")
    assert 0 < report["memory"]["available_bytes"] <= report["memory"]["total_bytes"]
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: flags | cpu_info.KERNEL_BUILDS["avx512_vnni"])
    assert cli.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"]["build"] == "avx512_vnni"
    assert report["kernels"]["others"]["avx512"] == "avx512 needs avx512_bf16"
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: flags | cpu_info.KERNEL_BUILDS["amx"])
    monkeypatch.setattr(cpu_info, "refusal", lambda name: "amx: refused" if name == "amx" else None)
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == {"build": "avx512", "others": {"amx": "amx: refused"}}
    monkeypatch.setenv("VLLM_MP_CPU_KERNELS", "none")
    assert cli.main(["env"]) == 0
    assert "none, chosen by VLLM_MP_CPU_KERNELS" in capsys.readouterr().out


def test_ps_lists_a_shared_core_with_its_clients_and_load(core, address, default_model, capsys):
    pid = asyncio.run(core.core_status())["pid"]
    assert cli.main(["ps", "--json"]) == 0
    (engine,) = [engine for engine in json.loads(capsys.readouterr().out) if engine["pid"] == pid]
    assert (engine["kind"], engine["address"], engine["model"]) == ("shared", address, str(default_model))
    assert (engine["state"], engine["restarts"]) == ("idle", 0)
    assert engine["clients"] >= 1
    assert engine["memory_bytes"] > 2**27
    assert psutil.Process(pid).ppid() == engine["parent_pid"]
    assert cli.main(["ps"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{pid} ")]
    assert address in row


def test_rm_refuses_a_model_that_an_engine_uses(core, default_model, capsys, monkeypatch):
    def refuse(entry):
        raise AssertionError(f"{entry} would have been removed")

    monkeypatch.setattr("vllm_mp.model_store.entries.remove_entry", refuse)  # all tests share the model
    own = [engine for engine in running_engines() if engine.pid == asyncio.run(core.core_status())["pid"]]
    assert len(own) == 1
    monkeypatch.setattr("vllm_mp.cli.running_engines.running_engines", lambda: own)
    assert cli.main(["rm", "--yes", DEFAULT_MODEL]) == 2
    assert f"in use by the core process {own[0].pid}" in capsys.readouterr().err
    assert (default_model / "config.json").exists()


def test_env_into_a_closed_pipe_fails_without_a_message():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as pipe:
        done = subprocess.run(
            [*PROGRAM, "env"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_pull_prints_the_folder_of_the_model_and_nothing_else(default_model):
    done = run("pull")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{default_model}\n", "")


def test_generate_prints_the_answer_and_nothing_else(core, options):
    prompt = "The capital of France is"
    done = run("generate", prompt, "--max-tokens", "8", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == greedy_text(core, prompt, 8) + "\n"
    assert "Paris" in done.stdout


def test_generate_reads_the_prompt_from_stdin_and_uses_the_chat_template(core, options):
    question = "What is the capital of France?\nAnswer in French, é."
    done = run("generate", "-", "--chat", *GREEDY, "--max-tokens", "8", *options, input=question)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == chat_text(core, question, max_tokens=8) + "\n"
    assert done.stdout != greedy_text(core, question, 8) + "\n", "the template changes the answer"


def test_generate_ends_without_a_message_when_its_reader_closes_the_pipe(small_options, temporary):
    pipeline = '"$@" | head -c 10; exit "${PIPESTATUS[0]}"'
    command = [*PROGRAM, "generate", "Once upon a time", "--ignore-eos", *small_options]
    done = subprocess.run(
        ["bash", "-c", pipeline, "-", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout) == 10
    assert not list(temporary.iterdir())


def test_ctrl_c_during_the_answer_ends_generate_with_130_and_leaves_no_core(small_options, temporary):
    with running("generate", "Once upon a time", "--ignore-eos", *small_options) as process:
        child = core_of(process)
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stderr.strip() == b""
        assert stdout.count(b" ") < 200, "the answer was stopped before its end"
        assert not child.is_running()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("pattern", ["vllm_mp-*", "vllm_mp-*/core-1.status"], ids=["begins", "loads"])
def test_ctrl_c_while_the_core_starts_ends_generate_with_130_and_leaves_no_core(small_options, temporary, pattern):
    async def file_exists():
        return bool(list(temporary.glob(pattern)))

    with running("generate", "x", *small_options) as process:
        child = core_of(process)
        asyncio.run(eventually(file_exists))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        # Both are the same to a shell: Python may die by the signal if it arrives during an import.
        assert process.returncode in (130, -signal.SIGINT)
        assert (stdout, stderr.strip()) == (b"", b"")
        # A core that has not read its configuration yet notices on its own that its parent is gone.
        assert psutil.wait_procs([child], timeout=20)[1] == []
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_generate_continues_after_core_is_killed(small_options, temporary):
    flags = ("--ignore-eos", "--max-tokens", "60", "--temperature", "0")
    arguments = ("generate", "Once upon a time", *flags, *small_options)
    undisturbed = run(*arguments)
    with running(*arguments) as process:
        beginning = os.read(process.stdout.fileno(), 1)  # communicate() ignores what is buffered
        core_of(process).kill()
        rest, stderr = process.communicate(timeout=60)
        assert process.returncode == 0
        assert (beginning + rest).decode() == undisturbed.stdout
        assert b"SIGKILL" in stderr
    assert not list(temporary.iterdir())


def test_without_recovery_generate_ends_with_1_and_the_cause_of_the_death(small_options, temporary):
    with running("generate", "Once upon a time", "--ignore-eos", "--no-recovery", *small_options) as process:
        assert process.stdout.read(1)
        core_of(process).kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"SIGKILL" in stderr
        assert b"Traceback" not in stderr
    assert not list(temporary.iterdir())


def test_chat_in_a_pipe_keeps_the_conversation_until_clear_ends_at_exit_and_leaves_the_core_empty(core, address):
    questions = ["Name a fruit.", "Name another one."]
    lines = [questions[0], "", questions[1], "/clear", questions[1], "/exit", "Name a third one."]
    done = run("chat", "--connect", address, *GREEDY, "--max-tokens", "12", input="\n".join(lines) + "\n")
    assert (done.returncode, done.stderr.replace(CUT, "")) == (0, "(the conversation is forgotten)\n")
    first = chat_text(core, questions[0], max_tokens=12)
    second = chat_text(core, questions[0], first, questions[1], max_tokens=12)
    alone = chat_text(core, questions[1], max_tokens=12)
    assert second != alone, "the first question changes the answer"
    assert done.stdout == f"{first}\n{second}\n{alone}\n"

    async def check():
        await core.check_health()
        await eventually(lambda: is_empty(core))

    asyncio.run(check())


def test_refused_question_leaves_the_conversation_unchanged(core, address):
    lines = [b"\xff is no text", b"word " * 300, CAPITAL.encode()]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = run("chat", "--connect", address, *GREEDY, input=b"\n".join(lines), text=False, env=strict)
    assert done.returncode == 0
    assert done.stdout.decode() == chat_text(core, CAPITAL) + "\n"
    complaints = done.stderr.decode().splitlines()
    assert [("Unicode" in line, "the limit is 192" in line) for line in complaints] == [(True, False), (False, True)]


def test_conversation_longer_than_the_context_drops_its_oldest_turn_and_says_so(core, address):
    lines = ["word " * 120, "word " * 110, CAPITAL]
    done = run("chat", "--connect", address, "--max-tokens", "4", input="\n".join(lines))
    assert done.returncode == 0
    assert done.stdout.count("\n") >= 3
    assert "oldest turn was dropped" in done.stderr


def test_chat_without_stdin_ends_at_once(address):
    command = [*PROGRAM, "chat", "--connect", address]
    done = subprocess.run(
        ["bash", "-c", '"$@" <&-', "-", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_program(core, options, temporary):
    with PlainTerminal("chat", *GREEDY, *options) as terminal:
        greeting = terminal.until_prompt()
        assert "/help" in greeting
        assert "Ctrl-C" in greeting
        (child,) = children(terminal.process)

        terminal.ask(LONG_STORY)
        terminal.until(r"\w+ \w+")
        terminal.type(PlainTerminal.CTRL_C)
        rest = terminal.until_prompt()
        assert rest.endswith(" [stopped]\n\n> ")
        assert len(rest.split()) < 200, "the answer was stopped before its end"

        terminal.type(PlainTerminal.CTRL_C)
        assert "/bye" in terminal.until_prompt(), "at the prompt it explains how to leave"

        terminal.ask("/clear")
        terminal.until_prompt()
        terminal.ask(CAPITAL)
        assert terminal.until_prompt() == f"{chat_text(core, CAPITAL)}\n\n> "
        terminal.type(PlainTerminal.CTRL_D)
        code, screen = terminal.end()
        assert code == 0
        assert "Traceback" not in screen
        assert not child.is_running()
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_chat_continues_after_core_is_killed(options):
    with PlainTerminal("chat", *GREEDY, "--max-tokens", "60", *options) as terminal:
        terminal.until_prompt()
        terminal.ask(LONG_STORY)
        undisturbed = terminal.until_prompt()
        terminal.ask("/clear")
        terminal.until_prompt()
        (child,) = children(terminal.process)
        terminal.ask(LONG_STORY)
        beginning = terminal.until(r"\w+")
        child.kill()
        beginning += terminal.until("· the engine restarts …")  # at once, before the next token
        screen = beginning + terminal.until_prompt()
        assert re.sub(r" · the engine restarts … \d+\.\d s ·", "", screen) == undisturbed
        assert screen != undisturbed
        terminal.type(PlainTerminal.CTRL_D)
        assert terminal.end()[0] == 0


@pytest.mark.slow
def test_without_recovery_chat_ends_with_1_and_the_cause_of_the_death(options):
    with PlainTerminal("chat", "--no-recovery", *options) as terminal:
        terminal.until_prompt()
        (child,) = children(terminal.process)
        terminal.ask(LONG_STORY)
        terminal.until(r"\w+")
        child.kill()
        code, screen = terminal.end()
        assert code == 1
        assert "SIGKILL" in screen
        assert "Traceback" not in screen


@pytest.mark.slow
def test_bench_startup_prints_and_writes_its_figures(small_model, small_options, tmp_path):
    file = tmp_path / "figures.json"
    done = run("bench", "startup", "--rounds", "1", "--idle-seconds", "0.2", "--json", str(file), *small_options)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(file.read_text())
    assert figures.pop("model") == str(small_model)
    assert figures.pop("cores") == os.cpu_count()
    assert len(figures) == 6
    for name, value in figures.items():
        assert re.search(rf"^{re.escape(name)} +{value:.3f}$", done.stdout, re.MULTILINE)
    import_s, imported_s, ready_s, first_token_s, client_mb, _ = figures.values()
    assert 0 < import_s < imported_s < ready_s < first_token_s
    assert 10 < client_mb < 500
    assert re.search(r"torch loaded by the client +False", done.stdout)


@pytest.mark.slow
def test_bench_recovery_prints_and_writes_its_figures(small_options, tmp_path):
    file = tmp_path / "figures.json"
    done = run("bench", "recovery", "--kills", "1", "--streams", "2", "--json", str(file), *small_options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert (figures["kills"], figures["core_template"]) == (1, True)
    parts = ("death is seen", "process is started", "model is loaded", "first token")
    assert sum(figures[name]["median"] for name in parts) == pytest.approx(figures["first stream"]["median"], abs=1e-3)
    for name in ("usual wait", "first stream", "every stream", *parts):
        assert 0 < figures[name]["median"] <= figures[name]["max"]
        assert re.search(rf"^ *{name} +{figures[name]['median']:.3f} ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_bench_recovery_replaces_the_core(small_options, tmp_path):
    file = tmp_path / "figures.json"
    options = ("--replace", "--kills", "1", "--streams", "2", "--json", str(file))
    done = run("bench", "recovery", *options, *small_options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["replace"] is True
    assert figures["recomputed_tokens"] == [0]
    for name in ("usual wait", "old core to new core", "every stream"):
        assert 0 < figures[name]["median"] <= figures[name]["max"] <= figures["every stream"]["max"]
    assert "longest wait for a token, s (1 replacements, 2 streams)" in done.stdout


@pytest.mark.slow
def test_bench_latency_prints_and_writes_its_figures(small_options, tmp_path):
    file = tmp_path / "figures.json"
    sizes = ("--batch-size", "2", "--input-len", "20", "--output-len", "12", "--rounds", "2")
    done = run("bench", "latency", *sizes, "--json", str(file), *small_options)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(file.read_text())
    assert (figures["batch_size"], figures["input_len"], figures["output_len"]) == (2, 20, 12)
    for name in ("time to first token, ms", "between tokens, ms", "decode, tokens/s", "prompt to last token, s"):
        row = figures[name]
        assert 0 <= row["min"] <= row["median"] <= row["max"]
        assert row["min"] or name == "between tokens, ms", "only tokens that arrive together have no time between them"
        assert re.search(rf"^{re.escape(name)} +{row['median']:.2f} ", done.stdout, re.MULTILINE)
    assert figures["output tokens/s"]["max"] == pytest.approx(24 / figures["prompt to last token, s"]["min"])


@pytest.mark.slow
def test_bench_throughput_prints_and_writes_its_figures(small_options, tmp_path):
    file = tmp_path / "figures.json"
    sizes = ("--num-prompts", "5", "--input-len", "8:20", "--output-len", "6", "--request-rate", "50")
    done = run("bench", "throughput", *sizes, "--json", str(file), *small_options)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(file.read_text())
    assert figures["tokens_out"] == 30
    assert 5 * 8 <= figures["tokens_in"] <= 5 * 20
    assert figures["output_tokens_per_s"] == pytest.approx(30 / figures["seconds"])
    for name in ("time to first token, ms", "between tokens, ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_load_that_exceeds_the_context_is_refused_before_an_engine_starts(name, small_options, capsys):
    flags = ("--input-len", "40", "--output-len", "25", "--max-model-len", "64")
    assert cli.main(["bench", name, *small_options, *flags]) == 2
    message = "--input-len 40 and --output-len 25 are 65 tokens together, more than max_model_len=64"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["latency", "--rounds", "0"],
        ["latency", "--batch-size", "-1"],
        ["throughput", "--num-prompts", "0"],
        ["throughput", "--request-rate", "nan"],
        ["throughput", "--input-len", "9:3"],
        ["throughput", "--output-len", "many"],
        ["latency", "--json", "no/such/folder/figures.json"],
        ["throughput", "--json", "."],
    ],
    ids=" ".join,
)
def test_impossible_load_is_refused_by_name(flags, capsys):
    # In this process, because the flags are refused before anything is started.
    try:
        code = cli.main(["bench", *flags])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert flags[1] in capsys.readouterr().err
