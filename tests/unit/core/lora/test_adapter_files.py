"""LoRA adapters in PEFT's format are read, and adapters that cannot be served are refused by name."""

import json
import math
import os
import pickle

import pytest
import torch

from vllm_mp.core.lora.adapter import WEIGHTS_FILE, read_adapter
from vllm_mp.core.lora.peft_config import CONFIG_FILE
from vllm_mp.core.lora.targets import num_bytes, projections
from vllm_mp.model_config.families.registry import NATIVE_MODELS, read_architecture
from vllm_mp.model_config.families.with_images import read_qwen_vl, read_with_images
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import CONFIGS

ARCH = read_architecture(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
GPT2 = read_architecture(CONFIGS["gpt2"].to_dict() | {"architectures": ["GPT2LMHeadModel"]})
QUERY = "layers.1.self_attn.q_proj"
AT = "base_model.model.model." + QUERY


def read(folder, arch=ARCH, dtype=torch.float32, max_rank=16):
    return read_adapter(folder, arch, dtype, max_rank)


@pytest.mark.parametrize("name", [name for name, entry in NATIVE_MODELS.items() if "bert" not in entry.model])
def test_every_native_decoder_can_have_adapters(name):
    config = CONFIGS["gpt2" if name == "GPT2LMHeadModel" else "llama"]
    fields = config.to_dict()
    if NATIVE_MODELS[name].read is read_qwen_vl:
        fields |= {"rope_parameters": {"rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
    if NATIVE_MODELS[name].read in (read_qwen_vl, read_with_images):
        fields = {"text_config": fields}
    arch = read_architecture(fields | {"architectures": [name]})
    # Layers with experts have adapters of their attention only.
    num_with_experts = 0 if arch.experts is None else sum(arch.experts.layers)
    assert len(projections(arch)) == 4 * arch.num_layers - 2 * num_with_experts


@pytest.mark.parametrize("arch", [ARCH, GPT2], ids=["llama", "gpt2"])
def test_all_linear_layers_are_read_and_b_is_multiplied_by_the_scale(tmp_path, arch):
    tensors = adapter_tensors(arch, 8)
    adapter = read(save_adapter(tmp_path / "adapter", tensors, r=8, lora_alpha=24), arch)
    assert len(adapter.factors) == len(tensors) // 2 == sum(len(found.parts) for found in projections(arch))
    for name, factors in adapter.factors.items():
        at = next(key for key in tensors if key.endswith(f"{name}.lora_A.weight"))
        assert torch.equal(factors.a, tensors[at])
        torch.testing.assert_close(factors.b, 3 * tensors[at.replace("lora_A", "lora_B")])
    assert adapter.num_bytes <= num_bytes(arch, 1, 8, 4)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 4}, 0.5),
        ({"lora_alpha": 4, "use_rslora": True}, 4 / math.sqrt(8)),
        ({"alpha_pattern": {"q_proj": 40}}, 5),
        ({"alpha_pattern": {r"^model\.layers\.\d+\.self_attn\.q_proj": 40}}, 5),
        ({"alpha_pattern": {"layers.(0|1).self_attn.q_proj": 2, "q_proj": 40}}, 0.25),
        ({"r": 4, "lora_alpha": 4, "rank_pattern": {QUERY: 8}}, 0.5),
    ],
)
def test_scale_follows_the_configuration(tmp_path, fields, scale):
    tensors = adapter_tensors(ARCH, 8, only=QUERY)
    adapter = read(save_adapter(tmp_path / "adapter", tensors, **fields))
    torch.testing.assert_close(adapter.factors[QUERY].b, scale * tensors[AT + ".lora_B.weight"])


def test_layers_may_be_missing_and_may_differ_in_rank(tmp_path):
    tensors = adapter_tensors(ARCH, 8, ranks={"q_proj": 3}, only="_proj")
    del tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"]
    del tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
    adapter = read(save_adapter(tmp_path / "adapter", tensors, rank_pattern={"q_proj": 3}))
    assert adapter.factors[QUERY].a.shape == (3, 48)
    assert "layers.0.self_attn.k_proj" not in adapter.factors


