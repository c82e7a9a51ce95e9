"""The outputs of a request have the fields of vLLM's classes, in its order, and are read as those are."""

import dataclasses

import pytest

from vllm_mp.client.outputs import output_path
from vllm_mp.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

VLLM_ORDER = [
    *("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics", "lora_request"),
    *("encoder_prompt", "encoder_prompt_token_ids", "num_cached_tokens"),
]
"""The order of the arguments of vLLM 0.32's `RequestOutput`."""


def test_fields_come_by_position_in_the_order_of_vllm():
    assert list(RequestOutput.__struct_fields__[: len(VLLM_ORDER)]) == VLLM_ORDER
    output = RequestOutput("a", "p", [1], None, [], True)
    assert (output.prompt_logprobs, output.outputs, output.finished) == (None, [], True)
    assert output.encoder_prompt is output.encoder_prompt_token_ids is output.kv_transfer_params is None
    completion = CompletionOutput(0, "a", [1], None, None, None, "stop")
    assert (completion.routed_experts, completion.finish_reason) == (None, "stop")


@pytest.mark.skipif(output_path.COMPILED is None, reason="the output path is not compiled")
def test_compiled_output_path_refuses_outputs_with_fields_in_another_order():
    import vllm_mp.client.outputs._output_path as compiled

    others, swapped = [object] * 7, ("request_id", "prompt_token_ids", "prompt")
    with pytest.raises(TypeError, match=r"field 1 of RequestOutput is not prompt$"):
        compiled.configure(*others, swapped, object)


def test_vars_and_dataclass_functions_read_outputs():
    completion = CompletionOutput(0, "a", [1], logprobs=[{1: Logprob(-0.5, 1, "a")}])
    assert vars(completion) == {name: getattr(completion, name) for name in CompletionOutput.__struct_fields__}
    as_dict = dataclasses.asdict(RequestOutput("a", "p", [1], None, [completion], True))
    assert as_dict["outputs"][0]["logprobs"] == [{1: {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    assert dataclasses.replace(completion, text="b").text == "b"


def test_metrics_have_the_times_of_vllm_that_a_client_knows_and_refuse_the_others_by_name():
    metrics = RequestMetrics(10.0, 12.5, 15.0)
    assert (metrics.first_token_latency, metrics.last_token_ts - metrics.first_token_ts) == (2.5, 2.5)
    assert RequestMetrics(10.0).first_token_latency == RequestMetrics(10.0).first_token_ts == 0
    for name in ("scheduled_ts", "queued_ts", "first_scheduled_time", "num_generation_tokens"):
        assert not hasattr(metrics, name)
        with pytest.raises(NotImplementedError, match=f"RequestMetrics has no {name}: ."):
            getattr(metrics, name)
