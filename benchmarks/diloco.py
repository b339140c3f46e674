"""Bytes on the wire and time over a slow network that examples/diloco saves.

    python benchmarks/diloco.py --json benchmarks/diloco.json

Each host has one rank (network namespaces; root). The interfaces count the bytes that leave a host, including headers
and keepalives. `tc tbf` limits the bits per second that each host sends. Each variant runs the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster import Host, cluster  # noqa: E402

WAYS = {
    "all_reduce in each step": ["--inner", "1", "--outer", "300", "--plain"],
    "20 inner steps": [],
    "20 inner steps, int8": ["--quantise"],
}


def sent(host: Host) -> int:
    """Return the number of bytes that the host has sent."""
    done = subprocess.run(host.inside("ip", "-json", "-s", "link", "show", "eth0"), capture_output=True, check=True)
    count: int = json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"]
    return count


def measure(hosts: list[Host], way: list[str]) -> dict[str, Any]:
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"WORLD_SIZE": str(len(hosts)), "MASTER_PORT": "29500", "ALLRANKS_SECRET": secrets.token_hex(32)}
    command = [sys.executable, str(ROOT / "examples/diloco/train.py"), *way]
    before = [sent(host) for host in hosts]
    running = [
        host.start(command, {**environ, "RANK": str(rank), "MASTER_ADDR": hosts[0].name})
        for rank, host in enumerate(hosts)
    ]
    printed = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        sys.exit("".join(printed))
    bytes_sent = max(sent(host) - least for host, least in zip(hosts, before, strict=True))
    found = re.search(r"([\d.]+)% after (\d+) steps in ([\d.]+) s", printed[0])
    assert found is not None, printed[0]
    return {"bytes": bytes_sent, "seconds": float(found[3]), "accuracy": float(found[1]), "steps": int(found[2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="default %(default)s")
    parser.add_argument("--mbit", type=int, default=10, help="bandwidth of a host in Mbit/s (default %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for count in map(int, options.hosts.split(",")):
        with cluster(count) as made:
            limit = ("root", "tbf", "rate", f"{options.mbit}mbit", "burst", "16kb", "latency", "200ms")
            for host in made.hosts:
                subprocess.run(host.inside("tc", "qdisc", "add", "dev", "eth0", *limit), check=True)
            found[str(count)] = {name: measure(made.hosts, way) for name, way in WAYS.items()}
        for name, row in found[str(count)].items():
            print(
                f"{count} hosts, {name:>24}: {row['bytes'] / row['steps']:>9,.0f} B a step, {row['seconds']:6.1f} s, "
                f"{row['accuracy']:.1f}%",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"mbit": options.mbit, "hosts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
