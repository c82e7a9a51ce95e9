"""Programs for vLLM run with another import: the programs of its reference pages, and others of the same style.

microsoft/DialoGPT-medium, which the pages name, is a GPT-2 here whose weights are random.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.lora_engines import save_adapters
from support.tiny_tokenizers import byte_level
from transformers import GPT2Config, PreTrainedTokenizerFast

PROGRAMS = Path(__file__).parents[1] / "programs"
TIMEOUT_S = 240
IN_SLOW_MOTION = """
import asyncio, functools, runpy, sys, vllm_mp

limit = asyncio.timeout
asyncio.timeout = lambda seconds: limit(seconds / 10)
vllm_mp.AsyncEngineArgs = functools.partial(vllm_mp.AsyncEngineArgs, fault_injection="slow@step=*,seconds=0.05")
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a program with an engine that takes at least 0.05 s for a token, and with a tenth of the time limits."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The hub's local cache, which holds nothing but the model of the pages."""
    from vllm_mp.testing.random_models import save_random_model  # which imports torch

    cache = tmp_path_factory.mktemp("hub")
    repository, commit = cache / "models--microsoft--DialoGPT-medium", "0" * 40
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    tokenizer = byte_level()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": tokenizer.get_vocab_size()}
    save_random_model(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None), folder)
    return cache


@contextlib.contextmanager
def started(hub: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """Run Python with the arguments `command`; end it by SIGTERM if it still runs."""
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def run_all(hub: Path, commands: dict[str, list[str]]) -> dict[str, str]:
    """Run programs at the same time; return what each of them prints. All must end without an error."""
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(started(hub, *command)) for name, command in commands.items()}
        texts = {name: process.communicate(timeout=TIMEOUT_S) for name, process in running.items()}
    assert {name: process.returncode for name, process in running.items()} == dict.fromkeys(running, 0), texts
    return {name: output for name, (output, _) in texts.items()}


@pytest.fixture(scope="module")
def printed(hub) -> dict[str, str]:
    """What the programs of the pages print."""
    commands = {name: [str(PROGRAMS / f"{name}.py")] for name in ("basic", "streaming", "concurrent_requests")}
    return run_all(hub, commands | {"time_out": ["-c", IN_SLOW_MOTION, str(PROGRAMS / "time_out.py")]})


@pytest.fixture(scope="module")
def printed_by_default_model(hub, default_model, tmp_path_factory) -> dict[str, str]:
    """What the other programs print, for the real default model."""
    names = ("embeddings", "pause_and_sleep", "lora")
    commands = {name: [str(PROGRAMS / f"{name}.py"), str(default_model)] for name in names}
    adapters = save_adapters(default_model, tmp_path_factory.mktemp("adapters"))
    commands["lora"] += [adapters[number].lora_path for number in (1, 2, 3)]
    return run_all(hub, commands)


def test_basic_program_prints_the_growing_text(printed):
    texts = [part.removesuffix("\n") for part in printed["basic"].split("Generated: ")[1:]]
    assert 1 < len(texts) <= 100
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_streaming_program_prints_until_the_end(printed):
    assert printed["streaming"].startswith("Streaming generation:\n")
    assert printed["streaming"].endswith("\nGeneration complete!\n")
    assert len(printed["streaming"]) > 1000


def test_concurrent_program_prints_an_answer_to_each_prompt(printed):
    assert re.findall(r"^(req-\d): .", printed["concurrent_requests"], re.MULTILINE) == [f"req-{i}" for i in range(4)]


def test_program_with_a_time_limit_cancels_its_request(printed):
    lines = printed["time_out"].splitlines()
    assert lines[-2:] == ["Generation timed out, cancelling request...", "Request cancelled successfully"]
    assert all(re.fullmatch(r"Generated so far: \d+ chars", line) for line in lines[:-2])
    assert 0 < len(lines[:-2]) < 500


@pytest.mark.slow
def test_program_for_embeddings_finds_the_sentences_that_mean_the_same(printed_by_default_model):
    itself, paraphrase, other = map(float, printed_by_default_model["embeddings"].split())
    assert itself == pytest.approx(1, abs=0.01)
    assert itself > paraphrase > other


@pytest.mark.slow
def test_program_pauses_and_sleeps_and_goes_on(printed_by_default_model):
    assert printed_by_default_model["pause_and_sleep"].splitlines() == [
        "paused: True, finished: False",
        "same text after the pause: True",
        "sleeping: True",
        "same text after level 1: True",
        "sleeping: True",
        "same text after level 2: True",
    ]


@pytest.mark.slow
def test_program_for_lora_mixes_adapters_and_the_base_model(printed_by_default_model):
    assert printed_by_default_model["lora"].splitlines() == [
        "different texts: 4",
        "same texts in one batch: True",
        "adapters: {2, 3}",
    ]


@pytest.mark.extended
def test_fastapi_program_serves_streams_and_cancellations_under_uvicorn(hub):
    command = ["-m", "uvicorn", "fastapi_server:app", "--app-dir", str(PROGRAMS), "--port", "0"]
    with started(hub, *command) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"running on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(lines))
        with httpx.Client(base_url=address[1], timeout=TIMEOUT_S) as client:
            with client.stream("POST", "/generate", params={"prompt": "Hello", "max_tokens": 20}) as response:
                assert response.status_code == 200
                events = [line for line in response.iter_lines() if line]
            texts = [json.loads(event.removeprefix("data: "))["text"] for event in events]
            assert 1 < len(texts) <= 20
            assert texts[-1].startswith(texts[0])
            cancelled = client.delete("/cancel/unknown")
            assert cancelled.json() == {"message": "Request cancelled"}
