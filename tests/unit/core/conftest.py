"""The libraries of structured output with the default model's tokenizer."""

import importlib.util

import pytest
from support.grammar_backends import Library

from vllm_mp.core.structured_output.tokenizer import TokenizerSource

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
XGRAMMAR = pytest.mark.skipif(not HAS_XGRAMMAR, reason="the extra xgrammar is not installed")


@pytest.fixture(scope="session")
def source(default_model):
    """A vocabulary with more ids than the tokenizer has, whose number is no multiple of 32."""
    return TokenizerSource(str(default_model), 49_152 + 13, [2, 0])


@pytest.fixture(scope="session")
def llguidance(source):
    return Library.load("llguidance", source)


@pytest.fixture(scope="session", params=["llguidance", pytest.param("xgrammar", marks=[XGRAMMAR, pytest.mark.slow])])
def library(request, source, llguidance):
    return llguidance if request.param == "llguidance" else Library.load("xgrammar", source)


@pytest.fixture
def xgrammar_or_skip():
    """Skip the test if xgrammar is not installed."""
    if not HAS_XGRAMMAR:
        pytest.skip("the extra xgrammar is not installed")
