"""Names and modules of vLLM that this engine does not have: using them raises an error that says what to use."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_SERVER = "`vllm-mp serve` is the server, and docs/using/server.md says how a program uses it"
_DRAFTS = "the option speculative_config says how tokens are drafted"
_EXECUTOR = "the core runs the model; the options tensor_parallel_size and data_parallel_backend say where"
_CONFIG = "vllm_mp.config has the configuration of an engine; EngineArgs makes it"
_PARTS = "AsyncLLM and LLM are the interface of the engine; docs/architecture.md shows its parts"
_TOOLS = "it is a tool of vLLM's own code; copy the function into the program"
_MODELS = "docs/internals/adding_a_model.md says how a model is added"
NEW_WEIGHTS = "weights come from files: change the files of the model's folder, then call sleep(level=2) and wake_up()"
WEIGHT_CALLS = dict.fromkeys(
    (
        "finish_weight_update",
        "get_weight_version",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weight_version",
        "update_weights",
    ),
    NEW_WEIGHTS,
)
"""The methods of vLLM's engines that change weights, and what to use instead."""
NO_RENDERER = "get_input_preprocessor() of AsyncLLM makes token ids, and chat() applies a chat template"

MODULES = {
    "assets": "give the texts of your own",
    "attention": "the option attention_backend chooses the implementation of attention",
    "beam_search": "ask for n completions with logprobs, and choose by cumulative_logprob",
    "benchmarks": "`vllm-mp bench` measures an engine",
    "collect_env": "`vllm-mp env` prints versions, devices and settings",
    "compilation": "nothing is compiled",
    "config.attention": _CONFIG,
    "config.cache": _CONFIG,
    "config.compilation": "nothing is compiled",
    "config.device": _CONFIG,
    "config.kernel": "nothing is compiled",
    "config.kv_events": "a KV cache stays with its core",
    "config.kv_transfer": "a KV cache stays with its core",
    "config.load": "the options load_format and download_dir say how weights are loaded",
    "config.lora": _CONFIG,
    "config.model": _CONFIG,
    "config.multimodal": _CONFIG,
    "config.observability": _CONFIG,
    "config.parallel": _CONFIG,
    "config.pooler": "give PoolingParams, or change the model's folder",
    "config.profiler": "profiles are written to VLLM_TORCH_PROFILER_DIR",
    "config.scheduler": _CONFIG,
    "config.speculative": _DRAFTS,
    "config.structured_outputs": _CONFIG,
    "config.utils": _CONFIG,
    "config.vllm": _CONFIG,
    "config.weight_transfer": NEW_WEIGHTS,
    "connections": "use aiohttp or requests",
    "device_allocator": "sleep() and wake_up() free and restore memory",
    "distributed.weight_transfer": NEW_WEIGHTS,
    "engine.metrics": "vllm_mp.v1.metrics.loggers has the loggers of figures",
    "entrypoints.api_server": _SERVER,
    "entrypoints.cli": "`vllm-mp` is the command",
    "entrypoints.launchers": _SERVER,
    "entrypoints.logger": "the option enable_log_requests logs requests",
    "entrypoints.openai": _SERVER,
    "entrypoints.pooling": _SERVER,
    "entrypoints.score_utils": "LLM.score compares texts",
    "entrypoints.serve": _SERVER,
    "entrypoints.utils": _SERVER,
    "envs": "docs/operating/environment.md lists the environment variables; read os.environ",
    "executor": _EXECUTOR,
    "forward_context": _MODELS,
    "logits_process": "logits_processors registers classes; vllm_mp.logits_processor has their base",
    "lora.peft_helper": "give a LoRARequest with the folder of the adapter",
    "lora.resolver": "give a LoRARequest with the folder of the adapter",
    "lora.utils": "give a LoRARequest with the folder of the adapter",
    "model_executor": _MODELS,
    "model_inspection": _MODELS,
    "multimodal": "give images in multi_modal_data of a prompt; docs/using/images.md says how",
    "parser": "vllm_mp.client.answer_parser splits answers, and `vllm-mp serve` has --reasoning-parser",
    "platforms": "the option device chooses the device, and torch.cuda tells about GPUs",
    "plugins": "logits_processors registers classes, and the server's options name files with parsers",
    "profiler": "start_profile() and stop_profile() make a profile",
    "prompt_adapter": "vLLM has dropped prompt adapters; use LoRA adapters",
    "ray": "an engine connects to Ray by itself; give data_parallel_backend='ray'",
    "renderers": NO_RENDERER,
    "scalar_type": _MODELS,
    "scripts": "`vllm-mp` is the command",
    "spec_decode": _DRAFTS,
    "third_party": "install the package that it copies",
    "tracing": "the option otlp_traces_endpoint sends traces",
    "transformers_utils.config": "use transformers.AutoConfig, or model_config of an engine",
    "transformers_utils.processor": "use transformers.AutoProcessor",
    "transformers_utils.repo_utils": "use huggingface_hub",
    "transformers_utils.utils": _TOOLS,
    "triton_utils": "import triton",
    "utils.collection_utils": _TOOLS,
    "utils.func_utils": _TOOLS,
    "utils.hashing": _TOOLS,
    "utils.import_utils": "use importlib",
    "utils.math_utils": _TOOLS,
    "utils.mem_constants": "write the number of bytes: a GiB is 2**30",
    "utils.mem_utils": "use torch.cuda.mem_get_info or psutil",
    "utils.print_utils": "use print()",
    "utils.serial_utils": "numpy.frombuffer reads the bytes of a vector that was sent in base64",
    "utils.system_utils": _TOOLS,
    "utils.torch_utils": "use torch; torch.manual_seed() and the option seed make runs repeatable",
    "v1.attention": "the option attention_backend chooses the implementation of attention",
    "v1.core": "the core schedules and keeps the KV cache by itself",
    "v1.engine.coordinator": _PARTS,
    "v1.engine.core": _PARTS,
    "v1.engine.core_client": _PARTS,
    "v1.engine.detokenizer": _PARTS,
    "v1.engine.input_processor": "AsyncLLM.get_input_preprocessor() makes token ids",
    "v1.engine.logprobs": _PARTS,
    "v1.engine.parallel_sampling": _PARTS,
    "v1.engine.processor": "AsyncLLM.get_input_preprocessor() makes token ids",
    "v1.engine.utils": _PARTS,
    "v1.executor": _EXECUTOR,
    "v1.kv_cache_interface": "the core schedules and keeps the KV cache by itself",
    "v1.metrics.reader": "stat_loggers of AsyncLLM and /metrics of `vllm-mp serve` have the figures",
    "v1.metrics.prometheus": "PrometheusStatLogger and /metrics of `vllm-mp serve` have the figures",
    "v1.outputs": "vllm_mp.outputs has what callers get",
    "v1.pool": "give PoolingParams",
    "v1.request": "requests live in the core; RequestOutput has what callers get",
    "v1.serial_utils": "messages between client and core are vllm_mp.wire",
    "v1.spec_decode": _DRAFTS,
    "v1.sample.metadata": "logits_processors registers classes",
    "v1.sample.sampler": "logits_processors registers classes",
    "v1.structured_output": "SamplingParams.structured_outputs constrains an output",
    "v1.utils": _PARTS,
    "v1.worker": _EXECUTOR,
    "weight_transfer": NEW_WEIGHTS,
    "worker": _EXECUTOR,
}
"""What to use instead of a module of vLLM, and of all modules below it."""


