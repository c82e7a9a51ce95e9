"""Models with LoRA adapters compute what `peft`'s merged weights compute, for each token by its own adapter."""

import pytest
import torch
from peft import PeftModel
from support.paged_batch import PagedBatch
from transformers import AutoModelForCausalLM

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.lora.slots import AdapterSlots
from vllm_mp.core.models import build_model
from vllm_mp.core.models.loader import load_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.library import library
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


MODELS = ("llama-biased", "qwen3", "gemma3", "phi3", "gpt2")
PROMPTS = random_prompts((9, 3, 30, 2, 12, 5, 26, 4))
SLOTS = (2, -1, 0, 1, 0, 2, 1, -1)
"""The slot of each prompt."""
MAX_RANK = 12
TOLERANCE = 2e-5
"""The greatest error relative to the greatest logit. Float32 rounds to 6e-8; three layers of random weights amplify
that to about 1e-5, the distance between the merged weights' results in float32 and in float64."""
NEEDS_BUILD = pytest.mark.skipif(library() is None, reason="operations of torch are not batch-invariant")


class Case:
    """A model in a folder, and three adapters: all layers, rank-stabilized with two ranks, and attention only."""

    def __init__(self, name, folder):
        self.folder = folder
        self.arch = read_architecture(save_random_model(CONFIGS[name], folder).config.to_dict())
        is_gpt2 = name == "gpt2"
        ranks = {"c_fc" if is_gpt2 else "down_proj": 12}
        alphas = {"h.1.attn.c_attn" if is_gpt2 else r"layers\.1\.self_attn\.q?k?v_proj": 4}
        adapters = [
            (adapter_tensors(self.arch, 8, seed=1), {}),
            (adapter_tensors(self.arch, 3, seed=2, ranks=ranks), {"r": 3, "use_rslora": True, "rank_pattern": ranks}),
            (adapter_tensors(self.arch, 8, seed=3, only="attn."), {"alpha_pattern": alphas}),
        ]
        self.adapters = [
            save_adapter(
                folder / f"adapter{i}", tensors, **fields, target_modules=layers(tensors), fan_in_fan_out=is_gpt2
            )
            for i, (tensors, fields) in enumerate(adapters)
        ]

    def merged(self, slot):
        """Return transformers' model with the weights that `peft` merges."""
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return base if slot < 0 else PeftModel.from_pretrained(base, self.adapters[slot]).merge_and_unload()

    def model(self, dtype=torch.float32, quantization=None, order=(0, 1, 2)):
        """Return the native model, packed, with the adapters in slots in the order `order`."""
        model = build_model(self.arch, dtype, "cpu")
        load_weights(model, self.folder, "auto", 0)
        model.pack(quantization, dtype)
        slots = AdapterSlots(self.arch, len(order), MAX_RANK)
        slots.bind(model)
        for slot, number in enumerate(order):
            slots.load(slot, read_adapter(self.adapters[number], self.arch, dtype, MAX_RANK))
        return model


def layers(tensors):
    """Return the names of the layers that an adapter changes."""
    return sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors})


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {name: Case(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def logits(case, model, prompts, slots, dtype=torch.float32):
    """Return the logits of each prompt, [length, vocab_size], all computed in one step."""
    cells = [(len(prompt), len(prompt)) for prompt in prompts]
    batch = PagedBatch(cells, case.arch.num_heads, case.arch.num_kv_heads, case.arch.head_dim, 8)
    caches = [(batch.k_cache.to(dtype), batch.v_cache.to(dtype)) for _ in range(case.arch.num_layers)]
    metadata = batch.metadata
    if slots is not None:
        of_tokens = [slot for slot, prompt in zip(slots, prompts, strict=True) for _ in prompt]
        metadata = metadata._replace(adapter_slots=torch.tensor(of_tokens, dtype=torch.int32))
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    with torch.inference_mode():
        hidden = model(torch.tensor([token for prompt in prompts for token in prompt]), positions, caches, metadata)
        return model.compute_logits(hidden).split([len(prompt) for prompt in prompts])


def assert_near(got, expected, tolerance=TOLERANCE):
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("is_compiled", [True, False], ids=["cpu", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_give_the_logits_of_merged_weights_alone_and_mixed(cases, name, is_compiled, monkeypatch):
    if is_compiled and library() is None:
        pytest.skip("the kernels are not built")
    if not is_compiled:
        monkeypatch.setattr(ops, "library", lambda: None)
    case = cases[name]
    model = case.model()
    mixed = logits(case, model, PROMPTS, SLOTS)
    for slot in {*SLOTS}:
        theirs = case.merged(slot)
        own = [i for i, other in enumerate(SLOTS) if other == slot]
        alone = logits(case, model, [PROMPTS[i] for i in own], [slot] * len(own))
        for i, got in zip(own, alone, strict=True):
            with torch.inference_mode():
                expected = theirs(torch.tensor([PROMPTS[i]])).logits[0]
            assert_near(got, expected)
            assert_near(mixed[i], expected)
    differences = [(mixed[i] - logits(case, model, [PROMPTS[i]], None)[0]).abs().max() for i in range(len(PROMPTS))]
    assert all((difference > 0.1) == (slot >= 0) for difference, slot in zip(differences, SLOTS, strict=True))


@NEEDS_BUILD
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_adapted_results_are_the_same_to_the_bit_in_any_company_and_slot(cases, name, quantization):
    case, dtype = cases[name], torch.bfloat16
    model, turned = (case.model(dtype, quantization, order) for order in ((0, 1, 2), (2, 0, 1)))
    mixed = logits(case, model, PROMPTS, SLOTS, dtype)
    slots_of = {-1: -1, 2: 0, 0: 1, 1: 2}
    turned_mixed = logits(case, turned, PROMPTS[::-1], [slots_of[slot] for slot in SLOTS[::-1]], dtype)[::-1]
    for i, (prompt, slot) in enumerate(zip(PROMPTS, SLOTS, strict=True)):
        assert torch.equal(mixed[i], turned_mixed[i])
        alone = logits(case, model, [prompt], None if slot < 0 else [slot], dtype)[0]
        assert torch.equal(mixed[i], alone)


def test_slots_are_loaded_again_when_the_weights_return(cases):
    case = cases["llama-biased"]
    model = case.model()
    expected = logits(case, model, PROMPTS, SLOTS)
    slots = AdapterSlots(case.arch, 3, MAX_RANK)
    for slot, folder in enumerate(case.adapters):
        slots.load(slot, read_adapter(folder, case.arch, torch.float32, MAX_RANK))
    for _ in range(2):
        slots.bind(model)
        assert all(map(torch.equal, logits(case, model, PROMPTS, SLOTS), expected))
        slots.unbind()


def test_loading_a_slot_replaces_all_that_it_held(cases):
    case = cases["llama-biased"]
    replaced = case.model(order=(1, 0, 0))
    slots = AdapterSlots(case.arch, 3, MAX_RANK)
    slots.bind(replaced)
    for number in (1, 0, 2):
        slots.load(0, read_adapter(case.adapters[number], case.arch, torch.float32, MAX_RANK))
    expected = logits(case, case.model(), PROMPTS, [2] * len(PROMPTS))
    assert all(map(torch.equal, logits(case, replaced, PROMPTS, [0] * len(PROMPTS)), expected))
