"""``allranks doctor``: real limits, files, ports and processes of this host, and verdicts on constructed values."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.tools import quiet
from allranks.tools.doctor import check, fabric, job, limits, network, pairs, ranks, report, software, text
from allranks.tools.doctor.check import Check
from support import warm
from support.mpi_jobs import python_with

SOURCE = Path(__file__).parents[2] / "src"
NAMES = [look.__name__.replace("_", " ") for m in (software, limits, network, fabric, job) for look in m.CHECKS]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    and not name.startswith("ALLRANKS_")
}
GB = 1 << 30


def doctor(*arguments: str, python: str = sys.executable, before: str = "", **environ: str) -> tuple[int, str, str]:
    command = [python, "-m", "allranks", "doctor", *arguments]
    if python == sys.executable and not before and "PYTHONPATH" not in environ:
        done = warm.run(command, env={**CLEAN, **environ}, timeout=60)
        return done.returncode, done.stdout, done.stderr
    command = ["sh", "-c", f'{before} exec "$@"', "sh", *command]
    done = subprocess.run(command, env={**CLEAN, **environ}, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def lines(*arguments: str, code: int = 0, **given: str) -> dict[str, dict]:
    """Run the command and return its lines by the name of the check."""
    ended, out, err = doctor("--json", *arguments, **given)
    assert (ended, err) == (code, ""), out
    found = json.loads(out)
    assert found["failed"] == sum(line["verdict"] == "FAIL" for line in found["lines"])
    return {line["name"]: line for line in found["lines"]}


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """Return a PYTHONPATH with a torch module that fails to import."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    return os.pathsep.join([str(tmp_path), str(SOURCE)])


def test_every_check_prints_one_line() -> None:
    code, out, err = doctor()
    assert (code, err) == (0, "")
    said = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [re.split(r"  +", line)[1] for line in said[:-1]] == NAMES
    assert all(line.split()[0] in ("ok", "warn") for line in said[:-1])
    assert said[-1].startswith(f"{len(NAMES)} checks: 0 failed")


def test_broken_torch_fails_only_the_torch_check(no_torch: str) -> None:
    found = lines(code=1, PYTHONPATH=no_torch)
    assert list(found) == NAMES
    assert [name for name, line in found.items() if line["verdict"] == "FAIL"] == ["torch"]
    assert "OSError: libcudart.so.12" in found["torch"]["measured"]


def test_job_without_torch_reports_each_rank(no_torch: str) -> None:
    code, out, err = doctor(PYTHONPATH=no_torch, RANK="0", WORLD_SIZE="2", MASTER_PORT="29577")
    assert (code, err) == (1, "")
    assert re.search(rf"^FAIL +torch +\[rank 0 on {socket.gethostname()}\] cannot be imported", out, re.MULTILINE)
    assert re.search(r"^FAIL +join .* OSError: libcudart.so.12", out, re.MULTILINE)


def test_job_on_this_host_measures_all_pairs(tmp_path: Path) -> None:
    figures, picture = tmp_path / "found.json", tmp_path / "pairs.png"
    code, out, err = doctor("-n", "3", "--json", str(figures), "--plot", str(picture), "--megabytes", "1")
    assert (code, err) == (0, "")
    assert out.startswith(f"3 ranks on {socket.gethostname()}\n")
    assert re.search(r"^latency, us: half a round trip", out, re.MULTILINE)
    found = json.loads(figures.read_text())
    assert {line["where"] for line in found["lines"]} == {""}
    assert [line["name"] for line in found["lines"]] == [*NAMES, "versions", "latency", "bandwidth"]
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]["found"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < pair["latency_us"] < 1e6 for pair in found["pairs"]["found"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_doctor_runs_as_program_of_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "run", "-n", "2", "--", sys.executable, "-m", "allranks", "doctor"],
        env=CLEAN, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("[0] ") for line in done.stdout.splitlines() if line.strip("[]01 "))
    assert "unix:" not in done.stdout  # the address of the store, which gives access to the job


