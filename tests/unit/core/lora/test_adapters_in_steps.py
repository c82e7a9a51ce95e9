"""Steps with LoRA adapters: as captured graphs, after the weights were dropped, and without memory for the slots."""

import numpy as np
import pytest
import torch
from support.local_engine import LocalEngine

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker import step_inputs as repeated_inputs
from vllm_mp.core.worker.cuda_graphs import StepGraphs
from vllm_mp.core.worker.memory import plan as memory
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


PROMPTS = random_prompts((9, 3, 30, 1, 12, 5))
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(CONFIGS["llama"], folder)
    return folder


@pytest.fixture(scope="module")
def adapters(folder):
    arch = read_architecture(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    folders = [save_adapter(folder / str(i), adapter_tensors(arch, 8, seed=i)) for i in range(2)]
    return [read_adapter(path, arch, torch.float32, 8) for path in folders]


@pytest.fixture
def slots_of_rows(monkeypatch):
    """Return a dictionary of the adapter slot of each row, which every step uses; -1 for other rows."""
    slots = {}

    def with_slots(step, batch, block_size, to_device, *spare_blocks):
        ids, positions, metadata = step_inputs(step, batch, block_size, to_device, *spare_blocks)
        of_rows = [slots.get(int(row), -1) for row in step.rows]
        if max(of_rows) >= 0:
            (of_tokens,) = to_device([np.repeat(np.array(of_rows, np.int32), step.counts)])
            metadata = metadata._replace(adapter_slots=of_tokens)
        return ids, positions, metadata

    for module in (model_runner, repeated_inputs):
        monkeypatch.setattr(module, "step_inputs", with_slots)
    return slots


def play(engine):
    """Return the tokens and log-probabilities of requests that begin and end at different steps."""
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, max_tokens=4 + 5 * slot)
        engine.step()
    engine.run()
    return engine.tokens, engine.logprobs


def start(folder, adapters, **options):
    engine = LocalEngine(folder, **LORA, **options)
    for slot, adapter in enumerate(adapters):
        engine.runner.memory.adapters.load(slot, adapter)
    return engine


def stand_in(device):
    """Return a `Capture` for the CPU, whose replays call the computation again."""
    return lambda compute: compute


def test_steps_with_adapters_are_the_same_to_the_bit_with_and_without_graphs(
    folder, adapters, slots_of_rows, monkeypatch
):
    plain = play(LocalEngine(folder))
    assert play(start(folder, adapters)) == plain
    slots_of_rows |= {1: 0, 2: 1}
    expected = play(start(folder, adapters))
    assert 0 < sum(expected[0][request] == plain[0][request] for request in range(len(PROMPTS))) < len(PROMPTS)
    run, replayed = StepGraphs.run, set()

    def watch(graphs, shape, input_ids, positions, metadata, latest):
        replayed.add((len(positions), metadata.adapter_slots is None))
        return run(graphs, shape, input_ids, positions, metadata, latest)

    monkeypatch.setattr(StepGraphs, "run", watch)
    assert play(start(folder, adapters, make_capture=stand_in)) == expected
    assert {is_plain for _, is_plain in replayed} == {True, False}
    assert {3, 5} & {count for count, is_plain in replayed if not is_plain}, "these sizes are padded"


def test_adapters_are_there_again_after_the_weights_were_dropped(folder, adapters, slots_of_rows):
    slots_of_rows |= {0: 1, 3: 0}
    engine = start(folder, adapters)
    expected = play(engine)
    engine.runner.memory.drop_weights()
    engine.runner.memory.restore_weights()
    assert play(engine) == expected


def test_start_without_memory_for_the_slots_is_refused_with_remedies(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    with pytest.raises(ValueError, match=r"no space for LoRA adapters: max_loras=2 of max_lora_rank=8 .* lower one"):
        LocalEngine(folder, **LORA)
