"""Installs a wheel as a user does, into an environment with nothing but torch, and runs the programs of the README.

Each Python gets an environment of its own. torch is there before: the one of constraints.txt where pip finds it
without CUDA for this Python, else PyPI's without its CUDA packages (torch_without_cuda.py; 0.5 GB each). Then
`pip install allranks` may install neither torch nor a package of CUDA.

    python .ci/try_wheel.py build/dist/allranks-0.2.0-*.whl python3.10 python3.13
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PROGRAMS = {  # the README's, and lines that they print in any order
    "hello.py": (["allranks", "run", "-n", "2"], r"\[[01]\] rank [01] of 2: \[3.0, 3.0, 3.0\]"),
    "workers.py": (["python"], r"-?\d+ on worker:2"),
}
_CUDA = "(?:triton|nvidia|cuda)"
_LEFT_OUT = {"PYTHONPATH", "VIRTUAL_ENV", "PIP_QUIET"}  # with the last one pip lists nothing
_PLUGIN = """
import torch
torch.distributed.init_process_group("allranks")
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(f"total {total.item():.0f}")
torch.distributed.destroy_process_group()
"""


def main() -> None:
    wheel, *pythons = sys.argv[1:]
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            try_wheel(Path(wheel).resolve(), python, Path(folder))


def try_wheel(wheel: Path, python: str, folder: Path) -> None:
    _output([python, "-m", "venv", str(folder / "venv")], folder)
    bin_ = folder / "venv/bin"
    pip = [str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check"]
    version = _install_torch(pip, folder)
    before = _packages(pip, folder)
    _output([*pip, "install", "-q", str(wheel)], folder)
    brought = _packages(pip, folder) - before
    wrong = [name for name in brought if re.match(rf"torch$|{_CUDA}", name)]
    if wrong:
        raise SystemExit(f"{python}: pip installed {', '.join(wrong)}")

    readme = (ROOT / "README.md").read_text()
    for name, (command, line) in _PROGRAMS.items():
        found = re.search(rf"```python\n(# {name}\n.*?)```", readme, re.DOTALL)
        assert found is not None, f"the README has no {name}"
        (folder / name).write_text(found[1])
        _expect([*command, name], line, bin_, folder)
    (folder / "plugin.py").write_text(_PLUGIN)
    _expect(["allranks", "run", "-n", "2", "plugin.py"], r"\[[01]\] total 2", bin_, folder)
    _expect(["allranks", "doctor"], r"(.|\n)*\b0 failed", bin_, folder)
    about = _output([str(bin_ / "python"), "--version"], folder).strip()
    print(f"{wheel.name} on {about} with torch {version}: 4 programs ran; pip brought {', '.join(sorted(brought))}")


def _install_torch(pip: list[str], folder: Path) -> str:
    """Installs the pinned torch without CUDA, and returns its version."""
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None, "constraints.txt has no torch"
    wanted = f"torch=={pinned[1]}"
    report = folder / "report.json"
    _output([*pip, "install", "-q", "--dry-run", "--no-deps", "--report", str(report), wanted], folder)
    (found,) = json.loads(report.read_text())["install"]
    version = str(found["metadata"]["version"])
    if version.endswith("+cpu"):
        _output([*pip, "install", "-q", wanted], folder)
    else:
        _output([sys.executable, str(ROOT / ".ci/torch_without_cuda.py"), pip[0], pinned[1]], folder)
        (metadata,) = (folder / "venv/lib").glob("python*/site-packages/torch-*.dist-info/METADATA")
        # As a torch for CPUs has it: else whatever pip installs next brings torch's CUDA packages.
        metadata.write_text(re.sub(rf"^Requires-Dist: {_CUDA}.*\n", "", metadata.read_text(), flags=re.MULTILINE))
        needs = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
        _output([*pip, "install", "-q", *(need for need in needs if "extra ==" not in need)], folder)
    return version


def _packages(pip: list[str], folder: Path) -> set[str]:
    return {package["name"].lower() for package in json.loads(_output([*pip, "list", "--format=json"], folder))}


def _expect(command: list[str], line: str, bin_: Path, folder: Path) -> None:
    """Runs a command of the environment, whose lines must be of that form."""
    printed = _output([str(bin_ / command[0]), *command[1:]], folder)
    if not re.match(line, printed):
        raise SystemExit(f"{' '.join(command)} printed:\n{printed}")


def _output(command: list[str], folder: Path) -> str:
    """What a command prints to stdout. It runs outside of the repository, whose package it must not find."""
    environ = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    path = f"{Path(command[0]).parent}{os.pathsep}{environ['PATH']}" if os.sep in command[0] else environ["PATH"]
    executable = shutil.which(command[0])
    if executable is None:
        raise SystemExit(f"{command[0]} is not there")
    done = subprocess.run(
        [executable, *command[1:]],
        cwd=folder, env={**environ, "PATH": path}, stdout=subprocess.PIPE, text=True, check=False, timeout=1200,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