def test_each_problem_of_a_host_is_one_line(tmp_path: Path) -> None:
    secret = tmp_path / "allranks" / "secret"
    secret.parent.mkdir()
    secret.write_text("0123456789abcdef" * 2)
    secret.chmod(0o644)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = lines(
            code=1, before="ulimit -n 300;", RANK="0", MASTER_ADDR="node7", MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="ib7", XDG_CONFIG_HOME=str(tmp_path),
        )  # fmt: skip
    wrong = {name: line for name, line in found.items() if line["verdict"] == "FAIL"}
    assert sorted(wrong) == ["interfaces", "open files", "secret", "variables"]
    assert "WORLD_SIZE is not set" in wrong["variables"]["measured"]
    assert wrong["variables"]["advice"].endswith("`unset RANK MASTER_ADDR MASTER_PORT`.")
    assert "GLOO_SOCKET_IFNAME=ib7 matches none of" in wrong["interfaces"]["measured"]
    assert "Too many open files; limit 300" in wrong["open files"]["measured"]
    assert f"chmod 600 {secret}" in wrong["secret"]["advice"]
    assert (found["master port"]["verdict"], found["master port"]["measured"]) == ("warn", f"{port} is taken")


def test_secret_is_checked_and_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("ALLRANKS_SECRET", "ALLRANKS_SECRET_FILE", "ALLRANKS_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    assert "none yet" in job.secret().measured
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("ALLRANKS_SECRET", "short")
    assert job.secret().verdict == "FAIL"
    monkeypatch.setenv("ALLRANKS_SECRET", "0123456789abcdef" * 2)
    assert job.secret() == check.ok("from ALLRANKS_SECRET")
    monkeypatch.setenv("ALLRANKS_INSECURE", "1")
    assert job.secret().verdict == "warn"


def test_variables() -> None:
    assert job.judge_variables({}).measured == "RANK and similar variables are not set: rank 0 of 1"
    there = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0:29500"}
    assert job.judge_variables(there).measured.endswith("MASTER_ADDR=node0:29500: rank 1 of 2")
    said = job.judge_variables({"ALLRANKS_IFACES": "eth0"})
    assert said.verdict == "warn"
    assert "ALLRANKS_IFACES (did you mean ALLRANKS_IFACE?)" in said.measured
    used = {
        name for file in SOURCE.rglob("*.py") for name in re.findall(r"\bALLRANKS_[A-Z_]*[A-Z]\b", file.read_text())
    }
    assert job.judge_variables(dict.fromkeys(used - set(job._RANKS), "")).verdict == "ok", (
        "a variable is not in env.VARIABLES"
    )
    assert job.judge_variables({"MASTER_PORT": "29500"}).advice.endswith("`unset MASTER_PORT`.")


@pytest.mark.parametrize("first", ["init", "allranks run", "mpirun -n 2", "serve --in /of/allranks/tests"])
def test_orphaned_rank_is_found_unless_a_launcher_adopts_it(first: str, tmp_path: Path) -> None:
    """Run in a PID namespace, in which the first process adopts orphans and has the name of the parameter."""
    program = tmp_path / "first.py"
    program.write_text(
        "import os, subprocess; from pathlib import Path; from allranks.tools.doctor import job\n"
        "said = subprocess.run(['sh', '-c', 'sleep 60 >/dev/null 2>&1 & echo $!'], capture_output=True, text=True,"
        " env={**os.environ, 'RANK': '3', 'WORLD_SIZE': '8'}).stdout\n"
        "print(int(said) in dict(job.orphans(Path('/proc'))))"
    )
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*alone, sys.executable, str(program), first], env=CLEAN, capture_output=True, text=True, check=False
    )
    if done.returncode and "unshare" in done.stderr and os.environ.get("ALLRANKS_TEST_HOSTS") != "required":
        pytest.skip(f"namespaces are not allowed: {done.stderr.strip()}")
    launcher = first.startswith(("allranks", "mpirun"))
    assert (done.stdout, done.stderr) == (f"{not launcher}\n", "")


def test_unused_shared_memory_files_are_found(tmp_path: Path) -> None:
    forgotten, open_, mapped, young, foreign = (
        tmp_path / name for name in ("torch_1_2", "psm_3", "sm_segment.x", "nccl-4", "somebody's")
    )
    for file in (forgotten, open_, mapped, young, foreign):
        file.write_bytes(bytes(4096))
        os.utime(file, (0, 0))
    os.utime(young)
    program = (
        f"import mmap; a = open({str(open_)!r}); f = open({str(mapped)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        "f.close(); print(flush=True); input()"
    )
    user = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"\n"
        assert job.unused_files(tmp_path, Path("/proc"), time.time() - 60) == [forgotten]
        user.kill()


