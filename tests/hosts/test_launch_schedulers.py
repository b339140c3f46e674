"""Schedulers without a test installation, simulated by small stand-ins for their commands.

The stand-ins start real processes on the test hosts by ssh, in the environments that the schedulers set. The data that
a command passes to a host (stdin, variables) follows the manual of the scheduler.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, finish, jobs
from support.sshd import Ssh

SAY = """
    import os, socket
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], socket.gethostname())
"""
WANTED = ["0 4 0 node0", "1 4 1 node0", "2 4 0 node1", "3 4 1 node1"]

# LSF: passes stdin and the caller's variables.
BLAUNCH = """
    assert sys.argv[1] == "-z"
    over_ssh(sys.argv[2], sys.argv[3:], dict(os.environ))
"""
# SGE: the same as LSF, with -V.
QRSH = """
    assert sys.argv[1:3] == ["-inherit", "-V"]
    over_ssh(sys.argv[3], sys.argv[4:], dict(os.environ))
"""
# PBS: passes neither stdin nor variables, except the test's own paths. Line numbers of the node file select hosts.
PBSDSH = """
    assert (sys.argv[1], sys.argv[3]) == ("-n", "--")
    host = open(os.environ["PBS_NODEFILE"]).read().split()[int(sys.argv[2])]
    over_ssh(host, sys.argv[4:], {name: os.environ[name] for name in ("PYTHONPATH", "XDG_CONFIG_HOME")}, "-n")
"""
FLUX = """
    if sys.argv[1:] == ["getattr", "hostlist"]:
        print("node[0-1]")
        sys.exit()
    assert sys.argv[1:6:2] == ["run", "2", "2"], sys.argv
    hosts = sys.argv[7].removeprefix("host:").split(",")
    if os.fork() == 0:
        over_ssh(hosts[1], sys.argv[8:], dict(os.environ), "-n")
    over_ssh(hosts[0], sys.argv[8:], dict(os.environ), "-n")
"""
STAND_IN = """#!{python}
import os, shlex, sys
def over_ssh(host, command, variables, *options):
    keep = [f"{{n}}={{v}}" for n, v in variables.items() if n.startswith(("PYTHON", "ALLRANKS_", "XDG_"))]
    os.execvp("ssh", ["ssh", *options, host, shlex.join(["env", *keep, *command])])
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def stand_in(job: Jobs, name: str, body: str) -> str:
    """Create a command. Return a PATH that contains it."""
    folder = job.folder / "bin"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(STAND_IN.format(python=sys.executable) + textwrap.dedent(body))
    path.chmod(0o755)
    return f"{folder}:{job.environ['PATH']}"


@pytest.mark.parametrize("kind", ["lsf", "sge", "pbs", "flux"])
def test_ranks_are_started_through_the_scheduler_of_an_allocation(job: Jobs, kind: str) -> None:
    files = {
        "sge": "node0 2 all.q@node0 UNDEFINED\nnode1 2 all.q@node1 UNDEFINED\n",
        "pbs": "node0\nnode0\nnode1\nnode1\n",
    }
    listed = job.folder / "hosts"
    listed.write_text(files.get(kind, ""))
    command, body = {
        "lsf": ("blaunch", BLAUNCH),
        "sge": ("qrsh", QRSH),
        "pbs": ("pbsdsh", PBSDSH),
        "flux": ("flux", FLUX),
    }[kind]
    environ = {
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node0 2 node1 2"},
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": str(listed)},
        "pbs": {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(listed), "PBS_TASKNUM": "1"},
        "flux": {"FLUX_URI": "local:///run/flux/local"},
    }[kind]
    if kind == "pbs":  # the secret comes from a file in the user's home, which the hosts share
        environ |= {"ALLRANKS_SECRET": "", "XDG_CONFIG_HOME": str(job.folder)}
    words = ["--nproc-per-node", "2"] if kind == "flux" else []
    done = job.run(0, *words, job.write(SAY), PATH=stand_in(job, command, body), **environ)
    assert done.code == 0, done.err
    assert [line.partition("] ")[2] for line in done.lines] == WANTED


@pytest.mark.parametrize("kind", ["indexed", "jobset", "pytorchjob", "kubeflow", "sagemaker"])
def test_ranks_in_pods_find_each_other(job: Jobs, kind: str) -> None:
    """Environments of pods, with names as the DNS of a cluster resolves them."""
    files = [host.names for host in job.hosts.hosts[:2]]
    before = [file.read_text() for file in files]
    leader = {
        "indexed": "train-0",
        "jobset": "set-work-0-0.set",
        "pytorchjob": "job-master-0",
        "kubeflow": "job-node-0-0",
        "sagemaker": "algo-1",
    }[kind]
    for file, text in zip(files, before, strict=True):
        file.write_text(f"{text}10.77.0.1 {leader}\n")
    try:
        processes = []
        for node in (0, 1):
            environ = {
                "indexed": {"JOB_COMPLETION_INDEX": str(node), "HOSTNAME": f"train-{node}"},
                "jobset": {"JOB_COMPLETION_INDEX": str(node), "HOSTNAME": f"set-work-0-{node}", "JOBSET_NAME": "set"},
                "pytorchjob": {
                    "RANK": str(node),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": leader,
                    "MASTER_PORT": "23456",
                    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                },
                "kubeflow": {
                    "PET_NODE_RANK": str(node),
                    "PET_NNODES": "2",
                    "PET_NPROC_PER_NODE": "2",
                    "PET_MASTER_ADDR": leader,
                    "PET_MASTER_PORT": "29400",
                },
                "sagemaker": {
                    "SM_HOSTS": json.dumps(["algo-1", "algo-2"]),
                    "SM_CURRENT_HOST": f"algo-{node + 1}",
                    "SM_NETWORK_INTERFACE_NAME": "eth0",
                },
            }[kind]
            count = ("-N", "2") if kind in ("indexed", "jobset") else ()
            processes.append(job.start(node, *count, "--nproc-per-node", "2", job.write(SAY), **environ))
        done = [finish(process) for process in processes]
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    assert [d.code for d in done] == [0, 0], done
    assert [line.partition("] ")[2] for d in done for line in d.lines] == WANTED
