"""The library of structured output with the default model's tokenizer."""

import pytest
from support.grammar_library import Library

from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource


@pytest.fixture(scope="session")
def source(default_model):
    """A vocabulary with more ids than the tokenizer has, whose number is no multiple of 32."""
    return TokenizerSource(str(default_model), 49_152 + 13, [2, 0])


@pytest.fixture(scope="session")
def library(source):
    return Library.load(source)
