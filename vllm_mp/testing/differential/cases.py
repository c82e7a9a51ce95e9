"""Random requests: prompts, parameters and how the consumer behaves. A seed decides everything."""

import dataclasses
import random
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_mp import LoRARequest, RequestOutputKind
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.sampling_cases import FILTERS

MAX_MODEL_LEN = 320
VOCAB_SIZE = 49_152
"""The vocabulary of the default model."""
CROWD, CROWD_LEN = 12, 40
"""Requests, and output tokens of each, that overflow the cache of `playing.shared_options`, which holds 336 tokens."""
_REPEATED_LEN = 21
"""Prompt tokens of each of the last two cases."""
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


@dataclasses.dataclass
class Case:
    """One request, and how its consumer behaves."""

    prompt: Any
    params: dict[str, Any]
    kind: RequestOutputKind
    priority: int
    abort_after: int | None
    """The consumer aborts after this many outputs; None: never."""
    after: int
    """The request is sent after this many other cases have ended; 0: from the start."""
    adapter: LoRARequest | None = None

    def __str__(self) -> str:
        shown = self.prompt if isinstance(self.prompt, dict) else {"prompt": self.prompt}
        adapter = "" if self.adapter is None else f" adapter={self.adapter.lora_name}"
        return f"{str(shown)[:300]} {self.params} {self.kind.name} abort_after={self.abort_after}{adapter}"


def random_case(chance: random.Random, tokenizer: PreTrainedTokenizerBase, num_before: int) -> Case:
    """Return a random request of the kinds that are served, sent after at most `num_before` others have ended."""
    params: dict[str, Any] = {}

    def maybe(share: float, name: str, value: Any) -> None:
        if chance.random() < share:
            params[name] = value() if callable(value) else value

    def ids(most: int) -> list[int]:
        # Low ids are byte tokens and short words, which occur often.
        return [chance.randrange(chance.choice((300, 3000, VOCAB_SIZE))) for _ in range(chance.randint(1, most))]

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
    prompt, fills_context = _random_prompt(chance, tokenizer)
    if fills_context:
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
    """Return a prompt, and whether it leaves little room for output tokens."""
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
    return [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 40))], False


def random_cases(seed: int, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """Return `count` cases decided by `seed`; no case waits for more ends than there are cases before it.

    The first `CROWD` cases are sent at the start, with short prompts and the highest priority. The cache has room for
    their prompts but not for their output, so some are preempted. The first case is aborted early in a long output.
    The last two run after all others, with one prompt, which the last finds in the cache.
    """
    chance = random.Random(seed)
    cases = [random_case(chance, tokenizer, index) for index in range(count)]
    for case in cases[:CROWD]:
        case.prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 8))]
        case.params |= {"max_tokens": CROWD_LEN, "min_tokens": CROWD_LEN}
        case.priority, case.after, case.abort_after = -2, 0, None
    for case in cases[:1]:
        case.params |= {"max_tokens": None, "min_tokens": 250}
        case.kind, case.abort_after = RequestOutputKind.DELTA, 1
    repeated = [chance.randrange(VOCAB_SIZE) for _ in range(_REPEATED_LEN)]
    for after, case in enumerate(cases[-2:], count - 2):
        case.prompt, case.after, case.abort_after = repeated, after, None
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            case.params.pop(name, None)
    return cases
