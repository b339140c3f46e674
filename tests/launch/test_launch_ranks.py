"""Environment, arguments, ``__main__``, streams and exit of a rank, with both start methods."""

from __future__ import annotations

import json
import os
import py_compile
import socket
import subprocess
import zipapp
import zipfile
from pathlib import Path

import pytest

from support.launcher_process import Launcher

STARTS = pytest.mark.parametrize("start", ["fork", "spawn"])


@STARTS
def test_environment(launcher: Launcher, start: str) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK ROLE_RANK"
    names += " ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "nowhere"}
    done = launcher.script(script, "-n", "2", "--start", start, environ=outer)
    assert done.code == 0
    ranks = [json.loads(line.partition("] ")[2]) for line in done.lines]
    for number, rank in enumerate(ranks):
        assert [rank[name] for name in names.split()] == [
            *(str(number), str(number), "2", "2", "0", "1", "0", str(number)),
            *("2", "default", "127.0.0.1", "0", "0"),
        ]
        assert rank["ALLRANKS_STORE"].startswith("unix:@")
        assert rank["TORCHELASTIC_RUN_ID"]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in rank
        with socket.create_server(("127.0.0.1", int(rank["MASTER_PORT"]))):
            pass
    for name in ("MASTER_PORT", "ALLRANKS_STORE", "TORCHELASTIC_RUN_ID"):
        assert ranks[0][name] == ranks[1][name]


@STARTS
def test_threads(launcher: Launcher, start: str) -> None:
    script = "import os, torch; print(os.environ['OMP_NUM_THREADS'], torch.seen)"
    launcher.environ()
    launcher.write("import os; seen = os.environ.get('OMP_NUM_THREADS')", "fake/torch.py")
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert launcher.script(script, "-n2", "--start", start).lines[1] == f"[1] {share} {share}"
    assert launcher.script(script, "--start", start, environ={"OMP_NUM_THREADS": "5"}).lines == ["[0] 5 5"]
    assert launcher.script(script, "--start", start, "--threads=3", environ={"OMP_NUM_THREADS": "5"}).lines == [
        "[0] 3 3"
    ]


@STARTS
def test_threads_wait_passively_if_they_outnumber_the_cpus(launcher: Launcher, start: str) -> None:
    script = "import os, torch; print(os.environ.get('OMP_WAIT_POLICY'), torch.seen)"
    launcher.environ()
    launcher.write("import os; seen = os.environ.get('OMP_WAIT_POLICY')", "fake/torch.py")
    many = f"--threads={len(os.sched_getaffinity(0))}"

    def told(*options: str, **environ: str) -> list[str]:
        return launcher.script(script, "--start", start, *options, environ=environ).lines

    assert told("-n2") == ["[0] None None", "[1] None None"]
    assert told("-n2", many) == ["[0] PASSIVE PASSIVE", "[1] PASSIVE PASSIVE"]
    assert told("-n1", many) == ["[0] None None"]
    assert told("-n1", many, OMP_WAIT_POLICY="ACTIVE") == ["[0] ACTIVE ACTIVE"]
    assert told("-n2", many, OMP_WAIT_POLICY="ACTIVE") == ["[0] ACTIVE ACTIVE", "[1] ACTIVE ACTIVE"]


@STARTS
def test_variables_of_the_command_line_do_not_replace_those_of_the_rank(launcher: Launcher, start: str) -> None:
    """Check that -x sets variables on one host, except those that describe the rank."""
    script = "import os; print(*map(os.environ.get, ('A', 'KEPT', 'OMP_NUM_THREADS', 'RANK')))"
    words = ("-x", "A=b=c", "-x", "KEPT", "-x", "OMP_NUM_THREADS=3", "-x", "RANK=7")
    done = launcher.script(script, "--start", start, *words, environ={"A": "a", "KEPT": "kept"})
    assert (done.code, done.out) == (0, "[0] b=c kept 3 0\n"), done.err


