"""What the shell commands say about wrong arguments, and which options their help shows."""

import argparse
import dataclasses
import re

import pytest

from vllm_mp import AsyncEngineArgs, cli
from vllm_mp.arguments import unserved_arguments
from vllm_mp.arguments.argument_parser import FlexibleArgumentParser

FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
WITH_ENGINE_OPTIONS = [["chat"], ["generate"], ["engine"], ["serve"], ["bench", "latency"], ["bench", "throughput"]]


def output_of(capsys, *argv):
    """Return the exit code, stdout and stderr of a command line that ends in the parser."""
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args(argv)
    return ended.value.code, *capsys.readouterr()


def flags_in(text):
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))


def parsers(parser):
    """Yield `parser` and the parsers of the commands below it, each with its arguments."""
    parser.load()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("chat --modl x", "vllm-mp chat: unknown option --modl; did you mean `--model`?"),
        ("serve --modl=x", "vllm-mp serve: unknown option --modl; did you mean `--model`?"),
        (
            "bench latency --xyzzy",
            "unknown option --xyzzy; see vllm-mp bench latency --help-all",
        ),
        ("env --xyzzy", "vllm-mp env: unknown option --xyzzy; see vllm-mp env --help"),
        (
            "engine --listen a --max-model-len x",
            "vllm-mp engine: --max-model-len must be an integer, such as 4096, 32k or 32K, got 'x'",
        ),
        ("chat --temperature hot", "vllm-mp chat: --temperature must be a number, got 'hot'"),
        ("chat --override-generation-config x", "--override-generation-config must be a JSON object, got 'x'"),
        ("chat --max-model-len", "vllm-mp chat: --max-model-len N: expected one argument; see vllm-mp chat --help"),
        ("engine", "vllm-mp engine: missing --listen or --headless; see vllm-mp engine --help"),
        ("", "vllm-mp: missing COMMAND; see vllm-mp --help"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_with_exit_code_2(command_line, message, capsys):
    code, stdout, stderr = output_of(capsys, *command_line.split())
    assert (code, stdout) == (2, "")
    assert stderr.endswith(message + "\n")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command_line", "suggestion", "allowed"),
    [
        ("chta", "chat", "serve"),
        ("bench latancy", "latency", "recovery"),
        ("keys alow", "allow", "revoke"),
        ("chat --dtype flaot16", "float16", "bfloat16"),
        ("chat --dtype FLOAT-16", "float16", "bfloat16"),
    ],
)
def test_a_wrong_choice_is_refused_with_all_choices_and_the_closest(command_line, suggestion, allowed, capsys):
    code, _, stderr = output_of(capsys, *command_line.split())
    assert code == 2
    assert f"got '{command_line.split()[-1]}'; did you mean `{suggestion}`?\n" in stderr
    assert f", {allowed}, " in stderr
    assert stderr.count("\n") == 1


def test_flags_with_underscores_are_accepted():
    assert cli.parser().parse_args(["chat", "--max_model_len", "512"]).max_model_len == 512


@pytest.mark.parametrize("command", WITH_ENGINE_OPTIONS, ids=" ".join)
def test_help_shows_the_common_options_and_help_all_every_served_option(command, capsys):
    code, common, _ = output_of(capsys, *command, "--help")
    assert code == 0
    code, full, _ = output_of(capsys, *command, "--help-all")
    assert code == 0
    of_engine = {"--" + name.replace("_", "-"): field.metadata for name, field in FIELDS.items()}
    shown = {flag for flag, metadata in of_engine.items() if metadata["subject"]}
    served = {flag for flag, metadata in of_engine.items() if not metadata["without_effect"]}
    assert flags_in(common) & of_engine.keys() == shown
    assert flags_in(full) & of_engine.keys() == served
    assert flags_in(common) < flags_in(full)
    assert 10 <= len(flags_in(common) - {"--help", "--help-all"}) <= 20
    assert "\nmodel:\n" in common
    assert "\nmemory and load:\n" in common


