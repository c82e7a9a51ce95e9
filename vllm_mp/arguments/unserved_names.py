"""Names and modules of vLLM that this engine does not have: using them raises an error that says what to use."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_SERVER = "`vllm-mp serve` is the server, and docs/using/server.md says how a program uses it"
_DRAFTS = "the option speculative_config says how tokens are drafted"
_EXECUTOR = "the core runs the model; the options tensor_parallel_size and data_parallel_backend say where"
_MODELS = "docs/internals/adding_a_model.md says how a model is added"

MODULES = {
    "assets": "give the texts of your own",
    "attention": "the option attention_backend chooses the implementation of attention",
    "beam_search": "ask for n completions with logprobs, and choose by cumulative_logprob",
    "benchmarks": "`vllm-mp bench` measures an engine",
    "collect_env": "`vllm-mp env` prints versions, devices and settings",
    "compilation": "nothing is compiled",
    "entrypoints.api_server": _SERVER,
    "entrypoints.cli": "`vllm-mp` is the command",
    "entrypoints.openai": _SERVER,
    "entrypoints.serve": _SERVER,
    "entrypoints.utils": _SERVER,
    "envs": "docs/operating/environment.md lists the environment variables; read os.environ",
    "executor": _EXECUTOR,
    "forward_context": _MODELS,
    "model_executor": _MODELS,
    "multimodal": "prompts have no images or sounds",
    "platforms": "the option device chooses the device, and torch.cuda tells about GPUs",
    "plugins": "logits_processors registers classes, and the server's options name files with parsers",
    "prompt_adapter": "vLLM has dropped prompt adapters; use LoRA adapters",
    "scalar_type": _MODELS,
    "spec_decode": _DRAFTS,
    "triton_utils": "import triton",
    "utils.print_utils": "use print()",
    "v1.core": "the core schedules and keeps the KV cache by itself",
    "v1.executor": _EXECUTOR,
    "v1.metrics.reader": "stat_loggers of AsyncLLM and /metrics of `vllm-mp serve` have the figures",
    "v1.outputs": "vllm_mp.outputs has what callers get",
    "v1.serial_utils": "messages between client and core are vllm_mp.wire",
    "v1.spec_decode": _DRAFTS,
    "v1.structured_output": "SamplingParams.structured_outputs constrains an output",
    "v1.worker": _EXECUTOR,
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