def test_ranks_exchange_values_in_the_store_of_the_launcher(launcher: Launcher) -> None:
    script = """
        import os
        from allranks._store import StoreClient
        store = StoreClient.connect(os.environ["ALLRANKS_STORE"], timeout_s=10)
        store.set("from" + os.environ["RANK"], b"hello")
        print(store.get("from" + str(1 - int(os.environ["RANK"])), 10))
        """
    done = launcher.script(script, "-n", "2")
    assert (done.code, done.lines) == (0, ["[0] b'hello'", "[1] b'hello'"]), done.err


@STARTS
def test_main_module_is_the_same_as_without_a_launcher(launcher: Launcher, start: str) -> None:
    script = """
        import gc, multiprocessing, pickle, signal, sys
        class Thing: pass
        def work(queue): queue.put((__name__, Thing()))
        if __name__ == "__main__":
            thing = pickle.loads(pickle.dumps(Thing()))
            queue = multiprocessing.get_context("spawn").Queue()
            child = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
            child.start(); name, other = queue.get(); child.join()
            print(sys.argv, sys.path[0], __file__, __spec__, type(thing) is Thing, name, type(other) is Thing)
            print(sys.modules["__main__"].Thing is Thing, repr(sys.stdin.read()), sys.stdout.isatty(), gc.isenabled())
            print([signal.getsignal(n) is h for n, h in ((2, signal.default_int_handler), (15, signal.SIG_DFL))])
            print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        """
    (launcher.folder / "link.py").symlink_to(launcher.write(script, "real/script.py"))
    done = launcher.run("--start", start, "link.py", "a", "--b")
    folder = launcher.folder
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"[0] ['link.py', 'a', '--b'] {folder}/real {folder}/link.py None True __mp_main__ True",
        "[0] True '' False True",
        "[0] [True, True]",
        "[0] set()",
    ]


@STARTS
def test_module_runs_as_with_python_m(launcher: Launcher, start: str) -> None:
    launcher.write("", "package/__init__.py")
    script = "import sys, package; print(sys.argv, sys.path[0], __name__, __spec__.name, __package__)"
    launcher.write(script, "package/tool.py")
    launcher.write(script, "package/__main__.py")
    done = launcher.run("-n", "2", "--start", start, "-m", "package.tool", "-n", "x")
    folder = launcher.folder
    shown = f"['{folder}/package/tool.py', '-n', 'x'] {folder} __main__ package.tool package"
    assert (done.code, done.lines) == (0, [f"[0] {shown}", f"[1] {shown}"]), done.err
    assert "__main__ package.__main__ package" in launcher.run("--start", start, "-m", "package").out


