"""Predicted cost of a small call on machines with more cores and with more hosts than are available here.

    python benchmarks/model.py --json benchmarks/model.json --plot benchmarks/model.png

Within a host, the core itself provides the counts. `lines` (benchmarks/lines.cc) runs its code with a thread for each
rank, each bound to a simulated CPU of the described machine. It reports which cache lines of each rank's memory every
rank touches in a call. The time is predicted from these counts and from published latencies between cores:

    a reader   waits one latency for the reads of a stage, and a part of one (OVERLAP) for each further line
    a line     moves to one reader after the other, each a part of one latency later
    a call     is OWN_NS of a rank's own work (measured here, with one rank), plus its stages in sequence:
               flat: each rank reads all ranks; grouped: leader reads group, leaders each other, groups their leaders

Between hosts, the counts are those of the exchange between leaders (core/collective/leader_exchange.h).

The model also predicts a call that can be measured here: two ranks, from the latency between this machine's two CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks._cluster.host import processor, usable_cpus

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/core-plain"
NEVER = 0xFFFF_FFFF
OVERLAP = 4  # concurrent reads of a core: ten and more are possible, but fewer for lines in other caches
COMBINE_NS = 0.5  # for one operand of 8 bytes
GOAL_US = 5.0


@dataclass(frozen=True)
class Machine:
    """A machine, whose CPUs are numbered through caches, nodes and sockets."""

    name: str
    nodes: int
    caches: int  # per node
    cpus: int  # per cache
    cache_ns: float  # one way, between cores that share the last-level cache
    node_ns: float  # between cores that share the node
    far_ns: float
    source: str

    @property
    def size(self) -> int:
        return self.nodes * self.caches * self.cpus

    def near(self, a: int, b: int) -> str:
        if a // self.cpus == b // self.cpus:
            return "cache"
        return "node" if a // (self.caches * self.cpus) == b // (self.caches * self.cpus) else "far"

    def latency_ns(self, a: int, b: int) -> float:
        return {"cache": self.cache_ns, "node": self.node_ns, "far": self.far_ns}[self.near(a, b)]


_MEASURED = "github.com/nviennot/core-to-core-latency, medians of its README"
MACHINES = [
    Machine("2 x 32 cores, one cache per socket", 2, 1, 32, 51, 51, 108, f"Xeon Platinum 8375C, {_MEASURED}"),
    Machine("2 x 64 cores, 8 per cache", 2, 8, 8, 23, 107, 197, f"EPYC 7R13 (48 cores, same caches), {_MEASURED}"),
    Machine("2 x 96 cores, 8 per cache", 2, 12, 8, 23, 107, 197, "as for 2 x 64: no figures of its own"),
]


@dataclass
class Touched:
    """The cache lines that the ranks of a call touch."""

    groups: list[list[int]]
    lines: dict[tuple[int, int], int]  # by reader and owner

    @classmethod
    def count(cls, machine: Machine, verb: str, nbytes: int, ranks: int, levels_from: int) -> Touched:
        words = [verb, nbytes, ranks, machine.nodes, machine.caches, machine.cpus, levels_from]
        done = subprocess.run([BUILD / "lines", *map(str, words)], capture_output=True, text=True, check=True)
        groups, lines = [], {}
        for row in done.stdout.splitlines():
            first, *rest = row.split()
            if first == "group":
                groups.append([int(rank) for rank in rest])
            else:
                lines[int(first), int(rest[0])] = int(rest[1])
        return cls(groups, lines)

    def by_distance(self, machine: Machine) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (reader, owner), n in self.lines.items():
            found[machine.near(reader, owner)] += n
        return dict(found)

    def most(self) -> int:
        by_reader: Counter[int] = Counter()
        for (reader, _), n in self.lines.items():
            by_reader[reader] += n
        return max(by_reader.values())


def stage_ns(machine: Machine, lines: dict[tuple[int, int], int], overlap: int) -> float:
    """Return the time of one stage.

    Each reader waits for its reads, and each line moves to one reader after the other.
    """
    reads: dict[int, list[float]] = defaultdict(list)
    serves: dict[int, list[float]] = defaultdict(list)
    for (reader, owner), n in lines.items():
        latency = machine.latency_ns(reader, owner)
        reads[reader] += [latency] * n
        serves[owner] += [latency]
    queues = [*reads.values(), *serves.values()]
    return max((max(queue) + (sum(queue) - max(queue)) / overlap for queue in queues), default=0)


def call_ns(machine: Machine, touched: Touched, own_ns: float, by_groups: bool, overlap: int = OVERLAP) -> float:
    """Return the time of one call of 8 bytes."""
    ranks = 1 + max(reader for reader, _ in touched.lines)
    combine = ranks * COMBINE_NS
    if not by_groups:
        return own_ns + stage_ns(machine, touched.lines, overlap) + combine
    leader_of = {rank: group[0] for group in touched.groups for rank in group}
    leaders = set(leader_of.values())
    gather, between, release = {}, {}, {}
    for (reader, owner), n in touched.lines.items():
        if reader in leaders and owner in leaders:
            between[reader, owner] = n
        elif reader in leaders:
            gather[reader, owner] = n
        elif owner == leader_of[reader]:
            release[reader, owner] = n
        # The reads with which a member detects whether it is the last one are not on the critical path.
    return own_ns + sum(stage_ns(machine, stage, overlap) for stage in (gather, between, release)) + combine


def within_hosts(own_ns: float) -> Iterator[dict[str, object]]:
    for machine in MACHINES:
        numbers = [ranks for ranks in (2, 4, 8, 16, 32, 64, 128, 192) if ranks <= machine.size]
        for ranks in numbers:
            row: dict[str, object] = {"machine": machine.name, "ranks": ranks}
            for way, levels_from in (("flat", NEVER), ("groups", 2)):
                touched = Touched.count(machine, "all_reduce", 8, ranks, levels_from)
                by_groups = way == "groups" and len(touched.groups) > 1 and ranks > 2
                row[way] = {
                    "lines": sum(touched.lines.values()),
                    "lines_by_distance": touched.by_distance(machine),
                    "most_of_a_rank": touched.most(),
                    "us": round(call_ns(machine, touched, own_ns, by_groups) / 1e3, 2),
                    "us_if_two_overlap": round(call_ns(machine, touched, own_ns, by_groups, 2) / 1e3, 2),
                }
            yield row


def between_hosts(
    latency_us: float = 15.0, message_us: float = 3.0, gbytes_s: float = 1.2
) -> Iterator[dict[str, object]]:
    """Predict the exchange with which each collective begins, of 8 bytes from each host.

    latency_us: from a leader's send to the other's receive, over TCP. message_us: CPU time for each message and side.
    """
    opening = 104  # bytes: core/collective/leader_exchange.h
    for hosts in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000):
        rounds = 1 if hosts <= 8 else math.ceil(math.log2(hosts))
        messages = hosts - 1 if hosts <= 8 else rounds
        nbytes = (hosts - 1) * (opening + 8)
        us = rounds * latency_us + 2 * messages * message_us + nbytes / gbytes_s / 1e3
        yield {
            "hosts": hosts,
            "rounds": rounds,
            "messages_of_a_leader": messages,
            "streams_of_a_leader": messages if hosts <= 8 else 2 * rounds,
            "bytes_of_a_leader": nbytes,
            "us": round(us, 1),
        }


def measured() -> dict[str, float]:
    """Measure a rank's own work, the transfer of a line between two CPUs, and the call of two ranks.

    The measured call is compared with its prediction from the other two figures.
    """
    from allranks.testing import run_ranks

    one = run_ranks(1, _rank_us)[0]
    twos = run_ranks(2, _rank_us)
    bounce = subprocess.run([BUILD / "lines", "bounce"], capture_output=True, text=True, check=True)
    line_us = float(bounce.stdout) / 1e3
    here = Machine("this one", 1, 1, 2, line_us * 1e3, line_us * 1e3, line_us * 1e3, "measured")
    touched = Touched.count(here, "all_reduce", 8, 2, NEVER)
    return {
        "own_us": one,
        "line_us": line_us,
        "two_ranks_us": statistics.median(twos),
        "two_ranks_predicted_us": call_ns(here, touched, one * 1e3, by_groups=False) / 1e3,
    }


def _rank_us() -> float:
    import torch

    import allranks as dist

    tensor = torch.zeros(2)
    blocks = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(200):
            dist.all_reduce(tensor)
        blocks.append((time.perf_counter() - began) / 200 * 1e6)
    return statistics.median(blocks)


def draw(path: Path, rows: list[dict[str, object]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for number, machine in enumerate(MACHINES):
        mine = [row for row in rows if row["machine"] == machine.name]
        ranks = [row["ranks"] for row in mine]
        for way, style in (("flat", "--"), ("groups", "-")):
            for axis, key in zip(axes, ("us", "lines"), strict=True):
                values = [row[way][key] for row in mine]  # type: ignore[index]
                axis.plot(ranks, values, style, color=f"C{number}", label=f"{machine.name}, {way}")
    axes[0].axhline(GOAL_US, color="grey", linewidth=0.8)
    axes[0].set(title="all_reduce of 8 bytes, predicted", xlabel="ranks", ylabel="us", xscale="log", yscale="log")
    axes[1].set(title="lines of others that are read", xlabel="ranks", ylabel="lines", xscale="log", yscale="log")
    for axis in axes:
        axis.set_xticks([2, 8, 32, 128], ["2", "8", "32", "128"])
    axes[0].set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes[0].set_yticks([], minor=True)
    axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


def build() -> None:
    if not (BUILD / "lines").exists():
        subprocess.run(["make", "-C", ROOT, "core-tests", "SANITIZERS=plain"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    build()
    here = measured()
    print(f"own work of a rank: {here['own_us']:.2f} us; transfer of a cache line: {here['line_us']:.3f} us")
    print(f"two ranks: {here['two_ranks_us']:.2f} us, predicted {here['two_ranks_predicted_us']:.2f} us\n")
    rows = list(within_hosts(here["own_us"] * 1e3))
    print(f"{'':38}{'flat':>16}{'by groups':>16}\n{'':30}{'ranks':>8}" + 2 * f"{'lines':>8}{'us':>8}")
    for row in rows:
        flat, groups = row["flat"], row["groups"]
        values = [flat["lines"], flat["us"], groups["lines"], groups["us"]]  # type: ignore[index]
        print(f"{row['machine']:30}{row['ranks']:8}" + "".join(f"{value:8}" for value in values))
    hosts = list(between_hosts())
    print(f"\n{'hosts':>8}{'rounds':>8}{'messages':>10}{'streams':>9}{'bytes':>9}{'us':>8}")
    for row in hosts:
        print(
            "{hosts:8}{rounds:8}{messages_of_a_leader:10}{streams_of_a_leader:9}{bytes_of_a_leader:9}{us:8}".format(
                **row
            )
        )
    if options.json:
        found = {
            "processor": processor(),
            "cpus": usable_cpus(),
            "measured": {name: round(value, 3) for name, value in here.items()},
            "machines": [asdict(machine) for machine in MACHINES],
            "within_hosts": rows,
            "between_hosts": hosts,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        draw(options.plot, rows)


if __name__ == "__main__":
    main()
