"""The model folder of a text part and image parts in two GGUF files."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.image_gguf import make_half_model, write_mmproj, write_text_part
from support.image_models import image_tokenizer
from transformers import PreTrainedModel

from vllm_mp import AsyncEngineArgs
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_store import gguf, resolve_model
from vllm_mp.model_store.entries import cache_entries, dead_reason
from vllm_mp.model_store.progress import Progress

BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tokenizer that the converter makes of every file; empty: none."""
    content: dict[str, Any] = {
        "added_tokens": [{"content": "<image>", "id": 90}, {"content": "<fake_token_around_image>", "id": 91}]
    }

    def convert(source: Path, target: Path, lock: int, progress: Progress) -> None:
        target.mkdir()
        if content:
            (target / "tokenizer.json").write_text(json.dumps(content))
            (target / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))

    monkeypatch.setattr(gguf, "_convert_tokenizer", convert)
    return content


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: make_half_model(name, 90) for name in ("smolvlm", "llava", "gemma3", "qwen2_vl")}


def write_pair(folder: Path, model: PreTrainedModel) -> Path:
    folder.mkdir()
    write_text_part(folder / "text.gguf", model, image_tokenizer(), num_tokens=97)
    write_mmproj(folder / "mmproj.gguf", model)
    return folder


def content_of(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_folder_has_configuration_processor_and_both_paths(
    tmp_path: Path, cache: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    pair = write_pair(tmp_path / "pair", models["smolvlm"])
    folder = resolve_model(str(pair))
    assert resolve_model(str(pair)) == folder
    assert content_of(folder, "config.json")["image_token_id"] == 90
    mapped = gguf.mapped_mmproj(folder)
    assert mapped is not None
    assert mapped.read().path == pair / "mmproj.gguf"
    images = AsyncEngineArgs(model=str(pair), skip_tokenizer_init=True).create_engine_config().model_config.images
    assert images is not None
    assert (images.family, images.token_id, images.tile_size, images.tile_tokens) == ("idefics3", 90, 32, 4)
    [entry] = cache_entries(cache, tmp_path / "no hub")
    assert dead_reason(entry, cache) == ""
    write_mmproj(pair / "mmproj.gguf", models["llava"])
    assert "mmproj.gguf was changed or replaced" in dead_reason(entry, cache)


def test_processor_files_beside_the_image_parts_are_taken(
    tmp_path: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    pair = write_pair(tmp_path / "pair", models["llava"])
    plain = resolve_model(str(pair))
    own = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 30}, "do_center_crop": False}
    (pair / "preprocessor_config.json").write_text(json.dumps(own))
    folder = resolve_model(str(pair))
    assert content_of(folder, "preprocessor_config.json") == own
    assert content_of(folder, "processor_config.json") == content_of(plain, "processor_config.json")
    (pair / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json is not valid JSON"):
        resolve_model(str(pair))


WITHOUT_BYTES = {"byte_fallback": True, "vocab": {"<unk>": 0, "a": 1}}


@pytest.mark.parametrize(
    ("family", "tokens", "model", "message"),
    [
        ("smolvlm", {"<fake_token_around_image>": 91}, {}, "no special token '<image>', which stands for images in"),
        ("smolvlm", {"<image>": 90}, {}, "no special token '<fake_token_around_image>'"),
        ("llava", {"<unk>": 0}, WITHOUT_BYTES, "no special token '<image>'"),
        ("llava", {"<unk>": 0}, {"vocab": BYTES}, "no special token '<image>'"),
        ("gemma3", {"<start_of_image>": 90, "<end_of_image>": 91}, {}, "no special token '<image_soft_token>'"),
        ("gemma3", {"<start_of_image>": 90, "<unused9>": 92}, {"vocab": {}}, "no special token '<end_of_image>'"),
        ("llava", None, {}, r"text\.gguf has no tokenizer that can be used"),
    ],
    ids=["no placeholder", "no other token", "no bytes", "unused bytes", "no spare", "no end", "no tokenizer"],
)
def test_vocabulary_without_the_tokens_of_images_is_refused(
    family: str,
    tokens: dict[str, int] | None,
    model: dict[str, Any],
    message: str,
    tmp_path: Path,
    models: dict[str, PreTrainedModel],
    tokenizer: dict[str, Any],
) -> None:
    tokenizer.clear()
    if tokens is not None:
        tokenizer |= {"added_tokens": [{"content": text, "id": index} for text, index in tokens.items()]}
        tokenizer["model"] = model
    with pytest.raises(ValueError, match=message):
        resolve_model(str(write_pair(tmp_path / "pair", models[family])))


def test_placeholder_takes_the_place_of_the_unknown_token_with_images_only(
    tmp_path: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    tokenizer["added_tokens"] = [{"content": "<unk>", "id": 0}]
    tokenizer["model"] = {"byte_fallback": True, "unk_token": "<unk>", "vocab": {"<unk>": 0, **BYTES}}
    pair = write_pair(tmp_path / "pair", models["llava"])
    folder, alone = resolve_model(str(pair)), resolve_model(str(pair / "text.gguf"))
    assert content_of(folder, "config.json")["image_token_id"] == 0
    changed = content_of(folder, "tokenizer.json")
    assert changed["added_tokens"] == [{"content": "<image>", "id": 0, "special": True, "normalized": False}]
    assert changed["model"] == {"byte_fallback": True, "unk_token": "<image>", "vocab": {"<image>": 0, **BYTES}}
    assert content_of(folder, "tokenizer_config.json") == {"unk_token": "<image>"}
    assert content_of(alone, "tokenizer.json") == tokenizer
    assert gguf.mapped_mmproj(alone) is None
    assert not (alone / "preprocessor_config.json").exists()


def test_placeholder_takes_the_place_of_the_last_reserved_token(
    tmp_path: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    names = ["<|begin_of_text|>", "<|reserved_special_token_9|>", "<|reserved_special_token_10|>", "<|eot_id|>"]
    tokenizer["added_tokens"] = [{"content": name, "id": 90 + index} for index, name in enumerate(names)]
    tokenizer["model"] = {"vocab": {name: 90 + index for index, name in enumerate(names)}}
    folder = resolve_model(str(write_pair(tmp_path / "pair", models["llava"])))
    assert content_of(folder, "config.json")["image_token_id"] == 92
    assert [token["content"] for token in content_of(folder, "tokenizer.json")["added_tokens"]] == [
        names[0],
        names[1],
        "<image>",
        names[3],
    ]


def test_image_token_of_gemma_takes_the_place_of_the_last_unused_token(
    tmp_path: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    names = ["<start_of_image>", "<end_of_image>", "<unused9>", "<unused10>"]
    tokenizer["added_tokens"] = [
        {"content": name, "id": 90 + index, "special": index < 2, "normalized": True}
        for index, name in enumerate(names)
    ]
    tokenizer["model"] = {"vocab": {name: 90 + index for index, name in enumerate(names)}}
    folder = resolve_model(str(write_pair(tmp_path / "pair", models["gemma3"])))
    config = content_of(folder, "config.json")
    assert [config[f"{name}_token_index"] for name in ("image", "boi", "eoi")] == [93, 90, 91]
    assert content_of(folder, "tokenizer.json")["added_tokens"][3] == {
        "content": "<image_soft_token>",
        "id": 93,
        "special": True,
        "normalized": False,
    }


def test_text_part_of_qwen_alone_is_a_model_without_images(
    tmp_path: Path, models: dict[str, PreTrainedModel], tokenizer: dict[str, Any]
) -> None:
    text_part = write_pair(tmp_path / "pair", models["qwen2_vl"]) / "text.gguf"
    config = AsyncEngineArgs(model=str(text_part), skip_tokenizer_init=True).create_engine_config().model_config
    assert config.images is None
    architecture = config.architecture
    assert isinstance(architecture, NativeArchitecture)
    assert architecture.rope is not None
    assert architecture.rope.sections == (1, 2, 1)
