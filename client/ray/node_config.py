"""The configuration of an engine as a node of the cluster needs it."""

from pathlib import Path

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.model_store import resolve_model


def config_on_node(encoded: bytes, node_key_file: str) -> VllmConfig:
    """Return the configuration in JSON with the model's folder on this node, fetched if necessary.

    Its devices are those that Ray chose, and `node_key_file` is this node's. Raises ValueError if this node cannot have
    the model or the tokenizer, and what `resolve_model` raises.
    """
    config = msgspec.json.decode(encoded, type=VllmConfig)
    model = config.model_config
    if not Path(model.path).exists():
        path = str(
            resolve_model(
                model.model,
                revision=model.revision,
                download_dir=model.download_dir,
                load_format=model.load_format,
                mmproj=model.mmproj,
            )
        )
        tokenizer = path if model.tokenizer == model.path else model.tokenizer
        model = msgspec.structs.replace(model, path=path, tokenizer=tokenizer)
    if not Path(model.tokenizer).exists():
        raise ValueError(f"the tokenizer's folder {model.tokenizer} does not exist here; copy it to each node")
    # Ray shows a process only its own GPUs, so that each core has the first ones.
    parallel = msgspec.structs.replace(config.parallel_config, data_parallel_rank=0, node_key_file=node_key_file)
    return msgspec.structs.replace(config, model_config=model, parallel_config=parallel)
