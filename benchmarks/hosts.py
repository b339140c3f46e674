"""Calls between hosts: allranks, gloo and Open MPI over TCP, compared with one plain stream of iperf3.

    python benchmarks/hosts.py --json benchmarks/hosts_1.json            # one rank on each of two hosts
    python benchmarks/hosts.py --per-host 2 --json benchmarks/hosts_2.json

The hosts are network namespaces of this machine (tests/support/cluster.py; root), connected by veth and a bridge. The
comparison therefore covers the software of both ends, not a wire. Each host has an equal share of this machine's CPUs.
Without this, the kernel sometimes runs both ranks on one CPU, which makes any of the libraries several times slower.
Run it with the Python of build/bench-venv (`make mpi`), which has Open MPI. Further arguments are passed to `allranks
bench`. For more hosts, see benchmarks/many_hosts.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster import cluster  # noqa: E402

AGENT = """#!/bin/sh
# What mpirun takes for ssh: HOST COMMAND...
case "$1" in {cases} *) echo "no host $1" >&2; exit 1;; esac
shift
exec taskset --cpu-list "$cpus" nsenter --target "$holder" --net --uts --mount -- sh -c "$*"
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--verbs", default="all")
    parser.add_argument("--json", type=Path)
    options, more = parser.parse_known_args()
    with cluster(2) as hosts:
        cpus = parts(2)
        report = bench(hosts.hosts, cpus, options.per_host, options.verbs, *more)
        streams = [iperf3(hosts.hosts, cpus, environment(2)) for _ in range(5)]
        print(f"iperf3, one stream: {', '.join(f'{s:.2f}' for s in streams)} GB/s")
        if options.json:
            report["iperf3_bytes_per_s"] = [round(s * 1e9) for s in streams]
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def parts(hosts):
    """Return the CPUs of each host for taskset: an equal part, or one CPU in turn if there are more hosts than CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    each = max(1, len(cpus) // hosts)
    return [",".join(map(str, (cpus[(host * each) % len(cpus) :])[:each])) for host in range(hosts)]


def environment(ranks):
    return {name: value for name, value in os.environ.items() if not name.startswith("ALLRANKS_")} | {
        # All hosts are this machine. If bound to the first core that mpirun assigns per host, all ranks would share
        # it.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PRTE_MCA_prte_allow_run_as_root": "1",
        "OMPI_MCA_mpi_yield_when_idle": str(int(ranks > len(os.sched_getaffinity(0)))),
        "OMP_NUM_THREADS": "1",
    }


def bench(hosts, cpus, per_host, verbs, *more):
    """Return the results of `allranks bench` on these hosts, beside gloo and Open MPI."""
    ranks = per_host * len(hosts)
    with tempfile.TemporaryDirectory() as folder:
        agent, found = Path(folder) / "agent", Path(folder) / "found.json"
        cases = " ".join(
            f"{h.name}|{h.address}) holder={h.holder}; cpus={own};;" for h, own in zip(hosts, cpus, strict=True)
        )
        agent.write_text(AGENT.format(cases=cases))
        agent.chmod(0o755)
        placed = ",".join(f"{host.address}:{per_host}" for host in hosts)
        command = [sys.executable, "-m", "allranks", "bench", verbs, "-n", str(ranks), "-H", placed]
        command += ["--against", "gloo,mpi", "--json", str(found), *more]
        env = environment(ranks) | {"PRTE_MCA_plm_ssh_agent": str(agent)}
        running = hosts[0].start(["taskset", "--cpu-list", cpus[0], *command], env)
        for line in running.stdout:
            print(line, end="", flush=True)
        if running.wait() != 0:
            sys.exit(running.returncode)
        return json.loads(found.read_text())


def iperf3(hosts, cpus, env):
    """Return the GB/s of one stream over two seconds."""
    server = hosts[1].start(["taskset", "--cpu-list", cpus[1], "iperf3", "--server", "--one-off", "--forceflush"], env)
    try:
        while "listening" not in server.stdout.readline():
            pass
        client = hosts[0].start(
            ["taskset", "--cpu-list", cpus[0], "iperf3", "--client", hosts[1].address, "--time", "2", "--json"], env
        )
        return json.loads(client.communicate()[0])["end"]["sum_received"]["bits_per_second"] / 8e9
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if subprocess.run(["which", "iperf3"], stdout=subprocess.DEVNULL).returncode:
        sys.exit("iperf3 is missing: apt-get install iperf3")
    main()
