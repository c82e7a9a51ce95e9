"""`vllm-mp list` and `rm`: the models in the cache, and nothing outside it."""

import fcntl
import json
import os
import sys

import pytest
from huggingface_hub import constants

from vllm_mp import cli
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.model_store.entries import cache_entries
from vllm_mp.model_store.package import packaged_folder


def make_model(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [50_000], "data_offsets": [0, 100_000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 100_000)
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache folder, beside an empty cache of the hub, without engines that run."""
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("vllm_mp.cli.running_engines.running_engines", list)
    return tmp_path / "cache"


def names(root):
    return [entry.name for entry in cache_entries(root, root.parent / "hub")]


def test_models_are_listed_by_the_names_that_find_them(root, capsys):
    make_model(packaged_folder(DEFAULT_MODEL, root), torch_dtype="float32")
    (make_model(root / "models" / f"Some.Q4_0-{'0' * 16}-v2") / "model.safetensors").write_bytes(b"x" * 100_000)
    for digest in "12":
        make_model(root / "models" / f"Twice-{digest * 16}-v2")
    (root / "models" / ".Half-made.partial").mkdir()
    make_model(
        root.parent / "hub" / "models--org--name" / "snapshots" / "abc", quantization_config={"quant_method": "fp8"}
    )
    (root.parent / "hub" / "datasets--org--other" / "snapshots" / "abc").mkdir(parents=True)
    expected = ["Some.Q4_0", f"Twice-{'1' * 16}-v2", f"Twice-{'2' * 16}-v2", "org/name", DEFAULT_MODEL]
    assert cli.main(["list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert sorted(entries) == sorted(expected)
    assert entries[DEFAULT_MODEL]["format"] == "safetensors, bfloat16"
    assert entries["Some.Q4_0"]["format"] == "safetensors"
    assert entries["org/name"]["format"] == "safetensors, fp8"
    assert 100_000 <= entries["Some.Q4_0"]["size"] < 200_000
    assert cli.main(["list"]) == 0
    assert f"{DEFAULT_MODEL}  " in capsys.readouterr().out


def test_empty_cache_is_named(root, capsys):
    assert cli.main(["list"]) == 0
    assert f"no models in {root}" in capsys.readouterr().err


def test_rm_removes_the_named_models_only(root, capsys):
    kept = make_model(root / "models" / f"Kept-{'0' * 16}-v2")
    make_model(root / "models" / f"Gone-{'0' * 16}-v2")
    make_model(root.parent / "hub" / "models--org--name" / "snapshots" / "abc")
    assert cli.main(["rm", "-y", "gone", "org/name"]) == 0
    assert capsys.readouterr().out.startswith("removed Gone (")
    assert names(root) == ["Kept"]
    assert not (root.parent / "hub" / "models--org--name").exists()
    assert (kept / "config.json").exists()


@pytest.mark.parametrize("name", ["../outside", "nothing", ".", "", "/"])
def test_rm_refuses_what_is_not_in_the_cache_and_then_removes_nothing(root, name, capsys):
    make_model(root / "models" / f"Kept-{'0' * 16}-v2")
    outside = make_model(root.parent / "outside")
    assert cli.main(["rm", "-y", "kept", name]) == 2
    assert f"{name!r} is not a model in the cache" in capsys.readouterr().err
    assert names(root) == ["Kept"]
    assert (outside / "config.json").exists()


def test_rm_follows_no_symbolic_link_out_of_the_cache(root):
    outside = make_model(root.parent / "outside")
    (make_model(root / "models" / "inside") / "link").symlink_to(outside)
    (root / "models" / "whole").symlink_to(outside)
    assert cli.main(["rm", "-y", "inside", "whole"]) == 0
    assert names(root) == []
    assert not (root / "models" / "whole").is_symlink()
    assert sorted(path.name for path in outside.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_rm_asks_on_a_terminal(root, monkeypatch, answer, code):
    make_model(root / "models" / "model")
    reader, writer = os.pipe()
    os.write(writer, answer.encode())
    os.close(writer)
    with os.fdopen(reader) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        assert cli.main(["rm", "model"]) == code
    assert names(root) == ["model"][:code]


def test_rm_without_a_terminal_needs_yes(root, monkeypatch, capsys):
    make_model(root / "models" / "model")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert cli.main(["rm", "model"]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert names(root) == ["model"]


def test_rm_refuses_a_model_that_another_process_prepares(root, capsys):
    folder = make_model(root / "models" / "model")
    with folder.with_name(".model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["rm", "-y", "model"]) == 2
    assert "another process prepares 'model'" in capsys.readouterr().err
    assert names(root) == ["model"]
