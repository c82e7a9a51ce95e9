"""Answers of an engine whose ranks share a model, and their comparison with answers of one process."""

import contextlib

import numpy as np
import pytest

from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker import step_inputs as repeated_inputs
from vllm_mp.core.worker.step_message import StepEncoder
from vllm_mp.testing.random_models import random_prompts

PROMPTS = random_prompts((40, 5, 33, 12, 1, 20))
NUM_TOKENS = 10
SCARCE = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 6, "max_num_partial_prefills": 2}
"""Options under which prompts take several steps, some of them beside decodes."""
NEAR_TIE = 1e-3


def answers(engine, prompts=PROMPTS, num_tokens=NUM_TOKENS, **params):
    """Return (tokens, log-probabilities of the two best tokens of each) of all prompts."""
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, num_tokens, num_logprobs=2, **params)
    engine.run()
    return [(engine.tokens[slot], engine.logprobs[slot]) for slot in range(len(prompts))]


def assert_near(found, expected, near_tie=NEAR_TIE):
    """Raise AssertionError unless tokens and log-probabilities are equal up to the first near-tie of the two best."""
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(found, expected, strict=True):
        assert len(tokens) == len(wanted_tokens) == len(logprobs)
        steps = zip(tokens, wanted_tokens, logprobs, wanted_logprobs, strict=True)
        for token, wanted_token, (_, values), (_, wanted_values) in steps:
            own, wanted = (np.frombuffer(packed, np.float32) for packed in (values, wanted_values))
            np.testing.assert_allclose(own[1:], wanted[1:], rtol=0, atol=near_tie)
            if token != wanted_token:
                assert wanted[1] - wanted[2] < near_tie, "the tokens differ where no other token comes close"
                break


def answers_with_slot(engine, slot):
    """Return the answers of requests that use the adapter in `slot`."""
    with adapter_slot(slot):
        return answers(engine)


@contextlib.contextmanager
def adapter_slot(slot):
    """Let all steps in the block use the adapter in `slot`."""
    encode, lay_out = StepEncoder.encode, model_runner.step_inputs

    def in_message(self, step, batch, *args):
        with slots(batch):
            return encode(self, step, batch, *args)

    def in_inputs(step, batch, *args):
        with slots(batch):
            return lay_out(step, batch, *args)

    @contextlib.contextmanager
    def slots(batch):
        own = batch.adapter_slot
        batch.adapter_slot = np.full_like(own, slot)
        yield
        batch.adapter_slot = own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepEncoder, "encode", in_message)
        for module in (model_runner, repeated_inputs):
            patch.setattr(module, "step_inputs", in_inputs)
        yield


class Poison:
    """A model whose results are not finite for the first step of more than 6 tokens, until it is repeated."""

    def __init__(self, model):
        self._model = model
        self.strikes = True

    def __call__(self, *args):
        hidden = self._model(*args)
        if self.strikes and len(hidden) > 6:
            self.strikes = False
            hidden = hidden * float("nan")
        return hidden

    def __getattr__(self, name):
        return getattr(self._model, name)
