"""The outputs that transformers' model and a request's parameters require, by code independent of the engine."""

import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from vllm_mp import SamplingParams
from vllm_mp.core.worker.sampling.random_numbers import uniform_draws
from vllm_mp.testing.differential.cases import MAX_MODEL_LEN
from vllm_mp.testing.differential.playing import FinalCompletion

TIE = 1e-4
"""The greatest distance from the right choice that is excused, in logits or in probability."""

Logits = npt.NDArray[np.float64]


class End(NamedTuple):
    """How a completion ends."""

    num_tokens: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class Reference:
    """Transformers' model with a tokenizer and the ids of the end-of-sequence tokens."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._exact_model: torch.nn.Module | None = None
        self._eos = eos_token_ids
        own = tokenizer.eos_token_id
        self._unnamed_eos = next(iter(eos_token_ids), None) if own is None else own
        self._known: tuple[list[int], Logits] = ([], np.zeros((0, 0)))

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Logits:
        """Return the logits after each of `ids`, [num_tokens, vocab_size]."""
        known, logits = self._known
        if known[: len(ids)] != ids:
            logits = self._model(torch.tensor([ids])).logits[0].double().numpy()
            self._known = ids, logits
        return logits[: len(ids)]

    def logprob(self, completion: FinalCompletion, place: int) -> tuple[int, float]:
        """Return the token at `place` of prompt and output, and its log-probability after the tokens before it."""
        ids = completion.prompt_token_ids + completion.token_ids
        logits = self.logits(ids)[place - 1]
        return ids[place], float(logits[ids[place]] - np.logaddexp.reduce(logits))

    def distribution(self, completion: FinalCompletion, place: int) -> Logits:
        """Return the log-probabilities [vocab_size] of the token at `place` of prompt and output."""
        logits = self.logits(completion.prompt_token_ids + completion.token_ids)[place - 1]
        return np.asarray(logits - np.logaddexp.reduce(logits))

    def is_rounding(self, completion: FinalCompletion, place: int, token: int, *values: float) -> bool:
        """Return whether all `values`, said to be the log-probability of `token`, differ from it by rounding only.

        The truth is the log-probability in float64. Rounding is measured as the difference that a batch of two makes in
        float32. The first tokens of some models have activations so large that rounding shows in the fourth digit.
        """
        if self._exact_model is None:
            self._exact_model = copy.deepcopy(self._model).double()
        ids = (completion.prompt_token_ids + completion.token_ids)[:place]
        with torch.inference_mode():
            exact = self._exact_model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            batched = self._model(torch.tensor([ids, ids[::-1]])).logits[0, -1].double().log_softmax(-1)
        rounding = max(TIE, float((batched - exact).abs().max()))
        return all(abs(value - float(exact[token])) <= rounding for value in values)

    def distance(
        self, params: SamplingParams, prompt: list[int], output: list[int], token: int, logits: Logits
    ) -> float:
        """Return how far `token` is from being the right choice after `prompt` and `output`, given its `logits`.

        The distance is in logits if the choice is greedy, else in probability relative to what is left to draw from. A
        filter may keep or drop a token that is within `TIE` of its border.
        """
        values = self._processed(params, prompt, output, logits)
        if params.temperature == 0:
            return float(values.max() - values[token])
        assert params.seed is not None
        position = np.array([len(output)])
        uniform = float(uniform_draws(np.array([params.seed % 2**64], np.uint64), position)[0])
        slack = TIE / min(1.0, params.temperature)
        distance = np.inf
        for leeway in (0.0, slack, -slack):
            if distance <= TIE:
                break
            kept = self._filtered(params, values, leeway)
            if kept[token] == 0:
                continue
            cumulative = kept.cumsum() / kept.sum()
            low, high = cumulative[token] - kept[token] / kept.sum(), cumulative[token]
            distance = min(distance, max(low - uniform, uniform - high, 0.0) * min(1.0, params.temperature))
        return distance

    def _processed(self, params: SamplingParams, prompt: list[int], output: list[int], logits: Logits) -> Logits:
        """Return `logits` [vocab_size] after allowed tokens, bad words, biases and penalties, by their definitions."""
        values = logits.copy()
        if params.allowed_token_ids is not None:
            barred = np.ones(len(values), bool)
            barred[params.allowed_token_ids] = False
            values[barred] = -np.inf
        if len(output) < params.min_tokens:
            values[params.stop_token_ids or []] = -np.inf
            if not params.ignore_eos:
                values[self._eos] = -np.inf
        for word in params.bad_words or []:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer(spelling, add_special_tokens=False).input_ids
                if ids and output[len(output) - len(ids) + 1 :] == ids[:-1] and len(output) >= len(ids) - 1:
                    values[ids[-1]] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            values[token] += bias
        for token in {*prompt, *output}:
            value = values[token]
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            count = output.count(token)
            values[token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        return values

    def _filtered(self, params: SamplingParams, values: Logits, leeway: float) -> Logits:
        """Return weights [vocab_size]: 0 for the tokens that a filter drops when its border is moved by `leeway`."""
        scaled = (values - values.max()) / params.temperature
        if params.typical_p < 1:
            share = np.exp(scaled) / np.exp(scaled).sum()
            surprise = np.log(np.exp(scaled).sum()) - scaled
            distance = np.abs(surprise - (share * np.where(share > 0, surprise, 0)).sum())
            order = np.argsort(distance, kind="stable")
            last = int(np.searchsorted(np.cumsum(share[order]), params.typical_p + leeway))
            scaled[distance > distance[order[min(last, len(order) - 1)]] + leeway] = -np.inf
        highest = int(scaled.argmax())
        scaled -= scaled[highest]
        if params.min_p > 0:
            scaled[scaled < np.log(params.min_p) - leeway] = -np.inf
        if 0 < params.top_k < len(scaled):
            scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k] - leeway] = -np.inf
        scaled[highest] = 0.0  # neither min-p nor top-k drops the most likely token
        weights: Logits = np.exp(scaled)
        if params.top_p < 1:
            order = np.argsort(-scaled, kind="stable")
            before = np.cumsum(weights[order]) / weights.sum() - weights[order] / weights.sum()
            barred = order[before >= params.top_p + leeway]
            weights[barred[barred != highest]] = 0
        return weights

    def end_overrun(self, params: SamplingParams, completion: FinalCompletion) -> str | None:
        """Return a message if the output goes on after a stop token or is longer than allowed."""
        ids, limit = completion.token_ids, _max_output_tokens(params, completion)
        early = [i for i, token in enumerate(ids[:-1]) if token in self._stop_ids(params)]
        if early or len(ids) > limit:
            return f"{len(ids)} tokens where at most {limit} are allowed, stop tokens at {early}"
        return None

    def end(self, params: SamplingParams, completion: FinalCompletion) -> End | None:
        """Return the end that the tokens of a completion require.

        None if it cannot be told, because a character begins in the prompt or the bytes of the text are broken.
        """
        ids, stop_ids = completion.token_ids, self._stop_ids(params)
        text = self._decode(params, ids) if params.detokenize else ""
        if "\ufffd" in text or "\ufffd" in self._tokenizer.decode(completion.prompt_token_ids[-4:]):
            return None
        found = self._stop_string(params, ids, stop_ids)
        if found is not None:
            count, text, stop = found
            return End(count, text + (stop if params.include_stop_str_in_output else ""), "stop", stop)
        if ids and ids[-1] in stop_ids and len(ids) >= params.min_tokens:
            if params.detokenize and not params.include_stop_str_in_output:
                text = self._decode(params, ids[:-1])
            by_eos = not params.ignore_eos and ids[-1] in self._eos
            return End(len(ids), text, "stop", None if by_eos and ids[-1] == self._unnamed_eos else ids[-1])
        return End(_max_output_tokens(params, completion), text, "length", None)

    def _stop_string(self, params: SamplingParams, ids: list[int], stop_ids: set[int]) -> tuple[int, str, str] | None:
        """Return the number of tokens up to the first stop string, the text before it, and the stop string."""
        fixed = self._decode(params, ids[: params.min_tokens]).rstrip("\ufffd")
        for count in range(params.min_tokens + 1, len(ids) + 1):
            if count == len(ids) and not params.include_stop_str_in_output and ids[-1] in stop_ids:
                return None
            text = self._decode(params, ids[:count]).rstrip("\ufffd")
            # A stop string may begin within min_tokens, but it must end after them.
            places = {stop: text.find(stop, max(len(fixed) - len(stop) + 1, 0)) for stop in params.stop or ()}
            ends = {stop: start + len(stop) for stop, start in places.items() if start >= 0}
            if ends:
                stop = min(ends, key=ends.__getitem__)
                return count, text[: places[stop]], stop
        return None

    def _decode(self, params: SamplingParams, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))

    def _stop_ids(self, params: SamplingParams) -> set[int]:
        return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos)}


def _max_output_tokens(params: SamplingParams, completion: FinalCompletion) -> int:
    room = MAX_MODEL_LEN - len(completion.prompt_token_ids)
    return room if params.max_tokens is None else min(room, params.max_tokens)
