"""A core's scheduler, model and sampler on a fake CUDA device, with requests that use all of them."""

import contextlib
import json

import numpy as np
import torch

from support.local_engine import OPTIONS, LocalEngine
from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker.device import prepare_device
from vllm_mp.core.worker.memory.sleep import Sleep
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.fake_cuda import fake_cuda, watch_steps
from vllm_mp.testing.random_models import random_prompts

PROMPTS = random_prompts((9, 30, 7, 12, 5, 26, 1, 8))
PARAMS = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.1, "num_logprobs": 5, "num_prompt_logprobs": 2},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
    {"temperature": 0.7, "typical_p": 0.5},
    {"min_tokens": 3, "stop_token_ids": [4], "allowed_token_ids": [0, 4, 7]},
    {"temperature": 2.0},
    {},
)
"""Of the requests: every sampling filter and every kind of logits processor."""
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
NUM_BLOCKS = 17
"""The blocks of a cache that is too small for all requests at a time."""


class ZeroGrammar:
    """A grammar, and its matcher, that allows any number of zeros, the token that the fake device samples."""

    num_words = 0  # another number than that of the masks: threads of the library cannot fill them

    def matcher(self):
        return self

    def accept(self, tokens):
        assert not any(tokens)

    def fill(self, mask):
        mask[:] = 0
        mask[0] = 1 | 1 << 5

    def fill_ahead(self, drafts, masks):
        for mask in masks:
            self.fill(mask)

    def num_allowed(self, tokens):
        return len(tokens)

    def forced(self):
        return []


def constrained():
    output = ConstrainedOutput(Constraint("grammar", "a stand-in"), may_force=False)
    output.begin(ZeroGrammar())
    return output


class FakeCudaEngine(LocalEngine):
    """A `LocalEngine` on a fake device, which it prepares as a core does."""

    @staticmethod
    def make_config(folder, device="cuda", has_few_blocks=False, **options):
        if has_few_blocks:
            arch = read_architecture(json.loads((folder / "config.json").read_text()))
            size = 1 if options.get("kv_cache_dtype") == "fp8" else getattr(torch, options["dtype"]).itemsize
            options["kv_cache_memory_bytes"] = (NUM_BLOCKS + 1) * OPTIONS["block_size"] * arch.kv_bytes_per_token(size)
        config = LocalEngine.make_config(folder, device, load_format="dummy", num_threads=1, **options)
        *_, num_threads = prepare_device(config)
        torch.set_num_threads(num_threads)
        return config

    @property
    def num_graphs(self):
        graphs = self.runner.memory.graphs
        return graphs and graphs.num_graphs

    def step(self):
        """Capture a graph that is missing, if it is time, as a core does; then run the core's loop once."""
        late = self.runner.memory.late_captures
        if late is not None and late.is_due(is_idle=False):
            self.process_all_but(0)
            late.capture_next()
        return super().step()

    def run(self):
        super().run()
        late = self.runner.memory.late_captures
        while late is not None and late.is_due(is_idle=True):
            late.capture_next()

    def play(self, num_tokens=8):
        """Compute requests that begin and end at different steps, the last of them for embeddings.

        Each makes `num_tokens` tokens, or up to 15 more.
        """
        hidden_size = self.config.model_config.architecture.hidden_size
        for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            masks = constrained() if slot % 4 == 0 else None
            embeds = torch.zeros(len(prompt), hidden_size) if slot == len(PROMPTS) - 1 else None
            self.add(slot, prompt, num_tokens + 7 * slot % 17, constrained=masks, embeds=embeds, **params)
            self.step()
            if slot % 2:
                self.step()
        self.run()
        assert all(set(tokens) == {0} for tokens in self.tokens.values()), "the host read what was not there yet"
        assert self.pool.num_free == self.pool.num_blocks

    def encode_prompts(self):
        for slot, prompt in enumerate(PROMPTS):
            self.encode(slot, prompt)
        self.run()
        assert set(self.vectors) == set(range(len(PROMPTS)))

    def sleep_and_wake_up(self, level):
        sleep = Sleep(self.scheduler, self.runner.released_memory, lambda _: None, lambda _: None)
        for call in (sleep.sleep(level), sleep.wake_up()):
            while self.scheduler.pending_steps:
                self.process_all_but(0)
            sleep.settle()
            call.result(0)


def use_adapters(engine, folder, patch):
    """Give every other row one of two adapters."""
    arch = engine.config.model_config.architecture
    dtype = getattr(torch, engine.config.model_config.dtype)
    for slot in range(2):
        path = save_adapter(folder / f"adapter-{slot}", adapter_tensors(arch, 8, seed=slot), r=8)
        engine.runner.load_adapter(slot, read_adapter(path, arch, dtype, 8))

    def with_slots(step, batch, block_size, to_device):
        ids, positions, metadata = step_inputs(step, batch, block_size, to_device)
        of_rows = np.array([row % 4 // 2 if row % 2 else -1 for row in step.rows], np.int32)
        if of_rows.max() >= 0:
            (of_tokens,) = to_device([np.repeat(of_rows, step.counts)])
            metadata = metadata._replace(adapter_slots=of_tokens)
        return ids, positions, metadata

    patch.setattr(model_runner, "step_inputs", with_slots)


@contextlib.contextmanager
def engine_on_fake_cuda(folder, capability=(9, 0), **options):
    """Yield a started engine and its device, which notes what steps in the block do."""
    with fake_cuda(capability) as device:
        engine = FakeCudaEngine(folder, device="cuda", captures_late=True, **options)
        may_wait = getattr(engine.config.model_config.architecture, "experts", None) is not None
        with watch_steps(device, may_wait=may_wait):
            yield engine, device
