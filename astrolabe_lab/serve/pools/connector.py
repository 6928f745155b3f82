"""vLLM's side of an emulated hand-off: what its scheduler asks a KV connector (``kv_connector_module_path``).

Decode: a prompt computed elsewhere is taken as loaded from outside, but for its last token; prefill: blocks of a
finished request are kept until decode has pulled them or they expire. The waiting itself is the executor's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from astrolabe_lab.serve.pools.desk import Desk

DESK = Desk()  # of this process, which is one engine's


@dataclass
class Pull:
    """``blocks`` that request ``rid`` pulls from the desk at ``port``, kept there as ``name``."""

    rid: str
    port: int
    name: str
    blocks: int


@dataclass
class Pulls(KVConnectorMetadata):
    """What the executor is told with a step. ``dropped``: (port, name) of blocks that nobody wants."""

    pulls: list[Pull] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)


class EmulatedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half; there are no workers."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._port = int(extra["port"])
        self._expiry_s = float(extra["expiry_s"]) * float(extra["time_scale"])
        self._next = Pulls()

    # the scheduler asks

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = len(request.prompt_token_ids or ()) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        port, name = int(params["remote_port"]), str(params["remote_request_id"])
        if num_external_tokens > 0:
            size = self._vllm_config.cache_config.block_size
            self._next.pulls.append(Pull(request.request_id, port, name, -(-num_external_tokens // size)))
        else:  # all of it is in the cache here
            self._next.dropped.append((port, name))

    def build_connector_meta(self, scheduler_output) -> Pulls:
        told, self._next = self._next, Pulls()
        return told

    def request_finished(self, request, block_ids) -> tuple[bool, dict | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, dict | None]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # it ends before it was ever scheduled
            params["do_remote_prefill"] = False
            self._next.dropped.append((int(params["remote_port"]), str(params["remote_request_id"])))
            return False, None
        ended_well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or not ended_well or not any(map(len, block_ids)):
            return False, None
        DESK.keep(request.request_id, time.monotonic() + self._expiry_s)
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(g) for g in block_ids],
            "remote_engine_id": f"emulated-{self._port}", "remote_request_id": request.request_id,
            "remote_host": "127.0.0.1", "remote_port": self._port,
        }  # fmt: skip

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping: to say what was let go, or to tell of what is not wanted."""
        return self.has_pending_block_frees() or bool(self._next.dropped)

    def has_pending_block_frees(self) -> bool:
        return self._kv_transfer_config.is_kv_producer and len(DESK) > 0

    # a worker would do

    def start_load_kv(self, forward_context, **kwargs) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