def test_check_that_raises_is_a_failure() -> None:
    def broken_thing() -> check.Finding:
        raise ZeroDivisionError("by\n  zero")

    said = check.run(broken_thing)
    assert (said.name, said.verdict, said.measured) == ("broken thing", "FAIL", "ZeroDivisionError: by zero")
    assert said.advice


@pytest.mark.parametrize(
    ("addresses", "published", "verdict", "says"),
    [
        (["10.0.0.5"], ["10.0.0.5"], "ok", ""),
        (["127.0.1.1"], ["10.0.0.5"], "warn", "which on another host means that host itself"),
        (["::1", "127.0.0.1"], ["10.0.0.5"], "warn", "which on another host means that host itself"),
        (["127.0.1.1", "10.0.0.5"], ["10.0.0.5"], "ok", ""),
        (["203.0.113.9"], ["10.0.0.5"], "warn", "not an address of this host"),
        ([], ["10.0.0.5"], "warn", "unknown"),
        (["127.0.1.1"], [], "ok", "this host has no network"),
    ],
)
def test_names(addresses: list[str], published: list[str], verdict: str, says: str) -> None:
    said = network.judge_name("node7", addresses, "no such name", published)
    assert said.verdict == verdict
    assert says in said.measured
    assert ("'10.0.0.5 node7' to /etc/hosts" in said.advice) == (verdict == "warn")


@pytest.mark.parametrize(
    ("port", "error", "verdict"),
    [
        (29500, None, "ok"),
        (40000, None, "warn"),
        (29500, OSError(98, "Address already in use"), "warn"),
        (80, OSError(13, "Permission denied"), "FAIL"),
    ],
)
def test_master_port_is_judged(port: int, error: OSError | None, verdict: str) -> None:
    assert network.judge_port(port, (32768, 60999), error).verdict == verdict


@pytest.mark.parametrize(
    ("ranks_here", "threads", "verdict", "advice"),
    [
        (1, None, "ok", ""),
        (4, 2, "ok", ""),
        (4, None, "warn", "OMP_NUM_THREADS=2"),
        (4, 8, "warn", "OMP_NUM_THREADS=2"),
        (16, 1, "warn", "Ranks share CPUs"),
    ],
)
def test_threads(ranks_here: int, threads: int | None, verdict: str, advice: str) -> None:
    said = limits.judge_cpus(8, 64, ranks_here, threads)
    assert said.verdict == verdict
    assert advice in said.advice
    assert said.measured.startswith("8 of 64 usable")


def test_more_ranks_than_cores_give_warning() -> None:
    said = limits.judge_cpus(8, 8, 6, 1, 4)
    assert (said.verdict, "share cores (hyperthreads)" in said.advice) == ("warn", True)
    assert limits.judge_cpus(8, 8, 4, 1, 4).verdict == "ok"


@pytest.mark.parametrize(
    ("load", "waited", "governor", "steal", "verdict"),
    [
        (0.2, 0.01, "performance", 0.0, "ok"),
        (0.2, None, "", 0.0, "ok"),
        (3.0, 0.01, "", 0.0, "warn"),
        (0.2, 0.3, "", 0.0, "warn"),
        (0.2, None, "powersave", 0.0, "warn"),
        (0.2, None, "", 0.2, "warn"),
    ],
)
def test_busy_machine_gives_warning(
    load: float, waited: float | None, governor: str, steal: float, verdict: str
) -> None:
    said = limits.judge_quiet(quiet.Conditions(4, load, waited, governor, steal=steal))
    assert said.verdict == verdict
    assert (quiet.READING in said.advice) == (verdict == "warn")
    assert governor in said.measured


