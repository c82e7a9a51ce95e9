"""Requests that cannot run on a given model and engine are refused with field, value and remedy."""

import msgspec
import numpy as np
import pytest

from vllm_mp.config import (
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LivenessConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm_mp.model_config.pooling import PoolingConfig
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.validation.request_validation import validate_generation, validate_pooling

VOCAB, CONTEXT, HIDDEN, MAX_SEQS = 100, 32, 64, 4
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}


def config(max_logprobs=20, **changes):
    return VllmConfig(
        model_config=ModelConfig(
            model="m",
            path="",
            tokenizer="",
            tokenizer_mode="auto",
            skip_tokenizer_init=True,
            trust_remote_code=False,
            served_model_name="m",
            chat_template=None,
            load_format="dummy",
            dtype="auto",
            seed=0,
            max_model_len=CONTEXT,
            enforce_eager=True,
            hf_config={**LLAMA, **changes},
            eos_token_ids=[2],
            max_logprobs=max_logprobs,
            pooling=PoolingConfig(pooling_type="last", normalize=True),
        ),
        cache_config=CacheConfig(
            block_size=4,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.9,
            cache_dtype="auto",
            enable_prefix_caching=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=64,
            max_num_partial_prefills=1,
            enable_chunked_prefill=True,
            policy="fcfs",
            stream_interval=1,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu", num_threads=1),
        decoding_config=DecodingConfig(),
        observability_config=ObservabilityConfig(disable_log_stats=True, disable_log_requests=True, max_log_len=None),
        liveness_config=LivenessConfig(engine_iteration_timeout_s=1, start_timeout_s=1),
    )


def admit(params=None, num_prompt_tokens=5, output=(), bad_words=(), request_id="id", engine=None, prompt=None):
    prompt = np.arange(num_prompt_tokens, dtype=np.int32) if prompt is None else np.array(prompt, np.int32)
    return validate_generation(
        request_id, prompt, np.array(output, np.int32), params or SamplingParams(), list(bad_words), engine or config()
    )


def refusal(**request):
    with pytest.raises(ValueError) as caught:
        admit(**request)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "total"),
    [
        (5, 3, 8),
        (5, None, CONTEXT),
        (5, CONTEXT - 5, CONTEXT),
        (5, CONTEXT - 4, CONTEXT),
        (5, 2**31 - 1, CONTEXT),
        (CONTEXT - 1, 1, CONTEXT),
        (CONTEXT - 1, 500, CONTEXT),
        (1, 1, 2),
    ],
)
def test_answer_ends_at_max_tokens_or_at_the_end_of_the_context(num_prompt_tokens, max_tokens, total):
    assert admit(SamplingParams(max_tokens=max_tokens), num_prompt_tokens) == total


def test_answer_that_an_earlier_core_began_has_the_same_limit():
    params = SamplingParams(max_tokens=3)
    assert admit(params, output=[1, 2]) == admit(params) == 8
    message = refusal(params=params, output=[1, 2, 3])
    assert message == "the completion has ended: it has 3 tokens, the limit of the request"


def test_empty_prompt_and_prompt_without_room_for_a_token_are_refused():
    assert "empty" in refusal(num_prompt_tokens=0)
    for length in (CONTEXT, CONTEXT + 1):
        message = refusal(num_prompt_tokens=length)
        assert f"{length} tokens" in message
        assert f"max_model_len={CONTEXT}" in message
        assert "truncate_prompt_tokens" in message


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_token_id_outside_the_vocabulary_is_refused_in_every_field(token):
    expected = f"must be in [0, {VOCAB}), the model's vocabulary, got {token}"
    assert refusal(prompt=[1, token, 2]) == f"prompt_token_ids {expected}"
    assert refusal(output=[token]) == f"the completion so far {expected}"
    assert refusal(params=SamplingParams(bad_words=["x"]), bad_words=[[1], [2, token]]) == f"bad_words {expected}"
    if token >= 0:
        for name in ("stop_token_ids", "allowed_token_ids"):
            assert refusal(params=SamplingParams(**{name: [5, token]})) == f"{name} {expected}"
        assert refusal(params=SamplingParams(logit_bias={5: 1, token: 1})) == f"logit_bias {expected}"


def test_every_token_of_the_vocabulary_is_accepted():
    all_ids = list(range(VOCAB))
    params = SamplingParams(
        stop_token_ids=all_ids, allowed_token_ids=all_ids, logit_bias=dict.fromkeys(all_ids, 1), bad_words=["x"]
    )
    assert admit(params, prompt=[0, VOCAB - 1], bad_words=[[0, VOCAB - 1]]) == 18


