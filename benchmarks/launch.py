"""Measure start and stop of jobs: `allranks run` beside torchrun, on one host, on two hosts, and with 256 ranks.

    python benchmarks/launch.py --json benchmarks/launch.json

The contenders run in turn, so that a drift of the machine's speed affects all alike. Medians are compared. Unless
stated otherwise, a time is measured from the command to the first line that the last rank prints. The two hosts are
network namespaces of this machine, as in the tests, and need root and sshd.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import cluster, sshd

PYTHON = [sys.executable, "-m"]
WHOLE = """
import torch
import {module} as dist

dist.init_process_group({backend})
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
dist.destroy_process_group()
"""
# unbuffered, one write per line
LINE = "import os, torch\nos.write(1, ('line of %s\\n' % os.environ['RANK']).encode())\n"
FAIL = """
import os, time, torch
import allranks as dist

dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    print("failed at", time.monotonic(), flush=True)
    raise ValueError("boom")
time.sleep(600)
"""
FAST = "print('line')\n"


def ours(n, script):
    return [*PYTHON, "allranks", "run", "-n", str(n), str(script)]


def theirs(n, script):
    return [*PYTHON, "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(script)]


def whole(command, **how):
    """Return the seconds from the command to its exit."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, **how)
    return time.perf_counter() - began


def first_lines(command, n, **how):
    """Return the seconds from the command to the n-th line."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
        lines = [process.stdout.readline() for _ in range(n)]
        elapsed = time.perf_counter() - began
        _, err = process.communicate()
    if process.returncode or not all(b"line of" in line for line in lines):
        raise SystemExit(f"{command} exited with {process.returncode}: {err.decode()}")
    return elapsed


def failure_to_end(command, **how):
    """Return the seconds from a rank's failure to the command's exit."""
    done = subprocess.run(command, capture_output=True, text=True, **how)
    ended = time.monotonic()  # The hosts are namespaces, so the ranks use the same clock.
    if done.returncode != 1:
        raise SystemExit(f"{command} exited with {done.returncode}: {done.stderr}")
    return ended - float(next(line for line in done.stdout.splitlines() if "failed at" in line).split()[-1])


def in_turn(measures, runs):
    """Return medians by name, after a first round that fills the file cache."""
    times = {name: [] for name in measures}
    for run in range(-1, runs):
        for name, measure in measures.items():
            elapsed = measure()
            if run >= 0:
                times[name].append(elapsed)
    for name, values in times.items():
        median, spread = statistics.median(values), f"fastest {min(values):.2f} s   slowest {max(values):.2f} s"
        print(f"{name:45} median {median:.2f} s   {spread}", flush=True)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def two_hosts():
    """Yield a function that converts a command to one on the first of two hosts, and the environment for it."""
    if reason := cluster.trouble() or sshd.trouble():
        raise SystemExit(f"no hosts available: {reason}")
    with cluster.cluster(2) as hosts, sshd.sshd(hosts) as ssh:
        yield hosts.hosts[0].inside, ssh.environ


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    runs, few = args.runs, (args.runs + 1) // 2
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, two_hosts() as (inside, environ):
        names = {"ours": WHOLE.format(module="allranks", backend="")}
        names["theirs"] = WHOLE.format(module="torch.distributed", backend='"gloo"')
        names |= {"line": LINE, "fail": FAIL, "fast": FAST}
        files = {name: Path(folder) / f"{name}.py" for name in names}
        for name, text in names.items():
            files[name].write_text(text)
        total = in_turn(
            {
                "allranks run": lambda: whole(ours(2, files["ours"])),
                "torchrun": lambda: whole(theirs(2, files["theirs"])),
            },
            runs,
        )
        lines = {
            n: in_turn(
                {
                    "allranks run": lambda n=n: first_lines(ours(n, files["line"]), n),
                    "torchrun": lambda n=n: first_lines(theirs(n, files["line"]), n),
                },
                runs if n == 2 else few,
            )
            for n in (2, 16)
        }
        there = [*PYTHON, "allranks", "run", "--hosts", "node0,node1"]
        hosts = in_turn(
            {
                "import torch": lambda: whole(inside(sys.executable, "-c", "import torch"), env=environ),
                "first line": lambda: first_lines(inside(*there, str(files["line"])), 2, env=environ),
                "failure to end": lambda: failure_to_end(inside(*there, str(files["fail"])), env=environ),
            },
            runs,
        )
        many = in_turn(
            {
                "command": lambda: whole([*PYTHON, "allranks", "run", "-n", "256", "--", "true"]),
                "script": lambda: whole(ours(256, files["fast"])),
            },
            few,
        )
    report = {
        "ranks": 2,
        "machine": platform.machine(),
        "load": [load, os.getloadavg()[0]],
        "median_s": total,
        "torchrun_over_allranks": total["torchrun"] / total["allranks run"],
        "first_line_s": lines,
        "two_hosts_s": hosts,
        "many": {"ranks": 256, "median_s": many},
    }
    for n, medians in lines.items():
        print(f"-n {n}: allranks run / torchrun: {medians['allranks run'] / medians['torchrun']:.2f}")
    print(f"two hosts: {hosts['first line'] - hosts['import torch']:.2f} s beyond one import of torch")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
