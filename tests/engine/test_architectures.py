"""Each native architecture in a real core, and the forms in which its weights and its tokenizer can be stored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy, num_preemptions
from vllm_mp.testing.random_models import (
    CONFIGS,
    GPT2_SIZES,
    NATIVE,
    PROMPT_LENGTHS,
    WHOLE_PROMPTS,
    random_prompts,
    save_config,
    save_random_model,
    scarce_blocks,
)

pytestmark = pytest.mark.usefixtures("forked_cores")

NUM_TOKENS = 24
PROMPTS = random_prompts(PROMPT_LENGTHS)


def running(folder, **options):
    return running_engine(folder, skip_tokenizer_init=True, device="cpu", num_threads=1, **options)


def weights(folder, **options):
    """Return the weights that a core loads from a folder, by name."""
    arguments = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True, device="cpu", **options)
    return load_model(arguments.create_engine_config().model_config, torch.float32, torch.device("cpu")).state_dict()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


# They share their code with others here; test_model_parity.py runs them all.
SLOW = ("gemma2", "granite", "olmo2", "mixtral", "granite-moe")


def case(name):
    marks = {"llama": pytest.mark.essential, **dict.fromkeys(SLOW, pytest.mark.slow)}.get(name, ())
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module", params=map(case, NATIVE))
def random_model(request, tmp_path_factory):
    """The configuration of an architecture, the folder of a random model of it, and the same model in transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    with one_thread():
        yield config, folder, save_random_model(config, folder)


def test_answers_to_whole_prompts_equal_those_of_transformers(random_model):
    _, folder, reference = random_model
    with running(folder, **WHOLE_PROMPTS) as engine:
        assert_engine_is_greedy(engine, reference, PROMPTS, NUM_TOKENS)


def test_answers_with_chunks_and_preemption_equal_those_of_transformers(random_model):
    config, folder, reference = random_model
    with running(folder, **scarce_blocks(config)) as engine:
        assert_engine_is_greedy(engine, reference, PROMPTS, NUM_TOKENS)
        assert num_preemptions(engine) > 0


def test_dummy_weights_are_a_function_of_the_seed(tmp_path):
    folder = save_config(CONFIGS["qwen3"], tmp_path / "model")
    first, again, other = (weights(folder, load_format="dummy", seed=seed) for seed in (7, 7, 8))
    assert_equal(again, first)
    assert sum(not torch.equal(weight, other[name]) for name, weight in first.items()) > len(first) / 2


def test_sharded_weights_equal_those_of_a_single_file(tmp_path):
    save_random_model(CONFIGS["llama"], tmp_path / "single")
    save_random_model(CONFIGS["llama"], tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "single").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_equal(weights(tmp_path / "sharded"), weights(tmp_path / "single"))


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """A folder with the files of DialoGPT on the hub: GPT-2 weights, vocab.json and merges.txt, no tokenizer.json."""
    folder = tmp_path / "dialogue"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Does money buy happiness? Depends on how much you spend. 你好 😀"] * 4, trainer)
    sizes = {**GPT2_SIZES, "vocab_size": backend.get_vocab_size()}
    save_random_model(GPT2Config(**sizes), folder)
    backend.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 128}))
    return folder


CHAT = """
import asyncio, json, sys
from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams, RequestOutputKind

llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], dtype="float32", device="cpu"))
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

async def main():
    outputs = [output async for output in llm.generate("Does money buy happiness? 😀", params)]
    print(json.dumps({
        "prompt": outputs[0].prompt_token_ids,
        "pieces": [output.outputs[0].text for output in outputs],
        "answer": [token for output in outputs for token in output.outputs[0].token_ids],
        "torch": "torch" in sys.modules,
    }))

asyncio.run(main())
llm.shutdown()
"""


def chat(folder: Path, cache: Path):
    """Run `CHAT` in a process; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "VLLM_MP_CACHE": str(cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_folder_with_vocabulary_and_merges_streams_text_without_torch_in_the_client(chat_folder, tmp_path):
    result = chat(chat_folder, tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    assert not result["torch"]
    assert result["prompt"] == tokenizer("Does money buy happiness? 😀").input_ids
    assert len(result["pieces"]) > 1
    assert "".join(result["pieces"]) == tokenizer.decode(result["answer"], skip_special_tokens=True)
