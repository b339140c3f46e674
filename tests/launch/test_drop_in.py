"""``allranks torchrun`` and ``python -m allranks.launch`` as replacements of torch's commands, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.launch.ranks.environ import free_port
from support.launcher_process import Done, Launcher

SAY_ENVIRON = """
    import json, os
    from pathlib import Path
    Path(os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
SAY_PLACE = """
    import os
    names = ("GROUP_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    print(*(os.environ[name] for name in names))
"""


@pytest.fixture
def torchrun(launcher: Launcher) -> Launcher:
    launcher.program = ("allranks", "torchrun")
    return launcher


@pytest.fixture
def launch(launcher: Launcher) -> Launcher:
    launcher.program = ("allranks.launch",)
    return launcher


def together(launcher: Launcher, *lines: str) -> list[Done]:
    """Run several command lines concurrently."""
    started = [launcher.start(*line.split()) for line in lines]
    ended = [process.communicate(timeout=60) for process in started]
    return [
        Done(process.returncode, out.decode(), err.decode()) for process, (out, err) in zip(started, ended, strict=True)
    ]


def said(dones: list[Done]) -> list[str]:
    """Return the output lines of the ranks, sorted and without prefixes."""
    assert all(done.code == 0 for done in dones), dones
    return sorted(re.sub(r"^\[.*?\] ", "", line, count=1) for done in dones for line in done.out.splitlines())


def test_ranks_have_the_environment_that_torchrun_gives_them(torchrun: Launcher) -> None:
    words = ["--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "1", "--rdzv-id", "a"]
    words += ["--master-port", str(free_port()), str(torchrun.write(SAY_ENVIRON))]
    found = []
    for command in (torchrun.command(*words), [sys.executable, "-m", "torch.distributed.run", *words]):
        environ = torchrun.environ(real_torch=True)
        subprocess.run(command, cwd=torchrun.folder, env=environ, check=True, capture_output=True, timeout=60)
        found.append([json.loads((torchrun.folder / name).read_text()) for name in "01"])
    for ours, theirs in zip(*found, strict=True):
        missing = theirs.keys() - ours.keys()
        # allranks serves no torch store, reads no error file, and does not export the signals that it handles.
        assert missing == {
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_SIGNALS_TO_HANDLE",
        }
        differing = {name for name in theirs.keys() - missing if ours[name] != theirs[name]}
        assert differing <= {"OMP_NUM_THREADS"}  # torchrun sets 1, allranks sets the rank's share of the CPUs
        assert ours.keys() - theirs.keys() == {
            "NODE_RANK",
            "ALLRANKS_STORE",
            "ALLRANKS_RECORD_MEMORY",
            "ALLRANKS_MACHINE",
            "ALLRANKS_SEAL",
            "ALLRANKS_WATCH",
        }


@pytest.mark.parametrize("end", ["sys.exit(7)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_launcher_exits_with_the_code_of_the_failed_rank(torchrun: Launcher, end: str) -> None:
    done = torchrun.script(f"import os, signal, sys\nif os.environ['RANK'] == '1': {end}", "--nproc-per-node=2")
    assert done.code == (7 if "exit" in end else 128 + signal.SIGSEGV)
    assert done.err.startswith("allranks torchrun: rank 1 (pid ")


RECORDED = """
    import os
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise ValueError("boom")

    main()
"""


def test_recorded_exception_is_in_the_error_file_of_the_launcher(torchrun: Launcher) -> None:
    """Check that the launcher writes to its own error file and does not pass that file to the ranks."""
    file = torchrun.folder / "error.json"
    done = torchrun.script(
        RECORDED, "--nproc-per-node=2", real_torch=True, environ={"TORCHELASTIC_ERROR_FILE": str(file)}
    )
    assert done.code == 1
    assert 1 <= done.err.count("ValueError: boom\n") <= 3  # printed by the ranks and by the launcher
    error = json.loads(file.read_text())["message"]
    assert error["message"] == "ValueError: boom"
    assert "in main" in error["extraInfo"]["py_callstack"]
    assert error["errorCode"] == 1


def test_failed_job_is_restarted_with_max_restarts(torchrun: Launcher) -> None:
    script = "import os, sys\nprint(n := os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(n == '0')"
    done = torchrun.script(script, "--standalone", "--max-restarts=2")
    assert (done.code, done.lines) == (0, ["[0] 0", "[0] 1"])


def test_log_files_have_the_same_paths_as_with_torchrun(torchrun: Launcher) -> None:
    script = "import sys\nprint('out')\nprint('err', file=sys.stderr)"
    done = torchrun.script(script, "--nproc-per-node=2", "-r", "1", "-t", "1:2", "--log-dir", "logs", "--rdzv-id", "a")
    assert (done.code, done.out) == (0, "")
    (folder,) = (torchrun.folder / "logs").iterdir()
    assert folder.name.startswith("a_")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.log") if path.stat().st_size)
    assert files == ["attempt_0/0/stdout.log", "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"]


def test_c10d_launchers_on_one_machine_form_one_job(torchrun: Launcher) -> None:
    """Start three launchers on one machine: the launcher that binds the port leads.

    The other launchers are numbered in the order in which they join. Each has its own number of ranks. One of them is
    ``allranks run``, which has the same options.
    """
    torchrun.write(SAY_PLACE)
    line = f"--nnodes 3 --rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --rdzv-id 7 --role"
    run = replace(torchrun, program=("allranks", "run"))
    third = run.start(*line.split(), "b", "script.py")
    dones = together(torchrun, f"{line} a script.py", f"{line} b --nproc-per-node 2 script.py")
    out, err = third.communicate(timeout=60)
    dones.append(Done(third.returncode, out.decode(), err.decode()))
    places = [text.split() for text in said(dones)]
    assert [place[:4] for place in places] == [
        [group, str(rank), "4", "7"] for rank, group in enumerate(place[0] for place in places)
    ]
    assert sorted(place[4:] for place in places) == [["a", "0", "1"], *(["b", str(rank), "3"] for rank in range(3))]
    assert sorted({place[0] for place in places}) == ["0", "1", "2"]


def test_host_with_another_run_id_is_rejected(torchrun: Launcher) -> None:
    torchrun.write(SAY_PLACE)
    line = f"--nnodes 2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-conf join_timeout=20"
    first = torchrun.start(*line.split(), "--rdzv-conf", "is_host=1,join_timeout=50", "--rdzv-id=a", "script.py")
    stranger = torchrun.run(*line.split(), "--rdzv-conf", "is_host=0", "--rdzv-id=b", "script.py")
    assert stranger.code == 2
    assert "host 0 runs 'a', but this host requests 'b' (--rdzv-id)" in stranger.err
    second = torchrun.run(*line.split(), "--rdzv-conf", "is_host=0", "--rdzv-id=a", "script.py")
    out, err = first.communicate(timeout=60)
    assert said([Done(first.returncode, out.decode(), err.decode()), second]) == [
        "0 0 2 a default 0 2",
        "1 1 2 a default 1 2",
    ]


def test_virtual_local_rank_makes_one_gpu_visible_to_each_rank(torchrun: Launcher) -> None:
    script = "import os\nprint(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['RANK'])"
    words = ["--nproc-per-node=2", "--virtual-local-rank"]
    done = torchrun.script(script, *words, environ={"CUDA_VISIBLE_DEVICES": "4,7"})
    assert done.lines == ["[0] 0 4 0", "[1] 0 7 1"]
    done = torchrun.script(script, *words, environ={"CUDA_VISIBLE_DEVICES": "4"})
    assert done.code == 2
    assert "2 ranks cannot have a GPU each" in done.err


@pytest.mark.parametrize("nproc", [1, 2])
def test_launch_passes_local_rank_to_the_script(launch: Launcher, nproc: int) -> None:
    script = """
        import argparse, os
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)
        args = parser.parse_args()
        where = "http://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
        print(f"[{where}] hello from nccl process {args.local_rank}/{os.environ['WORLD_SIZE']}")
    """
    done = launch.script(script, "--nproc_per_node", str(nproc))
    hello = [re.sub(r":\d+\]", ":29500]", text) for text in said([done])]  # the port differs if 29500 is in use
    assert hello == [f"[http://127.0.0.1:29500] hello from nccl process {rank}/{nproc}" for rank in range(nproc)]


def test_torchrun_runs_commands_modules_and_other_interpreters(torchrun: Launcher) -> None:
    torchrun.write("import sys; print(sys.argv[1:])", "package/mod.py")
    assert torchrun.run("--no-python", "echo", "${local_rank}").lines == ["[0] 0"]
    assert torchrun.run("-m", "package.mod", "x").lines == ["[0] ['x']"]
    python = torchrun.write("#!/bin/sh\necho other $*", "python")
    python.chmod(0o755)
    other = torchrun.run("--nproc-per-node=1", "-m", "package.mod", "x", environ={"PYTHON_EXEC": str(python)})
    assert other.lines == ["[0] other -u -m package.mod x"]


def test_errors_name_the_command(torchrun: Launcher, tmp_path: Path) -> None:
    done = torchrun.run("--rdzv-backend", "etcd", "x.py")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("allranks torchrun: error: argument --rdzv-backend: 'etcd' is not supported")
    assert torchrun.run("nowhere.py").err.startswith("allranks torchrun: error: cannot find script 'nowhere.py'")
    launch = replace(torchrun, program=("allranks", "launch"))
    assert launch.run("nowhere.py").err.startswith("allranks launch: error: cannot find script 'nowhere.py'")


def test_parsing_a_command_line_does_not_import_torch() -> None:
    code = "import sys; from allranks.launch.arguments.torchrun import read; read(['-m', 'this'], {}, for_launch=True)"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "False\n"


def test_shell_script_without_no_python_is_rejected_with_advice(torchrun: Launcher) -> None:
    torchrun.write("#!/bin/bash\nexit 3", "run.sh").chmod(0o755)
    done = torchrun.run("run.sh")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("To run a command, put --no-python before it: `--no-python ./run.sh`.\n")


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_advice_for_other_hosts_never_names_the_loopback_address(torchrun: Launcher, backend: str) -> None:
    torchrun.write("")
    done = torchrun.run("--nnodes", "2", "--rdzv-backend", backend, "--rdzv-conf", "timeout=1", "script.py")
    assert done.code == 2
    name = "127.0.0.1" if backend == "static" else "localhost"
    assert f"No other host can reach {name}. To use another host, start all with the address of" in done.err
    assert not re.search(r"there with .*--master-addr (127|localhost)", done.err)
    assert re.search(r"\(--master-addr (?!127|localhost)\S+\)", done.err)
