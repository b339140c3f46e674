"""Command-line arguments, and the errors for invalid ones."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster.hostlist import Slots
from allranks.launch.arguments.options import _parser, parse
from allranks.launch.ranks import environ
from allranks.launch.reporter import Reporter
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import Target
from support.launcher_process import Launcher


def test_omitted_options_have_default_values() -> None:
    options = parse(["train.py"])
    assert options.target == Target("script", "train.py")
    assert (options.nproc, options.start, options.display.show, options.display.logs) == (None, "fork", "all", None)
    assert (options.grace_s, options.threads, options.reporter, options.backend) == (
        10,
        None,
        Reporter("allranks run"),
        "",
    )


def test_trace_folder_is_exported_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(["--trace", "traces", "x.py"]).environ == {"ALLRANKS_TRACE": str(tmp_path / "traces")}
    assert parse(["--trace", "/traces", "x.py"]).environ == {"ALLRANKS_TRACE": "/traces"}


def test_arguments_after_the_script_belong_to_the_script() -> None:
    options = parse(["-n", "2", "train.py", "-n", "3", "--", "-q", "--start=x"])
    assert options.target == Target("script", "train.py", ("-n", "3", "--", "-q", "--start=x"))
    assert (options.nproc, options.reporter.quiet) == (2, False)


def test_arguments_after_a_module_or_command_belong_to_it() -> None:
    assert parse(["-m", "a.b", "-m", "x"]).target == Target("module", "a.b", ("-m", "x"))
    assert parse(["--", "ls", "--", "-l"]).target == Target("command", "ls", ("--", "-l"))


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["--nproc=3"], ["-np", "3"]])
def test_all_spellings_of_nproc_are_accepted(words: list[str]) -> None:
    assert parse([*words, "--use-env", "--standalone", "x.py"]).nproc == 3


@pytest.mark.parametrize("words", [["--nproc-per-node", "3"], ["--nproc_per_node=3"]])
def test_all_spellings_of_nproc_per_node_are_accepted(words: list[str]) -> None:
    assert parse([*words, "x.py"]).per_host == 3


def test_options_of_torchrun_are_accepted() -> None:
    words = ["--nnodes=2:4", "--node_rank", "1", "--max-restarts", "2", "--nproc-per-node", "3", "x.py", "--nnodes"]
    wanted = Options(Target("script", "x.py", ("--nnodes",)), per_host=3, nodes=(2, 4), node=1, restarts=2)
    assert parse(words) == wanted


def test_hosts(tmp_path: Path) -> None:
    assert parse(["-H", "a[1-2]:2,b", "x.py"]).hosts == (Slots("a1", 2), Slots("a2", 2), Slots("b"))
    (tmp_path / "hosts").write_text("a slots=2\n# none\nb\n")
    assert parse(["--hostfile", str(tmp_path / "hosts"), "x.py"]).hosts == (Slots("a", 2), Slots("b"))


def test_leader_is_read_from_rendezvous_and_master_options() -> None:
    assert parse(["--rdzv-endpoint", "node0:7", "--rdzv_id", "a", "x.py"]).leader == ("node0", 7)
    assert parse(["--rdzv-endpoint=[::1]:0", "x.py"]).leader == ("::1", 0)
    assert parse(["--rdzv-endpoint", "node0", "--rdzv-backend", "c10d", "x.py"]).leader == ("node0", 29400)
    conf = parse(["--rdzv-conf", "is_host=no, timeout=7,last_call_timeout=3,read_timeout=5", "x.py"])
    assert (conf.leads, conf.join_timeout_s, conf.last_call_s) == (False, 7.0, 3.0)
    assert parse(["--master-addr", "node0:7", "x.py"]).leader == ("node0", 7)
    assert parse(["--master_addr", "::1", "--master_port=8", "x.py"]).leader == ("::1", 8)


def test_standalone_ignores_the_scheduler() -> None:
    assert parse(["--standalone", "x.py"]).env == "local"


def test_auto_and_gpu_are_accepted_as_numbers() -> None:
    assert parse(["-n", "auto", "x.py"]).per_host == "auto"
    assert parse(["--nproc-per-node", "gpu", "x.py"]).per_host == "gpu"
    assert parse(["--threads", "auto", "x.py"]).threads is None
    assert parse(["--threads", "3", "x.py"]).threads == 3


def test_cpus_are_divided_among_ranks_unless_the_user_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "usable_cpus", lambda: 8)
    assert environ.threads_per_rank(3, None, {}) == "2"
    assert environ.threads_per_rank(16, None, {"OMP_NUM_THREADS": ""}) == "1"
    assert environ.threads_per_rank(3, None, {"OMP_NUM_THREADS": "5"}) == "5"
    assert environ.threads_per_rank(3, 7, {"OMP_NUM_THREADS": "5"}) == "7"


def test_backend_environment_and_verbosity_are_read() -> None:
    assert parse(["--backend", "cpu:gloo,cuda:nccl", "x.py"]).environ == {"ALLRANKS_BACKEND": "cpu:gloo,cuda:nccl"}
    assert parse(["-x", "A=b", "-x", "C", "--instead-of-gloo", "x.py"]).environ.keys() == {
        "A",
        "ALLRANKS_INSTEAD_OF_GLOO",
    }
    assert [parse([word, "x.py"]).reporter for word in ("-q", "-v")] == [Reporter(quiet=True), Reporter(verbose=True)]


def test_times_have_optional_units() -> None:
    times = {"30": 30.0, "30s": 30.0, "1.5m": 90.0, "2h": 7200.0, ".5": 0.5}
    assert [parse(["--grace", text, "x.py"]).grace_s for text in times] == list(times.values())
    assert parse(["--idle-timeout", "5m", "x.py"]).idle_s == 300


def test_stream_options_of_torchrun_are_accepted() -> None:
    display = parse(
        ["-t", "10:3,0:1", "--redirects", "2", "--log_dir", "d", "--local_ranks_filter=0,12", "x.py"]
    ).display
    assert [display.tee.has(*at) for at in ((10, 1), (10, 2), (0, 1), (0, 2), (1, 1))] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert [display.redirects.has(*at) for at in ((7, 1), (7, 2))] == [False, True]
    assert (display.log_dir, display.only) == (Path("d"), frozenset({0, 12}))


def test_signals_are_read_with_or_without_prefix() -> None:
    assert parse(["x.py"]).signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert parse(["--signals", "usr1,SIGALRM", "x.py"]).signals == (signal.SIGUSR1, signal.SIGALRM)
    assert parse(["--signals", "none", "x.py"]).signals == ()


BAD = {
    "nothing": ([], "expected a script"),
    "no module": (["-m"], "expected a module"),
    "no command": (["--"], "expected a command"),
    "module and command": (["-m", "--", "ls"], "are mutually exclusive"),
    "missing script": (["nowhere.py"], "cannot find script 'nowhere.py'"),
    "command without dashes": (["ls"], "put -- before it: `-- ls`."),
    "command with arguments": (["ls", "-l", "my file"], "put -- before it: `-- ls -l 'my file'`."),
    "directory": (["folder"], "'folder' is a directory"),
    "no file": (["/dev/null"], "'/dev/null' is not a regular file"),
    "program": ([os.path.realpath(sys.executable)], "is a program, not a python script"),
    "shell script": (
        ["tool.sh"],
        "'tool.sh' is not a python script (line 1: invalid syntax).\n  To run a command, put --",
    ),
    "shell script without execute permission": (["tool.sh"], "before it: `-- sh tool.sh`."),
    "executable script": (["run.sh"], "before it: `-- ./run.sh`."),
    "script of another interpreter": (["run.pl"], "before it: `-- perl run.pl`."),
    "unknown module": (["-m", "nowhere"], "cannot find python module 'nowhere'"),
    "unknown submodule": (["-m", "json.nowhere"], "cannot find python module 'json.nowhere'"),
    "submodule of a module": (["-m", "this.nowhere"], "cannot find python module 'this.nowhere'"),
    "odd module": (["-m", ".x"], "cannot find python module '.x'"),
    "package": (["-m", "email"], "'email' is a package without a __main__ module"),
    "unknown command": (["--", "no-such-command"], "cannot find command 'no-such-command' in PATH"),
    "script as command": (["--", "./plain.py"], "remove the --"),
    "not executable": (["--", "./tool.sh"], "./tool.sh is not executable.\n  Run chmod +x ./tool.sh"),
    "no path": (
        ["--", "tool.sh"],
        "cannot find command 'tool.sh' in PATH.\n  To run the file in this folder, use ./",
    ),
    "which hosts": (["--nnodes", "2", "plain.py"], "-N requests 2 hosts, but no scheduler lists them.\n  Specify"),
    "too few hosts": (["-N", "2", "-H", "a", "plain.py"], "-N requests 2 hosts, but the job has 1: a"),
    "host number": (["-N", "2", "--node-rank", "2", "plain.py"], "--node-rank 2 is out of range; expected 0 to 1"),
    "odd hosts": (["-N", "3:2", "plain.py"], "MIN is greater than MAX"),
    "slots": (["-n", "5", "-H", "a:2,b:2", "plain.py"], "5 ranks do not fit: a has 2 slots, b has 2 slots"),
    "no slots": (["-H", "a:0", "plain.py"], "no host has a slot: a:0.\n  Specify slots: a:1."),
    "no slots at all": (["-H", "a:0,b:0", "plain.py"], "no host has a slot: a:0, b:0"),
    "listed and numbered": (["-H", "a,b", "--node-rank", "1", "plain.py"], "--node-rank requires that you start"),
    "listed and led": (["-H", "a,b", "--master-port", "29511", "plain.py"], "--master-addr and --master-port requires"),
    "listed and meeting": (["-H", "a,b", "--rdzv-endpoint", "a:29511", "plain.py"], "--rdzv-endpoint requires that"),
    "listed and alone": (["-H", "a,b", "--standalone", "plain.py"], "--standalone runs the job on this host, but"),
    "fewer than asked for": (
        ["-N", "2", "-H", "a:2,b:2", "-n", "2", "plain.py"],
        "-N requests 2 hosts, but all 2 ranks fit on 1 of them.\n  Use --nproc-per-node, or set the number",
    ),
    "one of how many": (
        ["--node-rank", "1", "plain.py"],
        "--node-rank 1: the job has several hosts, but their",
    ),
    "one of one": (["-N", "1", "--node-rank", "1", "plain.py"], "--node-rank 1 is out of range; expected 0 (-N 1)"),
    "host 0 elsewhere": (
        ["--master-addr", "198.51.100.1", "plain.py"],
        "host 0 is 198.51.100.1, another host: the",
    ),
    "meeting elsewhere": (
        ["--rdzv-endpoint", "198.51.100.1:7", "plain.py"],
        "several hosts, but their number is",
    ),
    "hosts without GPUs": (
        ["-N", "2", "--node-rank", "0", "--nproc-per-node", "gpu", "plain.py"],
        "this host has no GPU, but -n gpu requests one rank per GPU",
    ),
    "hosts twice": (["-H", "a", "--hostfile", "b", "plain.py"], "--hosts and --hostfile are mutually exclusive"),
    "no hostfile": (["--hostfile", "nowhere", "plain.py"], "cannot read the hostfile 'nowhere'"),
    "two ports": (["--master-addr", "a:1", "--master-port", "2", "plain.py"], "specify two different ports"),
    "both numbers": (["-n", "3", "--nproc-per-node", "2", "plain.py"], "-n requests 3 ranks, but --nproc-per-node 2"),
    "folder to be in": (["--chdir", "nowhere", "plain.py"], "cannot enter 'nowhere'"),
    "environment": (["--env", "venus", "plain.py"], "invalid choice: 'venus'"),
    "not there": (["--env", "slurm", "plain.py"], "--env=slurm, but this process has no variable of that scheduler"),
    "etcd": (["--rdzv_backend=etcd-v2", "plain.py"], "the rendezvous runs on one of the hosts.\n  Use --rdzv-backend"),
    "rendezvous settings": (
        ["--rdzv-conf", "patience=3", "plain.py"],
        "unknown setting 'patience'; known settings: is_host",
    ),
    "rendezvous time": (["--rdzv-conf=timeout=1.5", "plain.py"], "timeout=1.5: expected a number of seconds"),
    "rendezvous words": (["--rdzv_conf", "is_host", "plain.py"], "expected KEY=VALUE,KEY=VALUE"),
    "two meetings": (["--rdzv-endpoint", "a", "--master-port", "7", "plain.py"], "are equivalent.\n  Specify only one"),
    "no port": (["-N", "2", "--rdzv-endpoint", "a:0", "plain.py"], "port 0: the other hosts cannot know the port"),
    "alone": (["-N", "2", "--standalone", "plain.py"], "--standalone runs the job on one host"),
    "local address": (["--local-addr", "no.such.host", "plain.py"], "is not an address, and the name does not resolve"),
    "no python": (["--no-python", "ls"], "Use -- command"),
    "zero ranks": (["-n", "0", "plain.py"], "'0' is not a number of ranks"),
    "negative ranks": (["-n", "-1", "plain.py"], "'-1' is not a number of ranks"),
    "x ranks": (["-n", "x", "plain.py"], "'x' is not a number of ranks"),
    "no number": (["-n"], "argument -n/--nproc: expected one argument"),
    "unknown option": (["--bogus", "plain.py"], "unrecognized arguments: --bogus"),
    "abbreviation": (["--npro=2", "plain.py"], "unrecognized arguments: --npro=2 (did you mean --nproc? see"),
    "start": (["--start", "thread", "plain.py"], "invalid choice: 'thread'"),
    "show": (["--show", "7", "plain.py"], "invalid choice: '7'"),
    "grace": (["--grace", "nan", "plain.py"], "'nan' is not a time (30 or 30s, 5m, 2h)"),
    "grace of days": (["--grace", "1d", "plain.py"], "'1d' is not a time"),
    "idle": (["--idle-timeout", "0", "plain.py"], "--idle-timeout: expected more than 0"),
    "streams": (["-t", "4", "plain.py"], "'4' is neither 0, 1, 2 or 3 nor a map"),
    "map of streams": (["-r", "0:1,x:2", "plain.py"], "'0:1,x:2' is neither"),
    "log folder": (["-t", "3", "--log-dir", "plain.py", "plain.py"], "cannot write to 'plain.py' for --log-dir"),
    "filter": (["--local-ranks-filter", "0-3", "plain.py"], "'0-3' is not a list of local ranks"),
    "collapse": (["--collapse", "some", "plain.py"], "invalid choice: 'some'"),
    "signals": (["--signals", "USR3", "plain.py"], "unknown signal 'USR3'"),
    "signals of the job": (["--signals", "sigterm", "plain.py"], "SIGTERM controls the job itself"),
    "bind": (["--bind", "socket", "plain.py"], "invalid choice: 'socket'"),
    "cores": (["-n", "100000", "--bind", "core", "plain.py"], "100000 ranks cannot have a core each"),
    "backend": (
        ["--backend", "cpu:pigeon", "plain.py"],
        "'pigeon' is not one of native, tcp, gloo, mpi, nccl;",
    ),
    "loud and quiet": (["-q", "-v", "plain.py"], "-v/--verbose: not allowed with argument -q/--quiet"),
    "threads": (["--threads", "0", "plain.py"], "'0' is not a number of threads"),
    "rehearsal, not elastic": (
        ["-n", "2", "--rehearse", "plain.py"],
        "--rehearse requires an elastic job",
    ),
    "rehearsal without replacement": (
        ["-n", "2", "--elastic", "1", "--respawns", "0", "--rehearse", "plain.py"],
        "--rehearse compares jobs in which lost ranks are replaced",
    ),
    "rehearsal on several hosts": (
        ["-H", "node0,node1", "--elastic", "1", "--rehearse", "plain.py"],
        "--rehearse runs on one host only",
    ),
    "logs": (["--logs", "plain.py", "plain.py"], "cannot write to 'plain.py' for --logs"),
}


def test_localhost_with_another_user_is_reached_by_ssh(launcher: Launcher) -> None:
    launcher.write("", "plain.py")
    name = pwd.getpwuid(os.getuid()).pw_name
    plans = [launcher.run("--dry-run", "-H", f"{user}@localhost", "plain.py").out for user in (name, "nobody", "none")]
    assert ["from this process" in plan for plan in plans] == [True, False, False], plans
    assert ["by ssh" in plan for plan in plans] == [False, True, True]


@pytest.mark.parametrize("name", ["script", "script.txt"])
def test_a_script_needs_no_extension(launcher: Launcher, name: str) -> None:
    done = launcher.run(launcher.write("print('python')", name).name)
    assert (done.code, done.out) == (0, "[0] python\n"), done.err


@pytest.mark.parametrize("words", [["--master-addr", "localhost", "--master-port", "29517"], ["-N1", "--node-rank=0"]])
def test_single_host_accepts_the_options_of_several_hosts(launcher: Launcher, words: list[str]) -> None:
    done = launcher.script("import os; print(os.environ['WORLD_SIZE'])", *words)
    assert (done.code, done.out) == (0, "[0] 1\n"), done.err


IN_PLACE = {
    "restarts": (
        ["--restarts", "2"],
        "--restarts applies only to ranks that allranks run starts, but mpich has",
    ),
    "logs": (["--logs", "out"], "--logs applies only to ranks"),
    "binding": (["--bind", "core"], "--bind applies only to ranks"),
    "idle": (["--idle-timeout", "5m"], "--idle-timeout applies only to ranks"),
    "hosts": (["-N", "2"], "--nodes applies only to ranks"),
    "local ranks": (["--local-ranks-filter", "0"], "--local-ranks-filter applies only to ranks"),
}
RANK = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_HOSTNAME": "node1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize("case", IN_PLACE)
def test_options_that_have_no_effect_in_place_are_rejected(launcher: Launcher, case: str) -> None:
    """Set the variables that MPICH's mpirun sets, to simulate a rank that it has started."""
    launcher.write("raise SystemExit('must not run')", "plain.py")
    words, message = IN_PLACE[case]
    done = launcher.run(*words, "plain.py", environ=RANK)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_dry_run_in_place_describes_the_rank(launcher: Launcher) -> None:
    launcher.write("raise SystemExit('must not run')", "plain.py")
    done = launcher.run("--dry-run", "plain.py", environ=RANK)
    assert (done.code, done.out) == (
        0,
        "python plain.py, in place of this process, which is rank 1 of 2 of mpich\n",
    )


