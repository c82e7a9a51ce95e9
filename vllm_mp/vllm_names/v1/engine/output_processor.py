"""Internals of vLLM that are not here; importing them says what to use."""

from vllm_mp.arguments.unserved_names import refuse

__getattr__ = refuse(
    __name__,
    {
        "OutputProcessor": "iterate over what AsyncLLM.generate returns",
        "RequestOutputCollector": "iterate over what AsyncLLM.add_request returns",
    },
)
