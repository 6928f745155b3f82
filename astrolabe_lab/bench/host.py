"""Whether the machine kept up with the emulated engines while a run went on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astrolabe_lab.engines.pace import LATE_SHARE, read_pace
from astrolabe_lab.errors import InputError


class HostPace:
    """From its making on, over the engines whose pace files exist."""

    def __init__(self, paths: Sequence[str | Path]):
        self._before = {path: found for path in map(str, paths) if (found := _read(path))}

    def late_share(self) -> float:
        """The most that an engine's steps ended late since, as a share of the modelled time; 0 for real engines."""
        shares = [0.0]
        for path, before in self._before.items():
            now = _read(path) or before
            modelled = now["modelled_s"] - before["modelled_s"]
            if modelled > 0:
                shares.append((now["late_s"] - before["late_s"]) / modelled)
        return max(shares)

    def judge(self, validity: dict) -> dict:
        """``validity`` with ``host_late_share``, and with a reason more where the host did not keep up."""
        share = self.late_share()
        why = list(validity["why"])
        if share > LATE_SHARE:
            why.append(
                f"the host did not keep up: an emulated engine's steps ended {share:.0%} later than modelled; raise "
                "the time scale, or start fewer engines"
            )
        return validity | {"why": why, "valid": not why, "host_late_share": share}


def _read(path: str) -> dict | None:
    try:
        return read_pace(path)
    except InputError:
        return None