@pytest.mark.parametrize("around", ["model.language_model.", "language_model.model.", "model.language_model.model."])
def test_adapter_of_a_model_of_texts_and_images_is_read(tmp_path, around, caplog):
    tensors = adapter_tensors(ARCH, 8)
    named = {name.replace("base_model.model.model.", f"base_model.model.{around}"): t for name, t in tensors.items()}
    plain = read(save_adapter(tmp_path / "plain", tensors)).factors
    found = read(save_adapter(tmp_path / "named", named)).factors
    assert found.keys() == plain.keys()
    for name, factors in plain.items():
        assert torch.equal(found[name].a, factors.a)
        assert torch.equal(found[name].b, factors.b)
    assert not caplog.records

    of_images = {
        f"base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.lora_{kind}.weight": t
        for kind, t in (("A", torch.ones(8, 24)), ("B", torch.ones(24, 8)))
    }
    assert read(save_adapter(tmp_path / "images", {**named, **of_images})).factors.keys() == plain.keys()
    assert "2 tensors of an adapter are for images, which are not served" in caplog.text
    with pytest.raises(ValueError, match="adapts only the parts of the model for images, and texts alone are served"):
        read(save_adapter(tmp_path / "only images", of_images))


def test_adapter_of_a_bare_model_is_read(tmp_path):
    tensors = {name.replace("model.model.model.", "model.model."): x for name, x in adapter_tensors(ARCH, 8).items()}
    assert len(read(save_adapter(tmp_path / "adapter", tensors)).factors) == 21


