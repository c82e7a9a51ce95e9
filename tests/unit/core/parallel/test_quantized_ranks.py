"""Quantized weights in every form, shared by ranks or shared out to stages, give the distributions of one process."""

import gguf
import numpy as np
import pytest
import torch
from support.answers import PROMPTS, adapter_slot
from support.covering import by_turns
from support.layouts import with_layouts
from support.local_engine import LocalEngine
from support.quantized_checkpoints import save_in_float8, save_in_four_bits
from support.rank_threads import local_group
from support.tiny_gguf import write_random_gguf
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2MoeConfig

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.model_config.quantization import FourBits
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
"""Sizes whose halves are whole blocks of weights, in every form."""
# A token whose rows are rounded may choose another expert, unless it chooses all.
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=128),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=3),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
}
OPTIONS = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8-cache": {"kv_cache_dtype": "fp8"},
}
CHECKPOINTS = {
    "fp8-tensor": lambda folder: save_in_float8(folder, has_blocks=False),
    "fp8-block": lambda folder: save_in_float8(folder, has_blocks=True),
    "awq": lambda folder: save_in_four_bits(folder, FourBits("awq", 64)),
    "gptq": lambda folder: save_in_four_bits(folder, FourBits("gptq", 32, zero_offset=1)),
    "gptq-reordered": lambda folder: save_in_four_bits(folder, FourBits("gptq", 32, True, 1)),
}
GGUF = {
    "gguf-floats": (),
    "gguf-8-bits": (gguf.GGMLQuantizationType.Q8_0,),
    "gguf-4-bits": (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q5_1),
}
FORMS = [
    *((form, "llama") for form in (*OPTIONS, *CHECKPOINTS, *GGUF)),
    *(("int8", name) for name in ("gpt2", "qwen2-moe")),
    *(("int4", name) for name in ("gpt2", "qwen2-moe")),
    ("awq", "qwen2-moe"),
    ("gptq", "mixtral"),
]
"""Pairs of a form of weights and a model."""
TOLERANCE = 0.05
ROUNDED_BY_RANK = {"int8": 0.3, "int4": 0.3, "fp8": 0.3, "fp8-tensor": 0.3}
"""Tolerances of forms whose scales span more weights or activations than a rank has. A rank then rounds otherwise, and
the distance to one process is that of one process to weights that are not quantized. Wrong cuts lead to 1 and more."""
LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module", autouse=True)
def _no_tokenizers(tmp_path_factory):
    """Leave out the conversion of the tokenizers of GGUF files, which takes seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("vllm_mp.model_store.gguf._convert_tokenizer", lambda _, target, *__: target.mkdir())
        yield


@pytest.fixture(scope="module")
def model_in(tmp_path_factory):
    """Returns the path and the options of a model in a form of weights."""
    made = {}

    def make(form, name):
        if (form, name) not in made:
            folder = made[form, name] = tmp_path_factory.mktemp("model")
            if form in GGUF:
                write_random_gguf(folder / "model.gguf", "llama", MODELS[name], kinds=GGUF[form])
            else:
                save_random_model(MODELS[name], folder)
            if form in CHECKPOINTS:
                CHECKPOINTS[form](folder)
        path = made[form, name]
        return path / "model.gguf" if form in GGUF else path, OPTIONS.get(form, {})

    return make


def distributions(engine):
    """Return the log-probabilities [num_prompts, VOCABULARY] of the token after each prompt."""
    found = np.empty((len(PROMPTS), VOCABULARY))
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, 1, num_logprobs=VOCABULARY)
    engine.run()
    for slot, own in enumerate(found):
        [(ids, values)] = engine.logprobs[slot]
        own[np.frombuffer(ids, np.int32)[1:]] = np.frombuffer(values, np.float32)[1:]
    return found


def distance(found, expected):
    """Return the distance of log-probabilities, as a share of how much the expected ones vary."""
    return np.linalg.norm(found - expected) / np.linalg.norm(expected - expected.mean(1, keepdims=True))


def tolerance(form, layout):
    return 1e-3 if layout.size == 1 else ROUNDED_BY_RANK.get(form, TOLERANCE)


@with_layouts(
    "form, name",
    *(((form, name), layout) for form, name, layout in by_turns(FORMS, ["tensor-2-pipeline-2", "tensor-2"])),
    extended=[(form, "pipeline-2") for form in FORMS],
)
def test_every_form_of_weights_is_shared_out(form, name, layout, model_in):
    path, options = model_in(form, name)
    expected = distributions(LocalEngine(path, **options))
    with local_group(path, **layout._asdict(), **options) as group:
        assert distance(distributions(group.engine), expected) < tolerance(form, layout)


@with_layouts(
    "form",
    *by_turns(
        ["int8", "int4", "fp8-block", "awq", "gptq", "gguf-8-bits"], ["tensor-2-pipeline-2", "tensor-2", "pipeline-2"]
    ),
)
def test_adapters_change_quantized_weights_on_all_ranks(form, layout, model_in, tmp_path):
    path, options = model_in(form, "llama")

    def adapted(engine):
        arch = engine.config.model_config.architecture
        tensors = adapter_tensors(arch, 8)
        adapter = read_adapter(save_adapter(tmp_path, tensors), arch, torch.float32, max_rank=8)
        engine.runner.load_adapter(0, adapter)
        with adapter_slot(0):
            return distributions(engine)

    whole = LocalEngine(path, **options, **LORA)
    expected = adapted(whole)
    assert distance(distributions(whole), expected) > 0.5
    with local_group(path, **layout._asdict(), **options, **LORA) as group:
        assert distance(adapted(group.engine), expected) < tolerance(form, layout)
