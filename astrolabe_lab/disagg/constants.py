"""What a P/D router takes its cluster to be: the calibration constants, in one checked object.

A router prices with these and nothing else. They come from a calibration of the cluster (``astrolabe calibrate``), or
from elsewhere to miscalibrate it on purpose. What is true of a simulated cluster is not in here but in its step costs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import json_object

if TYPE_CHECKING:
    from astrolabe_lab.cost import StepCost

CLASSES = ("tight", "loose")


@dataclass(frozen=True)
class Constants:
    """Costs of one prefill/decode cluster as a router believes them, all times in s.

    A prefill of n tokens takes ``prefill_base_s + n * prefill_per_token_s`` (the papers' tau_pre); a decode step with c
    streams ``decode_step_s + (c - 1) * decode_slope_s`` (tau_dec is that of one stream); handing over b KV blocks of
    ``block_size`` tokens ``transfer_base_s + b * transfer_per_block_s``. ``kv_capacity_tokens``: what one decode engine
    holds. ``ttft_s`` and ``tpot_s``: targets of tight requests; loose ones may take ``loose_factor`` times as long.
    ``max_num_seqs`` and ``max_num_batched_tokens``: the engines' limits, for who simulates them forward. ``source``:
    where the numbers are from. Raises InputError for a number that is none.
    """

    prefill_base_s: float
    prefill_per_token_s: float
    decode_step_s: float
    decode_slope_s: float
    transfer_base_s: float
    transfer_per_block_s: float
    kv_capacity_tokens: int
    ttft_s: float
    tpot_s: float
    loose_factor: float = 3.0
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    source: str = ""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "source":
                if not isinstance(value, str):
                    raise InputError(f"constants: source={value!r} must be text")
                continue
            whole = field.type == "int"
            good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            least = 0.0 if field.name in ZERO else 1 if whole or field.name == "loose_factor" else None
            if not good or not math.isfinite(value) or (value < least if least is not None else value <= 0):
                what = "a whole number >= 1" if whole else ">= 1" if least == 1 else ">= 0" if least == 0 else "> 0"
                raise InputError(f"constants: {field.name}={value!r} must be {what}{'' if whole else ', in s'}")

    def tau_pre_s(self, prompt_tokens):
        """Seconds of a prefill that has the engine for itself (int or array)."""
        return self.prefill_base_s + self.prefill_per_token_s * prompt_tokens

    def tau_dec_s(self, streams=1):
        """Seconds of a decode step with so many streams, at least one (int or array)."""
        return self.decode_step_s + self.decode_slope_s * (streams - 1)

    def transfer_s(self, prompt_tokens):
        """Seconds from a finished prefill to its KV cache being at the decode engine (int or array)."""
        blocks = (prompt_tokens + self.block_size - 1) // self.block_size
        return self.transfer_base_s + self.transfer_per_block_s * blocks

    def targets_s(self, slo: str) -> tuple[float, float]:
        """(TTFT, TPOT) that a request of the class (tight or loose) may take."""
        if slo not in CLASSES:
            raise InputError(f"slo={slo!r} is not one of {', '.join(CLASSES)}")
        factor = self.loose_factor if slo == "loose" else 1.0
        return self.ttft_s * factor, self.tpot_s * factor

    def step_cost(self) -> StepCost:
        """The step cost that these constants say, for who simulates an engine forward."""
        from astrolabe_lab.cost import StepCost

        return StepCost.from_dict(
            {
                "mixed": {
                    "base_s": max(self.prefill_base_s - self.decode_slope_s, 0.0),
                    "per_token_s": self.prefill_per_token_s,
                    "per_seq_s": self.decode_slope_s,
                },
                "decode": {
                    "base_s": max(self.decode_step_s - self.decode_slope_s, 0.0),
                    "per_seq_s": self.decode_slope_s,
                },
            }
        )

    @classmethod
    def of_world(cls, engine, cost, hand_off, targets: tuple[float, float] | None = None) -> Constants:
        """The constants that a perfect calibration of simulated pools would find, without measuring.

        ``engine``, ``cost``: (prefill, decode) EngineConfigs and StepCosts; ``hand_off``: a HandOff. A line through
        lone prefills of 1 to 2,048 tokens, decode steps of one stream and of eight at 400 tokens of context each.
        ``targets``: (TTFT, TPOT) of tight requests in s; default: as far above the constants as the second paper's.
        """
        import numpy as np

        n = np.array([1.0, 256.0, 512.0, 1024.0, 2048.0])
        n = n[n <= max(256, engine[0].max_num_batched_tokens)]
        per_token_s, base_s = np.polyfit(n, [cost[0].step_seconds(k, 1, 0, k * k / 2, mixed=True) for k in n], 1)
        one_s, eight_s = (cost[1].step_seconds(c, c, 400.0 * c) for c in (1, 8))
        base_s += cost[0].frontend_s  # prefill answers through its own, and decode through its own
        extra_s = hand_off.base_s + hand_off.proxy_s + cost[1].frontend_s
        ttft_s = 0.175 / 0.0667 * (base_s + extra_s + one_s)
        return cls(
            prefill_base_s=max(float(base_s), 0.0),
            prefill_per_token_s=max(float(per_token_s), 0.0),
            decode_step_s=float(one_s),
            decode_slope_s=max(float(eight_s - one_s) / 7, 0.0),
            transfer_base_s=extra_s,
            transfer_per_block_s=hand_off.per_block_s,
            kv_capacity_tokens=engine[1].usable_blocks * engine[1].block_size,
            ttft_s=float(targets[0] if targets else ttft_s),
            tpot_s=float(targets[1] if targets else 3.0 * one_s),
            block_size=engine[1].block_size,
            max_num_seqs=engine[1].max_num_seqs,
            max_num_batched_tokens=engine[0].max_num_batched_tokens,
            source="worked out from the simulated pools' step costs",
        )

    def with_(self, **changes) -> Constants:
        """These constants with some changed. Raises InputError for a name that is none of them."""
        _known(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Constants:
        """The constants of a dict as ``to_dict`` makes it. Raises InputError for unknown or missing names."""
        if not isinstance(values, dict):
            raise InputError(f"constants: {values!r:.80} is no object of {', '.join(_NAMES)}")
        _known(values)
        needed = [field.name for field in fields(cls) if field.name not in values and field.name in _NEEDED]
        if needed:
            raise InputError(f"constants: {', '.join(needed)} missing; needed are {', '.join(_NEEDED)}")
        return cls(**values)

    @classmethod
    def read(cls, source: str | Path) -> Constants:
        """The constants named: ``paper``, ``paper-simulator``, or a JSON file that is a calibration, changed by hand or
        not, or holds them, alone or as its member ``constants``. Raises InputError where there is no such file or it
        holds something else."""
        from astrolabe_lab.cost import CALIBRATION

        if str(source) in NAMED:
            return NAMED[str(source)]
        try:
            found = json_object(source, "these constants")
        except InputError as error:
            raise InputError(
                f"constants {str(source)!r}: neither calibrated (of simulated pools), {', '.join(NAMED)} nor a "
                f"readable JSON file ({error})"
            ) from None
        if found.get("kind") == CALIBRATION:
            from astrolabe_lab.calibrate.artifact import Calibration

            return Calibration.from_dict(found, str(source), edited=True).constants()
        if isinstance(found.get("constants"), dict):
            found = found["constants"]
        return cls.from_dict(found)


ZERO = ("decode_slope_s", "transfer_base_s", "transfer_per_block_s", "prefill_per_token_s", "prefill_base_s")
_NAMES = tuple(field.name for field in fields(Constants))
_NEEDED = _NAMES[: _NAMES.index("loose_factor")]


def _known(values) -> None:
    if unknown := [str(name) for name in values if name not in _NAMES]:
        raise InputError(f"constants: unknown {', '.join(unknown)}; allowed are {', '.join(_NAMES)}")


# "Calibrate, Then Route": Qwen2.5-3B on A40. Printed there: a decode step of 13.237 ms, 2.9 % more per token in a batch
# of eight, a prefill base of 66.7 ms (through the proxy, so with hand-off and first decode step), 60,000 KV tokens an
# engine, the targets. The rest is derived: 75 us a prompt token, and the base taken apart into 13.5 ms of prefill,
# 40 ms of hand-off and a step; moving a block at 10 GB/s.
PAPER = Constants(
    prefill_base_s=0.0135,
    prefill_per_token_s=75e-6,
    decode_step_s=0.013237,
    decode_slope_s=0.013237 * 0.029 / 7,
    transfer_base_s=0.040,
    transfer_per_block_s=16 * 36_864 / 10e9,
    kv_capacity_tokens=60_000,
    ttft_s=0.175,
    tpot_s=0.0397,
    source="Calibrate, Then Route: Qwen2.5-3B on A40; parts of the prefill base derived",
)
# Its simulator's constants before it was refitted: decode 1.8 ms a token, prefill base 5 ms, 2,048 KV bytes a token.
# The per-token prefill cost and the hand-off are scaled like that base, the slope like its step.
PAPER_SIMULATOR = replace(
    PAPER,
    prefill_base_s=0.0135 * 0.005 / 0.0667,
    prefill_per_token_s=75e-6 * 0.005 / 0.0667,
    decode_step_s=0.0018,
    decode_slope_s=0.0018 * 0.029 / 7,
    transfer_base_s=0.040 * 0.005 / 0.0667,
    transfer_per_block_s=16 * 2_048 / 10e9,
    source="Calibrate, Then Route: the constants of its simulator before it was refitted",
)
NAMED = {"paper": PAPER, "paper-simulator": PAPER_SIMULATOR}