def test_command_runs_with_its_arguments(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", "--", "sh", "-c", 'echo "$RANK $1"', "-", "-m")
    assert (done.code, done.lines) == (0, ["[0] 0 -m", "[1] 1 -m"])
    done = launcher.run("--", "sh", "-c", "kill -PIPE $$")
    assert "SIGPIPE" in done.err  # the command did not inherit python's ignored SIGPIPE


def test_command_that_cannot_be_executed_exits_with_code_126(launcher: Launcher) -> None:
    path = launcher.write("\x01", "odd")
    path.chmod(0o755)
    done = launcher.run("--", "./odd")
    assert done.code == 126
    assert "cannot execute './odd': Exec format error" in done.err


@pytest.mark.parametrize(
    ("start", "script", "code", "said"),
    [
        ("fork", "raise SystemExit", 0, ""),
        ("fork", "raise SystemExit(3)", 3, "exited with code 3"),
        ("spawn", "raise SystemExit(3)", 3, "exited with code 3"),
        ("fork", "raise SystemExit(-1)", 255, "exited with code 255"),
        ("fork", "raise SystemExit('text')", 1, "[0] text"),
        ("fork", "import os; os._exit(4)", 4, "exited with code 4"),
        ("fork", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_exit_code_of_a_rank_is_returned(launcher: Launcher, start: str, script: str, code: int, said: str) -> None:
    done = launcher.script(script, "--start", start)
    assert done.code == code
    assert said in done.err
    assert bool(done.err) == (code != 0)


@STARTS
def test_traceback_has_only_frames_of_the_program_and_is_printed_once(launcher: Launcher, start: str) -> None:
    script = """
        def inner():
            raise KeyError("deep")
        try:
            inner()
        except KeyError as error:
            raise ValueError("boom \\udcff") from error
        """
    path = launcher.write(script)
    done = launcher.run("-n", "2", "--start", start, str(path))
    assert done.err.count("Traceback") == 2
    assert done.err.count("KeyError: 'deep'") == 1
    assert done.err.count(f'File "{path}"') == 3
    assert done.err.count("File ") == 3
    assert "direct cause" in done.err
    assert "ValueError: boom \\udcff" in done.err
    assert "[0]" not in done.err


@STARTS
def test_syntax_error_is_reported_without_other_frames(launcher: Launcher, start: str) -> None:
    done = launcher.script("x = (\n", "--start", start)
    assert done.code == 1
    assert "SyntaxError: '(' was never closed" in done.err
    assert done.err.count("File ") == 1


@STARTS
def test_rank_exits_like_an_ordinary_interpreter(launcher: Launcher, start: str) -> None:
    script = """
        import atexit, sys, threading, time
        atexit.register(print, "atexit")
        class Late:
            def __del__(self): print("deleted")
        late = Late()
        file = open("left-open", "w"); file.write("flushed")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        sys.stdout.write("no line end")
        """
    done = launcher.script(script, "--start", start)
    assert done.out.splitlines() == ["[0] no line endthread", "[0] atexit", "[0] deleted"]
    assert (launcher.folder / "left-open").read_text() == "flushed"


@STARTS
def test_excepthook_of_the_program_is_called(launcher: Launcher, start: str) -> None:
    script = """
        import sys, traceback
        sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, len(traceback.extract_tb(trace)))
        1 / 0
        """
    done = launcher.script(script, "--start", start)
    assert (done.code, done.out) == (1, "[0] hook ZeroDivisionError 1\n")
    assert "Traceback" not in done.err
    assert "rank 0" in done.err


@STARTS
def test_failure_of_a_forked_child_does_not_fail_the_rank(launcher: Launcher, start: str) -> None:
    script = """
        import os
        if (pid := os.fork()) == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    done = launcher.script(script, "--start", start)
    assert (done.code, done.out) == (0, "[0] 1\n")
    assert "[0] ValueError: in the child" in done.err


@STARTS
def test_descriptors_of_the_launcher_are_not_inherited(launcher: Launcher, start: str) -> None:
    script = """
        import os
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
                print(name, os.readlink(f"/proc/self/fd/{name}"))
        """
    done = launcher.script(script, "-n", "3", "--start", start)
    # Each has a pipe for its failure, one for its stacks, and the file with its stacks for the other ranks of its host.
    assert len(done.lines) == 9, done.out
    assert len([line for line in done.lines if "pipe:" in line]) == 6
    assert len([line for line in done.lines if "memfd:allranks-stacks" in line]) == 3


def test_output_is_shown_with_prefixes_and_final_states_of_lines(launcher: Launcher) -> None:
    script = """
        import os, sys
        rank = int(os.environ["RANK"])
        sys.stdout.buffer.write(b"\\xff\\xfe %d\\n\\n" % rank)
        sys.stdout.write("10%\\r20%\\r"); sys.stdout.flush(); sys.stdout.write("100%\\n")
        print("crlf", end="\\r\\n"); print("err", file=sys.stderr)
        sys.stdout.write("end")
        """
    done = launcher.script(script, "-n", "11", "--start", "spawn", "--collapse", "never")
    mine = [line.removeprefix("[ 7] ") for line in done.out.split("\n") if line.startswith("[ 7] ")]
    assert mine == ["\udcff\udcfe 7", "", "100%", "crlf\r", "end"]
    assert sorted(done.err.splitlines()) == [f"[{rank:>2}] err" for rank in range(11)]


def test_stdout_and_stderr_are_in_order_if_they_share_a_pipe(launcher: Launcher) -> None:
    script = "import sys\nfor n in range(50): print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    path = launcher.write(script)

    done = subprocess.run(
        launcher.command("--start", "spawn", str(path)),
        env=launcher.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        text=True,
    )
    assert done.stdout.splitlines() == [f"[0] {n}" for n in range(50)]


def test_lines_are_shown_while_the_rank_runs(launcher: Launcher) -> None:
    path = launcher.write("import time; print('now'); time.sleep(60)")
    process = launcher.start("--start", "spawn", str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] now\n"


def test_large_output_is_complete(launcher: Launcher) -> None:
    script = "import os\nfor n in range(5000): print('x' * 50, os.environ['RANK'], n)"
    done = launcher.script(script, "-n", "3", "--start", "spawn")
    lines = done.out.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {'x' * 50} {rank} {n}" for n in range(5000)]


def test_hidden_output_is_logged_and_printed_with_a_failure(launcher: Launcher, tmp_path: Path) -> None:
    script = """
        import os, sys, time
        print("out", os.environ["RANK"]); print("err", file=sys.stderr)
        if os.environ["RANK"] == "0":
            open("printed", "w").close()
        while not os.path.exists("printed"):
            time.sleep(0.01)
        sys.exit(os.environ["RANK"] == "1")
        """
    done = launcher.script(script, "-n", "2", "--start", "spawn", "--show", "0", "--logs", "a/b")
    assert done.out == "out 0\n"
    assert "err" in done.err.splitlines()
    assert done.err.splitlines()[-3:][0].endswith("exited with code 1")
    assert sorted(done.err.splitlines()[-2:]) == ["err", "out 1"]  # hidden output is printed with the failure
    assert sorted((tmp_path / "a/b/rank1.log").read_text().splitlines()) == ["err", "out 1"]
    done = launcher.script("print(1); 1 / 0", "--start", "spawn", "--show", "none", "--logs", "a")
    assert done.out == ""
    assert done.err.count("ZeroDivisionError") == 1
    log = (tmp_path / "a/rank0.log").read_text()
    assert log.startswith("1\nTraceback")
    assert "ZeroDivisionError" in log


def test_broken_torch_fails_only_programs_that_import_it(launcher: Launcher) -> None:
    launcher.environ()
    launcher.write("raise ImportError('broken')", "fake/torch.py")
    assert launcher.script("print('fine')").out == "[0] fine\n"
    done = launcher.script("import torch")
    assert (done.code, done.err.count("ImportError: broken")) == (1, 1)


def test_rank_runs_if_standard_streams_are_closed(launcher: Launcher) -> None:
    path = launcher.write("import os; print('x'); os.write(1, b'y'); open(__file__ + '.done', 'w').close()")
    command = " ".join(launcher.command("--start", "fork", str(path)))
    assert os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", f"exec {command} <&- >&- 2>&-"], launcher.environ()) == 0
    assert path.with_name(path.name + ".done").exists()


def test_real_torch_is_imported_once_and_ranks_differ_in_random_state(launcher: Launcher) -> None:
    script = """
        import sys
        loaded = "torch" in sys.modules
        import random, secrets, tempfile, uuid, numpy, torch
        print(loaded, torch.get_num_threads(), torch.ones(4, requires_grad=True).sum().backward())
        drawn = random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()
        names = next(tempfile._get_candidate_names()), uuid.uuid1(), uuid.uuid4(), secrets.token_hex()
        print(*drawn, *names, file=sys.stderr)
        """
    done = launcher.script(script, "-n", "2", "--threads", "1", real_torch=True)
    assert done.lines == ["[0] True 1 None", "[1] True 1 None"], done.err
    numbers = [word for line in done.err.splitlines() for word in line.split()[1:]]
    assert len(set(numbers)) == 16


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_have_different_dropout_masks_and_initial_weights(launcher: Launcher, start: str) -> None:
    script = """
        import torch
        mask = torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()
        print(hash(tuple(mask)), torch.nn.Linear(2, 1).bias.item(), torch.initial_seed())
        """
    done = launcher.script(script, "-n", "3", "--start", start, real_torch=True)
    values = [line.split()[1:] for line in done.lines]
    assert [len(set(column)) for column in zip(*values, strict=True)] == [3, 3, 3], done.err


def test_main_thread_of_forked_rank_has_its_own_native_id(launcher: Launcher) -> None:
    done = launcher.script("import os, threading; print(threading.main_thread().native_id == os.getpid())", "-n", "2")
    assert done.lines == ["[0] True", "[1] True"], done.err


@pytest.mark.parametrize(
    ("lines", "loaded"),
    [
        (["import allranks"], ["allranks._engines.native.engine"]),
        (
            ["from torch import optim", "from torch.utils.benchmark import Timer"],
            ["torch._dynamo", "torch.utils.benchmark"],
        ),
        (
            [
                "from torch.distributed import fsdp, nothing_of_that_name",
                "import torch.nothing_of_that_name",
                "import torch.testing._internal.common_utils",
            ],
            [],
        ),
    ],
)
def test_modules_named_in_a_script_are_preloaded(launcher: Launcher, lines: list[str], loaded: list[str]) -> None:
    script = f"""
        import os, sys
        names = ["allranks._engines.native.engine", "torch._dynamo", "torch.utils.benchmark"]
        names += ["torch.testing._internal.common_utils"]  # which reads sys.argv
        print([name for name in names if name in sys.modules])
        sys.stdout.flush()
        os._exit(0)
        {"; ".join(lines)}
        """
    done = launcher.script(script, "-n", "2", real_torch=True)
    assert done.lines == [f"[{rank}] {loaded}" for rank in range(2)], done.err


def test_unmodified_torch_distributed_script_runs(launcher: Launcher) -> None:
    script = """
        import sys
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(2) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        print(x.tolist())
        dist.destroy_process_group()
        if dist.is_available() and "fail" in sys.argv: raise ValueError("boom")
        """
    done = launcher.script(script, "-n", "2", real_torch=True)
    assert (done.code, done.lines) == (0, ["[0] [3.0, 3.0]", "[1] [3.0, 3.0]"]), done.err
    done = launcher.script(script, "-n", "2", args=("fail",), real_torch=True)
    assert done.err.count("ValueError: boom") in (1, 2)  # the second is in the line that lists other failed ranks
    assert "[rank" not in done.err
    assert "Traceback" in done.err


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_folders_archives_and_compiled_files_run_as_in_python(launcher: Launcher, start: str) -> None:
    """Run a folder, a zip file and compiled code. ``__main__`` and ``sys.path`` must be as in python."""
    body = "import os, sys, helper\nprint(sys.argv[1:], __name__, helper.WORD, sys.path[0] == EXPECTED)"
    app = launcher.folder / "app"
    launcher.write("WORD = 'helped'", "app/helper.py")
    main = launcher.write(body.replace("EXPECTED", repr(str(app))), "app/__main__.py")
    zipped = launcher.folder / "app.pyz"
    launcher.write("WORD = 'helped'", "zipped/helper.py")
    launcher.write(body.replace("EXPECTED", repr(str(zipped))), "zipped/__main__.py")
    zipapp.create_archive(launcher.folder / "zipped", zipped)
    compiled = app / "compiled.pyc"
    py_compile.compile(str(main), str(compiled), doraise=True)
    for program in (app, zipped, compiled):
        done = launcher.run("-n", "1", "--start", start, str(program), "word")
        assert (done.code, done.out) == (0, "[0] ['word'] __main__ helped True\n"), (program, done)


def test_folders_archives_and_compiled_files_without_a_program_are_rejected(launcher: Launcher) -> None:
    (launcher.folder / "empty").mkdir()
    zipped, compiled = launcher.folder / "empty.zip", launcher.folder / "old.pyc"
    zipfile.ZipFile(zipped, "w").close()
    compiled.write_bytes(b"\x03\xf3\r\nrest")
    for program, why in (
        (launcher.folder / "empty", "is a directory without a __main__.py"),
        (zipped, "is a zip file without a __main__.py"),
        (compiled, "was compiled by another version of python, or is corrupted"),
    ):
        done = launcher.run("-n", "1", str(program))
        assert done.code == 2
        assert why in done.err, done


def test_module_that_runs_another_program_finds_it(launcher: Launcher) -> None:
    """Check that tools such as ``-m coverage run`` and profilers find the program."""
    script = launcher.write("def f():\n    return 1\nprint(__name__, f())", "traced.py")
    done = launcher.run("-n", "1", "-m", "trace", "--count", "--summary", str(script))
    assert done.code == 0, done
    assert done.out.startswith("[0] __main__ 1\n")
    assert "3   100%   traced" in done.out