REFUSED_FIELDS = [
    ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING' is not served"),
    ({"peft_type": None}, "peft_type None is not served"),
    ({"use_dora": True}, "use_dora=True is not served"),
    ({"bias": "all"}, "bias='all' is not served"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* extra embeddings"),
    ({"target_modules": ["q_proj", "lm_head"]}, "target_modules contains 'lm_head': embeddings"),
    ({"target_modules": ["model.embed_tokens"]}, "target_modules contains 'model.embed_tokens'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"lora_bias": True}, "lora_bias"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' also changes the weights"),
    ({"r": 0}, "r must be an integer of at least 1, got 0"),
    ({"r": "8"}, "r must be an integer"),
    ({"lora_alpha": math.inf}, "lora_alpha must be a finite number"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must be a finite number"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
    ({"rank_pattern": {"(q": 8}}, "rank_pattern has an invalid pattern"),
    ({"rank_pattern": {"(a+)+$": 8}}, "rank_pattern has a pattern that may take too long"),
    ({"rank_pattern": {"a*a*a*a*$": 8}}, "may take too long"),
    ({"rank_pattern": {f"a{i}.*b+": 8 for i in range(60)}}, "may take too long"),
    ({"rank_pattern": {"a{99999999999}": 8}}, "invalid pattern"),
    ({"peft_type": "x" * 10_000}, "^.{,500}$"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_FIELDS)
def test_configuration_that_is_not_served_is_refused_by_name(tmp_path, fields, message):
    folder = save_adapter(tmp_path / "adapter", adapter_tensors(ARCH, 8), **fields)
    with pytest.raises(ValueError, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def test_configuration_that_is_no_file_is_refused_without_reading_it(tmp_path):
    folder = save_adapter(tmp_path / "adapter", adapter_tensors(ARCH, 8))
    (folder / CONFIG_FILE).unlink()
    os.mkfifo(folder / CONFIG_FILE)
    with pytest.raises(ValueError, match=f"lacks {CONFIG_FILE}"):
        read(folder)


def changed(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


REFUSED_TENSORS = [
    (changed(AT + ".lora_A.weight", torch.zeros(8, 47)), r"has shape \[8, 47\], not \[8, 48\]"),
    (changed(AT + ".lora_B.weight", torch.zeros(47, 8)), r"has shape \[47, 8\], not \[48, 8\]"),
    (changed(AT + ".lora_A.weight", torch.zeros(7, 48)), r"has shape \[7, 48\], not \[8, 48\]"),
    (changed(AT + ".lora_A.weight", torch.zeros(8, 48, dtype=torch.int8)), "has dtype torch.int8"),
    (changed(AT + ".lora_A.weight", torch.full((8, 48), math.nan)), "values that are not finite in float32"),
    (changed(AT + ".lora_B.weight", torch.full((48, 8), math.inf)), "values that are not finite in float32"),
    (lambda tensors: tensors.pop(AT + ".lora_B.weight"), f"{QUERY} lacks lora_B"),
    (lambda tensors: tensors.clear(), f"{WEIGHTS_FILE} is empty"),
    (changed(AT + ".lora_magnitude_vector.weight", torch.zeros(48)), "belongs to DoRA"),
    (changed(AT + ".lora_B.bias", torch.zeros(48)), "is not a factor of LoRA"),
    (changed("base_model.model.lm_head.weight", torch.zeros(97, 48)), "changes embeddings"),
    (changed("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 97)), "changes embeddings"),
    (changed("base_model.model.model.layers.3.mlp.up_proj.lora_A.weight", torch.zeros(8, 48)), "has 3 layers"),
    (changed("base_model.model.model.layers.0.mlp.router.lora_A.weight", torch.zeros(8, 48)), "not a linear layer"),
    (changed("x" * 100_000, torch.zeros(1)), "^.{,600}$"),
    (changed("base_model.model." + QUERY + ".lora_A.weight", torch.zeros(8, 48)), "occurs twice"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    tensors = adapter_tensors(ARCH, 8)
    change(tensors)
    folder = save_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(ValueError, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def test_rank_above_the_limit_and_another_model_are_refused(tmp_path):
    folder = save_adapter(tmp_path / "adapter", adapter_tensors(ARCH, 17), r=17)
    with pytest.raises(ValueError, match=r"has rank 17, above max_lora_rank=16; start the engine with a higher one"):
        read(folder)
    with pytest.raises(ValueError, match=r"not a linear layer of GPT2LMHeadModel.*; and \d+ more"):
        read(folder, GPT2)


def test_value_that_overflows_only_in_the_dtype_of_the_model_is_refused(tmp_path):
    tensors = adapter_tensors(ARCH, 8)
    tensors[AT + ".lora_B.weight"][0, 0] = 50_000.0
    folder = save_adapter(tmp_path / "adapter", tensors)
    read(folder)
    with pytest.raises(ValueError, match="not finite in float16"):
        read(folder, dtype=torch.float16)


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


def test_pickles_are_refused_and_not_loaded(tmp_path):
    folder = save_adapter(tmp_path / "adapter", adapter_tensors(ARCH, 8))
    content = pickle.dumps(Payload())
    (folder / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        read(folder)
    (folder / WEIGHTS_FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"only as adapter_model.bin, a pickle"):
        read(folder)


def test_missing_and_damaged_files_are_refused(tmp_path):
    folder = tmp_path / "adapter"
    with pytest.raises(ValueError, match="is not a folder"):
        read(folder)
    save_adapter(folder, adapter_tensors(ARCH, 8))
    whole = (folder / WEIGHTS_FILE).read_bytes()
    for content in (whole[:-8], b"", (2**40).to_bytes(8, "little") + whole[8:]):
        (folder / WEIGHTS_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=f"{WEIGHTS_FILE} is damaged or incomplete"):
            read(folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=f"lacks {WEIGHTS_FILE}"):
        read(folder)
    for content, message in (
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must contain a JSON object"),
        (json.dumps("x" * 2**20).encode(), "is too large"),
    ):
        (folder / CONFIG_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read(folder)
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(ValueError, match=f"lacks {CONFIG_FILE}"):
        read(folder)
