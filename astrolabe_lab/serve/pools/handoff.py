"""The two steps of a disaggregated request, as vLLM's connectors want them."""

from __future__ import annotations

from astrolabe_lab.serve.dispatch import EngineFault

ASK_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")


def prefill_body(body: dict) -> dict:
    """The request for the prefill engine: one token, not streamed, its KV blocks kept until they are pulled."""
    kept = {key: value for key, value in body.items() if key not in (*LIMITS, "stream", "stream_options", "n")}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return kept | {"stream": False, limit: 1, "kv_transfer_params": dict(ASK_PREFILL)}


def decode_body(body: dict, handle: dict | None) -> dict:
    """The request for the decode engine: the client's own, with what prefill said of its blocks; without that the
    engine computes the prompt itself."""
    kept = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return kept | {"kv_transfer_params": handle} if handle else kept


def release_body(body: dict, handle: dict) -> dict:
    """A request that the decode engine must refuse: it then tells prefill to let the blocks go, and pulls nothing."""
    kept = {key: value for key, value in body.items() if key not in (*LIMITS, "stream", "stream_options")}
    return kept | {"max_tokens": 2**31 - 1, "stream": False, "kv_transfer_params": handle}


def handle_of(answer: dict) -> dict | None:
    """What a prefill engine's answer says of the blocks it keeps; None where it keeps none."""
    handle = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return handle if isinstance(handle, dict) and handle.get("do_remote_prefill") else None


def check_blocks(handle: dict) -> None:
    """Raise EngineFault where its blocks are none: they would be the decode engine's undoing."""
    groups = handle.get("remote_block_ids")
    if groups is not None and not (isinstance(groups, list) and all(map(_is_group, groups))):
        raise EngineFault(f"remote_block_ids={groups!r:.60} are no blocks")


def blocks_of(handle: dict | None) -> int:
    """How many blocks there are to pull."""
    groups = (handle or {}).get("remote_block_ids") or []
    return max((len(g) if isinstance(g, (list, tuple)) else 1 for g in groups), default=0)


def _is_group(group) -> bool:
    return type(group) is int or isinstance(group, list) and all(type(block) is int for block in group)
