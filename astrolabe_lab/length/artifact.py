"""A length model on disk: ``model.json`` says what it is, and the files beside it hold the weights.

Weights are NumPy or safetensors files, never pickles, in a folder named after their content. ``model.json`` is
renamed into place last, so that a save that is stopped halfway leaves the model that was there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from astrolabe_lab import __version__
from astrolabe_lab.errors import InputError
from astrolabe_lab.record import write_whole

FORMAT, VERSION = "astrolabe-length-model", 2
MANIFEST = "model.json"
PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors")


def save(estimator, directory) -> Path:
    """Write ``estimator`` to the folder ``directory`` and return its path. Raises InputError for a folder that
    holds something else."""
    directory = Path(directory)
    before = check_target(directory)
    directory.mkdir(parents=True, exist_ok=True)
    work = directory / f".weights.{os.getpid()}.part"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        noted = estimator._write(work)
        files = {path.relative_to(work).as_posix(): sha256(path) for path in _files(work)}
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        weights = directory / f"weights-{digest[:16]}"
        if weights.exists():
            shutil.rmtree(weights)  # the same content, or what is left of it
        os.replace(work, weights)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "kind": estimator.kind,
        "params": _plain_params(estimator),
        "models": estimator.models_,
        "data": {
            "sha256": estimator.data_sha256_,
            "samples": estimator.n_samples_,
            "censored": estimator.censored_,
            "median_tokens": estimator.median_tokens_,
        },
        "metrics": estimator.metrics,
        "state": noted,
        "weights": weights.name,
        "files": files,
        "versions": {"astrolabe-lab": __version__} | _versions(),
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_whole(directory / MANIFEST, json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    if before and before != weights.name:
        shutil.rmtree(directory / before, ignore_errors=True)
    return directory


def load(directory):
    """The estimator saved in the folder ``directory``. Raises InputError for one that is damaged or foreign."""
    from astrolabe_lab.length.kinds import KINDS

    directory = Path(directory)
    manifest = read_manifest(directory)
    kind = manifest["kind"]
    if kind not in KINDS:
        raise InputError(f"{directory}: the model is of the unknown kind {kind!r}; known: {', '.join(KINDS)}")
    weights = directory / manifest["weights"]
    for name, expected in manifest["files"].items():
        path = weights / name
        if not path.is_file():
            raise InputError(f"{directory}: the model is damaged: {path.name} is missing; copy or train it again")
        if sha256(path) != expected:
            raise InputError(
                f"{directory}: the model is damaged: {path.name} is not the file that was saved (its sha256 "
                "differs); copy or train it again"
            )
    try:
        estimator = KINDS[kind]()(**manifest["params"])
        estimator.models_ = [str(name) for name in manifest["models"]]
        estimator.n_samples_ = int(manifest["data"]["samples"])
        estimator.censored_ = int(manifest["data"]["censored"])
        estimator.median_tokens_ = float(manifest["data"]["median_tokens"])
        estimator.metrics = dict(manifest["metrics"])
        estimator._read(weights, manifest["state"])
        estimator.data_sha256_ = str(manifest["data"]["sha256"])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OSError, AttributeError, IndexError) as error:
        raise InputError(
            f"{directory}: the model cannot be read ({type(error).__name__}: {error}); was it made by another "
            f"version? It was saved by {manifest['versions'].get('astrolabe-lab')}, this is {__version__}"
        ) from None
    return estimator


def read_manifest(directory, any_version: bool = False) -> dict:
    """What ``model.json`` in ``directory`` says. Raises InputError where it is missing, damaged or foreign, and unless
    ``any_version`` where it is of another version than this release reads."""
    path = Path(directory) / MANIFEST
    hint = "`astrolabe length train` makes such a folder"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "has no " + MANIFEST if Path(directory).is_dir() else "is no folder"
        raise InputError(f"{directory} {what}, so it is no length model; {hint}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is damaged: it is not JSON; copy or train the model again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not of a length model of this lab ({FORMAT}); {hint}")
    if manifest.get("version") != VERSION and not any_version:
        raise InputError(
            f"{path} has the version {manifest.get('version')!r}, and this release reads {VERSION}: train the model "
            "again"
        )
    needed = {
        "kind": str,
        "params": dict,
        "models": list,
        "data": dict,
        "metrics": dict,
        "state": dict,
        "weights": str,
        "files": dict,
        "versions": dict,
    }
    wrong = [name for name, form in needed.items() if not isinstance(manifest.get(name), form)]
    names = [manifest.get("weights"), *(manifest.get("files") or {})]
    if not wrong and any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        wrong = ["files"]
    if wrong:
        raise InputError(f"{path} is damaged: its entry {wrong[0]!r} is missing or wrong; train the model again")
    return manifest


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_arrays(path: Path, **arrays) -> None:
    """Write NumPy arrays (numbers or fixed-width text) as .npz."""
    import numpy as np

    if any(array.dtype == object for array in map(np.asarray, arrays.values())):
        raise TypeError("arrays of objects would be pickled")
    np.savez(path, **arrays)


def load_arrays(path: Path) -> dict:
    """The arrays of an .npz file. Raises InputError where it cannot be read, or would need unpickling."""
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({error}); copy or train the model again") from None


def check_target(directory) -> str | None:
    """Whether a model can be saved to ``directory``: the weights folder of the model that is there, or None where
    there is none. Raises InputError where it cannot."""
    directory = Path(directory)
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise InputError(f"{directory} is a file: a model is saved as a folder; give another name")
    inside = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
    if not inside:
        return None
    if MANIFEST not in inside:
        raise InputError(f"{directory} holds other files ({min(inside)}, ...): give a new or empty folder")
    return read_manifest(directory, any_version=True)["weights"]  # one of an older release may be replaced


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _plain_params(estimator) -> dict:
    return {name: value for name, value in estimator.get_params().items() if not hasattr(value, "predict")}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
