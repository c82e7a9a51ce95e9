"""The options of an engine: as arguments, as flags, and as the configuration that follows from them."""

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import math
import re
import sys
import typing
from pathlib import Path

import msgspec
import pytest
import torch

from vllm_mp import (
    AsyncLLM,
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    UsageContext,
)
from vllm_mp.config import VllmConfig
from vllm_mp.config.engine_args import AsyncEngineArgs, EngineArgs
from vllm_mp.core.worker.device import choose_step_size

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
FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
HINTS = typing.get_type_hints(AsyncEngineArgs)
WITHOUT_EFFECT = {"swap_space"}
"""The options that change nothing."""
SERVED = [name for name in FIELDS if name not in WITHOUT_EFFECT]
ALIASES = {"half", "float", "fp8_e4m3", "FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "uni"}
"""Choices that are replaced by another name."""
FINDS_FILES = {
    "model",
    "mmproj",
    "tokenizer",
    "tokenizer_revision",
    "revision",
    "hf_token",
    "download_dir",
    "load_format",
}
"""The options that choose files. Their values are used before there is a configuration."""
NOT_READ = {
    "decoding_config.reasoning_backend",
    "parallel_config.distributed_executor_backend",
}
"""Fields of the configuration that belong to options that are not served, or that only decide other fields."""
NEEDED: dict[str, dict[str, typing.Any]] = {
    **{name: {"enable_lora": True} for name in ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_modules")},
    "nnodes": {"tensor_parallel_size": 2},
    **{name: {"nnodes": 2, "tensor_parallel_size": 2} for name in ("node_rank", "node_key_file")},
}
"""Options that have an effect only with others, and these."""
_SPECIAL_VALUES: dict[str, typing.Any] = {
    "cpus": "0-3,node0",
    "chat_template": "{{ messages }}",
    "data_parallel_backend": "ray",
    "distributed_executor_backend": "ray",
    "download_dir": "/a b",
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "fault_injection": "exit@step=3",
    "generation_config": "vllm",
    "kv_cache_memory_bytes": 2**35,
    "nnodes": 2,
    "node_rank": 1,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "limit_mm_per_prompt": {"image": 2},
    "allowed_media_domains": ("images.example.org",),
    "mm_processor_kwargs": {"do_image_splitting": False},
    "logits_processors": ("some.module:Class", "name=entry-point"),
    "lora_modules": ("sql=/adapters/a b", '{"name": "law", "path": "/adapters/law"}'),
    "max_logprobs": -1,
    "override_generation_config": {"top_k": 5},
    "spec_model": "ngram",  # a model would be looked for; vLLM takes the name of a method too
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "structured_outputs_config": {"disable_any_whitespace": True},
}
"""Values of options that have special rules, and values that need quoting as a flag."""
BOUNDED = [
    (name, bound, side)
    for name, field in FIELDS.items()
    for bound, side in ((field.metadata["low"], -1), (field.metadata["high"], 1))
    if bound is not None
]
CHOICES = [name for name, field in FIELDS.items() if field.metadata["choices"]]
WRONG_TYPE = {"str": (3, True, ["x"]), "int": ("3", 1.5, True, [3]), "float": ("0.5", True, [0.5])}
WRONG_TYPE |= {"bool": ("yes", 1, [True]), "dict": ("{}", 3, [1]), "tuple": ("x", 3, [1])}

TAKES_TOO = [("hf_token", True), ("served_model_name", ["x"])]
"""Values of other types that vLLM takes, and so does this engine."""


def types_of(name):
    """Return the names of the types that an option accepts, without None."""
    hint = HINTS[name]
    alternatives = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    return [(typing.get_origin(kind) or kind).__name__ for kind in alternatives if kind is not type(None)]


def other_value(name):
    """Return a valid value of the option that is not the default."""
    field, (kind,) = FIELDS[name], types_of(name)
    if name in _SPECIAL_VALUES:
        return _SPECIAL_VALUES[name]
    if field.metadata["choices"]:
        return next(choice for choice in field.metadata["choices"] if choice not in {field.default, *ALIASES})
    if kind == "bool":
        return not field.default
    if kind == "str":
        return "some/value"
    step = {"int": 7, "float": 0.05}[kind]
    return (field.default if field.default is not None else field.metadata["low"] or 0) + step


def flags_for(name, value):
    """Return the flags of a command line that give the option this value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, tuple):
        return [text for element in value for text in (f"--{flag}", element)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


@pytest.mark.parametrize("options", [{}, {"lora_modules": ("poet=some/folder", "clerk=other/folder")}])
def test_options_are_equal_after_they_were_written_as_json(options):
    args = AsyncEngineArgs(**options)
    read = json.loads(json.dumps(dataclasses.asdict(args)))

    assert AsyncEngineArgs(**read) == args


def parse(*flags):
    """Return the options from a command line. Raise ValueError with the text of stderr if it is refused."""
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            namespace = parser.parse_args(flags)
    except SystemExit:
        raise ValueError(stderr.getvalue()) from None
    return AsyncEngineArgs.from_cli_args(namespace)


def section_type(hint):
    """Return the class of a section of the configuration: `LoRAConfig` for `LoRAConfig | None`."""
    return next(kind for kind in (*typing.get_args(hint), hint) if kind is not type(None))


def numbers_in(message):
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", message)
    return [int(number) if number.lstrip("-").isdigit() else float(number) for number in numbers]


def refusal(error, **options):
    with pytest.raises(error) as caught:
        AsyncEngineArgs(**options)
    return str(caught.value)


@pytest.fixture
def model(tmp_path):
    """A function that writes a model folder without weights and returns its path."""

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


def test_exactly_the_listed_options_have_no_effect():
    assert {name for name, field in FIELDS.items() if field.metadata["without_effect"]} == WITHOUT_EFFECT


def test_every_option_has_a_flag_whose_help_shows_default_and_choices():
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(prog="x"))
    actions = {action.dest: action for action in parser._actions}
    for name, field in FIELDS.items():
        action = actions[name]
        assert "--" + name.replace("_", "-") in action.option_strings
        assert len(field.metadata["help"]) > 10
        assert field.metadata["help"] in action.help.replace("%%", "%")
        assert ("no effect" in action.help) == (name in WITHOUT_EFFECT)
        if isinstance(field.default, bool):
            assert f"Default: {'on' if field.default else 'off'}." in action.help, name
        elif field.default not in (None, "", ()):
            assert f"Default: {field.default}." in action.help, name
        elif name in SERVED:
            assert "Default: " in action.help, name
        if field.metadata["choices"]:
            assert tuple(action.choices) == field.metadata["choices"]
    assert "--max-model-len" in parser.format_help()


def test_without_flags_every_option_has_its_default():
    assert parse() == AsyncEngineArgs()


@pytest.mark.parametrize("name", SERVED)
def test_flag_and_argument_mean_the_same(name):
    value = other_value(name)
    assert value != FIELDS[name].default
    args = parse(*flags_for(name, value))
    assert getattr(args, name) == value
    assert args == AsyncEngineArgs(**{name: value})


def test_all_flags_together_mean_the_same_as_all_arguments():
    values = {name: other_value(name) for name in SERVED}
    flags = [flag for name, value in values.items() for flag in flags_for(name, value)]
    assert parse(*flags) == AsyncEngineArgs(**values)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in FINDS_FILES])
def test_every_served_option_changes_the_configuration(model, name):
    folder = model(generation={"eos_token_id": 7})
    others = NEEDED.get(name, {})
    assert config_of(folder, **others, **{name: other_value(name)}) != config_of(folder, **others)


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_backend": "ray"},
        {"data_parallel_backend": "ray", "distributed_executor_backend": "mp"},
        {"engine_use_ray": True, "distributed_executor_backend": "mp"},
        {"distributed_executor_backend": "ray"},
        {"worker_use_ray": True},
    ],
)
def test_each_option_for_ray_puts_the_cores_on_ray(model, options):
    assert config_of(model(), **options).parallel_config.data_parallel_backend == "ray"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"worker_use_ray": True, "distributed_executor_backend": "mp"}, "worker_use_ray=True contradicts dist.*='mp'"),
        ({"engine_use_ray": True, "data_parallel_backend": "mp"}, "engine_use_ray=True contradicts data_par.*='mp'"),
        ({"worker_use_ray": True, "data_parallel_backend": "mp"}, "backend='ray' contradicts data_par.*='mp'"),
        ({"engine_use_ray": True, "cpus": "0"}, "cpus='0' is not served on Ray.*num_threads"),
    ],
)
def test_options_for_ray_that_contradict_each_other_are_refused_by_name(model, options, words):
    with pytest.raises(ValueError, match=words):
        config_of(model(), **options)


def test_engine_on_ray_without_ray_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"data_parallel_backend='ray' needs Ray.*pip install ray"):
        AsyncLLM.from_vllm_config(config_of(model(), engine_use_ray=True))


def test_configuration_of_adapters_keeps_as_many_in_host_memory_as_on_the_device_by_default(model):
    assert config_of(model(), enable_lora=True, max_loras=3).lora_config.max_cpu_loras == 3
    assert config_of(model(), max_loras=3).lora_config is None


def test_fewer_adapters_in_host_memory_than_on_the_device_are_refused(model):
    with pytest.raises(ValueError, match="max_cpu_loras=2 is below max_loras=3; raise the first or lower the second"):
        config_of(model(), enable_lora=True, max_loras=3, max_cpu_loras=2)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (("sql",), "lora_modules must be NAME=FOLDER, got 'sql'"),
        (("=/a",), "lora_name must have 1 to 256 characters"),
        (("sql=",), "lora_path must have 1 to 4096 characters"),
        (('{"name": "sql"}',), "is not a JSON object with name and path"),
        (("sql=/a", "sql=/b"), "the name 'sql' is used twice"),
        (("mine=/a",), "the name 'mine' is used twice"),
    ],
)
def test_adapters_that_a_server_cannot_name_are_refused(model, modules, words):
    with pytest.raises(ValueError, match=words):
        config_of(model(), enable_lora=True, lora_modules=modules, served_model_name="mine")
    with pytest.raises(ValueError, match="needs enable_lora=True"):
        config_of(model(), lora_modules=modules)


def test_adapters_are_refused_for_a_model_that_takes_none(model):
    folder = model(architectures=["BertModel"], layer_norm_eps=1e-12, type_vocab_size=2, hidden_act="gelu")
    with pytest.raises(ValueError, match=r"enable_lora=True.*BertModel"):
        config_of(folder, enable_lora=True)


def test_every_field_of_the_configuration_is_read_by_the_product():
    root = Path(__file__).parents[3]
    makers = ("engine_options.py", "engine_args.py", "resolution.py")  # they make the configuration
    folders = ["client", "core", "kernels", *(f"vllm_mp/{name}" for name in ("cli", "config", "machine", "validation"))]
    files = [file for folder in folders for file in (root / folder).rglob("*.py") if file.name not in makers]
    files += (root / "vllm_mp").glob("*.py")
    fields = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(VllmConfig)
        for field in msgspec.structs.fields(section_type(section.type))
    ]
    unread = {name.partition(".")[2] for name in fields}
    for text in (file.read_text() for file in files):
        if any(f".{name}" in text for name in unread):
            nodes = ast.walk(ast.parse(text))
            unread -= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    assert {name for name in fields if name.partition(".")[2] in unread} == NOT_READ


def test_attributes_that_are_not_options_are_ignored():
    namespace = argparse.Namespace(prompt="hello", model="m", seed=3)
    assert AsyncEngineArgs.from_cli_args(namespace) == AsyncEngineArgs(model="m", seed=3)
    assert EngineArgs.from_cli_args(namespace) == EngineArgs(model="m", seed=3)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if HINTS[name] is bool])
def test_flag_that_begins_with_no_switches_an_option_off(name):
    flag = name.replace("_", "-")
    assert getattr(parse(f"--{flag}", f"--no-{flag}") if name in SERVED else parse(f"--no-{flag}"), name) is False


@pytest.mark.parametrize("name", FIELDS)
def test_value_of_the_wrong_type_is_refused_by_name(name):
    (kind,) = types_of(name)
    for value in WRONG_TYPE[kind]:
        if (name, value) in TAKES_TOO:
            continue
        message = refusal(TypeError, **{name: value})
        assert message.startswith(f"{name} must be")
        assert kind in message
        assert repr(value) in message


@pytest.mark.parametrize(("name", "bound", "side"), BOUNDED)
def test_bounds_are_allowed_and_values_beyond_them_are_refused_by_name(name, bound, side):
    if name in SERVED:
        AsyncEngineArgs(**{name: bound})
    for distance in (1, 10**9):
        value = bound + side * distance
        message = refusal(ValueError, **{name: value})
        assert message.startswith(f"{name} must be")
        assert bound in numbers_in(message), "the error does not state the exact bound"
        assert str(value) in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name) == ["float"]])
def test_number_that_is_not_finite_is_refused_by_name(name, value):
    # Infinity cannot reach the core: JSON has no such number.
    message = refusal((ValueError, NotImplementedError), **{name: value})
    assert name in message
    assert str(value) in message


@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name)[0] in ("int", "float")])
def test_number_beyond_64_bits_is_refused_by_name(name):
    assert name in refusal((ValueError, NotImplementedError), **{name: 10**400})


def test_float_option_accepts_an_integer():
    assert AsyncEngineArgs(start_timeout_s=5, gpu_memory_utilization=1).start_timeout_s == 5


@pytest.mark.parametrize("name", CHOICES)
def test_value_that_is_not_among_the_choices_is_refused_by_name(name):
    message = refusal(ValueError, **{name: "nonsense"})
    assert message.startswith(f"{name} must be one of")
    assert "'nonsense'" in message
    for choice in FIELDS[name].metadata["choices"]:
        assert choice in message


def test_unknown_option_is_refused_by_name():
    assert "modle" in refusal(TypeError, modle="x")
    with pytest.raises(NotImplementedError, match=r"otlp_traces_endpoint='x' is not served: use AsyncEngineArgs"):
        EngineArgs(otlp_traces_endpoint="x")


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
def test_bad_flag_is_refused_by_name(flags):
    with pytest.raises(ValueError, match=f"{flags[0]}|{flags[0][2:].replace('-', '_')}"):
        parse(*flags)


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32")])
def test_older_names_of_dtypes_are_accepted(alias, dtype, model):
    assert AsyncEngineArgs(dtype=alias).dtype == dtype
    assert parse("--dtype", alias).dtype == dtype
    assert config_of(model(), dtype=alias).model_config.dtype == dtype


@pytest.mark.parametrize(
    ("alias", "backend"), [("FLASH_ATTN", "flash_attn"), ("TRITON_ATTN", "triton"), ("TORCH_SDPA", "torch")]
)
def test_other_names_of_attention_backends_are_accepted(alias, backend, model):
    assert parse("--attention-backend", alias).attention_backend == backend
    assert config_of(model(), attention_backend=alias).attention_config.backend == backend


def test_configuration_holds_the_values_of_the_options(model):
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
        otlp_traces_endpoint="http://localhost:4318",
        skip_tokenizer_init=True,
        batch_invariant=False,
        enforce_eager=True,
        max_cudagraph_capture_size=700,
        max_logprobs=33,
        stream_interval=4,
        check_invariants=True,
    )
    made, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    assert (made.model, made.path, made.tokenizer, made.served_model_name) == (folder, folder, folder, "name")
    assert (made.dtype, made.seed, made.max_model_len) == ("float32", 7, 300)
    assert made.skip_tokenizer_init
    assert made.enforce_eager
    assert not made.batch_invariant
    assert made.max_cudagraph_capture_size == 700
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
    assert (observability.max_log_len, observability.otlp_traces_endpoint) == (10, "http://localhost:4318")
    assert config.parallel_config.world_size == 1
    assert config.lora_config is None


def test_configuration_survives_its_encoding_as_json(model):
    config = config_of(model(generation={"eos_token_id": [2, 5]}), max_num_seqs=3, chat_template="{{ é }}")
    assert msgspec.json.decode(msgspec.json.encode(config), type=VllmConfig) == config


@pytest.mark.parametrize(("given", "enabled"), [(None, True), (True, True), (False, False)])
def test_prefix_caching_is_on_unless_it_is_switched_off(model, given, enabled):
    assert config_of(model(), enable_prefix_caching=given).cache_config.enable_prefix_caching is enabled


def test_served_name_is_by_default_the_model(model):
    folder = model()
    assert config_of(folder).model_config.served_model_name == folder


def test_max_model_len_is_by_default_the_context_and_may_be_shorter(model):
    folder = model()
    assert config_of(folder).model_config.max_model_len == CONTEXT
    assert config_of(folder, max_model_len=CONTEXT).model_config.max_model_len == CONTEXT
    assert config_of(folder, max_model_len=2).model_config.max_model_len == 2


@pytest.mark.parametrize(
    ("options", "words"), [({"device": "cuda"}, "on CPUs only"), ({"dtype": "float16"}, "float32 or bfloat16")]
)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_option_that_contradicts_integers_is_refused_by_name(model, quantization, options, words):
    with pytest.raises(ValueError, match=rf"quantization='{quantization}' .*{words}"):
        config_of(model(), quantization=quantization, **options)


@pytest.mark.parametrize(
    "options", [{"quantization": name} for name in ("int8", "int4", "fp8")] + [{"enable_lora": True}]
)
def test_option_that_needs_the_native_module_says_why_the_model_has_none(model, options):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*\(config field 'hidden_act' is 'relu2'; native are silu"):
        config_of(model(hidden_act="relu2"), **options)


def test_int4_makes_blocks_of_experts_too(model):
    config = config_of(model(), quantization="int4").model_config
    assert (config.quantization, config.architecture.blocks) == ("int4", "int4")
    assert config_of(model()).model_config.architecture.blocks is None
    experts = {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    assert config_of(model(**experts), quantization="int4").model_config.architecture.blocks == "int4"
    assert config_of(model(**experts, **AWQ_CHECKPOINT)).model_config.architecture.blocks == "awq"
    fused_experts = {"architectures": ["GraniteMoeForCausalLM"], "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"quant_method 'awq'\) is not supported for GraniteMoeForCausalLM"):
        config_of(model(**fused_experts, **AWQ_CHECKPOINT))


GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
BERT = {**LLAMA, "architectures": ["BertModel"]}
FP8_CHECKPOINT = {"quantization_config": {"quant_method": "fp8"}}
AWQ_CHECKPOINT = {"quantization_config": {"quant_method": "awq", "bits": 4}}


def test_checkpoint_with_4_bits_is_found_and_contradictions_are_refused_by_name(model):
    for quantization in (None, "awq"):
        assert config_of(model(**AWQ_CHECKPOINT), quantization=quantization).model_config.quantization == "awq"
    for quantization in ("gptq", "int8", "int4", "fp8"):
        with pytest.raises(ValueError, match=rf"quantization='{quantization}' needs another checkpoint.* is AWQ"):
            config_of(model(**AWQ_CHECKPOINT), quantization=quantization)
    with pytest.raises(ValueError, match=r"quantization='gptq' needs a checkpoint of that kind"):
        config_of(model(), quantization="gptq")
    with pytest.raises(ValueError, match=r"quantization='awq' is computed on CPUs only"):
        config_of(model(**AWQ_CHECKPOINT), device="cuda")


def test_fp8_checkpoint_stays_fp8_and_other_weights_become_fp8(model):
    for folder, quantization in ((model(**FP8_CHECKPOINT), None), (model(**FP8_CHECKPOINT), "fp8")):
        config = config_of(folder, quantization=quantization).model_config
        assert (config.quantization, config.architecture.fp8) == ("fp8", "tensor")
    config = config_of(model(), quantization="fp8", dtype="float16", device="cuda").model_config
    assert (config.quantization, config.architecture.fp8) == ("fp8", "channel")
    assert config_of(model()).model_config.architecture.fp8 is None


def test_fp8_is_refused_by_name_for_a_model_that_cannot_have_it(model):
    with pytest.raises(ValueError, match=r"quantization='int8' .*is FP8; leave it out"):
        config_of(model(**FP8_CHECKPOINT), quantization="int8")
    for config in (GPT2, BERT):
        with pytest.raises(
            ValueError, match=rf"quantization='fp8' .*not for {config['architectures'][0]}; leave it out"
        ):
            config_of(model(config), quantization="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8'.* is an encoder, which has no cache"):
        config_of(model(BERT), kv_cache_dtype="fp8")


@pytest.mark.parametrize(("dtype", "other_name"), [("fp8", "fp8_e4m3"), ("int8", "int8_per_token_head")])
def test_both_names_of_a_cache_in_8_bits_mean_the_same(model, dtype, other_name):
    for name in (dtype, other_name):
        assert config_of(model(), kv_cache_dtype=name).cache_config.cache_dtype == dtype


def test_max_model_len_above_the_context_is_refused_by_name(model):
    with pytest.raises(ValueError, match=rf"max_model_len={CONTEXT + 1} .*a model.* {CONTEXT} tokens"):
        config_of(model(), max_model_len=CONTEXT + 1)


def test_context_stretched_by_linear_scaling_is_the_default_and_that_of_dynamic_scaling_is_not_served(model):
    path = Path(model()) / "config.json"
    config = json.loads(path.read_text())
    for kind in ("linear", "dynamic"):
        path.write_text(json.dumps({**config, "rope_scaling": {"type": kind, "factor": 4.0}}))
        if kind == "linear":
            assert config_of(str(path.parent)).model_config.max_model_len == 4 * CONTEXT
        else:
            with pytest.raises(ValueError, match=rf"{CONTEXT} tokens \(dynamic rotary scaling beyond it is not served"):
                config_of(str(path.parent), max_model_len=4 * CONTEXT)


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
def test_limits_of_a_step_fit_each_other(model, options, seqs, tokens):
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
def test_core_chooses_the_maximum_tokens_of_a_step(model, options, device, tokens):
    config = config_of(model(max_position_embeddings=3000), **options)
    choose_step_size(config, torch.device(device))
    assert config.scheduler_config.max_num_batched_tokens == tokens


def test_without_chunked_prefill_a_step_must_fit_a_whole_context(model):
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
        ({"eos_token_id": 7}, [7, 2]),
        ({"eos_token_id": 0}, [0, 2]),
        ({"eos_token_id": [7, 2, 9]}, [7, 2, 9]),
        ({"eos_token_id": []}, [2]),
    ],
    ids=str,
)
def test_end_of_sequence_comes_from_generation_config_and_config(model, caplog, generation, ids):
    assert config_of(model(generation=generation)).model_config.eos_token_ids == ids
    assert not caplog.messages


@pytest.mark.parametrize(("in_config", "ids"), [(None, []), ([3, 4], [3, 4]), (0, [0])], ids=str)
def test_generation_config_can_be_ignored(model, in_config, ids):
    folder = model(eos_token_id=in_config, generation={"eos_token_id": 7})
    assert config_of(folder, generation_config="vllm").model_config.eos_token_ids == ids


def test_generation_config_can_come_from_another_folder(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": [8]}')
    folder = model(generation={"eos_token_id": 7})
    assert config_of(folder, generation_config=str(other)).model_config.eos_token_ids == [8, 2]
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
def test_end_of_sequence_outside_the_vocabulary_is_ignored_with_a_warning(model, caplog, eos, ids, file):
    in_config, in_generation = (eos, None) if file == "config.json" else (None, eos)
    folder = model(eos_token_id=in_config, generation={"eos_token_id": in_generation})
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
def test_broken_file_is_refused_by_name(model, content, file):
    folder = model(generation={})
    with open(f"{folder}/{file}", "wb") as broken:
        broken.write(content)
    with pytest.raises(ValueError, match=re.escape(f"a model/{file}")):
        config_of(folder)


def test_folder_without_config_is_refused_by_name(tmp_path):
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
def test_config_of_an_unknown_architecture_or_shape_is_refused_by_name(model, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(model(**changes))


def test_folder_without_weights_is_refused_unless_they_are_random(model):
    folder = model()
    with pytest.raises(ValueError, match="safetensors"):
        AsyncEngineArgs(model=folder).create_engine_config()


def test_tokenizer_may_be_in_another_folder_and_must_exist(model, tmp_path):
    folder = model()
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(ValueError, match=r"^tokenizer '.*tokenizer'.*no tokenizer"):
        config_of(folder, tokenizer=str(other))
    with pytest.raises(ValueError, match=r"^tokenizer '/nothing': no such file or folder; correct the path"):
        config_of(folder, tokenizer="/nothing")
    (other / "tokenizer.json").write_text("{}")
    assert config_of(folder, tokenizer=str(other)).model_config.tokenizer == str(other)


def test_requests_are_logged_only_if_asked_for(model):
    folder = model()
    assert config_of(folder).observability_config.disable_log_requests
    assert not config_of(folder, disable_log_requests=False).observability_config.disable_log_requests
    blocking = EngineArgs(model=folder, load_format="dummy").create_engine_config()
    assert blocking.observability_config.disable_log_requests
    assert not config_of(folder, enable_log_requests=True).observability_config.disable_log_requests
    assert config_of(folder, enable_log_requests=False).observability_config.disable_log_requests


def test_time_until_a_core_counts_as_hung_comes_from_the_environment_unless_it_is_an_option(model, monkeypatch):
    folder, variable = model(), "VLLM_ENGINE_ITERATION_TIMEOUT_S"
    monkeypatch.delenv(variable, raising=False)
    assert config_of(folder).liveness_config.engine_iteration_timeout_s == 60
    monkeypatch.setenv(variable, "7.5")
    assert config_of(folder).liveness_config.engine_iteration_timeout_s == 7.5
    assert config_of(folder, engine_iteration_timeout_s=9).liveness_config.engine_iteration_timeout_s == 9
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(ValueError, match=f"{variable} must be a number of seconds.*{wrong}.*unset it"):
            config_of(folder)
    assert config_of(folder, engine_iteration_timeout_s=9).liveness_config.engine_iteration_timeout_s == 9


def test_configuration_takes_the_usage_context_and_has_the_sections_that_vllm_has(model):
    args = AsyncEngineArgs(model=model(), load_format="dummy")
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    assert config == args.create_engine_config()
    assert (config.decoding_config.backend, config.decoding_config.reasoning_backend) == ("auto", "")
    sections = {
        "model_config": ModelConfig,
        "cache_config": CacheConfig,
        "scheduler_config": SchedulerConfig,
        "parallel_config": ParallelConfig,
        "device_config": DeviceConfig,
        "decoding_config": DecodingConfig,
        "observability_config": ObservabilityConfig,
    }
    assert all(isinstance(getattr(config, name), kind) for name, kind in sections.items())


def test_chat_template_may_be_text_or_a_path_and_the_configuration_has_its_text(model, tmp_path):
    folder, template = model(), "<{{ messages[0]['content'] }}>"
    (tmp_path / "mine.jinja").write_text(template)
    for given in (template, str(tmp_path / "mine.jinja")):
        assert config_of(folder, chat_template=given).model_config.chat_template == template


@pytest.mark.parametrize("given", ["no/such/file.jinja", "x" * 10_000, "."])
def test_chat_template_that_is_neither_text_nor_a_path_is_refused(model, given):
    with pytest.raises(ValueError, match="chat_template"):
        config_of(model(), chat_template=given)


@pytest.mark.parametrize("limit", [{"count": 2}, {"count": 2, "width": 512, "height": None}])
def test_limit_of_images_may_be_given_as_in_vllm(limit):
    args = AsyncEngineArgs(model="m", limit_mm_per_prompt={"image": limit, "video": {"count": 0}})
    assert args == AsyncEngineArgs(model="m", limit_mm_per_prompt={"image": 2, "video": 0})


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"image": {"number": 2}}, r"\['image'\] has the unknown field 'number'; it may have count, width, height"),
        ({"image": {"count": "2"}}, r"\['image'\] must be an integer from 0 to 999, got '2'"),
        ({"image": {"count": 2, "width": 0}}, r"\['image'\]\['width'\] must be an integer from 1 on or None, got 0"),
        ({"smell": {"length": 2}}, r"\['smell'\] has the unknown field 'length'; it may have count"),
    ],
)
def test_limit_of_images_with_other_fields_is_refused_by_name(limit, words):
    with pytest.raises(ValueError, match="limit_mm_per_prompt" + words):
        AsyncEngineArgs(model="m", limit_mm_per_prompt=limit)