def test_help_of_each_argument_is_a_sentence_that_ends_with_its_default():
    num_arguments = 0
    for parser in parsers(cli.parser()):
        assert re.fullmatch(r"[A-Z].*\w\.", parser.description), parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            num_arguments += 1
            text = action.help % vars(action)
            exits = action.dest in ("help", "help_all", "version")
            end = r"and exit" if exits else r"\. (Default: .+|Required)"
            assert re.fullmatch(rf"[A-Z]\w+ .*{end}\.", text), f"{parser.prog}, {action.dest}: {text}"
    assert num_arguments > 400


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--cpu-offload-gb", "weights and KV cache stay on the device"),
        ("--tool-server", "tools that the server itself runs are not served"),
        ("--uvicorn-log-level", "set VLLM_MP_LOG_LEVEL in the environment"),
    ],
)
def test_option_of_vllm_that_is_not_served_is_refused_with_the_reason(flag, reason, capsys):
    code, _, error = output_of(capsys, "serve", "m", f"{flag}=1")
    assert code == 2
    assert f"{flag} is not served: {reason}" in error


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("-tp 2 -pp=3 -dp 4", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}),
        ("-q fp8", {"quantization": "fp8"}),
        ("--max-model-len 32k --max-num-seqs 1K", {"max_model_len": 32_000, "max_num_seqs": 1024}),
        ("--max-num-batched-tokens 1.5k", {"max_num_batched_tokens": 1500}),
        (
            "--speculative-config.method ngram --speculative_config.prompt-lookup-max=4",
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}},
        ),
        (
            '--speculative-config.a.c 2 --speculative_config {"a":{"b":1,"c":1},"method":"x"} '
            '--speculative-config.method=ngram --speculative-config.a {"d":3}',
            {"speculative_config": {"a": {"b": 1, "c": 2, "d": 3}, "method": "ngram"}},
        ),
        (
            '--speculative-config={"a":1} --max-num-seqs 3 --speculative-config={"b":2} --speculative-config.c 3',
            {"speculative_config": {"b": 2, "c": 3}, "max_num_seqs": 3},
        ),
    ],
)
def test_short_names_names_with_dots_and_units_of_vllm_are_understood(command_line, expected):
    for parse in (cli.parser().parse_args, AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args):
        given = command_line.split() if parse.__self__.prog != "vllm-mp" else ["serve", "m", *command_line.split()]
        options = vars(parse(given))
        assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("command_line", "told"),
    [
        ("--enable-sleep-mode", "enable_sleep_mode=True has no effect: sleep"),
        ("--no-enable_sleep_mode", ""),
        ("--task embed", "task='embed' has no effect"),
        ("--max-seq-len-to-capture 8192", ""),
        ("--compilation-config 3", "compilation_config=3 has no effect"),
        ("--compilation-config.level 3", "compilation_config={'level': 3} has no effect"),
        ("-O.level=3", "compilation_config={'level': 3} has no effect"),
        ("-O3", "optimization_level=3 has no effect"),
        ("-O 2", "optimization_level=2 has no effect"),
        ("--cudagraph-capture-sizes 1 2", "cudagraph_capture_sizes=[1, 2] has no effect"),
        ("--cpu-offload-gb 0 --model-impl vllm", ""),
    ],
)
def test_option_of_vllm_that_changes_nothing_is_accepted_with_the_line_that_python_gives(
    command_line, told, caplog, monkeypatch
):
    plain = vars(cli.parser().parse_args(["serve", "m"]))
    for parse, given in (
        (cli.parser().parse_args, ["serve", "m", *command_line.split()]),
        (AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args, command_line.split()),
    ):
        caplog.clear()
        monkeypatch.setattr(unserved_arguments, "_told", set())
        assert vars(parse(given)).keys() <= plain.keys()
        assert [record.message.startswith(told) for record in caplog.records] == ([True] if told else [])


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("--task embed --no-task", "--no-task"),
        ("-O.a 1 -O.a.b 2", "--compilation-config.a.b: a flag before has given 'a' a value; leave out one of the two"),
        (
            '--speculative-config {"a":1} --speculative-config.a.b 2',
            "--speculative-config.a.b: a flag before has given 'a' a value; leave out one of the two",
        ),
        ("-cc 3 -O.level 3", "--compilation-config 3: a value without fields"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(command_line, message, capsys):
    code, _, error = output_of(capsys, "serve", "m", *command_line.split())
    assert code == 2
    assert message in error


def test_parser_of_a_program_says_why_an_option_of_vllm_is_not_served(capsys):
    with pytest.raises(SystemExit):
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--cpu-offload-gb", "4"])
    assert "--cpu-offload-gb is not served: weights and KV cache stay on the device" in capsys.readouterr().err


def test_file_of_options_may_have_options_of_vllm_that_change_nothing(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text("enable-sleep-mode: true\ncompilation_config: {level: 3}\nmax-model-len: 32k\n")
    assert cli.parser().parse_args(["serve", "m", "--config", str(file)]).max_model_len == 32_000
    file.write_text("cpu-offload-gb: 4\n")
    code, _, error = output_of(capsys, "serve", "m", "--config", str(file))
    assert (code, "--cpu-offload-gb is not served" in error) == (2, True)


@pytest.mark.parametrize(
    ("command_line", "remedy"),
    [
        ("run-batch -i a -o b", "`vllm-mp generate MODEL --prompts FILE`"),
        ("collect-env", "`vllm-mp env`"),
        ("complete", "`vllm-mp generate`"),
        ("bench serve", "`vllm bench serve` of vLLM works with this server"),
    ],
)
def test_command_of_vllm_is_refused_with_what_to_use(command_line, remedy, capsys):
    code, _, error = output_of(capsys, *command_line.split())
    assert code == 2
    assert f" is a command of vLLM; {remedy}" in error


def test_the_parser_of_a_program_shows_every_engine_option():
    text = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser()).format_help()
    assert flags_in(text) >= {"--" + name.replace("_", "-") for name in FIELDS}
