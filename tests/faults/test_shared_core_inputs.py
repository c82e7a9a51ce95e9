"""Clients of a shared core give it embeddings, and use the logits processors that its operator has registered."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from vllm_mp import AsyncLLM, SamplingParams
from vllm_mp.testing.engines import answer, greedy, rest, standalone_core
from vllm_mp.testing.random_models import CONFIGS, SIZES, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("forked_programs")

FLAGS = ("--skip-tokenizer-init", "--max-model-len", "128", "--num-threads", "1", "--scheduling-policy", "priority")
NAMED = ("--enable-prompt-embeds", "--logits-processors", "count=support.logits_processors:CountUp")
PROMPTS = random_prompts((40, 12))


@pytest.mark.slow
def test_embeddings_and_processors_of_plain_clients_survive_the_death_of_a_shared_core(tmp_path, monkeypatch):
    table = save_random_model(CONFIGS["llama"], tmp_path / "model").get_input_embeddings().weight.detach()
    address = f"ipc://{tmp_path}/core.sock"
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with standalone_core(tmp_path / "model", address, *FLAGS, *NAMED):
        clients = [AsyncLLM.connect(address) for _ in range(2)]

        async def run():
            expected = (await answer(clients[0], PROMPTS[0], greedy(80, ignore_eos=True))).outputs[0].token_ids
            embeds = {"prompt_embeds": table[torch.tensor(PROMPTS[0])]}
            params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
            stream = clients[0].generate(embeds, params, priority=5)
            counted = SamplingParams(max_tokens=80, ignore_eos=True, logits_processors=["count"])
            other = clients[1].generate(PROMPTS[1], counted)
            await asyncio.gather(anext(stream), anext(other))
            before = await clients[1].core_status()
            os.kill(before["pid"], signal.SIGKILL)
            found, counts = await asyncio.gather(rest(stream), rest(other))
            assert (await clients[0].core_status())["incarnation"] > before["incarnation"]
            assert found.token_ids == expected
            assert counts.token_ids == [(PROMPTS[1][-1] + i) % SIZES["vocab_size"] for i in range(80)]

        asyncio.run(run())
        for client in clients:
            client.shutdown()
