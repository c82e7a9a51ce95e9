"""Logits and parameters of draws for the tests of every implementation of `ops.sample`."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mp.kernels.sampling import DrawParams
from vllm_mp.testing.sampling_cases import DRAWS, draw_params

SampleCase = tuple[Tensor, DrawParams]
_KNOBS: list[dict[str, float]] = [{}, {"temperature": 0}, {"temperature": 1e-4}, *DRAWS]
_ALMOST_ONE = 1 - 2.0**-52


def every_parameter(size: int) -> SampleCase:
    logits = 3 * torch.randn(len(_KNOBS), size, generator=_generator())
    return logits, draw_params(_KNOBS, _uniforms(len(_KNOBS)))


def equal_logits_around_top_p(top_p: float) -> SampleCase:
    """A few values, each many times over, so that the sum reaches `top_p` among equally likely tokens."""
    logits = torch.tensor([0.0, 1.0, 3.0, 4.0])[torch.randint(0, 4, (8, 100), generator=_generator())]
    uniform = torch.linspace(0, 1 - 2**-40, 8, dtype=torch.float64)
    return logits, draw_params([{"top_p": top_p, "temperature": 0.9}] * 8, uniform)


def equal_logits_around_top_k() -> SampleCase:
    logits = torch.randint(0, 6, (10, 90), generator=_generator()).float()
    return logits, draw_params([{"top_k": k} for k in range(1, 31, 3)], _uniforms(10))


def rows_that_are_not_finite() -> SampleCase:
    """The rows 1 to 3 offer no choice, and row 4 offers token 0 only."""
    logits = torch.randn(6, 130, generator=_generator())
    logits[1, 5], logits[2, -1], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 1:] = -torch.inf
    return logits, draw_params([{"top_k": 20, "top_p": 0.8}] * 6, _uniforms(6))


def both_ends_of_the_distribution() -> SampleCase:
    """Tokens 4 and 70 alone are possible."""
    logits = torch.full((2, 150), -torch.inf)
    logits[:, 4] = logits[:, 70] = 0
    return logits, draw_params([{}, {}], torch.tensor([0.0, _ALMOST_ONE], dtype=torch.float64))


def impossible_tokens_at_the_end() -> SampleCase:
    """Tokens from 55 on are impossible."""
    logits = 8 * torch.randn(60, 64, generator=_generator())
    logits[:, 55:] = -torch.inf
    return logits, draw_params([{}] * 60, torch.full((60,), _ALMOST_ONE, dtype=torch.float64))


EQUAL_TO_REFERENCE: dict[str, Callable[[], SampleCase]] = {
    "every parameter, 40 tokens": lambda: every_parameter(40),
    "every parameter, 150 tokens": lambda: every_parameter(150),
    **{f"equal logits around top_p {p}": lambda p=p: equal_logits_around_top_p(p) for p in (0.2, 0.55, 0.9)},  # type: ignore[misc]
    "equal logits around top_k": equal_logits_around_top_k,
    "rows that are not finite": rows_that_are_not_finite,
    "both ends of the distribution": both_ends_of_the_distribution,
}
"""Cases in which an implementation draws the tokens of the reference."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _uniforms(count: int) -> Tensor:
    return torch.randint(0, 2**52, (count,), generator=_generator()).double() * 2.0**-52
