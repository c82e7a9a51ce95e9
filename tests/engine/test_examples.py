"""The programs in `examples/` run as they are, with a small model where its text does not matter."""

import ast
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from support.image_models import IMAGE_TOKEN, image_tokenizer, save_processor

from vllm_mp import LLM, SamplingParams
from vllm_mp.testing.image_models import save_image_model

pytestmark = pytest.mark.usefixtures("forked_programs")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"batch", "concurrent_requests", "embeddings", "http_server", "lora", "recovery", "shared_core", "streaming"}
TESTED |= {"images", "ray_serve", "stand_in_engine", "timeout", "weight_update"}


def run(name, *arguments):
    """Return what an example prints; it must end well, and without a warning or a process that stays."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_batch(small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = run("batch", folder)
    assert re.search(r"request 100 failed: the prompt is too long", out)
    assert len(out.splitlines()) == 5


def test_stand_in_engine():
    names = runpy.run_path(str(EXAMPLES / "stand_in_engine.py"))
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    with pytest.raises(TypeError, match="sampling_params"):
        names["engine_that_answers"]("").generate("Hello", sampling_parameters=None, request_id="a")


@pytest.mark.slow
def test_recovery(small_model):
    lines = run("recovery", small_model).splitlines()
    assert lines[-2:] == ["restarts: 1", "the same tokens: True"]
    assert re.fullmatch(r"killed the core after \d+ tokens", lines[0])


@pytest.mark.slow
def test_streaming(small_model):
    assert run("streaming", small_model).endswith(("(length)\n", "(stop)\n"))


@pytest.mark.slow
def test_concurrent_requests(default_model):
    out = run("concurrent_requests", default_model)
    assert "What is the capital of France?\n    " in out
    assert "Paris" in out


@pytest.mark.slow
def test_timeout(default_model):
    out = run("timeout", default_model)
    assert re.fullmatch(
        r"time is up after \d+ characters\nthe last request ended with abort\nrequests that still run: 0\n", out
    )


@pytest.mark.slow
def test_embeddings(minilm):
    lines = run("embeddings", minilm).splitlines()
    assert lines[0].startswith("384 numbers")
    assert lines[1].endswith("384,400 km.")
    assert lines[3].endswith("made of milk.")


@pytest.mark.slow
def test_weight_update(small_model):
    first, last = run("weight_update", small_model).splitlines()
    begin, _, said = first.partition(" was written with the old weights")
    assert said == ", and the rest with the new ones:"
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(small_model)) as llm:
        (old,) = llm.generate("Once upon a time", params)
    text = ast.literal_eval(last)
    assert text.startswith(ast.literal_eval(begin))
    assert text != old.outputs[0].text


@pytest.mark.slow
def test_shared_core(small_model):
    lines = sorted(run("shared_core", small_model).splitlines())
    assert [line.partition(":")[0] for line in lines] == ["first", "second"]
    assert lines[0].partition(":")[2] == lines[1].partition(":")[2]


@pytest.mark.slow
def test_http_server(small_model):
    command = [sys.executable, str(EXAMPLES / "http_server.py"), str(small_model), "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            for line in process.stderr:
                if found := re.search(r"Uvicorn running on (http://[\d.:]+)", line):
                    break
            response = httpx.get(f"{found[1]}/generate", params={"prompt": "Once upon a time", "max_tokens": 5})
            assert response.status_code == 200
            assert response.text
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
            assert psutil.wait_procs(children, timeout=30)[1] == []
        finally:
            watchdog.cancel()
            process.kill()


@pytest.mark.slow
def test_ray_serve(small_model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), str(small_model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        try:
            assert any("is ready at" in line for line in process.stderr)
            with httpx.stream("POST", "http://127.0.0.1:8000/", content="Once upon a time", timeout=60) as response:
                assert response.status_code == 200
                assert len(list(response.iter_text())) > 1
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert psutil.wait_procs(children, timeout=30)[1] == []
        finally:
            watchdog.cancel()
            process.kill()


@pytest.mark.slow
def test_images(tmp_path):
    tokenizer = image_tokenizer()
    sizes = {"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 1024}
    save_image_model("smolvlm", tmp_path, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), **sizes)
    save_processor(tmp_path, "smolvlm")
    first, second = re.findall(r"\((\d+) of (\d+) tokens were read\)", run("images", tmp_path))
    assert first[0] == first[1]
    num_cached = int(second[1]) - int(second[0])
    assert num_cached >= int(first[1]) // 16 * 16 > 0, "the image and the first question are not read again"


@pytest.mark.slow
def test_lora(small_model, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders = []
    for seed, rank in ((1, 4), (2, 8)):
        base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))
        folders.append(tmp_path / f"adapter-{seed}")
        model.save_pretrained(folders[-1])
    lines = run("lora", small_model, *folders).splitlines()
    assert lines[0].startswith("base model: ")
    assert [line.partition(": ")[0] for line in lines[1:]] == [str(folder) for folder in folders]
    assert len({line.partition(": ")[2] for line in lines}) == 3
