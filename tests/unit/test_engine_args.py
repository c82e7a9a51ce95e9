"""The options of an engine: as arguments, as flags, and as the configuration that comes of them."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import typing

import msgspec
import pytest
import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.worker.device import choose_step_size
from vllm_mp.engine_args import AsyncEngineArgs, EngineArgs

CONTEXT = 2048
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 2,
}
SERVED = {
    "model": ("some/model", ["--model", "some/model"]),
    "tokenizer": ("some/tokenizer", ["--tokenizer", "some/tokenizer"]),
    "tokenizer_mode": ("slow", ["--tokenizer-mode", "slow"]),
    "skip_tokenizer_init": (True, ["--skip-tokenizer-init"]),
    "revision": ("main", ["--revision", "main"]),
    "hf_token": ("hf_x", ["--hf-token", "hf_x"]),
    "trust_remote_code": (True, ["--trust-remote-code"]),
    "download_dir": ("/a b", ["--download-dir", "/a b"]),
    "load_format": ("dummy", ["--load-format", "dummy"]),
    "dtype": ("float16", ["--dtype", "float16"]),
    "seed": (5, ["--seed", "5"]),
    "max_model_len": (77, ["--max-model-len", "77"]),
    "served_model_name": ("name", ["--served-model-name", "name"]),
    "device": ("cpu", ["--device", "cpu"]),
    "enforce_eager": (True, ["--enforce-eager"]),
    "attention_backend": ("triton", ["--attention-backend", "triton"]),
    "num_threads": (2, ["--num-threads", "2"]),
    "gpu_memory_utilization": (0.5, ["--gpu-memory-utilization", "0.5"]),
    "kv_cache_memory_bytes": (2**35, ["--kv-cache-memory-bytes", str(2**35)]),
    "block_size": (32, ["--block-size", "32"]),
    "kv_cache_dtype": ("fp8", ["--kv-cache-dtype", "fp8"]),
    "enable_prefix_caching": (False, ["--no-enable-prefix-caching"]),
    "max_num_seqs": (9, ["--max-num-seqs", "9"]),
    "max_num_batched_tokens": (99, ["--max-num-batched-tokens", "99"]),
    "max_num_partial_prefills": (3, ["--max-num-partial-prefills", "3"]),
    "enable_chunked_prefill": (False, ["--no-enable-chunked-prefill"]),
    "scheduling_policy": ("priority", ["--scheduling-policy", "priority"]),
    "quantization": ("int8", ["--quantization", "int8"]),
    "async_scheduling": (True, ["--async-scheduling"]),
    "stream_interval": (2, ["--stream-interval", "2"]),
    "check_invariants": (True, ["--check-invariants"]),
    "generation_config": ("vllm", ["--generation-config", "vllm"]),
    "override_generation_config": ({"top_k": 5}, ["--override-generation-config", '{"top_k": 5}']),
    "max_logprobs": (-1, ["--max-logprobs", "-1"]),
    "chat_template": ("{{ messages }}", ["--chat-template", "{{ messages }}"]),
    "disable_log_stats": (True, ["--disable-log-stats"]),
    "engine_iteration_timeout_s": (1.5, ["--engine-iteration-timeout-s", "1.5"]),
    "start_timeout_s": (30.0, ["--start-timeout-s", "30"]),
    "recovery": (False, ["--no-recovery"]),
    "max_core_restarts": (3, ["--max-core-restarts", "3"]),
    "core_restart_window_s": (60.0, ["--core-restart-window-s", "60"]),
    "warm_standby": (True, ["--warm-standby"]),
    "fault_injection": ("exit@step=3", ["--fault-injection", "exit@step=3"]),
    "disable_log_requests": (True, ["--disable-log-requests"]),
    "max_log_len": (0, ["--max-log-len", "0"]),
}
"""A value other than the default for each served option, and the flags that say the same."""

NOT_SERVED = {
    "swap_space": (4.0, ["--swap-space", "4"]),
    "tensor_parallel_size": (2, ["--tensor-parallel-size", "2"]),
    "pipeline_parallel_size": (2, ["--pipeline-parallel-size", "2"]),
    "data_parallel_size": (2, ["--data-parallel-size", "2"]),
    "distributed_executor_backend": ("ray", ["--distributed-executor-backend", "ray"]),
    "worker_use_ray": (True, ["--worker-use-ray"]),
    "engine_use_ray": (True, ["--engine-use-ray"]),
    "enable_lora": (True, ["--enable-lora"]),
    "max_loras": (2, ["--max-loras", "2"]),
    "max_lora_rank": (64, ["--max-lora-rank", "64"]),
    "otlp_traces_endpoint": ("http://x", ["--otlp-traces-endpoint", "http://x"]),
}
FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
HINTS = typing.get_type_hints(AsyncEngineArgs)
BOUNDED = [
    (name, bound, side)
    for name, field in FIELDS.items()
    for bound, side in ((field.metadata["low"], -1), (field.metadata["high"], 1))
    if bound is not None
]
CHOICES = [name for name, field in FIELDS.items() if field.metadata["choices"]]
WRONG_TYPE = {"str": (3, True, ["x"]), "int": ("3", 1.5, True, [3]), "float": ("0.5", True, [0.5])}
WRONG_TYPE |= {"bool": ("yes", 1, [True]), "dict": ("{}", 3, [1])}


def types_of(name):
    """The names of the types that an option takes, without None."""
    hint = HINTS[name]
    alternatives = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    return [(typing.get_origin(kind) or kind).__name__ for kind in alternatives if kind is not type(None)]


def parse(*flags):
    """The options from a command line; a command line that is refused raises ValueError with what stderr got."""
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            namespace = parser.parse_args(flags)
    except SystemExit:
        raise ValueError(stderr.getvalue()) from None
    return AsyncEngineArgs.from_cli_args(namespace)


def numbers_in(message):
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", message)
    return [int(number) if number.lstrip("-").isdigit() else float(number) for number in numbers]


def refusal(error, **options):
    with pytest.raises(error) as caught:
        AsyncEngineArgs(**options)
    return str(caught.value)


@pytest.fixture
def model(tmp_path):
    """A function that writes a model folder, whose weights are random, and gives its path."""

    def write(config=None, generation=None, **changes):
        folder = tmp_path / "a model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config or {**LLAMA, **changes}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return str(folder)

    return write


def config_of(folder, **options):
    return AsyncEngineArgs(model=folder, load_format="dummy", **options).create_engine_config()


def test_the_samples_above_cover_every_option():
    assert not SERVED.keys() & NOT_SERVED.keys()
    assert SERVED.keys() | NOT_SERVED.keys() == FIELDS.keys()
    for name, (value, _) in {**SERVED, **NOT_SERVED}.items():
        assert value != FIELDS[name].default, name
        assert FIELDS[name].metadata["served"] == (name in SERVED), name


def test_every_option_has_a_flag_with_help_that_shows_its_default_and_choices():
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(prog="x"))
    actions = {action.dest: action for action in parser._actions}
    for name, field in FIELDS.items():
        action = actions[name]
        assert "--" + name.replace("_", "-") in action.option_strings
        assert len(field.metadata["help"]) > 10
        assert field.metadata["help"] in action.help.replace("%%", "%")
        assert ("not served" in action.help) == (name in NOT_SERVED)
        if field.default is not None and not isinstance(field.default, bool):
            assert f"(default: {field.default})" in action.help, name
        if field.metadata["choices"]:
            assert tuple(action.choices) == field.metadata["choices"]
    assert "--max-model-len" in parser.format_help()


def test_without_flags_every_option_has_its_default():
    assert parse() == AsyncEngineArgs()


@pytest.mark.parametrize("name", SERVED)
def test_a_flag_and_an_argument_mean_the_same(name):
    value, flags = SERVED[name]
    args = parse(*flags)
    assert getattr(args, name) == value
    assert args == AsyncEngineArgs(**{name: value})


def test_all_flags_at_once_mean_the_same_as_all_arguments():
    flags = [flag for _, flags in SERVED.values() for flag in flags]
    assert parse(*flags) == AsyncEngineArgs(**{name: value for name, (value, _) in SERVED.items()})


def test_other_attributes_of_a_command_line_are_left_alone():
    namespace = argparse.Namespace(prompt="hello", model="m", seed=3)
    assert AsyncEngineArgs.from_cli_args(namespace) == AsyncEngineArgs(model="m", seed=3)
    assert EngineArgs.from_cli_args(namespace) == EngineArgs(model="m", seed=3)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if HINTS[name] is bool])
def test_a_switch_can_be_switched_off_again(name):
    flag = name.replace("_", "-")
    assert getattr(parse(f"--{flag}", f"--no-{flag}") if name in SERVED else parse(f"--no-{flag}"), name) is False


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_the_wrong_type_is_named(name):
    (kind,) = types_of(name)
    for value in WRONG_TYPE[kind]:
        message = refusal(TypeError, **{name: value})
        assert message.startswith(f"{name} must be")
        assert kind in message
        assert repr(value) in message


@pytest.mark.parametrize("name", [name for name in FIELDS if type(None) not in typing.get_args(HINTS[name])])
def test_none_is_refused_where_it_has_no_meaning(name):
    assert f"{name} must be" in refusal(TypeError, **{name: None})


@pytest.mark.parametrize(("name", "bound", "side"), BOUNDED)
def test_bounds_belong_to_the_range_and_what_is_beyond_is_named(name, bound, side):
    if name in SERVED:
        AsyncEngineArgs(**{name: bound})
    for distance in (1, 10**9):
        value = bound + side * distance
        message = refusal(ValueError, **{name: value})
        assert message.startswith(f"{name} must be")
        assert bound in numbers_in(message), "the bound, exactly"
        assert str(value) in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name) == ["float"]])
def test_what_is_no_finite_number_is_refused_by_name(name, value):
    # Infinity cannot travel to the core: JSON has no such number.
    message = refusal((ValueError, NotImplementedError), **{name: value})
    assert name in message
    assert str(value) in message


@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name)[0] in ("int", "float")])
def test_a_number_that_no_machine_holds_is_refused_by_name(name):
    assert name in refusal((ValueError, NotImplementedError), **{name: 10**400})


def test_an_integer_does_for_a_float():
    assert AsyncEngineArgs(start_timeout_s=5, gpu_memory_utilization=1).start_timeout_s == 5


@pytest.mark.parametrize("name", CHOICES)
def test_a_value_that_is_not_among_the_choices_is_named(name):
    message = refusal(ValueError, **{name: "nonsense"})
    assert message.startswith(f"{name} must be one of")
    assert "'nonsense'" in message
    for choice in FIELDS[name].metadata["choices"]:
        assert choice in message


def test_an_unknown_option_is_named():
    assert "modle" in refusal(TypeError, modle="x")
    with pytest.raises(TypeError, match="max_log_len"):
        EngineArgs(max_log_len=3)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_an_option_that_is_not_served_is_refused_by_name_and_its_default_is_fine(name):
    value, flags = NOT_SERVED[name]
    message = refusal(NotImplementedError, **{name: value})
    assert message.startswith(f"{name}={value!r}")
    assert repr(FIELDS[name].default) in message
    with pytest.raises(NotImplementedError, match=name):
        parse(*flags)
    assert AsyncEngineArgs(**{name: FIELDS[name].default}) == AsyncEngineArgs()


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "int8"],
        ["--seed", "x"],
        ["--gpu-memory-utilization", "much"],
        ["--override-generation-config", "{"],
        ["--no-such-flag", "1"],
        ["--max-model-len"],
        ["--max-model-len", "0"],
        ["--gpu-memory-utilization", "nan"],
    ],
    ids=" ".join,
)
def test_a_bad_flag_is_refused_by_name(flags):
    with pytest.raises(ValueError, match=f"{flags[0]}|{flags[0][2:].replace('-', '_')}"):
        parse(*flags)


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32")])
def test_older_names_of_types_are_understood(alias, dtype, model):
    assert AsyncEngineArgs(dtype=alias).dtype == dtype
    assert parse("--dtype", alias).dtype == dtype
    assert config_of(model(), dtype=alias).model_config.dtype == dtype


@pytest.mark.parametrize(
    ("alias", "backend"), [("FLASH_ATTN", "flash_attn"), ("TRITON_ATTN", "triton"), ("TORCH_SDPA", "torch")]
)
def test_other_names_of_what_computes_attention_are_understood(alias, backend, model):
    assert parse("--attention-backend", alias).attention_backend == backend
    assert config_of(model(), attention_backend=alias).attention_config.backend == backend


def test_the_configuration_holds_what_the_options_say(model):
    folder = model()
    config = config_of(
        folder,
        served_model_name="name",
        dtype="float32",
        seed=7,
        max_model_len=300,
        block_size=8,
        kv_cache_memory_bytes=12345,
        gpu_memory_utilization=0.25,
        num_threads=3,
        device="cpu",
        scheduling_policy="priority",
        max_num_seqs=5,
        max_num_batched_tokens=50,
        max_num_partial_prefills=2,
        engine_iteration_timeout_s=1.5,
        start_timeout_s=9,
        disable_log_stats=True,
        disable_log_requests=True,
        max_log_len=10,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_logprobs=33,
        stream_interval=4,
        check_invariants=True,
    )
    made, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    assert (made.model, made.path, made.tokenizer, made.served_model_name) == (folder, folder, folder, "name")
    assert (made.dtype, made.seed, made.max_model_len) == ("float32", 7, 300)
    assert made.skip_tokenizer_init
    assert made.enforce_eager
    assert made.max_logprobs == 33
    assert made.hf_config == LLAMA
    assert (made.get_vocab_size(), made.get_hidden_size()) == (100, 64)
    assert (cache.block_size, cache.kv_cache_memory_bytes, cache.gpu_memory_utilization) == (8, 12345, 0.25)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.policy) == (5, 50, "priority")
    assert (scheduler.max_num_partial_prefills, scheduler.stream_interval, scheduler.check_invariants) == (2, 4, True)
    assert (config.device_config.device, config.device_config.num_threads) == ("cpu", 3)
    assert config.liveness_config.engine_iteration_timeout_s == 1.5
    assert config.liveness_config.start_timeout_s == 9
    observability = config.observability_config
    assert (observability.disable_log_stats, observability.disable_log_requests) == (True, True)
    assert observability.max_log_len == 10
    assert config.parallel_config.world_size == 1
    assert config.lora_config is None


def test_the_configuration_reaches_the_core_as_it_is(model):
    config = config_of(model(generation={"eos_token_id": [2, 5]}), max_num_seqs=3, chat_template="{{ é }}")
    assert msgspec.json.decode(msgspec.json.encode(config), type=VllmConfig) == config


@pytest.mark.parametrize(("given", "enabled"), [(None, True), (True, True), (False, False)])
def test_equal_prefixes_are_shared_unless_that_is_switched_off(model, given, enabled):
    assert config_of(model(), enable_prefix_caching=given).cache_config.enable_prefix_caching is enabled


def test_the_model_is_the_served_name_where_none_is_given(model):
    folder = model()
    assert config_of(folder).model_config.served_model_name == folder


def test_the_context_is_the_models_where_none_is_given_and_may_be_shortened(model):
    folder = model()
    assert config_of(folder).model_config.max_model_len == CONTEXT
    assert config_of(folder, max_model_len=CONTEXT).model_config.max_model_len == CONTEXT
    assert config_of(folder, max_model_len=2).model_config.max_model_len == 2


@pytest.mark.parametrize(
    ("options", "words"), [({"device": "cuda"}, "on CPUs only"), ({"dtype": "float16"}, "float32 or bfloat16")]
)
def test_what_goes_with_no_quantization_is_refused_by_name(model, options, words):
    with pytest.raises(ValueError, match=rf"quantization='int8' .*{words}"):
        config_of(model(), quantization="int8", **options)


GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
BERT = {**LLAMA, "architectures": ["BertModel"]}
FP8_CHECKPOINT = {"quantization_config": {"quant_method": "fp8"}}


def test_the_weights_of_a_checkpoint_in_fp8_stay_so_and_other_weights_are_made_so(model):
    for folder, quantization in ((model(**FP8_CHECKPOINT), None), (model(**FP8_CHECKPOINT), "fp8")):
        config = config_of(folder, quantization=quantization).model_config
        assert (config.quantization, config.architecture.fp8) == ("fp8", "tensor")
    config = config_of(model(), quantization="fp8", dtype="float16", device="cuda").model_config
    assert (config.quantization, config.architecture.fp8) == ("fp8", "channel")
    assert config_of(model()).model_config.architecture.fp8 is None


def test_fp8_is_refused_by_name_where_it_is_not_served(model):
    with pytest.raises(ValueError, match=r"quantization='int8' .*is FP8; leave it out"):
        config_of(model(**FP8_CHECKPOINT), quantization="int8")
    for config in (GPT2, BERT):
        with pytest.raises(
            ValueError, match=rf"quantization='fp8' .*not for {config['architectures'][0]}; leave it out"
        ):
            config_of(model(config), quantization="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8'.* is an encoder, which has no cache"):
        config_of(model(BERT), kv_cache_dtype="fp8")


def test_both_names_of_a_cache_in_8_bit_floats_mean_the_same(model):
    for name in ("fp8", "fp8_e4m3"):
        assert config_of(model(), kv_cache_dtype=name).cache_config.cache_dtype == "fp8"


def test_a_context_longer_than_the_models_is_refused_by_name(model):
    with pytest.raises(ValueError, match=rf"max_model_len={CONTEXT + 1} .*a model.* {CONTEXT} tokens"):
        config_of(model(), max_model_len=CONTEXT + 1)


@pytest.mark.parametrize(
    ("options", "seqs", "tokens"),
    [
        ({}, 256, 0),
        ({"max_num_seqs": 5}, 5, 0),
        ({"max_num_seqs": 5000}, 5000, 0),
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_batched_tokens": 1}, 1, 1),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, 64, 64),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, 256, 0),
    ],
    ids=str,
)
def test_the_limits_of_a_step_fit_each_other(model, options, seqs, tokens):
    scheduler = config_of(model(), **options).scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (seqs, tokens)
    assert scheduler.enable_chunked_prefill == options.get("enable_chunked_prefill", True)


def test_more_requests_than_tokens_in_a_step_are_refused_by_name(model):
    with pytest.raises(ValueError, match=r"max_num_seqs=65 .*max_num_batched_tokens=64"):
        config_of(model(), max_num_seqs=65, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("options", "device", "tokens"),
    [
        ({}, "cpu", 512),
        ({}, "cuda", 2048),
        ({"max_num_seqs": 5000}, "cpu", 5000),
        ({"max_num_seqs": 5000}, "cuda", 5000),
        ({"enable_chunked_prefill": False}, "cpu", 3000),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, "cpu", 512),
        ({"max_num_batched_tokens": 300}, "cpu", 300),
        ({"max_num_batched_tokens": 300}, "cuda", 300),
    ],
    ids=str,
)
def test_the_core_chooses_the_most_tokens_of_a_step(model, options, device, tokens):
    config = config_of(model(max_position_embeddings=3000), **options)
    choose_step_size(config, torch.device(device))
    assert config.scheduler_config.max_num_batched_tokens == tokens


def test_without_chunked_prefill_a_step_takes_a_whole_context(model):
    folder = model(max_position_embeddings=5000)
    exact = config_of(folder, enable_chunked_prefill=False, max_model_len=512, max_num_batched_tokens=512)
    assert exact.scheduler_config.max_num_batched_tokens == 512
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=512 .*max_model_len=513.*enable_chunked_prefill"):
        config_of(folder, enable_chunked_prefill=False, max_model_len=513, max_num_batched_tokens=512)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        (None, [2]),
        ({}, [2]),
        ({"eos_token_id": None}, [2]),
        ({"eos_token_id": 7}, [7]),
        ({"eos_token_id": 0}, [0]),
        ({"eos_token_id": [7, 2, 9]}, [7, 2, 9]),
        ({"eos_token_id": []}, []),
    ],
    ids=str,
)
def test_the_end_of_an_answer_is_what_generation_config_says_before_config(model, caplog, generation, ids):
    assert config_of(model(generation=generation)).model_config.eos_token_ids == ids
    assert not caplog.messages


@pytest.mark.parametrize(("in_config", "ids"), [(None, []), ([3, 4], [3, 4]), (0, [0])], ids=str)
def test_generation_config_can_be_left_out_of_account(model, in_config, ids):
    folder = model(eos_token_id=in_config, generation={"eos_token_id": 7})
    assert config_of(folder, generation_config="vllm").model_config.eos_token_ids == ids


def test_generation_config_can_come_from_another_folder(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": [8]}')
    folder = model(generation={"eos_token_id": 7})
    assert config_of(folder, generation_config=str(other)).model_config.eos_token_ids == [8]
    (other / "generation_config.json").unlink()
    for missing in (other, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=rf"generation_config=.*{missing.name}.*no generation_config\.json"):
            config_of(folder, generation_config=str(missing))


@pytest.mark.parametrize(
    ("eos", "ids"),
    [
        (100, []),
        (-1, []),
        ([2, 100, 5], [2, 5]),
        ("2", []),
        ([3, "2"], [3]),
        (2.5, []),
        ([2.5], []),
        (True, []),
        ([[2]], []),
    ],
    ids=repr,
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_that_is_no_token_is_left_out_with_a_warning(model, caplog, eos, ids, file):
    folder = model(eos_token_id=eos) if file == "config.json" else model(generation={"eos_token_id": eos})
    assert config_of(folder).model_config.eos_token_ids == ids
    (warning,) = caplog.messages
    assert "eos_token_id" in warning
    assert folder in warning
    assert str(eos) in warning


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'{"a": \xff}', b"[" * 100_000],
    ids=["empty", "cut short", "a list", "null", "not UTF-8", "too deep"],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_broken_file_is_refused_by_name(model, content, file):
    folder = model(generation={})
    with open(f"{folder}/{file}", "wb") as broken:
        broken.write(content)
    with pytest.raises(ValueError, match=re.escape(f"a model/{file}")):
        config_of(folder)


def test_a_folder_without_config_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        config_of(str(tmp_path))
    with pytest.raises(ValueError, match="no such"):
        config_of(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"], "max_position_embeddings": None}, "MambaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
    ],
    ids=str,
)
def test_a_configuration_that_describes_no_model_we_know_is_refused_by_name(model, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(model(**changes))


def test_weights_are_looked_for_unless_they_are_to_be_random(model):
    folder = model()
    with pytest.raises(ValueError, match="safetensors"):
        AsyncEngineArgs(model=folder).create_engine_config()


def test_the_tokenizer_may_lie_elsewhere_and_must_exist(model, tmp_path):
    folder = model()
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(ValueError, match="no tokenizer"):
        config_of(folder, tokenizer=str(other))
    (other / "tokenizer.json").write_text("{}")
    assert config_of(folder, tokenizer=str(other)).model_config.tokenizer == str(other)


def test_only_the_asyncio_arguments_log_requests(model):
    folder = model()
    assert not config_of(folder).observability_config.disable_log_requests
    blocking = EngineArgs(model=folder, load_format="dummy").create_engine_config()
    assert blocking.observability_config.disable_log_requests
