"""The Triton kernels in Triton's interpreter, on the CPU."""

import os

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs them on the GPU that is here"
)

from triton_sweep import *  # noqa: E402, F403
