"""Log-probabilities, where programs for vLLM import them from."""

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.outputs import Logprob, LogprobsOnePosition

__all__ = ["Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs"]

PromptLogprobs = list[LogprobsOnePosition | None]
SampleLogprobs = list[LogprobsOnePosition]

__getattr__ = refuse(__name__, {"FlatLogprobs": "the log-probabilities of an output are a list of dicts"})
