"""A request as registered logits processors know it."""

import numpy as np
import numpy.typing as npt

from vllm_mp.requests.sampling_params import SamplingParams


class ProcessedRequest:
    """The parameters and tokens that processors read, and the error if one of them failed."""

    __slots__ = ("_is_embedded", "error", "output", "params", "processors", "prompt")

    def __init__(self, params: SamplingParams, processors: frozenset[str], is_embedded: bool) -> None:
        """`processors` are the names of those that are for the request. `is_embedded`: the prompt has no token ids."""
        self.params = params
        self.processors = processors
        self._is_embedded = is_embedded
        self.prompt: list[int] | None = None
        """Its token ids; None before the first step, and for embeddings."""
        self.output: list[int] = []
        """The token ids of the output. Processors keep this list, so it is extended and never replaced."""
        self.error: str | None = None
        """Why a processor has failed the request."""

    def catch_up(self, tokens: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Take over the tokens since the last call from `tokens` [num_tokens], all known tokens, prompt included."""
        if self.prompt is None and not self._is_embedded:
            self.prompt = tokens[:num_prompt_tokens].tolist()
        self.output += tokens[num_prompt_tokens + len(self.output) :].tolist()
