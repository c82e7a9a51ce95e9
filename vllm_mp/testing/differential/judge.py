"""Compare completions with each other and with the reference, and note every difference that is not a near-tie."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from vllm_mp import SamplingParams
from vllm_mp.testing.differential.cases import Case
from vllm_mp.testing.differential.playing import MAX_STEP_TOKENS, FinalCompletion, Outcome
from vllm_mp.testing.differential.reference import TIE, End, Reference


class Difference(NamedTuple):
    """Something wrong with a completion of `case`."""

    case: Case
    completion_index: int
    what: str


class Judge:
    """Compares outcomes with each other, and with transformers' model."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]) -> None:
        self.counts: Counter[str] = Counter()
        """What was compared, and how often."""
        self.differences: list[Difference] = []
        self._reference = Reference(model, tokenizer, eos_token_ids)

    def compare(self, case: Case, together: Outcome, lone: Outcome) -> None:
        """Note how the outcome together with other cases differs from the lone outcome."""
        self.counts["requests"] += 1
        if isinstance(together, str) or isinstance(lone, str):
            self.counts["refused"] += 1
            if _error_type(together) != _error_type(lone):
                self._note(case, 0, f"{_shown(together)} together, {_shown(lone)} alone")
            return
        first = together[0]
        self.counts["prompts found in the cache"] += first.num_cached_tokens > 0
        num_computed = len(first.prompt_token_ids) - first.num_cached_tokens
        self.counts["prompts computed in chunks"] += num_computed > MAX_STEP_TOKENS
        for index, (mine, theirs) in enumerate(zip(together, lone, strict=True)):
            self.counts["completions"] += 1
            if mine.prompt_token_ids != theirs.prompt_token_ids:
                self._note(case, index, "other prompt tokens")
                continue
            if self._tokens_agree(case, index, mine, theirs):
                self._compare_ends(case, index, mine, theirs)
            if mine.prompt_logprobs is not None or theirs.prompt_logprobs is not None:
                self.counts["prompts with logprobs"] += 1
                if mine.finish_reason != "abort" or mine.prompt_logprobs is None:
                    self._compare_logprobs(
                        case, index, "prompt_logprobs", mine.prompt_logprobs, theirs.prompt_logprobs, mine
                    )

    def verify(self, case: Case, lone: Outcome) -> None:
        """Note where lone completions differ from what transformers' logits and the parameters of the case require."""
        if isinstance(lone, str):
            return
        for index, completion in enumerate(lone):
            self.counts["completions verified"] += 1
            params = _params(case, index)
            self._verify_tokens(case, index, params, completion)
            self._verify_prompt_logprobs(case, index, completion)
            self._verify_end(case, index, params, completion)

    def _note(self, case: Case, index: int, what: str) -> None:
        self.differences.append(Difference(case, index, what))

    def _tokens_agree(self, case: Case, index: int, mine: FinalCompletion, theirs: FinalCompletion) -> bool:
        """Return whether the tokens are the same; if they differ, note it unless a tie is shown."""
        ids, lone_ids = mine.token_ids, theirs.token_ids
        if mine.finish_reason == "abort":
            lone_ids = lone_ids[: len(ids)]
        self.counts["tokens"] += len(ids)
        if ids == lone_ids:
            return True
        common = next((i for i, (a, b) in enumerate(zip(ids, lone_ids, strict=False)) if a != b), None)
        if common is None:
            self._note(case, index, f"{len(ids)} tokens ({mine.finish_reason}), alone {len(lone_ids)}")
            return False
        params, prompt = _params(case, index), mine.prompt_token_ids
        logits = self._reference.logits(prompt + ids[:common])[-1]
        distances = [
            self._reference.distance(params, prompt, ids[:common], tokens[common], logits) for tokens in (ids, lone_ids)
        ]
        if max(distances) <= TIE:
            self.counts["shown ties"] += 1
        else:
            self._note(
                case,
                index,
                f"token {common} is {ids[common]} ({distances[0]:.2e} from being right), alone {lone_ids[common]} "
                f"({distances[1]:.2e})",
            )
        return False

    def _compare_ends(self, case: Case, index: int, mine: FinalCompletion, theirs: FinalCompletion) -> None:
        if mine.finish_reason == "abort":
            self.counts["aborted"] += 1
            whole = theirs.text + (theirs.stop_reason if isinstance(theirs.stop_reason, str) else "")
            if not whole.startswith(mine.text.rstrip("\ufffd")):
                self._note(case, index, f"aborted with text {mine.text!r}, alone {theirs.text!r}")
        else:
            if mine.text != theirs.text:
                self._note(case, index, f"text {mine.text!r}, alone {theirs.text!r}")
            self.counts["texts"] += 1
            ends = (mine.finish_reason, mine.stop_reason), (theirs.finish_reason, theirs.stop_reason)
            by_string = " string" if isinstance(mine.stop_reason, str) else ""
            self.counts[f"ended by {mine.finish_reason}{by_string}"] += 1
            if ends[0] != ends[1]:
                self._note(case, index, f"end {ends[0]}, alone {ends[1]}")
        if mine.logprobs is None and theirs.logprobs is None:
            return
        self.counts["completions with logprobs"] += 1
        lone_logprobs = (theirs.logprobs or [])[: len(mine.token_ids)]
        self._compare_logprobs(case, index, "logprobs", mine.logprobs, lone_logprobs, mine)
        if mine.logprobs is not None and mine.token_ids:
            total = sum(entry[token].logprob for token, entry in zip(mine.token_ids, mine.logprobs, strict=False))
            if mine.cumulative_logprob is None or abs(mine.cumulative_logprob - total) > TIE:
                self._note(case, index, f"cumulative_logprob {mine.cumulative_logprob}, the sum is {total}")

    def _compare_logprobs(
        self, case: Case, index: int, name: str, mine: Any, theirs: Any, completion: FinalCompletion
    ) -> None:
        if mine is None or theirs is None or len(mine) != len(theirs):
            sizes = [None if entries is None else len(entries) for entries in (mine, theirs)]
            self._note(case, index, f"{name} at {sizes[0]} positions, alone at {sizes[1]}")
            return
        for position, (entry, lone) in enumerate(zip(mine, theirs, strict=True)):
            if entry is None and lone is None:
                continue
            self.counts["logprobs"] += len(entry)
            place = _place(completion, name, position)
            # If two tokens tie for the last place of the entry, either may have it.
            lowest = max(min(value.logprob for value in values.values()) for values in (entry, lone))
            for token in entry.keys() | lone.keys():
                a, b = entry.get(token), lone.get(token)
                if a is None or b is None:
                    wrong = abs((a or b).logprob - lowest) > TIE
                else:
                    wrong = a.decoded_token != b.decoded_token
                    if abs(a.logprob - b.logprob) > TIE:
                        wrong = wrong or not self._is_rounding(completion, place, token, a.logprob, b.logprob)
                    if a.rank != b.rank and not wrong:
                        # Tokens within a tie of this one may be ranked before or after it.
                        near = np.abs(self._reference.distribution(completion, place) - a.logprob) < TIE
                        wrong = near.sum() <= 1
                if wrong:
                    self._note(case, index, f"{name}[{position}][{token}] is {a}, alone {b}")
                    return

    def _is_rounding(self, completion: FinalCompletion, place: int, token: int, *values: float) -> bool:
        is_rounding = self._reference.is_rounding(completion, place, token, *values)
        self.counts["shown rounding"] += is_rounding
        return is_rounding

    def _verify_tokens(self, case: Case, index: int, params: SamplingParams, completion: FinalCompletion) -> None:
        prompt, ids = completion.prompt_token_ids, completion.token_ids
        logits = self._reference.logits(prompt + ids)[len(prompt) - 1 :]
        for position, token in enumerate(ids):
            self.counts["tokens verified"] += 1
            distance = self._reference.distance(params, prompt, ids[:position], token, logits[position])
            if distance > TIE:
                self._note(case, index, f"token {position} ({token}) is {distance:.2e} from being right")
                return
            if completion.logprobs is not None:
                self._verify_logprob(case, index, "logprobs", position, completion, completion.logprobs)

    def _verify_prompt_logprobs(self, case: Case, index: int, completion: FinalCompletion) -> None:
        entries, num_prompt_tokens = completion.prompt_logprobs, len(completion.prompt_token_ids)
        if entries is None:
            return
        if len(entries) != num_prompt_tokens:
            self._note(case, index, f"{len(entries)} prompt_logprobs for {num_prompt_tokens} tokens")
            return
        for position in range(1, num_prompt_tokens):
            if not self._verify_logprob(case, index, "prompt_logprobs", position, completion, entries):
                return

    def _verify_logprob(
        self, case: Case, index: int, name: str, position: int, completion: FinalCompletion, entries: Any
    ) -> bool:
        """Return whether the log-probability of the token at `position` is right; note it if it is not."""
        place = _place(completion, name, position)
        token, expected = self._reference.logprob(completion, place)
        value = entries[position][token].logprob
        if abs(value - expected) <= TIE or self._is_rounding(completion, place, token, value):
            return True
        self._note(case, index, f"{name}[{position}] of token {token} is {value}; expected {expected}")
        return False

    def _verify_end(self, case: Case, index: int, params: SamplingParams, completion: FinalCompletion) -> None:
        if what := self._reference.end_overrun(params, completion):
            self._note(case, index, what)
            return
        expected = self._reference.end(params, completion)
        if expected is None:
            return
        self.counts["ends verified"] += 1
        given = End(len(completion.token_ids), completion.text, completion.finish_reason, completion.stop_reason)
        if given != expected:
            self._note(case, index, f"{given}; expected {expected}")


def _params(case: Case, index: int) -> SamplingParams:
    """Return the parameters of completion `index` of `case`."""
    return SamplingParams(**{**case.params, "seed": case.params["seed"] + index, "n": 1})


def _place(completion: FinalCompletion, name: str, position: int) -> int:
    """Return the index in prompt and output of `position` in the completion's "logprobs" or "prompt_logprobs"."""
    return position + (len(completion.prompt_token_ids) if name == "logprobs" else 0)


def _error_type(outcome: Outcome) -> str:
    return outcome.partition(":")[0] if isinstance(outcome, str) else ""


def _shown(outcome: Outcome) -> str:
    return outcome if isinstance(outcome, str) else "completions"