class NotServedError(NotImplementedError, AttributeError):
    """An attribute that vLLM's class has; `hasattr` is false for it."""


def refuse(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that raises ImportError for the names in `remedies`, with the remedy."""

    def get(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{name} of vLLM is not in vllm_mp: {remedies[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def refuse_attributes(remedies: Mapping[str, str]) -> Callable[[Any, str], NoReturn]:
    """Return a `__getattr__` for a class that raises NotServedError for the names in `remedies`, with the remedy."""

    def get(self: Any, name: str) -> NoReturn:
        owner = type(self).__name__
        if name in remedies:
            raise NotServedError(f"{owner} has no {name}: {remedies[name]}")
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    return get


class _ModuleFinder:
    """Raises ImportError for the modules of `MODULES`. Python asks it after all other finders have found nothing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        package, _, rest = name.partition(".")
        if package != "vllm_mp":
            return
        parts = rest.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if module in MODULES:
                # Its name is not that of the module: `from vllm_mp import NAME` would hide the error.
                raise ImportError(f"the module {rest} of vLLM is not in vllm_mp: {MODULES[module]}", name=package)


def refuse_modules() -> None:
    """Let imports of vLLM's modules that are not here say what to use instead."""
    if _ModuleFinder not in sys.meta_path:
        sys.meta_path.append(_ModuleFinder)
