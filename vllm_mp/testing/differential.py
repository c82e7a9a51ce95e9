"""Random requests with random parameters, answered in company and alone, and held against transformers' logits.

An answer may depend on its prompt, its parameters and its seed, and on nothing else: not on the batch, the chunks in
which its prompt was read, preemption, what was found in the cache, or the kind of output. So `play` answers every case
twice, `in_company` of all others and `alone`, and `Judge` compares the two. A different token is excused only where
transformers' logits, under the same rules applied by other code, show that both tokens are within `TIE` of being the
right one, other log-probabilities only where both are as near the truth as transformers' own. The lone answers are held
against the same reference at every position.
"""

import asyncio
import copy
import dataclasses
import itertools
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from vllm_mp import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from vllm_mp.core.worker.sampler import uniform_draws
from vllm_mp.errors import EngineError
from vllm_mp.testing.engines import answer, eventually
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.random_models import save_random_model
from vllm_mp.testing.sampling_cases import FILTERS

TIE = 1e-4
"""In logits, and in probability: how near to another choice one has to be to be excused."""
MAX_MODEL_LEN = 320
CROWD, CROWD_LEN = 12, 40
"""So many requests write so many tokens each that the cache of `company`, with room for 336, cannot hold them."""
BUDGET = 96
"""Tokens a step, in company."""
ALONE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "enable_prefix_caching": False,
    "max_logprobs": -1,
}
"""Engine options under which a request meets nothing of any other."""
SMALL_MODEL = LlamaConfig(
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
)
"""Has the default model's vocabulary, so its tokenizer fits; with random weights its text is wild."""

