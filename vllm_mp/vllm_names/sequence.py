"""Names that programs for older versions of vLLM import from its module for sequences."""

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.outputs import RequestMetrics

from .logprobs import Logprob, PromptLogprobs, SampleLogprobs

__all__ = ["Logprob", "PromptLogprobs", "RequestMetrics", "SampleLogprobs"]

__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        ("ExecuteModelRequest", "IntermediateTensors", "SamplerOutput", "Sequence", "SequenceGroup", "SequenceStatus"),
        "sequences live in the core; RequestOutput has what callers get",
    ),
)
