"""Times a whole job that imports torch and does one all_reduce: `allranks run` against torchrun with gloo.

    python benchmarks/launch.py --json benchmarks/launch.json

The two commands run in turn, so that a machine whose speed drifts slows them alike; medians are compared.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import torch
import {module} as dist

dist.init_process_group({backend})
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def seconds(command):
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--nproc", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.py", Path(folder) / "theirs.py"
        ours.write_text(SCRIPT.format(module="allranks", backend=""))
        theirs.write_text(SCRIPT.format(module="torch.distributed", backend='"gloo"'))
        python = [sys.executable, "-m"]
        commands = {
            "allranks run": [*python, "allranks", "run", "-n", str(args.nproc), str(ours)],
            "torchrun": [
                *python,
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={args.nproc}",
                str(theirs),
            ],
        }
        times = {name: [] for name in commands}
        for run in range(-1, args.runs):
            for name, command in commands.items():
                elapsed = seconds(command)
                if run >= 0:  # the first fills the file cache
                    times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["torchrun"] / medians["allranks run"]
    for name, values in times.items():
        print(f"{name:14} median {medians[name]:.2f} s   fastest {min(values):.2f} s   slowest {max(values):.2f} s")
    print(f"torchrun / allranks run: {ratio:.2f}")
    if args.json:
        report = {
            "ranks": args.nproc,
            "machine": platform.machine(),
            "median_s": medians,
            "torchrun_over_allranks": ratio,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
