"""Random requests together and alone, compared with each other and with transformers' logits.

The output of a request may depend on its prompt, its parameters and its seed, and on nothing else: not on the batch,
the chunks in which its prompt was computed, preemption, what was found in the prefix cache, or the output kind. So
`play` runs every case twice, together with all others and alone, and `Judge` compares the two. A different token is
excused only if transformers' logits, under the same rules applied by independent code, show that both tokens are within
`TIE` of being the right one; different log-probabilities only if both are as close to the truth as transformers' own.
The lone outputs are also verified against the same reference at every position.
"""

from vllm_mp.testing.differential.cases import Case, random_cases
from vllm_mp.testing.differential.judge import Difference, Judge
from vllm_mp.testing.differential.playing import (
    PRIVATE_OPTIONS,
    FinalCompletion,
    Outcome,
    consume,
    play,
    shared_options,
)
from vllm_mp.testing.differential.reference import TIE

__all__ = [
    "PRIVATE_OPTIONS",
    "TIE",
    "Case",
    "Difference",
    "FinalCompletion",
    "Judge",
    "Outcome",
    "consume",
    "play",
    "random_cases",
    "shared_options",
]
