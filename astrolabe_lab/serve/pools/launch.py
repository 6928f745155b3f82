"""Start a prefill and a decode pool of vLLM engines that hand KV blocks over.

with launch_pools(2, 2, world="hardware") as pools:            # real transfers by NIXL, on GPUs or the CPU
    print(pools.prefill, pools.decode)
with launch_pools(2, 4, preset="qwen2.5-3b-a40") as pools:     # emulated: steps and transfers take the modelled time
    ...
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass

from astrolabe_lab.calibrate.artifact import Transfer
from astrolabe_lab.disagg.settings import key_values
from astrolabe_lab.engines.cluster_file import ROLES
from astrolabe_lab.engines.engine_process import Engine, free_port
from astrolabe_lab.engines.launch import launch
from astrolabe_lab.engines.running import Cluster
from astrolabe_lab.errors import InputError

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PRESET = "qwen2.5-3b-a40"
TRANSFER = Transfer(0.040, 16 * 36_864 / 10e9)  # as disagg.constants.PAPER has it
EXPIRY_S = 30.0  # until a prefill engine gives up blocks that nobody has pulled

HAND_OFF = ("base_s", "per_block_s", "expiry_s", "fail_share")  # as options name what is in a Handover


@dataclass(frozen=True)
class Handover:
    """How blocks get from pool to pool. ``transfer``: modelled times of emulated engines; ``expiry_s``: how long
    (modelled) a prefill engine keeps blocks that nobody pulls; ``fail_share``: of emulated pulls, how many fail.

    Emulated pools differ from simulated ones (``disagg.state.HandOff``) in two things: decode engines do not share the
    bandwidth of the prefill engine that they pull from, and blocks expire while their request waits at decode, as no
    heartbeats renew their lease.
    """

    transfer: Transfer = TRANSFER
    expiry_s: float = EXPIRY_S
    fail_share: float = 0.0

    def __post_init__(self):
        told = (self.transfer.latency_s, self.transfer.per_block_s, self.expiry_s, self.fail_share)
        for name, value in zip(HAND_OFF, told, strict=True):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InputError(f"hand-off: {name}={value!r} must be a finite number >= 0")
        if not self.expiry_s > 0:
            raise InputError(f"hand-off: expiry_s={self.expiry_s!r} must be a number of seconds > 0")
        if not self.fail_share <= 1:
            raise InputError(f"hand-off: fail_share={self.fail_share!r} must be from 0 to 1")

    @classmethod
    def parse(cls, text: str) -> Handover:
        """Of ``key=value,...`` with the keys of HAND_OFF, on top of the defaults. Raises InputError."""
        told = dict(zip(HAND_OFF, (TRANSFER.latency_s, TRANSFER.per_block_s, EXPIRY_S, 0.0), strict=True))
        for key, value in key_values(text, HAND_OFF).items():
            try:
                told[key] = float(value)
            except ValueError:
                raise InputError(f"hand-off: {key}={value} must be a number") from None
        base_s, per_block_s, expiry_s, fail_share = told.values()
        return cls(Transfer(base_s, per_block_s), expiry_s, fail_share)

    def to_dict(self) -> dict[str, float]:
        """The numbers that emulated engines are told, by name."""
        times = {"latency_s": self.transfer.latency_s, "per_block_s": self.transfer.per_block_s}
        return times | {"expiry_s": self.expiry_s, "fail_share": self.fail_share}


def launch_pools(prefill: int, decode: int, *, handover: Handover = Handover(), world="emulated", **options) -> Cluster:
    """A running Cluster whose first ``prefill`` engines have the role prefill and the others decode.

    ``options`` are those of ``engines.launch.launch``. Raises InputError where NIXL is needed and missing, and whatever
    that raises.
    """
    for name, value in (("prefill", prefill), ("decode", decode)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} must be a whole number of engines >= 1")
    if world == "hardware" and importlib.util.find_spec("nixl") is None:
        raise InputError("real transfers need NIXL, which is not installed: make nixl")
    if world == "emulated" and not options.get("preset"):
        options["preset"] = PRESET

    def prepare(cluster: Cluster) -> None:
        cluster.handover = handover.to_dict() if world == "emulated" else None
        for engine in cluster.engines:
            engine.role = ROLES[engine.index >= prefill]
            connect = _emulated if world == "emulated" else _nixl
            connect(engine, cluster, handover)

    return launch(prefill + decode, world=world, prepare=prepare, **options)


def of_role(cluster, role: str) -> list:
    """The engines of a pool: of a Cluster or a ClusterFile."""
    return [e for e in cluster.engines if (e["role"] if isinstance(e, dict) else e.role) == role]


def _nixl(engine: Engine, cluster: Cluster, handover: Handover) -> None:
    from astrolabe_lab.engines.placement import device_of

    config = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[engine.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": max(1, round(handover.expiry_s))},
    }
    engine.environment |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }  # fmt: skip
    if "CUDA_VISIBLE_DEVICES" not in engine.environment or device_of() == "cpu":
        config |= {"kv_buffer_device": "cpu", "kv_connector_module_path": "astrolabe_lab.serve.pools.nixl"}
        engine.environment |= {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"}
    engine.command += ["--kv-transfer-config", json.dumps(config)]


def _emulated(engine: Engine, cluster: Cluster, handover: Handover) -> None:
    extra = {"port": free_port(), "time_scale": cluster.time_scale, **handover.to_dict()}
    if engine.role == "prefill":
        extra["fail_share"] = 0.0
    config = {
        "kv_connector": "EmulatedConnector",
        "kv_connector_module_path": "astrolabe_lab.serve.pools.connector",
        "kv_role": KV_ROLES[engine.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    at = engine.command.index("--distributed-executor-backend") + 1
    engine.command[at] = "astrolabe_lab.serve.pools.executor.PoolExecutor"
    engine.command += ["--kv-transfer-config", json.dumps(config)]
