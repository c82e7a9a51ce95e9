"""`vllm-mp list`, `alias`, `rm` and `prune`: the models in the cache, and nothing outside it."""

import fcntl
import json
import os
import sys

import msgspec
import pytest
from huggingface_hub import constants

from vllm_mp import cli
from vllm_mp.cli.flags.model import names_model
from vllm_mp.model_store import DEFAULT_MODEL, resolve_model
from vllm_mp.model_store.entries import cache_entries
from vllm_mp.model_store.gguf import CONVERTED_FILE, CONVERTER_VERSION, MAPPED_VERSION, PLACE_FILE, MappedGguf
from vllm_mp.model_store.gguf_file.reader import FileIdentity
from vllm_mp.model_store.package import packaged_folder
from vllm_mp.model_store.packed_names import packed_folder, packed_prefix


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
    assert sorted(name for name, entry in entries.items() if entry["folder"]) == sorted(expected)
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


def test_packed_weights_are_listed_and_removed_with_their_model(root, capsys):
    hub_folder = root.parent / "hub" / "models--org--name"
    models = [make_model(root / "models" / "mine"), *(make_model(hub_folder / "snapshots" / name) for name in "ab")]
    packed = [packed_folder(root) / f"{packed_prefix(model)}{number}.packed" for number, model in enumerate(models)]
    packed_folder(root).mkdir()
    for path in packed:
        path.write_bytes(b"x" * 50_000)
    assert cli.main(["list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["mine"]["packed"] == [str(packed[0])]
    assert 100_000 <= entries["org/name"]["packed_size"] < 120_000
    assert cli.main(["rm", "-y", "org/name"]) == 0
    assert [path.exists() for path in packed] == [True, False, False]


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


def test_models_that_could_be_pulled_are_listed_with_size_and_licence(root, capsys):
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["NAME", "SIZE", "LICENCE", "WHAT", "IT", "DOES"] for line in lines)
    assert any(line.startswith(f"{DEFAULT_MODEL}  89 MiB  Apache-2.0  ") for line in lines)
    make_model(packaged_folder(DEFAULT_MODEL, root))
    assert cli.main(["list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries[DEFAULT_MODEL]["folder"] is not None
    assert (entries["all-minilm-l6-v2"]["folder"], entries["all-minilm-l6-v2"]["download_size"]) == (None, 83_506_384)


def test_name_of_a_folder_finds_it_is_listed_and_removed(root, tmp_path, capsys, monkeypatch):
    model = make_model(tmp_path / "somewhere" / "model")
    (model / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["alias", "Mine", "somewhere/model"]) == 0
    assert capsys.readouterr().out == f"mine stands for {model}\n"
    assert [resolve_model(name) for name in ("mine", "MINE")] == [model, model]
    assert names_model("mine")
    assert not names_model("mind")
    assert cli.main(["list", "--json"]) == 0
    [entry] = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "mine"]
    assert (entry["target"], entry["format"]) == (str(model), "safetensors, bfloat16")
    assert entry["size"] >= 100_000
    assert cli.main(["list"]) == 0
    assert f"safetensors, bfloat16, at {model}" in capsys.readouterr().out
    assert cli.main(["rm", "-y", "mine"]) == 0
    assert capsys.readouterr().out == f"removed mine (the name of {model})\n"
    assert (model / "config.json").exists()
    assert names(root) == []


def test_name_can_be_changed_and_one_whose_model_is_gone_says_so(root, tmp_path, capsys):
    first, second = (make_model(tmp_path / name) for name in ("first", "second"))
    for model in (first, second):
        (model / "tokenizer.json").write_text("{}")
        assert cli.main(["alias", "mine", str(model)]) == 0
        assert resolve_model("mine") == model
    second.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=f"stands for {second}, which does not exist; run `vllm-mp alias mine PATH`"):
        resolve_model("mine")
    capsys.readouterr()
    assert cli.main(["list"]) == 0
    assert f"missing, at {second}" in capsys.readouterr().out
    assert cli.main(["rm", "-y", "mine"]) == 0
    assert not (root / "names" / "mine").is_symlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/b", "must be 1 to 64 letters"),
        ("", "must be 1 to 64 letters"),
        ("..", "must be 1 to 64 letters"),
        (".hidden", "must be 1 to 64 letters"),
        ("x" * 65, "must be 1 to 64 letters"),
        ("model.gguf", "not end with .gguf"),
        (DEFAULT_MODEL.upper(), "stands for a model of a package"),
        ("kept", "is the name of a model in the cache"),
    ],
)
def test_name_that_is_taken_or_not_allowed_is_refused(root, tmp_path, capsys, name, message):
    make_model(root / "models" / f"Kept-{'0' * 16}-v2")
    model = make_model(tmp_path / "model")
    assert cli.main(["alias", name, str(model)]) == 2
    assert message in capsys.readouterr().err
    assert not (root / "names").exists()


@pytest.mark.parametrize(("place", "message"), [("nothing", "neither a file nor a folder"), ("empty", "config.json")])
def test_place_without_a_model_gets_no_name(root, tmp_path, capsys, place, message):
    (tmp_path / "empty").mkdir()
    assert cli.main(["alias", "mine", str(tmp_path / place)]) == 2
    assert message in capsys.readouterr().err


def test_misspelt_name_is_suggested(root, tmp_path):
    model = make_model(tmp_path / "model")
    assert cli.main(["alias", "my-llama", str(model)]) == 0
    with pytest.raises(ValueError, match="my-llama"):
        resolve_model("my-lama")


def make_mapped_folder(root, name, path):
    folder = make_model(root / "models" / f"{name}-{'1' * 16}-{MAPPED_VERSION}")
    (folder / "model.safetensors").unlink()
    (folder / PLACE_FILE).write_bytes(msgspec.json.encode(MappedGguf(str(path), "", FileIdentity(1, 2, 3, 4))))
    return folder


def test_prune_removes_only_what_no_engine_can_use_any_more(root, tmp_path, capsys):
    gone = make_mapped_folder(root, "Gone", tmp_path / "gone.gguf")
    converted = [make_model(root / "models" / f"Old-{'0' * 16}-v{CONVERTER_VERSION - age}") for age in (0, 1)]
    for folder in converted:
        (folder / CONVERTED_FILE).write_text("")
    downloaded = make_model(root.parent / "hub" / "models--org--name" / "snapshots" / "abc")
    targets = [make_model(tmp_path / name) for name in ("kept", "moved")]
    for target in targets:
        assert cli.main(["alias", target.name, str(target)]) == 0
    targets[1].rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert cli.main(["prune", "--yes"]) == 0
    printed = capsys.readouterr().out
    for reason in (f"{tmp_path}/gone.gguf", f"{tmp_path}/moved is gone", "a later version converts", "removed 3"):
        assert reason in printed
    assert [gone.exists(), converted[1].exists()] == [False, False]
    assert [folder.exists() for folder in (converted[0], downloaded, tmp_path / "elsewhere")] == [True] * 3
    assert [path.name for path in (root / "names").iterdir()] == ["kept"]
    assert cli.main(["prune"]) == 0
    assert "nothing to remove" in capsys.readouterr().err