_STOPS = (
    " ",
    "e",
    "s ",
    "e ",
    "th",
    "the",
    " a",
    "a",
    "n",
    "an",
    "ing",
    "in",
    "er",
    "r",
    "d c",
    "ed",
    ".",
    ", ",
    "\n",
    "の",
)
_BAD_WORDS = ("the", " and", "a", "New York", "is not", "\n", ".", "1", "の", "everything")
_BASES = tuple(
    text * (1 + 500 // len(text)) for text in ("The engine has two halves. ", "x, y; ", "Les 3 étés à 日本, ")
)

Logits = npt.NDArray[np.float64]


def company(bytes_per_token: int) -> dict[str, Any]:
    """Engine options under which requests share a cache that is too small for them, and read prompts in chunks."""
    block_size, num_blocks = 4, 84
    return {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 16,
        "max_num_partial_prefills": 3,
        "block_size": block_size,
        "kv_cache_memory_bytes": (num_blocks + 1) * block_size * bytes_per_token,
        "scheduling_policy": "priority",
        "stream_interval": 2,
        "max_logprobs": -1,
        "check_invariants": True,
    }


@dataclasses.dataclass
class Case:
    """One request, and how its consumer behaves."""

    prompt: Any
    params: dict[str, Any]
    kind: RequestOutputKind
    priority: int
    abort_after: int | None
    """Outputs after which the consumer aborts; None: never."""
    after: int
    """Other cases that have ended before it is sent; 0: it is there from the start."""

    def __str__(self) -> str:
        shown = self.prompt if isinstance(self.prompt, dict) else {"prompt": self.prompt}
        return f"{str(shown)[:300]} {self.params} {self.kind.name} abort_after={self.abort_after}"


class Answered(NamedTuple):
    """One answer, put together from whatever outputs it came in."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Any
    num_cached_tokens: int
    """Tokens of the prompt that were found in the cache."""


Outcome = list[Answered] | str
"""The answers to a case, or why it was refused."""


class Difference(NamedTuple):
    """Something that ought not to be, about answer `index` to `case`."""

    case: Case
    index: int
    what: str


def random_case(chance: random.Random, tokenizer: PreTrainedTokenizerBase, num_before: int) -> Case:
    """A request of any kind that is served, sent after at most `num_before` others have ended."""
    params: dict[str, Any] = {}

    def maybe(share: float, name: str, value: Any) -> None:
        if chance.random() < share:
            params[name] = value() if callable(value) else value

    def ids(most: int) -> list[int]:
        # Byte tokens and short words are the ones that come up.
        return [chance.randrange(chance.choice((300, 3000, 49152))) for _ in range(chance.randint(1, most))]

    params["temperature"] = 0.0 if chance.random() < 0.4 else chance.choice((0.05, 0.3, 0.7, 1.0, 1.5))
    params["seed"] = chance.choice((chance.randrange(100), chance.randrange(-(2**63), -1), chance.randrange(2**63)))
    params["max_tokens"] = chance.choice(
        (chance.randint(1, 2), chance.randint(3, 12), chance.randint(8, 48), chance.randint(32, 64))
    )
    maybe(0.3, "min_tokens", lambda: chance.randint(0, params["max_tokens"]))
    for name, values in FILTERS.items():
        maybe(0.3, name, lambda values=values: chance.choice(values))
    maybe(0.25, "repetition_penalty", lambda: chance.uniform(0.7, 1.8))
    maybe(0.25, "frequency_penalty", lambda: chance.uniform(-2, 2))
    maybe(0.25, "presence_penalty", lambda: chance.uniform(-2, 2))
    maybe(0.2, "logit_bias", lambda: {i: chance.uniform(-20, 20) for i in ids(20)})
    maybe(0.15, "allowed_token_ids", lambda: [*ids(40), *ids(3), 2])
    maybe(0.2, "bad_words", lambda: chance.sample(_BAD_WORDS, chance.randint(1, 5)))
    maybe(0.2, "stop_token_ids", lambda: ids(50))
    maybe(0.3, "ignore_eos", True)
    maybe(0.4, "logprobs", lambda: chance.choice((0, 1, 5, 20)))
    maybe(0.2, "prompt_logprobs", lambda: chance.choice((0, 1, 5)))
    maybe(0.1, "truncate_prompt_tokens", lambda: chance.choice((1, 5, 50, -1)))
    maybe(0.2, "skip_special_tokens", False)
    maybe(0.1, "spaces_between_special_tokens", False)
    maybe(0.4, "include_stop_str_in_output", True)
    if params["temperature"]:
        maybe(0.2, "n", lambda: chance.randint(2, 4))
    if chance.random() < 0.05:
        params["detokenize"] = False
    else:
        maybe(0.4, "stop", lambda: chance.sample(_STOPS, chance.randint(1, 4)))
    prompt, to_the_end = _random_prompt(chance, tokenizer)
    if to_the_end:
        params["max_tokens"] = chance.choice((None, 10**6))
        params["min_tokens"] = 0
    if chance.random() < 0.15:
        form = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        prompt = {form: prompt, "cache_salt": chance.choice("ab")}
    kind = chance.choice(tuple(RequestOutputKind))
    aborts = kind != RequestOutputKind.FINAL_ONLY and chance.random() < 0.1
    return Case(
        prompt,
        params,
        kind,
        chance.choice((0, 0, 0, -1, 1)),
        chance.randint(1, 6) if aborts else None,
        chance.choice((0, 0, chance.randint(0, num_before))),
    )


def _random_prompt(chance: random.Random, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, bool]:
    """A prompt, and whether it leaves little room for an answer."""
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(PROMPTS), False
    if kind < 0.6:
        base = chance.choice(_BASES)
        return base[: chance.choice((50, 100, 400))] + chance.choice(PROMPTS)[: chance.randint(0, 20)], False
    text = "".join(chance.sample(PROMPTS, 6)) * 4
    token_ids: list[int] = tokenizer(text).input_ids
    if kind < 0.65:
        return (token_ids * MAX_MODEL_LEN)[: MAX_MODEL_LEN - chance.randint(1, 12)], True
    start = chance.randrange(len(token_ids) - 1)
    if kind < 0.9:
        return token_ids[start : start + chance.randint(1, chance.choice((20, 60, 300)))], False
    return [chance.randrange(49152) for _ in range(chance.randint(1, 40))], False


def random_cases(seed: int, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """`count` cases that `seed` decides; none waits for more ends than there are cases before it.

    The first are a crowd: they are all there from the start, short and the most urgent, so the cache takes them all
    in, but cannot hold their answers, so some are preempted. One of them is aborted early in a long answer.
    """
    chance = random.Random(seed)
    cases = [random_case(chance, tokenizer, index) for index in range(count)]
    for case in cases[:CROWD]:
        case.prompt = [chance.randrange(49152) for _ in range(chance.randint(1, 8))]
        case.params |= {"max_tokens": CROWD_LEN, "min_tokens": CROWD_LEN}
        case.priority, case.after, case.abort_after = -2, 0, None
    for case in cases[:1]:
        case.params |= {"max_tokens": None, "min_tokens": 250}
        case.kind, case.abort_after = RequestOutputKind.DELTA, 1
    return cases


async def in_company(engine: AsyncLLM, cases: list[Case]) -> list[Outcome]:
    """What the engine answers to all cases together.

    Those that wait for no other come to an engine that is paused, which goes on when it has them all: how many meet
    does not depend on how fast the machine is.
    """
    num_ended, an_end = 0, asyncio.Condition()

    async def play_one(case: Case) -> Outcome:
        nonlocal num_ended
        async with an_end:
            await an_end.wait_for(lambda: num_ended >= case.after)
        outcome = await consume(engine, case)
        async with an_end:
            num_ended += 1
            an_end.notify_all()
        return outcome

    await engine.pause_generation("keep", clear_cache=False)
    tasks = {asyncio.create_task(play_one(case)): case for case in cases}

    async def has_all() -> bool:
        due = [case for task, case in tasks.items() if case.after <= num_ended and not task.done()]
        waiting: int = (await engine.core_status())["num_waiting"]
        return waiting == sum(case.params.get("n", 1) for case in due)

    await eventually(has_all)
    await engine.resume_generation()
    return await asyncio.gather(*tasks)


async def alone(engine: AsyncLLM, case: Case) -> Outcome:
    """What the engine, which has nothing else to do, answers to the case; each of n answers by a request of its own."""
    answers = []
    for index in range(case.params.get("n", 1)):
        own = {**case.params, "n": 1, "seed": case.params["seed"] + index}
        if index:
            own.pop("prompt_logprobs", None)
        try:
            params = SamplingParams(**own, output_kind=RequestOutputKind.FINAL_ONLY)
            output = await answer(engine, case.prompt, params)
        except (ValueError, EngineError) as error:
            return f"{type(error).__name__}: {error}"
        answers.append(_answered(output.outputs[0], output))
    return answers


def play(shared: AsyncLLM, private: AsyncLLM, cases: list[Case]) -> list[tuple[Case, Outcome, Outcome]]:
    """Each case, with what it is answered in company of the others on one engine and alone on the other."""

    async def run_alone() -> list[Outcome]:
        return [await alone(private, case) for case in cases]

    together = asyncio.run(in_company(shared, cases))
    return list(zip(cases, together, asyncio.run(run_alone()), strict=True))


def _answered(completion: Any, output: RequestOutput) -> Answered:
    return Answered(
        output.prompt_token_ids,
        completion.text,
        completion.token_ids,
        completion.cumulative_logprob,
        completion.logprobs,
        completion.finish_reason,
        completion.stop_reason,
        output.prompt_logprobs if completion.index == 0 else None,
        output.num_cached_tokens or 0,
    )


async def consume(engine: AsyncLLM, case: Case) -> Outcome:
    """What the engine answers; raises AssertionError where outputs of one stream contradict each other."""
    request_id = f"case-{id(case)}"
    outputs: list[RequestOutput] = []
    try:
        params = SamplingParams(**case.params, output_kind=case.kind)
        async for output in engine.generate(case.prompt, params, request_id, priority=case.priority):
            outputs.append(output)
            if len(outputs) == case.abort_after:
                await engine.abort(request_id)
    except (ValueError, EngineError) as error:
        return f"{type(error).__name__}: {error}"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True], "finished once, at the end"
    return [_assemble(case.kind, index, outputs) for index in range(case.params.get("n", 1))]


def _assemble(kind: RequestOutputKind, index: int, outputs: list[RequestOutput]) -> Answered:
    """Put answer `index` together from outputs of `kind`; AssertionError where they contradict each other."""
    own = [(one, output) for output in outputs for one in output.outputs if one.index == index]
    assert own, f"answer {index} was never shown"
    last, output = own[-1]
    if kind != RequestOutputKind.DELTA:
        for (earlier, _), (later, _) in itertools.pairwise(own):
            assert later.text.startswith(earlier.text), "text was taken back"
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids, "tokens were taken back"
            assert earlier.finish_reason in (None, later.finish_reason), "an end was taken back"
        return _answered(last, output)
    assert [one.finish_reason is not None for one, _ in own] == [False] * (len(own) - 1) + [True], "ends once"
    prompt_logprobs = [one.prompt_logprobs for one in outputs]
    assert all(one is None for one in prompt_logprobs[1:]), "the prompt's log-probabilities came again"
    return Answered(
        output.prompt_token_ids,
        "".join(one.text for one, _ in own),
        [token for one, _ in own for token in one.token_ids],
        last.cumulative_logprob,
        None if last.logprobs is None else [entry for one, _ in own for entry in one.logprobs],
        last.finish_reason,
        last.stop_reason,
        prompt_logprobs[0] if index == 0 else None,
        output.num_cached_tokens or 0,
    )


class Judge:
    """Compares answers with each other, and with transformers' model."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]) -> None:
        self.counts: Counter[str] = Counter()
        """What was compared, and how often."""
        self.differences: list[Difference] = []
        self._model = model
        self._tokenizer = tokenizer
        self._exact_model: torch.nn.Module | None = None
        self._eos = eos_token_ids
        self._known: tuple[list[int], Logits] = ([], np.zeros((0, 0)))

    def compare(self, case: Case, together: Outcome, lone: Outcome) -> None:
        """Note how the answers in company differ from the lone ones."""
        self.counts["requests"] += 1
        if isinstance(together, str) or isinstance(lone, str):
            self.counts["refused"] += 1
            if _kind_of_error(together) != _kind_of_error(lone):
                self._note(case, 0, f"{_short(together)} in company, {_short(lone)} alone")
            return
        first = together[0]
        self.counts["prompts found in the cache"] += first.num_cached_tokens > 0
        self.counts["prompts read in chunks"] += len(first.prompt_token_ids) - first.num_cached_tokens > BUDGET
        for index, (one, other) in enumerate(zip(together, lone, strict=True)):
            self.counts["answers"] += 1
            if one.prompt_token_ids != other.prompt_token_ids:
                self._note(case, index, "other prompt tokens")
                continue
            if self._tokens_agree(case, index, one, other):
                self._compare_ends(case, index, one, other)
            if one.prompt_logprobs is not None or other.prompt_logprobs is not None:
                self.counts["prompts with logprobs"] += 1
                if one.finish_reason != "abort" or one.prompt_logprobs is None:
                    self._compare_logprobs(
                        case, index, "prompt_logprobs", one.prompt_logprobs, other.prompt_logprobs, one
                    )

    def verify(self, case: Case, lone: Outcome) -> None:
        """Note where lone answers are not what transformers' logits and the rules of the case say."""
        if isinstance(lone, str):
            return
        for index, one in enumerate(lone):
            self.counts["answers verified"] += 1
            params = self._params(case, index)
            logits = self._logits(one.prompt_token_ids + one.token_ids)[len(one.prompt_token_ids) - 1 :]
            for position, token in enumerate(one.token_ids):
                self.counts["tokens verified"] += 1
                so_far = one.token_ids[:position]
                away = self._distance(params, one.prompt_token_ids, so_far, token, logits[position])
                if away > TIE:
                    self._note(case, index, f"token {position} ({token}) is {away:.2e} from being right")
                    break
                if one.logprobs is not None:
                    expected = logits[position][token] - np.logaddexp.reduce(logits[position])
                    value = one.logprobs[position][token].logprob
                    if abs(value - expected) > TIE and not self._is_rounding(one, "logprobs", position, token, value):
                        self._note(case, index, f"logprob of token {position} is not {expected}")
            self._verify_prompt_logprobs(case, index, one)
            if what := self._wrong_end(case, params, one):
                self._note(case, index, what)

    def _note(self, case: Case, index: int, what: str) -> None:
        self.differences.append(Difference(case, index, what))

    def _params(self, case: Case, index: int) -> SamplingParams:
        return SamplingParams(**{**case.params, "seed": case.params["seed"] + index, "n": 1})

    def _tokens_agree(self, case: Case, index: int, one: Answered, other: Answered) -> bool:
        """Whether the tokens are the same; where they are not, notes it unless a tie is shown."""
        mine, theirs = one.token_ids, other.token_ids
        if one.finish_reason == "abort":
            theirs = theirs[: len(mine)]
        self.counts["tokens"] += len(mine)
        if mine == theirs:
            return True
        common = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if common is None:
            self._note(case, index, f"{len(mine)} tokens ({one.finish_reason}), alone {len(theirs)}")
            return False
        params, prompt = self._params(case, index), one.prompt_token_ids
        logits = self._logits(prompt + mine[:common])[-1]
        away = [self._distance(params, prompt, mine[:common], ids[common], logits) for ids in (mine, theirs)]
        if max(away) <= TIE:
            self.counts["shown ties"] += 1
        else:
            self._note(
                case,
                index,
                f"token {common} is {mine[common]} ({away[0]:.2e} from being right), alone {theirs[common]} "
                f"({away[1]:.2e})",
            )
        return False

    def _compare_ends(self, case: Case, index: int, one: Answered, other: Answered) -> None:
        if one.finish_reason == "abort":
            self.counts["aborted"] += 1
            whole = other.text + (other.stop_reason if isinstance(other.stop_reason, str) else "")
            if not whole.startswith(one.text.rstrip("\ufffd")):
                self._note(case, index, f"aborted with text {one.text!r}, alone {other.text!r}")
        else:
            if one.text != other.text:
                self._note(case, index, f"text {one.text!r}, alone {other.text!r}")
            self.counts["texts"] += 1
            ends = (one.finish_reason, one.stop_reason), (other.finish_reason, other.stop_reason)
            self.counts[f"ended by {one.finish_reason}" + (" string" if isinstance(one.stop_reason, str) else "")] += 1
            if ends[0] != ends[1]:
                self._note(case, index, f"end {ends[0]}, alone {ends[1]}")
        if one.logprobs is None and other.logprobs is None:
            return
        self.counts["answers with logprobs"] += 1
        self._compare_logprobs(case, index, "logprobs", one.logprobs, (other.logprobs or [])[: len(one.token_ids)], one)
        if one.logprobs is not None and one.token_ids:
            total = sum(entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=False))
            if one.cumulative_logprob is None or abs(one.cumulative_logprob - total) > TIE:
                self._note(case, index, f"cumulative_logprob {one.cumulative_logprob}, the sum is {total}")

    def _compare_logprobs(self, case: Case, index: int, name: str, mine: Any, theirs: Any, one: Answered) -> None:
        if mine is None or theirs is None or len(mine) != len(theirs):
            sizes = [None if some is None else len(some) for some in (mine, theirs)]
            self._note(case, index, f"{name} at {sizes[0]} positions, alone at {sizes[1]}")
            return
        for position, (entry, lone) in enumerate(zip(mine, theirs, strict=True)):
            if entry is None and lone is None:
                continue
            self.counts["logprobs"] += len(entry)
            # Where two tokens tie for the last place, each may have it.
            least = max(min(some.logprob for some in both.values()) for both in (entry, lone))
            for token in entry.keys() | lone.keys():
                a, b = entry.get(token), lone.get(token)
                if a is None or b is None:
                    wrong = abs((a or b).logprob - least) > TIE
                else:
                    wrong = a.decoded_token != b.decoded_token
                    if abs(a.logprob - b.logprob) > TIE:
                        wrong = wrong or not self._is_rounding(one, name, position, token, a.logprob, b.logprob)
                    if a.rank != b.rank and not wrong:
                        # Others within a tie of it may be counted before or behind it.
                        near = np.abs(self._distribution(one, name, position) - a.logprob) < TIE
                        wrong = near.sum() <= 1
                if wrong:
                    self._note(case, index, f"{name}[{position}][{token}] is {a}, alone {b}")
                    return

    def _is_rounding(self, one: Answered, name: str, position: int, token: int, *values: float) -> bool:
        """Whether all `values`, said to be the log-probability of `token`, are as near the truth as transformers'.

        The truth is what it computes in float64; how near float32 comes is seen where it computes a batch of two. Some
        models' first tokens have activations so large that rounding shows in the fourth digit.
        """
        if self._exact_model is None:
            self._exact_model = copy.deepcopy(self._model).double()
        ids = (one.prompt_token_ids + one.token_ids)[: self._place(one, name, position)]
        with torch.inference_mode():
            exact = self._exact_model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            batched = self._model(torch.tensor([ids, ids[::-1]])).logits[0, -1].double().log_softmax(-1)
        rounding = max(TIE, float((batched - exact).abs().max()))
        is_rounding = all(abs(value - float(exact[token])) <= rounding for value in values)
        self.counts["shown rounding"] += is_rounding
        return is_rounding

    def _place(self, one: Answered, name: str, position: int) -> int:
        return position + (len(one.prompt_token_ids) if name == "logprobs" else 0)

    def _distribution(self, one: Answered, name: str, position: int) -> Logits:
        """Transformers' log-probabilities [vocab] at a position of the prompt or the answer."""
        logits = self._logits(one.prompt_token_ids + one.token_ids)[self._place(one, name, position) - 1]
        distribution: Logits = logits - np.logaddexp.reduce(logits)
        return distribution

    def _verify_prompt_logprobs(self, case: Case, index: int, one: Answered) -> None:
        if one.prompt_logprobs is None:
            return
        if len(one.prompt_logprobs) != len(one.prompt_token_ids):
            self._note(
                case, index, f"{len(one.prompt_logprobs)} prompt_logprobs for {len(one.prompt_token_ids)} tokens"
            )
            return
        logits = self._logits(one.prompt_token_ids + one.token_ids)
        for position in range(1, len(one.prompt_token_ids)):
            token = one.prompt_token_ids[position]
            expected = logits[position - 1][token] - np.logaddexp.reduce(logits[position - 1])
            value = one.prompt_logprobs[position][token].logprob
            if abs(value - expected) > TIE and not self._is_rounding(one, "prompt_logprobs", position, token, value):
                self._note(case, index, f"prompt_logprobs[{position}] is not {expected}")
                return

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> Logits:
        """Transformers' logits behind each of `ids`, [n, vocab]."""
        known, logits = self._known
        if known[: len(ids)] != ids:
            logits = self._model(torch.tensor([ids])).logits[0].double().numpy()
            self._known = ids, logits
        return logits[: len(ids)]

    def _ruled(self, params: SamplingParams, prompt: list[int], so_far: list[int], logits: Logits) -> Logits:
        """`logits` [vocab] after bars, biases and penalties, by their definitions."""
        values = logits.copy()
        if params.allowed_token_ids is not None:
            barred = np.ones(len(values), bool)
            barred[params.allowed_token_ids] = False
            values[barred] = -np.inf
        if len(so_far) < params.min_tokens:
            values[params.stop_token_ids or []] = -np.inf
            if not params.ignore_eos:
                values[self._eos] = -np.inf
        for word in params.bad_words or []:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer(spelling, add_special_tokens=False).input_ids
                if ids and so_far[len(so_far) - len(ids) + 1 :] == ids[:-1] and len(so_far) >= len(ids) - 1:
                    values[ids[-1]] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            values[token] += bias
        for token in {*prompt, *so_far}:
            value = values[token]
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            count = so_far.count(token)
            values[token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        return values

    def _distance(
        self, params: SamplingParams, prompt: list[int], so_far: list[int], token: int, logits: Logits
    ) -> float:
        """How far `token` is from being the right choice behind `prompt` and `so_far`, given the model's `logits`.

        In logits where the choice is greedy, else in probability relative to what is left to draw from. Where a filter
        has its border within `TIE` of a token, it may let it through or not.
        """
        values = self._ruled(params, prompt, so_far, logits)
        if params.temperature == 0:
            return float(values.max() - values[token])
        assert params.seed is not None
        position = np.array([len(so_far)])
        uniform = float(uniform_draws(np.array([params.seed % 2**64], np.uint64), position)[0])
        slack = TIE / min(1.0, params.temperature)
        found = np.inf
        for leeway in (0.0, slack, -slack):
            if found <= TIE:
                break
            kept = self._filtered(params, values, leeway)
            if kept[token] == 0:
                continue
            cumulative = kept.cumsum() / kept.sum()
            low, high = cumulative[token] - kept[token] / kept.sum(), cumulative[token]
            found = min(found, max(low - uniform, uniform - high, 0.0) * min(1.0, params.temperature))
        return found

    def _filtered(self, params: SamplingParams, values: Logits, leeway: float) -> Logits:
        """Weights [vocab] of the tokens, 0 for those that a filter with `leeway` in its border bars."""
        scaled = (values - values.max()) / params.temperature
        if params.typical_p < 1:
            weights = np.exp(scaled) / np.exp(scaled).sum()
            surprise = np.log(np.exp(scaled).sum()) - scaled
            distance = np.abs(surprise - (weights * np.where(weights > 0, surprise, 0)).sum())
            order = np.argsort(distance, kind="stable")
            last = np.searchsorted(np.cumsum(weights[order]), params.typical_p + leeway)
            scaled[distance > distance[order[min(last, len(order) - 1)]] + leeway] = -np.inf
        highest = int(scaled.argmax())
        scaled -= scaled[highest]
        if params.min_p > 0:
            scaled[scaled < np.log(params.min_p) - leeway] = -np.inf
        if 0 < params.top_k < len(scaled):
            scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k] - leeway] = -np.inf
        scaled[highest] = 0.0  # neither min-p nor top-k bars the most likely token
        weights = np.exp(scaled)
        if params.top_p < 1:
            order = np.argsort(-scaled, kind="stable")
            before = np.cumsum(weights[order]) / weights.sum() - weights[order] / weights.sum()
            barred = order[before >= params.top_p + leeway]
            weights[barred[barred != highest]] = 0
        return weights

    def _wrong_end(self, case: Case, params: SamplingParams, one: Answered) -> str | None:
        """What is wrong with the text and the end of an answer, given its tokens; None if nothing is."""
        ids, room = one.token_ids, MAX_MODEL_LEN - len(one.prompt_token_ids)
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos)}
        early = [i for i, token in enumerate(ids[:-1]) if token in stops]
        if early or len(ids) > most:
            return f"{len(ids)} tokens of {most} at most, stop tokens at {early}"
        decode = self._tokenizer.decode
        text = decode(ids, skip_special_tokens=params.skip_special_tokens) if params.detokenize else ""
        if "\ufffd" in text or "\ufffd" in decode(one.prompt_token_ids[-4:]):
            return None  # a character begins in the prompt, or the bytes are broken
        found = None
        fixed = decode(ids[: params.min_tokens], skip_special_tokens=params.skip_special_tokens).rstrip("\ufffd")
        for count in range(params.min_tokens + 1, len(ids) + 1):
            if count == len(ids) and not params.include_stop_str_in_output and ids[-1] in stops:
                break
            so_far = decode(ids[:count], skip_special_tokens=params.skip_special_tokens).rstrip("\ufffd")
            searched = so_far[len(fixed) :]
            places = [(searched.find(stop), -len(stop), stop) for stop in params.stop or () if stop in searched]
            if places:
                found = count, so_far[: len(fixed) + min(places)[0]], min(places)[2]
                break
        if found is not None:
            count, text, stop = found
            text += stop if params.include_stop_str_in_output else ""
            expected = count, text, "stop", stop
        elif ids and ids[-1] in stops and len(ids) >= params.min_tokens:
            if params.detokenize and not params.include_stop_str_in_output:
                text = decode(ids[:-1], skip_special_tokens=params.skip_special_tokens)
            by_eos = not params.ignore_eos and ids[-1] in self._eos
            expected = len(ids), text, "stop", None if by_eos else ids[-1]
        else:
            expected = most, text, "length", None
        given = len(ids), one.text, one.finish_reason, one.stop_reason
        self.counts["ends verified"] += 1
        return None if given == expected else f"tokens, text and end are {given}, and ought to be {expected}"


def _kind_of_error(outcome: Outcome) -> str:
    return outcome.partition(":")[0] if isinstance(outcome, str) else ""


def _short(outcome: Outcome) -> str:
    return outcome if isinstance(outcome, str) else "an answer"


def save_small_model(folder: Path, tokenizer_of: Path) -> torch.nn.Module:
    """A model of random weights whose distribution is as peaked as a trained one's, with the tokenizer of another."""
    model = save_random_model(SMALL_MODEL, folder)
    with torch.no_grad():
        model.lm_head.weight *= 6
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)
    return model
