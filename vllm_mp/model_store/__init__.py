"""Where a model's files come from: an alias, a local folder, a GGUF file, the hub or a Python package.

`resolve_model` is the way in. It returns a local folder that holds config.json, safetensors and tokenizer files.
"""

from vllm_mp.model_store.cache import cache_root
from vllm_mp.model_store.folder import TOKENIZER_FILES, has_tokenizer
from vllm_mp.model_store.gguf import NO_TOKENIZER_FILE
from vllm_mp.model_store.package import DEFAULT_MODEL, PACKAGED_MODELS, recommended_generation_config
from vllm_mp.model_store.resolve import resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "NO_TOKENIZER_FILE",
    "PACKAGED_MODELS",
    "TOKENIZER_FILES",
    "cache_root",
    "has_tokenizer",
    "recommended_generation_config",
    "resolve_model",
]
