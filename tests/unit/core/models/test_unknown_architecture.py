"""A configuration whose architecture transformers does not have runs by its model type, and the log says so."""

import json

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.transformers.backend import _find_class
from vllm_mp.model_config.families.registry import read_architecture

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(("name", "is_known"), [("MyOwnForCausalLM", False), ("HeliumForCausalLM", True)])
def test_unknown_architecture_is_named_in_the_log(tmp_path, caplog, name, is_known):
    config = {**CONFIG, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine_config = AsyncEngineArgs(str(tmp_path), skip_tokenizer_init=True, load_format="dummy").create_engine_config()
    model_class, _ = _find_class(read_architecture(config), engine_config.model_config)
    assert model_class.__name__ == "LlamaForCausalLM"
    named = "names the architecture 'MyOwnForCausalLM', which transformers does not have; by its model_type 'llama'"
    assert (named in caplog.text) is not is_known
