"""Small models for ranks and stages."""

import copy

import pytest

from vllm_mp.testing.random_models import CONFIGS, save_random_model


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Returns the folder of a random model with three layers and heads for four ranks.

    It takes a configuration or its name in `CONFIGS`, and sizes by the names that transformers has for all families.
    """
    folders = {}

    def make(of, **sizes):
        key = (of if isinstance(of, str) else id(of), *sizes.items())
        if key not in folders:
            config = copy.deepcopy(CONFIGS[of] if isinstance(of, str) else of)
            for name, size in {"num_attention_heads": 4, **sizes}.items():
                setattr(config, name, size)
            folders[key] = tmp_path_factory.mktemp(config.model_type)
            save_random_model(config, folders[key])
        return folders[key]

    return make
