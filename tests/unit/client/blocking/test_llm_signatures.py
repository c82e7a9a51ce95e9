"""`LLM` has the methods and arguments of vLLM's class; what it has not is refused by name."""

import inspect

import pytest

from vllm_mp import LLM

VLLM = """
chat(messages, sampling_params=None, use_tqdm=True, lora_request=None, priority=None, chat_template=None, \
chat_template_content_format='auto', add_generation_prompt=True, continue_final_message=False, tools=None, \
chat_template_kwargs=None, tokenization_kwargs=None, mm_processor_kwargs=None)
classify(prompts, *, pooling_params=None, use_tqdm=True, lora_request=None, tokenization_kwargs=None, \
truncate_prompt_tokens=None)
collective_rpc(method, timeout=None, args=(), kwargs=None)
embed(prompts, *, use_tqdm=True, pooling_params=None, lora_request=None, tokenization_kwargs=None, \
truncate_prompt_tokens=None)
encode(prompts, pooling_params=None, *, use_tqdm=True, lora_request=None, pooling_task=None, tokenization_kwargs=None, \
truncate_prompt_tokens=None)
enqueue(prompts, sampling_params=None, lora_request=None, priority=None, use_tqdm=True, tokenization_kwargs=None, \
mm_processor_kwargs=None)
from_engine_args(engine_args)
generate(prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, priority=None, tokenization_kwargs=None, \
mm_processor_kwargs=None)
get_default_sampling_params()
get_tokenizer()
get_world_size(include_dp=True)
reset_mm_cache()
reset_prefix_cache(reset_running_requests=False, reset_connector=False)
score(data_1, data_2, /, *, use_tqdm=True, pooling_params=None, lora_request=None, tokenization_kwargs=None, \
chat_template=None, truncate_prompt_tokens=None)
sleep(level=1, mode='abort')
start_profile(profile_prefix=None, *, delay_iterations=None, max_iterations=None)
stop_profile()
wait_for_completion(output_type=None, *, use_tqdm=True)
wake_up(tags=None)
"""
"""The methods of vLLM 0.32's `LLM` that are here too, without types, and `truncate_prompt_tokens` of earlier ones."""
REFUSED = """
apply_model beam_search enqueue_chat finish_weight_update get_metrics get_weight_version init_weight_transfer_engine
release_kv_cache_memory shutdown_weight_transfer_engine start_draft_weight_update start_weight_update
update_weight_version update_weights
"""
"""Its other public names."""


@pytest.mark.parametrize("signature", VLLM.split("\n")[1:-1], ids=lambda line: line.partition("(")[0])
def test_method_has_the_arguments_of_vllms(signature):
    name = signature.partition("(")[0]
    found = inspect.signature(inspect.getattr_static(LLM, name).__get__(object(), LLM))
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    assert name + str(inspect.Signature(plain)) == signature


@pytest.mark.parametrize("name", REFUSED.split())
def test_name_that_is_not_served_is_refused_with_a_remedy(name):
    engine = object.__new__(LLM)  # which has no core
    assert not hasattr(engine, name)
    with pytest.raises(NotImplementedError, match=f"LLM has no {name}: ."):
        getattr(engine, name)
