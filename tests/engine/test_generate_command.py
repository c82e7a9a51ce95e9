"""`vllm-mp generate`: where its prompts and its model come from, and what it prints."""

import io
import json
import sys

import numpy as np
import pytest

from vllm_mp import AsyncLLM, SamplingParams, cli
from vllm_mp.cli.chat_text import whole_text
from vllm_mp.cli.flags.model import names_model
from vllm_mp.cli.generate import split_words, whole_prompt
from vllm_mp.client.prompts.tokenizer import get_tokenizer
from vllm_mp.outputs import CompletionOutput
from vllm_mp.replay_core.answers import Answers
from vllm_mp.testing.engines import replay_core

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def address(default_model, tmp_path_factory):
    with replay_core(tmp_path_factory.mktemp("replay")) as address:
        yield address


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a command in this process and returns its exit code, its output and its errors."""

    def run(*arguments, piped=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), "utf-8"))
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.essential
def test_prompt_is_the_piped_text_then_a_space_then_the_argument(run, address):
    flags = ["--temperature", "0", "--max-tokens", "12", "--connect", address]
    joined = run("generate", "Some text,\n é. Translate it.", *flags)
    assert joined[::2] == (0, "")
    model, piped = "smollm2-135m-instruct", "Some text,\n é.".encode()
    assert run("generate", model, "Translate it.", *flags, piped=piped) == joined


@pytest.mark.parametrize(
    ("words", "piped", "model", "prompt"),
    [
        (["Hi there"], "", None, "Hi there"),
        (["Hi there"], "Text.\n", None, "Text.\n Hi there"),
        ([], "Text.\n", None, "Text.\n"),
        (["-"], "Text.\n", None, "Text.\n"),
        (["some/model"], "Text.", "some/model", "Text."),
        (["model", "-"], "Text.", "model", "Text."),
        (["model", "some/model"], "", "model", "some/model"),
    ],
)
def test_arguments_and_piped_text_make_model_and_prompt(words, piped, model, prompt, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    found, given = split_words(words)
    assert (found, whole_prompt(given)) == (model, prompt)


@pytest.mark.essential
def test_prompts_of_a_file_are_answered_in_their_order(run, address, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Hello", "max_tokens": 9, "id": 7}\n{"prompt": ""}\n{"prompt": [1, 2], "max_tokens": 3}'
    )
    code, out, err = run("generate", "--prompts", str(file), "--connect", address)
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["id"] for result in results] == [7, 2, 3]
    assert [result.get("usage", {}).get("completion_tokens") for result in results] == [9, None, 3]
    assert "the prompt is empty" in results[1]["error"]
    assert code == 1
    assert err == "vllm-mp: 1 of 3 prompts failed; the results of these lines have an error\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "no prompt is given"),
        (["generate", "smollm2-135m-instruct"], "no prompt is given"),
        (["generate", "why", "is", "it"], "put quotes around"),
        (
            ["generate", "some/model", "--top-k", "3", "x", "--model", "other/model"],
            "some/model and --model other/model",
        ),
        (["generate", "some/model", "x", "--no-such-option", "y"], "--no-such-option"),
        (["generate", "model", "x", "--prompts", "file"], "leave out 'x'"),
        (["generate", "some/model", "x", "--model", "other/model"], "some/model and --model other/model"),
        (["generate", "some/model", "x", "--connect", "ipc:///nowhere"], "--model has no effect"),
        (["chat", "some/model", "--model", "other/model"], "some/model and --model other/model"),
        (["chat", "some/model", "--connect", "ipc:///nowhere"], "--model has no effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused_before_an_engine_starts(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_piped_bytes_that_are_no_text_are_named_with_their_place(run):
    assert run("generate", piped="é\n".encode() + b"\xff") == (
        2,
        "",
        "vllm-mp: standard input is not UTF-8 (byte 0xff at 3)\n",
    )


def test_a_word_names_a_model_if_it_is_an_alias_a_file_a_folder_or_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "file.gguf").touch()
    monkeypatch.chdir(tmp_path)
    models = ["SmolLM2-135M-instruct", "folder", "./folder", str(tmp_path / "file.gguf"), "some-one/Model-1.5_B"]
    assert [word for word in models if not names_model(word)] == []
    prompts = ["Hello", "other", "none.gguf", "this and/or that", "a/b/c", "", "/", "猫" * 1000, "\0"]
    assert [word for word in prompts if names_model(word)] == []


def test_character_that_max_tokens_cuts_is_left_out(run, address, default_model):
    tokenizer = get_tokenizer(str(default_model))
    tokens = Answers().tokens
    number, length, cut = next(
        (number, length, text)
        for number in range(len(tokens))
        for length in range(2, 60)
        if (text := tokenizer.decode(tokens[number, :length], skip_special_tokens=True)).endswith("\ufffd")
    )
    prompt = np.asarray(tokenizer("Hello").input_ids, np.int32)
    at_seed_0 = Answers().choose(prompt, SamplingParams(seed=0), length, []).number
    flags = ["--temperature", "1", "--sampling-seed", str((number - at_seed_0) % len(tokens)), "--ignore-eos"]
    shown = run("generate", "Hello", *flags, "--max-tokens", str(length), "--connect", address)
    assert shown == (0, cut.rstrip("\ufffd") + "\n", "")


def test_only_a_cut_character_at_the_end_is_left_out():
    def shown(text, reason):
        return whole_text(CompletionOutput(0, text, [], finish_reason=reason))

    assert shown("a\ufffdb\ufffd", "length") == "a\ufffdb"
    assert shown("a\ufffd", "stop") == "a\ufffd"
    assert shown("a\ufffd", None) == "a\ufffd"


def test_seed_repeats_the_answers_of_a_client_of_a_running_core(run, address):
    def sampled(*seed):
        code, out, err = run(
            "generate", "Hello", "--temperature", "1", "--max-tokens", "8", "--connect", address, *seed
        )
        assert (code, err) == (0, "")
        return out

    first = sampled("--seed", "7")
    assert sampled("--seed", "7") == first
    assert sampled("--seed", "8") != first
    assert sampled() == sampled("--seed", "0")


def test_clients_of_a_running_core_that_name_no_seed_draw_different_seeds(address):
    clients = [AsyncLLM.connect(address) for _ in range(2)]
    seeds = {client.model_config.seed for client in clients}
    for client in clients:
        client.shutdown()
    assert len(seeds) == 2
    assert None not in seeds


@pytest.mark.slow
def test_engine_seed_repeats_the_answers_of_the_same_command(run, small_model):
    def sampled(*flags):
        options = ["--model", str(small_model), "--dtype", "float32", "--kv-cache-memory-bytes", str(2**24)]
        code, out, err = run("generate", "Hello", "--temperature", "1", "--max-tokens", "8", *options, *flags)
        assert (code, err) == (0, "")
        return out

    first = sampled("--seed", "7")
    assert sampled("--seed", "7") == first
    assert sampled("--seed", "8") != first