def test_memory_limit_of_cgroups_is_read(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    for folder, limit, used in (("", "max", 0), ("job", 8 * GB, 7 * GB), ("job/step", "max", GB)):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "memory.max").write_text(f"{limit}\n")
        (root / folder / "memory.current").write_text(f"{used}\n")
    membership.write_text("0::/job/step\n")
    assert limits.memory_limit(root, membership) == (8 * GB, 7 * GB)
    membership.write_text("0::/elsewhere\n")
    assert limits.memory_limit(root, membership) is None
    (root / "memory" / "slurm").mkdir(parents=True)
    (root / "memory" / "slurm" / "memory.limit_in_bytes").write_text(f"{2 * GB}\n")
    (root / "memory" / "slurm" / "memory.usage_in_bytes").write_text(f"{GB}\n")
    membership.write_text("5:cpu,cpuacct:/slurm\n4:memory:/slurm\n")
    assert limits.memory_limit(root, membership) == (2 * GB, GB)
    assert limits.judge_memory(64 * GB, 60 * GB, (2 * GB, 2 * GB - 1)).verdict == "warn"
    assert limits.judge_memory(64 * GB, 60 * GB, (20 * GB, 2 * GB)).verdict == "ok"
    assert limits.judge_memory(64 * GB, GB // 2, None).verdict == "warn"


def test_small_shared_memory_gives_warning() -> None:
    assert limits.judge_shm(64 << 20, 64 << 20).verdict == "warn"
    assert "--shm-size" in limits.judge_shm(64 << 20, 64 << 20).advice
    assert limits.judge_shm(16 * GB, 15 * GB).verdict == "ok"
    assert limits.judge_shm(16 * GB, GB // 2).verdict == "warn"


OPENMPI = "Open MPI v5.0.8, package: Open MPI x@y Distribution, ident: 5.0.8"
MPIRUN_OPENMPI = "mpirun (Open MPI) 5.0.8\n\nReport bugs to https://www.open-mpi.org/community/help/"
MPICH = "MPICH Version:      4.3.1\nMPICH Release date: Fri Jun 20"
MPIRUN_MPICH = "HYDRA build details:\n    Version:                                 4.3.1\n    Release Date: x"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS"
MPIRUN_INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515 (id: df741590)"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (OPENMPI, "Open MPI 5.0.8"),
        (MPIRUN_OPENMPI, "Open MPI 5.0.8"),
        (MPICH, "MPICH 4.3.1"),
        (MPIRUN_MPICH, "MPICH 4.3.1"),
        (INTEL, "Intel MPI 2021.13"),
        (MPIRUN_INTEL, "Intel MPI 2021.13"),
        ("ImportError: libmpi.so.40: cannot open", "unknown: ImportError: libmpi.so.40: cannot open"),
    ],
)
def test_mpi_implementation_is_recognized(said: str, name: str) -> None:
    assert software.mpi_name(said) == name


@pytest.mark.parametrize(
    ("library", "launchers", "verdict"),
    [
        (None, [], "ok"),
        (None, [MPIRUN_OPENMPI], "ok"),
        (None, [MPIRUN_OPENMPI, MPIRUN_MPICH], "warn"),
        (OPENMPI, [MPIRUN_OPENMPI], "ok"),
        (OPENMPI, [], "warn"),
        (OPENMPI, [MPIRUN_MPICH], "FAIL"),
        (OPENMPI, [MPIRUN_OPENMPI, MPIRUN_MPICH], "warn"),
        (OPENMPI, [MPIRUN_OPENMPI.replace("5.0.8", "4.1.4")], "warn"),
        ("ImportError: libmpi.so.40: cannot open", [MPIRUN_MPICH], "FAIL"),
    ],
)
def test_mpi_library_and_launchers_are_compared(library: str | None, launchers: list[str], verdict: str) -> None:
    assert software.judge_mpi(library, {f"/{i}/mpirun": said for i, said in enumerate(launchers)}).verdict == verdict


def test_open_mpi_as_root_is_reported() -> None:
    def said(library: str, launcher: str, refuses_root: bool) -> bool:
        return "--allow-run-as-root" in software.judge_mpi(library, {"/mpirun": launcher}, refuses_root).measured

    assert said(OPENMPI, MPIRUN_OPENMPI, True)
    assert not said(OPENMPI, MPIRUN_OPENMPI, False)
    assert not said(OPENMPI, MPIRUN_MPICH, True)


def test_installed_mpi_mismatch_fails() -> None:
    ours, others = (Path(python_with(mpi)).parent for mpi in ("openmpi", "mpich"))
    found = {
        folder: lines(python=str(ours / "python"), code=code, PATH=f"{folder}{os.pathsep}{CLEAN['PATH']}")["mpi"]
        for folder, code in ((ours, 0), (others, 1))
    }
    assert found[ours]["verdict"] == "ok"
    assert found[others]["verdict"] == "FAIL"
    assert "mpi4py loads Open MPI" in found[others]["measured"]


