"""Files that ``allranks submit`` writes, checked with bash and a YAML parser. tests/hosts runs one on a real SLURM.

PBS, LSF and Kubernetes are not available here. Scripts with the names of their commands record their input and print
the same answers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPTS = ("slurm", "pbs", "lsf")
HARD = ("--text", """it's "quoted" $HOME `id` $(id) \\ \n * ~ #!""", "ünï", "", "-n", "a=b;c&d|e")
SHIMS = {
    "sbatch": ("slurm", "4711", "4711"),
    "qsub": ("pbs", "4712.head", "4712.head"),
    "bsub": ("lsf", "Job <4713> is submitted to default queue <normal>.", "4713"),
    "kubectl": ("k8s", "secret/show created\nservice/show created\njob.batch/show created", "job.batch/show"),
}
NAMES = {"slurm": "SLURM", "pbs": "PBS", "lsf": "LSF", "k8s": "Kubernetes"}
NEXT = {
    "slurm": ("state: squeue --jobs", "output: tail -F", "stop: scancel 4711"),
    "pbs": ("state: qstat 4712.head", "output: cat show.o4712", "stop: qdel 4712.head"),
    "lsf": ("state: bjobs 4713", "output: bpeek -f", "stop: bkill 4713"),
    "k8s": ("state: kubectl get", "output: kubectl logs", "stop: kubectl delete"),
}
SHOW = """import os, sys
print([os.environ.get("RANK"), os.getcwd(), sys.prefix, os.environ.get("VIRTUAL_ENV")] + sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    return folder


def submit(folder: Path, *words: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ, **({"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"} if path else {})}
    return subprocess.run(
        [sys.executable, "-m", "allranks", "submit", *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def file_of(folder: Path, *words: str) -> str:
    done = submit(folder, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def directives(text: str) -> list[str]:
    head = text.split("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    return [line.split(" ", 1)[1] for line in head[1:]]


ALL = (
    "-N", "3", "--nproc-per-node", "4", "--cpus", "4", "--gpus", "4", "--memory", "64G", "--time", "1-12:00:30",
    "--queue", "gpgpu", "--account", "11003281", "--name", "first", "show.py",
)  # fmt: skip


def test_slurm_directives(folder: Path) -> None:
    assert directives(file_of(folder, "--to", "slurm", *ALL)) == [
        "--job-name=first",
        "--nodes=3",
        "--ntasks-per-node=4",
        "--cpus-per-task=4",
        "--gres=gpu:4",
        "--mem=65536M",
        "--time=1-12:00:30",
        "--partition=gpgpu",
        "--account=11003281",
        "--output=%x-%j.out",
        "--signal=B:TERM@60",
    ]


def test_pbs_directives(folder: Path) -> None:
    assert directives(file_of(folder, "--to", "pbs", *ALL)) == [
        "-N first",
        "-l select=3:ncpus=16:mpiprocs=4:ngpus=4:mem=65536mb",
        "-l place=scatter",
        "-l walltime=36:00:30",
        "-q gpgpu",
        "-P 11003281",
        "-j oe",
    ]


def test_lsf_directives(folder: Path) -> None:
    assert directives(file_of(folder, "--to", "lsf", *ALL)) == [
        "-J first",
        "-n 48",
        '-R "span[ptile=16]"',
        '-gpu "num=4"',
        '-R "rusage[mem=65536MB/host]"',
        "-W 36:01",
        "-wa TERM",
        "-wt 1",
        "-q gpgpu",
        "-P 11003281",
        "-o %J.out",
    ]


def test_unset_options_write_no_directives(folder: Path) -> None:
    said = {system: directives(file_of(folder, "--to", system, "show.py")) for system in SCRIPTS}
    assert said["slurm"] == [
        "--job-name=show", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=%x-%j.out",
        "--signal=B:TERM@60",
    ]  # fmt: skip
    assert said["pbs"] == ["-N show", "-l select=1:ncpus=1:mpiprocs=1", "-l place=scatter", "-j oe"]
    assert said["lsf"] == ["-J show", "-n 1", '-R "span[ptile=1]"', "-o %J.out"]


def test_job_script_runs_program_in_folder_of_submission(folder: Path, tmp_path: Path) -> None:
    bodies = set()
    for system in SCRIPTS:
        script = folder / f"{system}.sh"
        assert file_of(folder, "--to", system, "-n", "2", "--file", str(script), "show.py", *HARD) == ""
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=True).stderr == b""
        bodies.add(script.read_text().partition("\n\n")[2])
    assert len(bodies) == 1
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}  # an environment in which the daemon of a node may start it
    done = subprocess.run(["bash", str(script)], cwd="/", env=bare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [[str(r), str(folder), sys.prefix, sys.prefix, *HARD] for r in range(2)]
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {expected[r]!r}" for r in range(2)]


def test_pbs_job_receives_sigterm_before_its_time_limit(folder: Path) -> None:
    (folder / "long.py").write_text("import time\ntime.sleep(100)\n")
    script = folder / "job.sh"
    assert file_of(folder, "--to", "pbs", "--time", "65s", "--file", str(script), "long.py") == ""
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 143, done.stderr  # exit code of SIGTERM, whether or not ranks have started
    assert "timeout" not in file_of(folder, "--to", "pbs", "--time", "60s", "long.py")


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (("-m", "json.tool", "--help"), ["-m", "json.tool", "--help"]),
        (("--", "env", "-i"), ["--", "env", "-i"]),
    ],
)
def test_modules_and_commands_are_passed_to_run(folder: Path, words: tuple[str, ...], runs: list[str]) -> None:
    last = file_of(folder, "--to", "slurm", *words).splitlines()[-1]
    assert shlex.split(last) == ["exec", sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", *runs]


def test_chdir_sets_folder_of_the_job(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "there.py").touch()
    assert file_of(folder, "--to", "slurm", "--chdir", "inner", "--file", "job.sh", "there.py") == ""
    assert f"cd {shlex.quote(str(folder / 'inner'))}\n" in (folder / "job.sh").read_text()


def test_kubernetes_manifest(folder: Path) -> None:
    text = file_of(
        folder, "--to", "k8s", "-N", "3", "-n", "6", "--cpus", "4", "--gpus", "2", "--memory", "64G", "--time", "90m",
        "--image", "registry.example/train:7", "--namespace", "team", "--name", "first", "--chdir", "/srv/train",
        "show.py", *HARD,
    )  # fmt: skip
    secret, service, job = yaml.safe_load_all(text)
    assert [(each["kind"], each["metadata"]) for each in (secret, service, job)] == [
        (kind, {"name": "first", "namespace": "team"}) for kind in ("Secret", "Service", "Job")
    ]
    assert re.fullmatch(r"[0-9a-f]{64}", secret["stringData"]["ALLRANKS_SECRET"])
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": "first"},  # the label that Kubernetes gives to the pods of a Job
    }
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    # Pods receive SIGTERM at the deadline, one minute before the end of the requested time.
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (0, 5340)
    assert pod["terminationGracePeriodSeconds"] == 60
    assert (pod["subdomain"], pod["restartPolicy"]) == ("first", "Never")
    (container,) = pod["containers"]
    assert (container["image"], container["workingDir"]) == ("registry.example/train:7", "/srv/train")
    assert container["resources"] == {"limits": {"cpu": 8, "memory": "65536Mi", "nvidia.com/gpu": 2}}
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "first", "key": "ALLRANKS_SECRET"}
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    command = container["command"]
    assert command[:12] == [
        "allranks", "run", "--nnodes", "3", "--nproc-per-node", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)",
        "--master-addr", "first-0.first", "--master-port", "29500",
    ]  # fmt: skip
    # Kubernetes replaces $(NAME), and converts $$ to $.
    assert [word.replace("$$", "$") for word in command[12:]] == ["show.py", *HARD]
    assert "$(" not in "".join(command[12:]).replace("$$", "")


ELASTIC = ("-N", "3", "-n", "4", "--elastic", "3", "--spares", "1", "--respawns", "5", "show.py", "--elastic", "9")


@pytest.mark.parametrize("system", [*SCRIPTS, "k8s"])
def test_elastic_job_tolerates_lost_hosts(folder: Path, system: str) -> None:
    """Set the option by which a lost host or pod does not end the job, if the system has one."""
    image = ("--image", "a") if system == "k8s" else ()
    text = file_of(folder, "--to", system, *image, *ELASTIC)
    if system == "k8s":
        job = list(yaml.safe_load_all(text))[2]
        command, spec = job["spec"]["template"]["spec"]["containers"][0]["command"], job["spec"]
        assert "backoffLimit" not in spec  # it counts failures of all pods and would end the job early
        assert (spec["backoffLimitPerIndex"], spec["template"]["spec"]["restartPolicy"]) == (5, "Never")
        assert spec["maxFailedIndexes"] == 1  # of three pods of two ranks, two are needed
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    else:
        command = shlex.split(text.splitlines()[-1])
        tolerant = {"slurm": {"--no-kill"}, "pbs": {"-W tolerate_node_failures=all"}, "lsf": set()}[system]
        plain = file_of(folder, "--to", system, "-N", "3", "--nproc-per-node", "2", "show.py")
        assert set(directives(text)) - set(directives(plain)) == tolerant
    place = command.index("--nproc-per-node")
    assert command[place : place + 2] == ["--nproc-per-node", "2"]
    place = command.index("--elastic")
    assert command[place:] == [
        "--elastic", "3", "--spares", "1", "--respawns", "5", "show.py", "--elastic", "9"
    ]  # fmt: skip


def test_every_manifest_has_its_own_secret_and_private_mode(folder: Path) -> None:
    words = ("--to", "k8s", "--image", "a", "--file", "job.yaml", "Train 7_x.py")
    secrets, names = set(), set()
    for _ in range(2):
        assert file_of(folder, *words) == ""
        documents = list(yaml.safe_load_all((folder / "job.yaml").read_text()))
        secrets.add(documents[0]["stringData"]["ALLRANKS_SECRET"])
        (name,) = {each["metadata"]["name"] for each in documents}
        assert re.fullmatch("train-7-x-[0-9a-f]{6}", name)
        names.add(name)
    assert len(secrets) == len(names) == 2
    assert (folder / "job.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("command", SHIMS)
def test_now_submits_the_job(command: str, folder: Path, tmp_path: Path) -> None:
    system, says, expected = SHIMS[command]
    shim = tmp_path / "bin" / command
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/input\nprintf %s {shlex.quote(says)}\n'
    )
    shim.chmod(0o755)
    image = ("--image", "a") if system == "k8s" else ()
    done = submit(folder, "--to", system, *image, "--now", "--file", "job", "-n", "2", "show.py", path=shim.parent)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n")
    assert (tmp_path / "input").read_text() == (folder / "job").read_text()
    head, *after = done.stderr.splitlines()
    assert head == f"allranks submit: submitted to {NAMES[system]}: show.py, 2 ranks on 1 host"
    assert [line.split()[: len(words.split())] for line, words in zip(after, NEXT[system], strict=True)] == [
        words.split() for words in NEXT[system]
    ]
    again = submit(folder, "--to", system, *image, "--now", "-q", "show.py", path=shim.parent)
    assert (again.stdout, again.stderr) == (f"{expected}\n", "")
    arguments = {"slurm": "--parsable", "k8s": "create -f -"}.get(system, "")
    assert (tmp_path / "arguments").read_text().strip() == arguments


def test_rejected_job_reports_exit_code(folder: Path, tmp_path: Path) -> None:
    shim = tmp_path / "sbatch"
    shim.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 3\n")
    shim.chmod(0o755)
    done = submit(folder, "--to", "slurm", "--now", "show.py", path=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "sbatch: error: invalid partition",
        "allranks submit: error: sbatch rejected the job (exit code 3)",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show.py",), "the following arguments are required: --to"),
        (("--to", "slurm"), "nothing to run"),
        (("--to", "slurm", "shwo.py"), "cannot find script 'shwo.py'"),
        (("--to", "slurm", "--time", "soon", "show.py"), "'soon' is not a duration"),
        (("--to", "slurm", "--time", "0:00:00", "show.py"), "'0:00:00' is not a duration"),
        (("--to", "slurm", "--memory", "lots", "show.py"), "'lots' is not a size"),
        (("--to", "slurm", "--name", "a\n#SBATCH --uid=0", "show.py"), "is not a plain name"),
        (("--to", "slurm", "-N", "0", "show.py"), "'0' is not a number, 1 or more"),
        (("--to", "slurm", "--image", "a", "show.py"), "options for Kubernetes, not for --to slurm.\n  Use --to k8s"),
        (("--to", "k8s", "show.py"), "--image"),
        (("--to", "k8s", "--image", "a", "--name", "7up", "show.py"), "'7up' is not a valid Kubernetes name"),
        (("--to", "k8s", "--image", "a", "--queue", "gpu", "show.py"), "Omit --queue"),
        (("--to", "slurm", "--spares", "1", "show.py"), "Add --elastic MIN"),
        (
            ("--to", "slurm", "-N", "2", "--elastic", "3", "show.py"),
            "--elastic 3 requires at least 3 ranks, but the job",
        ),
        (("--to", "slurm", "--elastic", "1", "--spares", "1", "show.py"), "--spares 1: no host is left for"),
        (("--to", "slurm", "--chdir", "missing", "show.py"), "cannot enter 'missing' (--chdir): No such file"),
        (("--to", "k8s", "--image", "a", "--chdir", "x", "show.py"), "--chdir 'x': expected a folder of the image"),
        (("--to", "pbs", "--file", "missing/job.sh", "show.py"), "cannot write 'missing/job.sh': No such file"),
    ],
)
def test_wrong_arguments(folder: Path, words: tuple[str, ...], says: str) -> None:
    done = submit(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("allranks submit: error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_submit_command_is_reported(folder: Path) -> None:
    done = submit(folder, "--to", "lsf", "--now", "show.py", PATH="/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bsub is not installed on this host" in done.stderr


def test_ranks_per_host_follow_from_options(folder):
    for words, each in (
        (("-N", "2", "-n", "4"), 2),
        (("-N", "2", "--nproc-per-node", "4"), 4),
        (("-N", "2", "-n", "4", "--nproc-per-node", "2"), 2),
        (("-N", "2", "--gpus", "3"), 3),
    ):
        assert f"--ntasks-per-node={each}" in file_of(folder, "--to", "slurm", *words, "show.py")
    for words in (("-N", "2", "-n", "3"), ("-N", "2", "-n", "4", "--nproc-per-node", "4")):
        done = submit(folder, "--to", "slurm", *words, "show.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert "cannot be distributed evenly over 2 hosts" in done.stderr


def test_trace_option_is_passed_to_run(folder: Path) -> None:
    last = file_of(folder, "--to", "slurm", "--trace", "a b", "show.py").splitlines()[-1]
    assert shlex.split(last)[-3:] == ["--trace", "a b", "show.py"]
