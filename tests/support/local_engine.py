"""A scheduler and a model in this process: the work of a core, without clients."""

import numpy as np
import torch

from vllm_mp import AsyncEngineArgs, PoolingParams, SamplingParams
from vllm_mp.core.collectives.group import ALONE
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.cache.block_pool import root_hash
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.invariants import check_invariants
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.worker.device import choose_step_size
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.testing.random_models import save_config

OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 40,
    "max_prefill_slowdown": 0.0,  # the steps are the same in each run, however long they take
    "block_size": 4,
    "kv_cache_memory_bytes": 2**22,
}


def dummy_args(config, folder, block_size):
    """Return the arguments of a small engine on a CPU with random weights; `folder` gets the model's configuration."""
    return AsyncEngineArgs(
        str(save_config(config, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        block_size=block_size,
        kv_cache_memory_bytes=2**22,
    )


class LocalEngine:
    """Runs requests, and keeps their tokens, log-probabilities and vectors by slot."""

    def __init__(
        self,
        folder,
        device="cpu",
        make_capture=None,
        beat=lambda: None,
        group=ALONE,
        leader=None,
        pipeline=None,
        captures_late=False,
        **options,
    ):
        """`group`, `leader`, `pipeline` and `captures_late` as for `ModelRunner`."""
        self.config = config = self.make_config(folder, device, **options)
        self.device = torch.device(device)
        dtype = getattr(torch, config.model_config.dtype)
        self.runner = ModelRunner(
            config,
            self.device,
            dtype,
            beat=beat,
            make_capture=make_capture,
            group=group,
            leader=leader,
            pipeline=pipeline,
            captures_late=captures_late,
        )
        scheduler, cache = config.scheduler_config, config.cache_config
        model = config.model_config
        has_rope_positions = model.architecture.has_rope_positions
        self.batch = Batch(scheduler.max_num_seqs, model.max_model_len, cache.block_size, [], has_rope_positions)
        kv_cache = KVCacheManager(self.batch, cache.num_blocks, cache.block_size)
        self.pool = kv_cache.pool
        num_stages = config.parallel_config.pipeline_parallel_size
        self.max_drafts = 0
        """Maximum number of drafts of the requests that are added from now on."""
        if (speculation := config.speculative_config) is not None:
            self.max_drafts = speculation.num_speculative_tokens
        self.scheduler = Scheduler(
            scheduler,
            self.batch,
            kv_cache,
            num_stages=num_stages,
            speculation=speculation,
            draft_model=self.runner.draft,
        )
        self.sampler = Sampler(self.batch, self.device)
        self.num_ahead = max(int(bool(scheduler.async_scheduling)), num_stages - 1)
        self.num_launched = 0
        self.tokens = {}
        self.logprobs = {}
        self.vectors = {}
        self.ends = {}

    @staticmethod
    def make_config(folder, device="cpu", **options):
        """Return the configuration of an engine with `options` on top of `OPTIONS`."""
        config = AsyncEngineArgs(str(folder), device=device, **{**OPTIONS, **options}).create_engine_config()
        choose_step_size(config, torch.device(device))
        return config

    def add(
        self,
        slot,
        prompt,
        max_tokens,
        num_logprobs=1,
        embeds=None,
        constrained=None,
        output=(),
        num_prompt_logprobs=-1,
        bad_words=(),
        priority=0,
        **params,
    ):
        """Add a request that continues after `output`, and whose output is `constrained`.

        `bad_words` are lists of token ids.
        `embeds`, float32 [num_tokens, hidden_size], takes the place of `prompt`.
        """
        packed = None
        if embeds is not None:
            packed, prompt = PromptEmbeds("float32", len(embeds), embeds.numpy().tobytes()), [0] * len(embeds)
        tokens = np.array([*prompt, *output], np.int32)
        made = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0, "seed": slot, **params})
        self.tokens[slot], self.logprobs[slot] = [], []
        self.scheduler.add(
            Request(
                0,
                slot,
                str(slot),
                made,
                tokens,
                len(prompt),
                len(prompt) + max_tokens,
                self.scheduler.order_of(priority),
                hashes=[root_hash("")],
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                prompt_embeds=packed,
                constrained=constrained,
                logits_processors=LogitsProcessors.from_params(made, bad_words),
                max_drafts=self.max_drafts,
            )
        )

    def encode(self, slot, prompt, **params):
        """Add a request for a vector of the token ids `prompt`."""
        tokens, order = np.array(prompt, np.int32), self.scheduler.order_of(0)
        made = PoolingParams(**{"pooling_type": "mean", "normalize": False, **params})
        self.scheduler.add(Request(0, slot, str(slot), made, tokens, len(tokens), len(tokens), order))

    def step(self):
        """Run the core's loop once; return the step that was launched, or None."""
        step = self.scheduler.schedule()
        if step is not None:
            self.num_launched += 1
            output = self.runner.launch(step, self.batch, self.sampler)
            self.scheduler.launched(step, output, self.num_launched)
            if step.samples_after_update:
                self.process_all_but(1)
            output.sample()
        pending = self.scheduler.pending_steps
        self.process_all_but(self.num_ahead if step is not None else max(0, len(pending) - 1))
        check_invariants(self.scheduler)
        return step

    def process_all_but(self, count):
        """Process the pending steps except the last `count`."""
        while len(self.scheduler.pending_steps) > count:
            output = self.scheduler.pending_steps.oldest.output.wait()
            update = self.scheduler.update(output)
            self.ends |= {end.slot: end for _, end in update.finished}
            self.vectors |= {slot: vector for _, slot, vector in update.vectors}
            for slot, token in zip(update.slots.tolist(), update.tokens.tolist(), strict=True):
                self.tokens[slot].append(token)
            for _, message in output.logprobs:
                size = len(message.token_ids) // (len(message.ranks) // 4)
                for at in range(0, len(message.token_ids), size):
                    columns = message.token_ids[at : at + size], message.values[at : at + size]
                    self.logprobs[message.slot].append(columns)

    def run(self):
        while self.scheduler.has_work or self.scheduler.pending_steps:
            self.step()