def test_unknown_name_of_host_0_is_an_error(launcher: Launcher) -> None:
    launcher.write("raise SystemExit('must not run')", "plain.py")
    done = launcher.run("plain.py", environ=RANK | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    assert (done.code, done.out) == (2, "")
    assert (
        "mpich reports that this is host 1 of 2, but not the name of host 0.\n  Specify it with --master-addr."
        in done.err
    )


ONE_BY_ONE = """
import contextlib, io, json, os, sys
from allranks.launch.cli import main

said = {}
for case, words in json.load(sys.stdin).items():
    before = dict(os.environ)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    said[case] = code, out.getvalue(), err.getvalue()
    os.environ.clear()
    os.environ.update(before)
assert "torch" not in sys.modules
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said_of_bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Run all invalid command lines in one process. Return exit code, stdout and stderr of each.

    No command line may start a rank.
    """
    launcher = Launcher(tmp_path_factory.mktemp("bad"))
    (launcher.folder / "folder").mkdir()
    launcher.write("raise SystemExit('must not run')", "plain.py")
    launcher.write("exit 3", "tool.sh")
    launcher.write("#!/bin/bash\nexit 3", "run.sh").chmod(0o755)
    launcher.write("#!/usr/bin/env -S perl -w\nexit 3;;", "run.pl")
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        cwd=launcher.folder,
        env=launcher.environ(),
        input=json.dumps({case: words for case, (words, _) in BAD.items()}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", BAD)
def test_invalid_arguments_print_one_error(case: str, said_of_bad: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = said_of_bad[case]
    assert (code, out) == (2, "")
    assert BAD[case][1] in err
    assert err.startswith("allranks run: error: ")
    assert all(line.startswith("  ") for line in err.splitlines()[1:])
    assert "Traceback" not in err


def test_invalid_arguments_are_reported_without_importing_torch(launcher: Launcher) -> None:
    launcher.write("raise SystemExit('torch must not be imported')", "fake/torch.py")
    done = launcher.run("nowhere.py")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"allranks run: error: cannot find script 'nowhere.py' in {launcher.folder}\n"


def test_too_many_ranks_for_the_limit_of_open_files_is_an_error(launcher: Launcher) -> None:
    done = launcher.run("-n", "100000000", "--", "true")
    assert done.code == 2
    assert "open files" in done.err
    assert all(line.startswith("  ") for line in done.err.splitlines()[1:])


def allranks(*words: str, module: str = "allranks") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)


def test_allranks_command_suggests_corrections() -> None:
    assert allranks("--version").stdout.startswith("allranks 0.")
    assert "bench" in allranks("--help").stdout
    for words, said in (
        ([], "a command is missing"),
        (["fly"], "unknown command 'fly'"),
        (["hello.py", "a b"], "did you mean: allranks run hello.py 'a b'"),
        (["-n", "2", "hello.py"], "did you mean: allranks run -n 2 hello.py"),
    ):
        done = allranks(*words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert said in done.stderr


def test_python_m_allranks_launch_is_allranks_launch() -> None:
    assert allranks("--help", module="allranks.launch").stdout == allranks("launch", "--help").stdout != ""


def test_help_imports_few_modules() -> None:
    """Check that the help imports fewer than 200 modules, and not torch.

    An interpreter starts in 20 ms, and each hundred modules add another 20 ms.
    """
    code = "import sys; from allranks.__main__ import main\ntry: main(['run', '--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "allranks.launch.arguments.options" in loaded
    assert not {"torch", "numpy", "allranks.launch.jobs.job"} & set(loaded)
    assert len(loaded) < 200


def test_running_a_job_imports_no_torch_into_the_launcher() -> None:
    code = "import sys, allranks.launch.jobs.job, allranks.launch.ranks.rank; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    "target", [["train.py", "--rehearse"], ["-m", "train", "--rehearse"], ["--", "program", "--rehearse"]]
)
def test_jobs_of_a_rehearsal_have_the_same_command_line(target: list[str]) -> None:
    own = ["--rehearse", "-n", "3", "--elastic", "2", "--restarts", "1"]
    words = ["-n", "3", "--elastic", "2", "--restarts", "1", "--restarts", "0", "--show", "all", *target]
    if target[0] == "-m":  # -m is a flag: it stays before the added options
        words = [*words[:6], "-m", *words[6:10], *target[1:]]
    options = parse([*own, *target])
    assert list(options.rehearse) == words
    again = parse(list(options.rehearse))
    assert (again.target, again.restarts, again.rehearse) == (options.target, 0, ())


def test_no_option_accepts_two_dashes_as_its_value() -> None:
    names = [name for action in _parser()._actions for name in action.option_strings if name.startswith("--")]
    assert len(names) > 60
    for name in names:
        with pytest.raises(ConfigError):
            parse([f"{name}=--", "plain.py"])