@pytest.mark.parametrize(
    ("words", "bad_words", "message"),
    [
        (["a"], [[1], [2], [3]], "bad_words must have at most 2 spellings each, got 3 in all"),
        ([], [[1]], "bad_words must have at most 2 spellings each, got 1 in all"),
        (["a", "b"], [], "bad_words must have token ids, got none for 2 words"),
        (["a"], [[1], []], "bad_words must be of 1 to 1024 tokens each, got 0"),
        (["a"], [[1] * 1025], "bad_words must be of 1 to 1024 tokens each, got 1025"),
        (["a"], [[2**64 - 1]], f"bad_words must be in [0, {VOCAB}), the model's vocabulary, got {2**64 - 1}"),
        (["a"], [[-(2**63), 2**64 - 1]], f"bad_words must be in [0, {VOCAB}), the model's vocabulary, got -{2**63}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_malformed_bad_words_are_refused_by_name(words, bad_words, message):
    assert refusal(params=SamplingParams(bad_words=words), bad_words=bad_words) == message


def test_bad_words_may_have_two_spellings_and_1024_tokens():
    admit(SamplingParams(bad_words=["a", "b"]), bad_words=[[1], [2], [3], [4] * 1024])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("limit", "accepted", "refused"),
    [
        (20, [None, 0, 20], [21, VOCAB, -1]),
        (0, [None, 0], [1, -1]),
        (-1, [0, VOCAB, -1], [VOCAB + 1]),
        (VOCAB, [VOCAB, -1], [VOCAB + 1]),
        (VOCAB + 50, [VOCAB + 50, -1], [VOCAB + 51]),
    ],
)
def test_logprobs_above_the_limit_of_the_engine_are_refused(name, limit, accepted, refused):
    engine = config(max_logprobs=limit)
    for wanted in accepted:
        admit(SamplingParams(**{name: wanted}), engine=engine)
    for wanted in refused:
        message = refusal(params=SamplingParams(**{name: wanted}), engine=engine)
        max_logprobs = VOCAB if limit == -1 else limit
        assert message.startswith(f"{name} must be at most {max_logprobs}, got {wanted}; ask for fewer")
        assert "max_logprobs" in message


def test_n_may_exceed_max_num_seqs():
    admit(SamplingParams(n=MAX_SEQS + 1))


def test_min_tokens_must_fit_after_the_prompt():
    room = CONTEXT - 5
    assert admit(SamplingParams(min_tokens=room, max_tokens=None)) == CONTEXT
    message = refusal(params=SamplingParams(min_tokens=room + 1, max_tokens=None))
    assert message.startswith(f"min_tokens must be at most {room}")
    assert f"max_model_len={CONTEXT} " in message
    assert message.endswith(f"the prompt of 5 tokens, got {room + 1}")


def test_request_id_that_is_too_long_or_not_unicode_is_refused():
    admit(request_id="é" * 512)
    assert refusal(request_id="é" * 513).startswith("request_id must be of at most 1024 bytes")
    assert refusal(request_id="\ud800").startswith("request_id must be valid Unicode")


def test_generation_with_an_encoder_is_refused():
    encoder = config()
    encoder.model_config.architecture = msgspec.structs.replace(encoder.model_config.architecture, is_encoder=True)
    assert refusal(engine=encoder) == (
        "m is an encoder and generates no text; call encode() for its embeddings, or ask /v1/embeddings for them"
    )


def test_prompt_that_is_too_long_is_to_be_truncated_unless_it_was_truncated_to_too_many_tokens():
    assert "shorten it, set truncate_prompt_tokens, or" in refusal(num_prompt_tokens=CONTEXT)
    message = refusal(num_prompt_tokens=CONTEXT, params=SamplingParams(truncate_prompt_tokens=CONTEXT))
    assert f"lower truncate_prompt_tokens={CONTEXT} to at most {CONTEXT - 1} or set it to -1" in message


def test_generation_with_a_decoder_without_a_head_is_refused():
    headless = config()
    headless.model_config.architecture = msgspec.structs.replace(headless.model_config.architecture, has_head=False)
    assert refusal(engine=headless) == (
        "m has no head for tokens (LlamaForCausalLM without lm_head) and generates no text; call encode() for its "
        "embeddings, or ask /v1/embeddings for them"
    )


def pool(params=None, num_prompt_tokens=5, request_id="id"):
    validate_pooling(request_id, np.arange(num_prompt_tokens, dtype=np.int32), params or PoolingParams(), config())


def test_pooling_accepts_a_prompt_of_the_whole_context_and_refuses_values_beyond_the_limits():
    pool(PoolingParams(dimensions=HIDDEN), CONTEXT)
    with pytest.raises(ValueError, match=f"too long: {CONTEXT + 1} tokens, and .* max_model_len={CONTEXT}"):
        pool(num_prompt_tokens=CONTEXT + 1)
    with pytest.raises(ValueError, match="empty"):
        pool(num_prompt_tokens=0)
    with pytest.raises(ValueError, match=rf"dimensions must be at most {HIDDEN}.*got {HIDDEN + 1}"):
        pool(PoolingParams(dimensions=HIDDEN + 1))
    with pytest.raises(ValueError, match="request_id"):
        pool(request_id="x" * 1025)
    with pytest.raises(ValueError, match=rf"prompt_token_ids must be in \[0, {VOCAB}\).*got 100"):
        validate_pooling("id", np.array([VOCAB], np.int32), PoolingParams(), config())


@pytest.mark.parametrize("most", [-1, True, 1.5, "2", None, [1]])
def test_limit_of_drafts_must_be_a_whole_number(most):
    def validate(arguments):
        admit(SamplingParams(extra_args=arguments))

    with pytest.raises(ValueError, match=r"extra_args\['num_speculative_tokens'\] must be an integer of at least 0"):
        validate({"num_speculative_tokens": most})
    validate({"num_speculative_tokens": 0})
    with pytest.raises(ValueError, match="extra_args must be empty or have 'num_speculative_tokens' alone"):
        validate({"num_speculative_tokens": 0, "target": 1})
