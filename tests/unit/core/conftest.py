"""The libraries of structured output with the default model's tokenizer."""

import pytest
from support.grammar_backends import Library

from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource


@pytest.fixture(scope="session")
def source(default_model):
    """A vocabulary with more ids than the tokenizer has, whose number is no multiple of 32."""
    return TokenizerSource(str(default_model), 49_152 + 13, [2, 0])


@pytest.fixture(scope="session")
def llguidance(source):
    return Library.load("llguidance", source)


@pytest.fixture(scope="session")
def xgrammar(source):
    return Library.load("xgrammar", source)


@pytest.fixture(scope="session", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def library(request):
    return request.getfixturevalue(request.param)
