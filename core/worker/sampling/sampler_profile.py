"""The largest draw that a step can make, to measure its memory."""

from typing import Any

import numpy as np
import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.kernels import ops
from vllm_mp.kernels.reference import MASK_WORD
from vllm_mp.requests.sampling_params import SamplingParams


def profile_sampler(config: VllmConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Sample as many tokens as a step can choose, each with every filter on, beside their log-probabilities.

    A step chooses one for each row, and one after each draft. This runs the sampler itself over all of
    `SAMPLING_FILTERS`, so it allocates as much as any step can allocate. Kernels that only some steps launch are
    compiled.
    """
    num_rows = config.scheduler_config.max_num_seqs
    if config.speculative_config is not None:
        num_rows += config.speculative_config.max_step_drafts
    all_filters: dict[str, Any] = {
        sampling_filter.name: sampling_filter.trial for sampling_filter in ops.SAMPLING_FILTERS
    }
    params = SamplingParams(temperature=0.5, seed=0, min_tokens=1, **all_filters)
    batch = Batch(num_rows, 1, config.cache_config.block_size, [])
    for slot in range(num_rows):
        request = Request(0, slot, "profile", params, np.zeros(1, np.int32), 1, 2, (0, slot))
        batch.add(request, np.zeros(0, np.int32))
    logits = torch.zeros((num_rows, config.model_config.architecture.vocab_size), dtype=dtype, device=device)
    kept = logits.clone()  # a step with log-probabilities makes them after the draw, which may overwrite the logits
    # Only steps with constrained rows launch the kernel for masks; the first of them must not wait for its compilation.
    masks = torch.full((num_rows, -(-logits.shape[1] // MASK_WORD)), -1, dtype=torch.int32, device=device)
    ops.apply_token_masks(logits, masks, torch.arange(num_rows, device=device))
    tokens = Sampler(batch, device).sample(logits, batch.order)
    ops.logprobs(kept, tokens.clamp(min=0), 1)
