"""A GGUF file of an architecture that is not mapped is converted exactly and once, and again after a change."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.tiny_gguf import split, write_tiny_gguf
from transformers import PreTrainedTokenizerFast

from vllm_mp.core.weights import gguf_to_safetensors
from vllm_mp.core.weights.known_gguf import rounded_to_16_bits
from vllm_mp.model_store import gguf, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


QUANTIZED = [f"model.layers.0.{name}.weight" for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")]
"""Tensors that `write_tiny_gguf` quantizes."""


@pytest.fixture
def converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every architecture be converted."""
    monkeypatch.setattr(gguf, "family_of", lambda _: None)


@pytest.fixture
def reads_nothing(converts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files have any content."""
    monkeypatch.setattr(
        gguf, "read_gguf_model", lambda path: SimpleNamespace(metadata={}, files=[SimpleNamespace(path=path)])
    )


def no_conversion(*_: object) -> Path:
    pytest.fail("the file was read or converted again")


@pytest.mark.extended
@pytest.mark.usefixtures("converts")
def test_conversion_keeps_every_tensor_and_is_done_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny model.gguf"
    weights = write_tiny_gguf(source)
    said: list[str] = []
    folder = resolve_model(str(source), progress=said.append)
    assert said == [
        "reading tiny model.gguf",
        f"tiny model.gguf: its conversion takes 0.1 MB in {cache / 'models'} and about 8 s",
        "converting tiny model.gguf to safetensors (once)",
    ]

    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        if name in QUANTIZED:
            assert converted[name].dtype == np.float16
            np.testing.assert_array_equal(converted[name], weight.astype(np.float16), err_msg=name)
        else:
            np.testing.assert_array_equal(converted[name], weight, err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    assert gguf.is_of_gguf(folder)
    assert (config["dtype"], config["num_key_value_heads"], config["bos_token_id"], config["eos_token_id"]) == (
        "float32",
        2,
        1,
        2,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode("abcab", add_special_tokens=False) == [11, 10]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)

    monkeypatch.setattr(gguf, "run_converter", no_conversion)
    monkeypatch.setattr(gguf, "file_sha256", no_conversion)
    assert resolve_model(str(source)) == folder


@pytest.mark.extended
@pytest.mark.usefixtures("converts")
def test_converted_file_without_a_usable_tokenizer_says_so_as_a_mapped_one_does(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    source.write_bytes(source.read_bytes().replace(b"gpt-2", b"ghost"))
    folder = resolve_model(str(source))
    assert (folder / "model.safetensors").is_file()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    reason = (folder / gguf.NO_TOKENIZER_FILE).read_text()
    assert reason.startswith(
        "that of tiny.gguf cannot be used: tokenizer.ggml.pre is 'ghost', a way to split text that"
    )


@pytest.mark.usefixtures("reads_nothing")
def test_moved_file_is_not_converted_again_but_changed_content_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []

    def record(source: Path, workspace: Path, *_: object) -> Path:
        conversions.append(source)
        (workspace / "model").mkdir()
        return workspace / "model"

    monkeypatch.setattr(gguf, "run_converter", record)
    source = tmp_path / "a.gguf"
    source.write_bytes(b"one")
    first = resolve_model(str(source))
    (tmp_path / "elsewhere").mkdir()
    source.rename(tmp_path / "elsewhere" / "a.gguf")
    assert resolve_model(str(tmp_path / "elsewhere")) == first
    assert len(conversions) == 1

    moved = tmp_path / "elsewhere" / "a.gguf"
    times = moved.stat()
    moved.write_bytes(b"two")
    os.utime(moved, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert resolve_model(str(moved)) != first
    assert len(conversions) == 2


@pytest.mark.usefixtures("reads_nothing")
def test_file_changed_during_its_conversion_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(source: Path, workspace: Path, *_: object) -> Path:
        source.write_bytes(b"changed")
        return workspace

    monkeypatch.setattr(gguf, "run_converter", change)
    (tmp_path / "a.gguf").write_bytes(b"before")
    with pytest.raises(ValueError, match="was changed while"):
        resolve_model(str(tmp_path / "a.gguf"))


@pytest.mark.usefixtures("converts")
def test_killed_conversion_leaves_no_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledHalfway(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            assert self.stdout.readline().startswith("plan")
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(subprocess, "Popen", KilledHalfway)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(RuntimeError, match=r"tiny\.gguf was ended by SIGKILL"):
        resolve_model(str(tmp_path / "tiny.gguf"))
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize("size", [0, 3, 200, -200])
def test_truncated_file_is_refused_by_name(tmp_path: Path, cache: Path, size: int) -> None:
    source = tmp_path / "cut.gguf"
    write_tiny_gguf(source)
    source.write_bytes(source.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut\.gguf: .*damaged or incomplete"):
        resolve_model(str(source))
    assert not cache.exists()


@pytest.mark.extended
def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", architecture="perceptron")
    with pytest.raises(ValueError, match=r"cannot convert .*odd\.gguf: .*perceptron"):
        resolve_model(str(tmp_path / "odd.gguf"))


@pytest.mark.extended
@pytest.mark.usefixtures("converts")
def test_parts_of_a_split_file_are_converted_to_one_model(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "whole.gguf")
    parts = split(tmp_path / "whole.gguf", tmp_path / "tiny.gguf", 5)
    folder = resolve_model(str(parts[1]))
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    assert np.array_equal(converted["lm_head.weight"], weights["lm_head.weight"])
    assert [resolve_model(str(part)) for part in parts] == [folder] * len(parts)


def test_conversion_without_room_on_the_disk_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert gguf_to_safetensors.main([str(tmp_path / "tiny.gguf"), str(tmp_path / "model")]) == gguf.DISK_FULL_EXIT
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "0.1 MB are needed, 0.0 MB are free\n")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("magnitude", "dtype"), [(1.0, torch.float16), (1e-6, torch.bfloat16), (1e6, torch.bfloat16), (0.0, torch.float16)]
)
def test_quantized_tensor_is_rounded_to_the_16_bits_that_hold_it_best(magnitude: float, dtype: torch.dtype) -> None:
    weights = magnitude * torch.randn(100, generator=torch.Generator().manual_seed(0))
    rounded = rounded_to_16_bits(weights)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, weights.to(dtype))


def test_conversion_of_an_older_version_is_removed_after_a_day_without_use(tmp_path: Path) -> None:
    now, current = time.time(), f"a-v{gguf.CONVERTER_VERSION}"
    for name, hours in (("a-v1", 25), ("a-v2", 1), (current, 25), ("a-v99", 25), ("other-v1", 25)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (now, now - hours * 3600))
    gguf.remove_older(tmp_path / current)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-v2", current, "a-v99", "other-v1"]
