"""vLLM's NIXL connector on a CPU (``kv_connector_module_path``), without the core that it takes for itself.

vLLM pins a worker's main thread, which computes where there is one thread an engine, to the last core of the machine:
all engines of a small machine to the same one.
"""

from __future__ import annotations

import os

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as Pinned


class NixlConnector(Pinned):
    """vLLM's own; the thread keeps the cores that it had."""

    def __init__(self, vllm_config, role, kv_cache_config):
        before = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, before)
