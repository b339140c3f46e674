"""Detection of the launcher or scheduler that started a process, for every entry of the table.

The environments of SLURM, Open MPI and MPICH were recorded from the versions in the comments. tests/hosts runs these
launchers. The other launchers are not available here, so their environments come from their manuals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext as Here
from allranks._cluster.context import with_domain
from allranks._cluster.detection import CHOICES, command_for, detect, read_hosts
from allranks._cluster.hostlist import Slots
from allranks._cluster.schedulers.ssh import SSH

Env = dict[str, str]

# Variables that sbatch -N2 -n3 sets in a batch script (SLURM 22.05).
BATCH: Env = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOBID": "17",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# Variables that srun in this script sets in its last task.
STEP: Env = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_RESV_PORTS": "20000-20001",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
ONE_EACH: Env = STEP | {
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}
OPENMPI: Env = {  # 5.0.11
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_HOSTNAME": "node1",
    "PMIX_NAMESPACE": "prterun-node0-6491@1",
    "PMIX_RANK": "3",
}
MPICH: Env = {  # 5.0.2
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "node1",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}
MVAPICH: Env = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS: Env = {
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "4f7d",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_SIZE": "4",
    "PBS_NODEFILE": "/var/spool/pbs/aux/12.pbs",
    "PBS_JOBID": "12.pbs",
}
JSRUN: Env = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "99",
    "LSB_DJOB_RANKFILE": "/home/me/.lsbatch/99.hostfile",
    "LSB_MCPU_HOSTS": "batch1 1 a1 42 a2 42",
    # Spectrum MPI derives from Open MPI and sets the same variables.
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
FLUX: Env = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_ID": "ƒ2eM",
    "FLUX_URI": "local:///run/flux/local-0",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
}
POD: Env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
KUBEFLOW: Env = POD | {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-node-0-1",
}
PYTORCHJOB: Env = POD | {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
}
INDEXED: Env = POD | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "my-job-3"}
JOBSET: Env = POD | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "js-workers-0-3", "JOBSET_NAME": "js"}
SAGEMAKER: Env = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}
TORCHRUN: Env = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
TWO = (Slots("node1", 2), Slots("node2", 1))
LOCAL = Here("local", "none")

RANKS = {
    "allranks": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "ALLRANKS_STORE": "unix:@x", "TORCHELASTIC_RUN_ID": "y"},
        Here("allranks", "rank", 1, 2, 1),
    ),
    "torchrun": (TORCHRUN, Here("torchrun", "rank", 3, 4, 1, 2, 1, 2, "node0")),
    "by hand": ({"RANK": "0", "WORLD_SIZE": "2"}, Here("torchrun", "rank", 0, 2)),
    "THD": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0:29500"}, Here("torchrun", "rank", 1, 2, leader="n0")),
    "PyTorchJob's pod": (PYTORCHJOB, Here("torchrun", "rank", 1, 3, leader="train-master-0")),
    "Open MPI, all ranks here": (
        OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_SERVER_URI2": "prterun-node0-6491@0.0;tcp4://10.0.0.1:1"},
        Here("openmpi", "rank", 3, 4, 1, 4, job="prterun-node0-6491@1 prterun-node0-6491@0.0;tcp4://10.0.0.1:1"),
    ),
    "Open MPI": (OPENMPI, Here("openmpi", "rank", 3, 4, 1, 2, job=OPENMPI["PMIX_NAMESPACE"])),
    "MVAPICH2": (MVAPICH, Here("mvapich", "rank", 1, 4, 1, 2)),
    "MPICH": (MPICH, Here("mpich", "rank", 1, 2, 0, 1, pmi=11)),
    "PALS": (
        PALS,
        Here("pals", "rank", 5, 8, 1, 4, 1, hostfile=f"PBS_NODEFILE={PALS['PBS_NODEFILE']}", job="4f7d"),
    ),
    "jsrun": (
        JSRUN,
        Here("jsrun", "rank", 7, 12, 1, 6, hostfile=f"LSB_DJOB_RANKFILE={JSRUN['LSB_DJOB_RANKFILE']}", job="99"),
    ),
    "flux run": (FLUX, Here("flux", "rank", 1, 4, 1, nodes=2, job="ƒ2eM", pmi=9)),
    "srun": (
        STEP,
        Here("slurm", "rank", 2, 3, 0, 1, 1, 2, "node1", (20000, 20001), TWO, job="17.0"),
    ),
    "srun --mpi=pmi2": (
        STEP | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "10"},
        Here("slurm", "rank", 2, 3, 0, 1, 1, 2, "node1", (20000, 20001), TWO, job="17.0", pmi=10),
    ),
    "one task per node": (
        ONE_EACH,
        Here("slurm", "rank", 1, 2, 0, 1, 1, 2, "node1", (20000, 20001), (Slots("node1", 1), Slots("node2", 1)),
              job="17.0"),
    ),
    # The innermost launcher wins.
    "mpirun in a batch script": (BATCH | OPENMPI, Here("openmpi", "rank", 3, 4, 1, 2, job=OPENMPI["PMIX_NAMESPACE"])),
    "mpirun by srun's daemons": (STEP | OPENMPI, Here("openmpi", "rank", 3, 4, 1, 2, job=OPENMPI["PMIX_NAMESPACE"])),
    "mpiexec by srun's proxies": (STEP | MPICH, Here("mpich", "rank", 1, 2, 0, 1, pmi=11)),
    "torchrun in a step": (STEP | TORCHRUN, Here("torchrun", "rank", 3, 4, 1, 2, 1, 2, "node0")),
    "mpirun in an allocation of PBS": (
        OPENMPI | {"PBS_NODEFILE": "/x", "PBS_TASKNUM": "1"},
        Here("openmpi", "rank", 3, 4, 1, 2, job=OPENMPI["PMIX_NAMESPACE"]),
    ),
    # Environments in which a program is not a rank.
    "nothing": ({}, LOCAL),
    "empty": ({"RANK": "", "SLURM_STEP_ID": "", "PMI_RANK": " "}, LOCAL),
    "PBS' task number is no rank": ({"PBS_NODEFILE": "/x", "PBS_TASKNUM": "3", "PBS_NODENUM": "1"}, LOCAL),
    "SLURM's batch step": ({"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, LOCAL),
    "SLURM's interactive step": ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, LOCAL),
    "an Indexed Job's pods need not know of each other": (INDEXED, LOCAL),
}  # fmt: skip

NODES = {
    "srun, one task per node": (
        ONE_EACH,
        Here("slurm", "node", 1, 2, None, None, 1, 2, "node1", (20000, 20001), (Slots("node1", 1), Slots("node2", 1)),
              job="17.0"),
    ),
    "mpiexec -ppn 1": (MPICH, Here("mpich", "node", 1, 2, node=1, nodes=2, pmi=11)),
    "flux run, one task per node": (
        FLUX | {"FLUX_JOB_SIZE": "2", "PMI_SIZE": "2"},
        Here("flux", "node", 1, 2, node=1, nodes=2, job="ƒ2eM", pmi=9),
    ),
    "Kubeflow": (KUBEFLOW, Here("kubeflow", "node", node=1, nodes=2, leader="train-node-0-0.train", ports=(29400,))),
    "Kubeflow, elastic": (
        KUBEFLOW | {"PET_NNODES": "1:4"},
        Here("kubeflow", "node", node=1, leader="train-node-0-0.train", ports=(29400,)),
    ),
    "PyTorchJob": (
        PYTORCHJOB, Here("pytorchjob", "node", node=1, nodes=3, leader="train-master-0", ports=(23456,))
    ),
    "Indexed Job": (INDEXED, Here("indexedjob", "node", node=3, leader="my-job-0", job="my-job")),
    "JobSet": (JOBSET, Here("jobset", "node", node=3, leader="js-workers-0-0.js", job="js-workers-0")),
    "SageMaker": (
        SAGEMAKER,
        Here("sagemaker", "node", node=1, nodes=2, leader="algo-1", hosts=(Slots("algo-1"), Slots("algo-2"))),
    ),
    # With several tasks per node, each task is a rank, also if it is a launcher.
    "srun": (STEP, RANKS["srun"][1]),
    "Open MPI, all ranks here": (
        OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_SERVER_URI2": "prterun-node0-6491@0.0;tcp4://10.0.0.1:1"},
        Here("openmpi", "rank", 3, 4, 1, 4, job="prterun-node0-6491@1 prterun-node0-6491@0.0;tcp4://10.0.0.1:1"),
    ),
    "Open MPI": (OPENMPI, RANKS["Open MPI"][1]),
    "torchrun": (TORCHRUN, RANKS["torchrun"][1]),
    "a rank in a pod": (KUBEFLOW | TORCHRUN, RANKS["torchrun"][1]),
    # Allocations.
    "sbatch in a step": (
        BATCH | {name: "0" if name.endswith("ID") else "1" for name in STEP if name.startswith("SLURM_STEP")},
        Here("slurm", "allocation", nodes=2, leader="node1", hosts=TWO, remote_commands=("srun",), job="17"),
    ),
    "sbatch": (
        BATCH, Here("slurm", "allocation", nodes=2, leader="node1", hosts=TWO, remote_commands=("srun",), job="17"),
    ),
    "PBS": (
        {"PBS_NODEFILE": "/var/spool/pbs/aux/12", "PBS_JOBID": "12.pbs", "PBS_TASKNUM": "1"},
        Here("pbs", "allocation", hostfile="PBS_NODEFILE=/var/spool/pbs/aux/12", remote_commands=("pbsdsh",),
              job="12.pbs"),
    ),
    "LSF": (
        {"LSB_DJOB_HOSTFILE": "/home/me/.lsbatch/9", "LSB_MCPU_HOSTS": "a1 4 a2 4", "LSB_JOBID": "9"},
        Here("lsf", "allocation", nodes=2, leader="a1", hosts=(Slots("a1", 4), Slots("a2", 4)),
              hostfile="LSB_DJOB_HOSTFILE=/home/me/.lsbatch/9", remote_commands=("blaunch",), job="9"),
    ),
    "SGE": (
        {"PE_HOSTFILE": "/var/spool/sge/pe_hostfile", "JOB_ID": "5"},
        Here("sge", "allocation", hostfile="PE_HOSTFILE=/var/spool/sge/pe_hostfile",
             remote_commands=("qrsh",), job="5"),
    ),
    "Flux": ({"FLUX_URI": "local:///run/flux/local"}, Here("flux", "allocation", remote_commands=("flux",))),
    "nothing": ({}, LOCAL),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "place"), RANKS.values(), ids=RANKS)
def test_program_detects_its_rank(environ: Env, place: Here) -> None:
    assert detect(environ, launcher=False) == place


@pytest.mark.parametrize(("environ", "place"), NODES.values(), ids=NODES)
def test_launcher_detects_node_or_allocation(environ: Env, place: Here) -> None:
    assert detect(environ, launcher=True) == place


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        (BATCH, "srun did not start this process. It runs alone in a job of 3 tasks"),
        (KUBEFLOW, "kubeflow started one process on each of 2 nodes"),
        (SAGEMAKER, "sagemaker started one process on each of 2 nodes"),
    ],
)
def test_unlaunched_program_gets_hint_to_use_launcher(environ: Env, hint: str) -> None:
    place = detect(environ, launcher=False)
    assert place.role == "none"
    assert hint in place.hint
    assert "allranks run train.py" in place.hint


def test_single_process_job_gets_no_hint() -> None:
    assert detect(BATCH | {"SLURM_NTASKS": "1"}, launcher=False) == LOCAL
    assert not detect(KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, launcher=False).hint


def test_detection_explains_its_clues() -> None:
    clues = {clue.name: clue for clue in detect(STEP, launcher=False).why}
    assert clues["SLURM_PROCID"].value == "2"
    assert clues["SLURM_PROCID"].meaning == "The number of this process."
    assert "SLURM_NTASKS" not in clues
    assert all(clue.meaning.endswith(".") or clue.meaning.endswith(")") for clue in clues.values())


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK=1 is: openmpi"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set"),
        ({"PALS_RANKID": "1"}, "PMI_SIZE is not set"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_JOB_SIZE is not set"),
        ({"SLURM_STEP_ID": "0"}, "SLURM_PROCID and SLURM_STEP_NUM_TASKS are not set, but slurm is"),
        ({"RANK": "1"}, "WORLD_SIZE is not set, but RANK=1 is"),
        ({"PET_NODE_RANK": "1"}, "PET_NNODES is not set"),
        ({"SM_HOSTS": "[]"}, "SM_CURRENT_HOST is not set"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "expected a JSON list of hosts"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "that contains this host"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK='4': expected a whole number, in 0..3"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x': expected a whole number, 1 or more"),
        (STEP | {"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST='node[1-' is not a list of hosts"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "2(x2)"}, "contradict each other"),
    ],
)
def test_incomplete_or_wrong_environment_names_variable(environ: Env, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ, launcher=False)
    assert said in str(caught.value)


def test_override_restricts_detection_to_one_launcher() -> None:
    both = STEP | OPENMPI
    assert detect(both, "slurm", launcher=False).kind == "slurm"
    assert detect(both | {"ALLRANKS_ENV": "slurm"}, launcher=False).rank == 2
    assert detect(both, "mpi", launcher=False).kind == "openmpi"
    assert detect(both, "local", launcher=True) == LOCAL
    assert detect(both, "ssh", launcher=True) == LOCAL
    with pytest.raises(ConfigError, match=r"--env='slrum' is not known. Expected one of auto, local, ssh, torchrun"):
        detect({}, "slrum", launcher=True)
    with pytest.raises(ConfigError, match=r"ALLRANKS_ENV='x' is not known"):
        detect({"ALLRANKS_ENV": "x"}, launcher=False)
    for choice in set(CHOICES) - {"auto", "local", "ssh"}:
        with pytest.raises(
            ConfigError, match=f"--env={choice}, but this process has no variable of that scheduler: expected [A-Zo]"
        ):
            detect({}, choice, launcher=True)


@pytest.mark.parametrize(
    ("name", "text", "hosts"),
    [
        ("PBS_NODEFILE", "a\na\nb\n", (Slots("a", 2), Slots("b", 1))),
        ("LSB_DJOB_HOSTFILE", "a\nb\nb\n", (Slots("a", 1), Slots("b", 2))),
        ("PE_HOSTFILE", "a.org 2 all.q@a.org UNDEFINED\nb.org 1 all.q@b.org UNDEFINED\n",
         (Slots("a.org", 2), Slots("b.org", 1))),
        ("LSB_DJOB_RANKFILE", "batch1\na1\na1\na2\na2\n", (Slots("a1", 2), Slots("a2", 2))),
    ],
)  # fmt: skip
def test_hosts_are_read_from_scheduler_files(tmp_path: Path, name: str, text: str, hosts: Any) -> None:
    (tmp_path / "hosts").write_text(text)
    environ = (JSRUN if name == "LSB_DJOB_RANKFILE" else {}) | {name: str(tmp_path / "hosts")}
    assert read_hosts(detect(environ, launcher=True)) == hosts
    (tmp_path / "hosts").unlink()
    with pytest.raises(ConfigError, match=f"{name}=.*cannot be read: no such file"):
        read_hosts(detect(environ, launcher=True))


def test_remote_command_is_used_only_if_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    place = detect(NODES["PBS"][0], launcher=True)
    assert command_for(place).name == "ssh"
    (tmp_path / "pbsdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pbsdsh").chmod(0o755)
    assert command_for(place).name == "pbsdsh"


@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ("me@node7: Permission denied (publickey).", "ssh-copy-id node7"),
        ("Host key verification failed.", "connect once manually: ssh node7"),
        ("ssh: Could not resolve hostname node7: Name or service not known", "check the name: getent hosts node7"),
    ],
)
def test_error_of_ssh_is_explained(stderr: str, hint: str) -> None:
    assert SSH.explain("node7", 255, stderr).startswith(f"ssh cannot connect: {stderr} (")
    assert hint in SSH.explain("node7", 255, stderr)
    assert SSH.explain("node7", 1, stderr) == ""  # the exit code of the agent


def test_domain_of_this_host_is_added_to_short_names() -> None:
    assert with_domain("my-job-0", "my-job-3.svc.ns.svc.cluster.local") == "my-job-0.svc.ns.svc.cluster.local"
    assert with_domain("js-workers-0-0.js", "js-workers-0-3.js.ns.svc") == "js-workers-0-0.js"
    assert with_domain("my-job-0", "my-job-3") == "my-job-0"