@pytest.mark.parametrize("size", [2, 3, 4, 16, 17, 24, 33])
def test_every_pair_is_measured_once(size: int) -> None:
    drawn = pairs.rounds(size)
    assert sorted(pair for together in drawn for pair in together) == list(itertools.combinations(range(size), 2))
    for together in drawn:
        busy = [rank for pair in together for rank in pair]
        assert len(busy) == len(set(busy))
    assert len(drawn) == (size * (size - 1) // 2 if size <= 16 else size - 1 + size % 2)


def test_slow_pairs_are_reported() -> None:
    slow = {(0, 3): 4000.0, (1, 2): 50.0}  # (1, 2) is slower than the other pairs, but fast enough
    found = [
        pairs.Pair(i, j, slow.get((i, j), 2.0), 0.1 if (i, j) == (1, 3) else 5.0)
        for i, j in itertools.combinations(range(4), 2)
    ]
    said = ranks.judge_pairs(pairs.Pairs(tuple(found), 1 << 20, True), ["a", "a", "b", "b"], ["1"] * 4)
    assert [(line.name, line.verdict) for line in said] == [("latency", "warn"), ("bandwidth", "warn")]
    assert said[0].measured.endswith("; ranks 0 (a) and 3 (b): 4e+03")
    assert said[1].measured.endswith("; ranks 1 (a) and 3 (b): 0.1")
    apart = ranks.judge_pairs(pairs.Pairs(tuple(found[:2]), 1 << 20, True), ["a", "a", "b"], ["1", "1", "2"])
    assert [line.measured.split(" ")[0] for line in apart] == ["in", "in", "between", "between"]
    assert {line.verdict for line in apart} == {"ok"}


def test_clock_offset_is_judged() -> None:
    assert ranks.judge_clock("node1", -0.02, 0.0001).measured == "20.00 ms behind rank 0's, +- 0.10 ms"
    assert ranks.judge_clock("node1", -0.02, 0.0001).verdict == "ok"
    assert ranks.judge_clock("node1", 3.0, 0.0001).verdict == "warn"
    assert ranks.judge_clock("node1", 0.2, 0.15).verdict == "ok"  # the offset is not known that precisely


def everybody() -> Iterator[report.DoctorFacts]:
    for rank, (host, torch, verdicts) in enumerate(
        [("a", "2.13.0", ("ok", "ok")), ("a", "2.13.0", ("ok", "warn")), ("b", "2.12.1", ("ok", "ok"))]
    ):
        checks = [
            Check("same", "ok", "as everywhere"),
            Check("name", "ok", host),
            Check("some", verdicts[1], f"{verdicts[1]} here", "do" if verdicts[1] == "warn" else ""),  # type: ignore[arg-type]
        ]
        yield report.DoctorFacts(rank, host, host, {"python": "3.11.2", "torch": torch}, checks)


def test_equal_results_are_merged_into_one_line() -> None:
    merged = report.merge(list(everybody()))
    assert [(line.name, line.verdict, line.measured, line.where) for line in merged] == [
        ("same", "ok", "as everywhere", ""),
        ("name", "ok", "a", "a"),
        ("name", "ok", "b", "b"),
        ("some", "warn", "warn here", "rank 1 on a"),
        ("some", "ok", "ok here", "b"),
    ]


def test_different_versions_are_reported() -> None:
    (line,) = report.compare_versions(list(everybody()))
    assert (line.verdict, line.measured) == ("FAIL", "torch 2.13.0 on a (ranks 0-1); 2.12.1 on b (rank 2)")
    (line,) = report.compare_versions(list(everybody())[:2])
    assert (line.verdict, line.measured) == ("ok", "python 3.11.2, torch 2.13.0: the same on all ranks")


def test_matrix_of_pairs_is_formatted() -> None:
    assert list(text.table([[None, 1.234], [1234.5, None]], ["a", "node"])) == [
        "             0       1",
        "   a:0       -    1.23",
        "node:1   1,234       -",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-n", "0"), "-n must be at least 1"),
        (("--timeout", "0"), "--timeout must be positive"),
        (("--plot", "/no/such/folder/pairs.png"), "no such directory: /no/such/folder"),
        (("--plot", "pairs.png"), "--plot draws pairs of ranks, but this is not a job.\n  Add -n 4.\n"),
        (("-n", "2", "--plot", "pairs.txt"), "--plot pairs.txt: unknown picture format 'txt'; expected one of"),
        (("--json", "/"), "/ is a directory"),
        (("--fast",), "unrecognized arguments: --fast"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = doctor(*arguments)
    assert (code, out) == (2, "")
    assert f"allranks doctor: error: {says}" in err
