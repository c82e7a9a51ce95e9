"""Logits processors that engines in tests register."""

import time
from typing import ClassVar

import torch

from vllm_mp.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates


class Target(LogitsProcessor):
    """Allows one token alone, for requests with the argument "target"."""

    @classmethod
    def validate_params(cls, sampling_params):
        target = (sampling_params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target must be a token id, got {target!r}")

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.model_config.get_vocab_size() > 0
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(
            self.targets, batch_update, lambda params, prompt, output: (params.extra_args or {}).get("target")
        )

    def apply(self, logits):
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = -torch.inf
            logits[row, target] = kept
        return logits


class CountUp(AdapterLogitsProcessor):
    """Makes each output token the sum of the prompt's last token, the number of output tokens so far and "step"."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        step = (params.extra_args or {}).get("step", 0)

        def count(prompt, output, logits):
            start = prompt[-1] if prompt is not None else 0
            assert output == [(start + i + step) % len(logits) for i in range(len(output))], "tokens are missing"
            changed = torch.full_like(logits, -torch.inf)
            changed[(start + len(output) + step) % len(logits)] = 1.0
            return changed

        return count


class Narrow(LogitsProcessor):
    """Keeps the two most likely tokens of a row, and notes the rows that it sees."""

    seen: ClassVar[list] = []

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        self.seen.append(logits.clone())
        return logits.masked_fill(logits < logits.topk(2).values[:, 1:], -torch.inf)


class Faulty(LogitsProcessor):
    """Fails as the argument "fault" of a request says, for the whole batch of the request."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.faults = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(
            self.faults, batch_update, lambda params, prompt, output: (params.extra_args or {}).get("fault")
        )
        if "update" in self.faults.values():
            raise RuntimeError("a fault in the update")

    def apply(self, logits):
        faults = set(self.faults.values())
        if "raise" in faults:
            raise RuntimeError("a fault in the step")
        if "shape" in faults:
            return logits[:, :-1]
        if "type" in faults:
            return logits.tolist()
        if "block" in faults:
            time.sleep(1e6)
        for row, fault in self.faults.items():
            if fault in ("nan", "inf"):
                logits[row, 3] = float(fault)
        return logits


class Broken(LogitsProcessor):
    """Cannot be constructed."""

    def __init__(self, vllm_config, device, is_pin_memory):
        raise OSError("no table")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits
