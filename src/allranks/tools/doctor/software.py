"""Checks of the installed software and its compatibility."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from allranks.tools.doctor.check import Finding, fail, ok, warn

__all__ = ["CHECKS", "judge_mpi", "mpi_name", "versions"]

_OLDEST_TORCH = (2, 10)
_PATIENCE_S = 20.0
_MPI_NAMES = (
    ("Open MPI", r"Open MPI\)? v?([\d.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library ([\d.]+)"),
    ("MVAPICH", r"MVAPICH2? Version\s*:\s*([\d.]+)"),
    ("MPICH", r"MPICH Version:\s*([\w.]+)"),
    ("MPICH", r"HYDRA build details:\s*Version:\s*([\w.]+)"),
)
_ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_ASK_MPI4PY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def versions() -> dict[str, str]:
    """Return the versions that should be equal on all hosts."""
    import allranks

    found = {"python": platform.python_version(), "allranks": allranks.__version__}
    for name in ("torch", "numpy", "mpi4py"):
        with suppress(importlib.metadata.PackageNotFoundError):  # not installed, or not by pip
            found[name] = importlib.metadata.version(name)
    return found


def python() -> Finding:
    """Report the interpreter."""
    return ok(f"{platform.python_version()}, {sys.executable}, {platform.system()} {platform.release()}")


def core() -> Finding:
    """Check that the C++ core of allranks can be loaded."""
    import allranks

    try:
        loaded = importlib.import_module("allranks._core")
    except ImportError as error:
        return fail(f"cannot be loaded: {error}", f"Reinstall allranks with {sys.executable} -m pip install.")
    return ok(f"allranks {allranks.__version__}, {loaded.ISA}, {Path(loaded.__file__ or '').parent}")


def torch() -> Finding:
    """Check that torch can be imported and is recent enough."""
    trouble = _trouble_with_torch()
    if trouble:
        return fail(
            f"cannot be imported: {trouble}",
            f"Install it with {sys.executable} -m pip install torch, and check that no other torch.py hides it.",
        )
    import torch

    described = f"{torch.__version__}, git {torch.version.git_version}, {Path(torch.__file__).parent}"
    if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < _OLDEST_TORCH:
        return fail(described, f"Install torch {'.'.join(map(str, _OLDEST_TORCH))} or newer.")
    return ok(described)


def gpus() -> Finding:
    """Compare the CUDA devices that torch detects with those of the host."""
    if _trouble_with_torch():
        return ok("not checked, because torch is missing")
    import torch

    built = torch.version.cuda or getattr(torch.version, "hip", None)
    driver = any(Path("/dev").glob("nvidia[0-9]*"))
    if not built:
        described = "torch is built for CPUs"
        return (
            warn(f"{described}; this host has /dev/nvidia*", "To use its GPUs, install torch for CUDA.")
            if (driver)
            else ok(described)
        )
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    described = f"CUDA {built}, {count} device(s)" + "".join(
        f"; {index}: {device.name}, {device.total_memory >> 20} MiB" for index, device in enumerate(devices)
    )
    if driver and not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return warn(
            f"{described}; this host has /dev/nvidia*",
            "Check with nvidia-smi whether the driver works and is new enough for this CUDA."
            if visible is None
            else f"CUDA_VISIBLE_DEVICES={visible!r} hides them. Unset it to use them.",
        )
    return ok(described)


def engines() -> Finding:
    """List the engines that init_process_group(backend=...) accepts here."""
    from allranks._engines import registry

    if _trouble_with_torch():
        return ok("none, because torch is missing")
    listing = registry.listing()
    usable = ", ".join(f"{each.name} ({each.package})" if each.package else each.name for each in listing if each.here)
    missing = ", ".join(each.name for each in listing if not each.here and not each.error)
    described = f"{usable}{f' (not available: {missing})' if missing else ''}"
    errors = [each.error for each in listing if each.error]
    return warn(described, " ".join(" ".join(errors).split())) if errors else ok(described)


def mpi() -> Finding:
    """Compare the MPI that mpi4py loads with the mpirun on the PATH. They must be the same."""
    runs = _mpiruns(os.environ.get("PATH", ""))
    library = _command_output([sys.executable, "-c", _ASK_MPI4PY]) if importlib.util.find_spec("mpi4py") else None
    allowed = all(os.environ.get(name) == "1" for name in _ALLOW_ROOT)
    return judge_mpi(
        library,
        {path: _command_output([path, "--version"]) for path in runs},
        refuses_root=os.geteuid() == 0 and not allowed,
    )


def judge_mpi(library: str | None, launchers: Mapping[str, str], refuses_root: bool = False) -> Finding:
    """Judge the MPI installation by the output of the library and of each mpirun.

    Args:
        library: The version text of the library that mpi4py loads. None without mpi4py.
        launchers: The ``mpirun`` programs on the PATH, in its order, and their output of ``--version``.
        refuses_root: This process is root, and no option allows Open MPI's mpirun to start processes for root.
    """
    found = {path: mpi_name(output) for path, output in launchers.items()}
    runs = ", ".join(f"{path} ({name})" for path, name in found.items()) or "no mpirun on the PATH"
    if refuses_root and any(name.startswith("Open MPI") for name in found.values()):
        runs += "; as root: mpirun --allow-run-as-root"
    if library is None:
        several = len(set(found.values())) > 1
        described = f"no mpi4py; {runs}"
        advice = "Two MPIs are on the PATH, and the first one is used. Keep only one (module purge; module load ...)."
        return warn(described, advice) if several else ok(described)
    loaded = mpi_name(library)
    described = f"mpi4py loads {loaded}; {runs}"
    if loaded.startswith("unknown"):
        return fail(described, f"Run {sys.executable} -c 'from mpi4py import MPI' to see what is wrong with it.")
    if not found:
        return warn(described, "Add the bin folder of that MPI to the PATH. Otherwise mpirun cannot start its ranks.")
    first = next(iter(found.values()))
    # The last word is the version.
    if first.split()[:-1] != loaded.split()[:-1]:
        return fail(
            described,
            "With another MPI's mpirun every process is rank 0 of 1. Put the right mpirun first on the PATH, or build "
            f"mpi4py against {first} (pip install --no-binary mpi4py --force-reinstall mpi4py).",
        )
    if first != loaded:
        return warn(described, "Two versions of one MPI: start ranks with the mpirun of the one that mpi4py loads.")
    if len(set(found.values())) > 1:
        return warn(
            described, "More than one MPI is on the PATH, and on other hosts another one may be first. Keep only one."
        )
    return ok(described)


def mpi_name(output: str) -> str:
    """Extract a name such as ``Open MPI 5.0.8`` from the version text of an MPI."""
    for name, pattern in _MPI_NAMES:
        if match := re.search(pattern, output, re.DOTALL):
            return f"{name} {match[1]}"
    return f"unknown: {' '.join(output.split())[:100] or 'no output'}"


def _trouble_with_torch() -> str:
    try:
        import torch

        torch.version.git_version  # noqa: B018 - a torch.py of one's own has none
    except Exception as error:  # noqa: BLE001 - the check reports whatever a broken library raises
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _mpiruns(path: str) -> list[str]:
    folders: Iterable[str] = dict.fromkeys([*path.split(os.pathsep), str(Path(sys.executable).parent)])
    found = [shutil.which("mpirun", path=folder) for folder in folders if folder]
    # Several links to one program count once.
    return list({os.path.realpath(each): each for each in found if each}.values())


def _command_output(command: list[str]) -> str:
    """Return the output of a program. It runs in a separate process, because a wrong MPI may terminate its process."""
    # Remove the variables that the launcher of a job sets for its ranks: this process is not a rank.
    environ_without_mpi = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environ_without_mpi,
        timeout=_PATIENCE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.stdout + done.stderr


CHECKS: tuple[Callable[[], Finding], ...] = (python, core, torch, gpus, engines, mpi)
