"""``allranks.run``: real agents and ranks, scripts, threads and a real notebook kernel."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from jupyter_client.manager import start_new_kernel

import allranks
from support.console import on_terminal
from support.launcher_process import Launcher
from support.terminal_model import Terminal

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise the ranks would import pytest and torch


@pytest.fixture
def light(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Give the agents of this process an empty torch. After the test, none of their processes may remain."""
    for name, value in launcher.environ().items():
        monkeypatch.setenv(name, value)
    return launcher


def rank() -> int:
    return int(os.environ["RANK"])


class OddError(Exception):
    """Exception that can be pickled."""


class LockedError(Exception):
    """Exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def test_modules_named_in_a_function_are_preloaded_in_ranks() -> None:
    def loaded() -> list[str]:
        found = [name for name in ("allranks._engines.native.engine", "torch._dynamo") if name in sys.modules]
        return found if found else [allranks.__name__, torch.optim.__name__]

    assert allranks.run(loaded, n=2) == [["allranks._engines.native.engine", "torch._dynamo"]] * 2


def test_results_are_ordered_by_rank(light: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    base = 10

    def work(factor: int, *, plus: int) -> tuple[int, str | None, int, bool]:
        print("out", rank())
        print("err", rank(), file=sys.stderr)
        return base * factor * rank() + plus, os.environ.get("WANTED"), os.getppid(), sys.stdin.read() == ""

    results = allranks.run(work, (2,), {"plus": 1}, n=3, env={"WANTED": "a=b"})
    assert [result[:2] for result in results] == [(1, "a=b"), (21, "a=b"), (41, "a=b")]
    agents = {result[2] for result in results}
    assert len(agents) == 1
    assert os.getpid() not in agents
    assert all(result[3] for result in results)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(shown.err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]
    assert allranks.run(lambda: "again", n=1) == ["again"]


class Ascii(io.StringIO):
    encoding = "ascii"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_output_is_written_to_redirected_python_streams(light: Launcher) -> None:
    told = Ascii()
    with contextlib.redirect_stdout(told):
        allranks.run(print, ("\u00e9",), n=1)
    assert told.getvalue() == "[0] \\xe9\n"
    notes = io.StringIO()
    with contextlib.redirect_stdout(Full()), contextlib.redirect_stderr(notes):
        with pytest.raises(OSError, match="print: the output of the ranks could not be written"):
            allranks.run(print, ("line",), n=1)
    assert notes.getvalue() == "allranks.run: cannot write to stdout: No space left on device\n"


def test_one_rank_per_cpu_is_started_by_default(light: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ALLRANKS_CPUS", "3")
    assert allranks.run(rank) == [0, 1, 2]
    assert allranks.run(rank, hosts=["localhost:2"]) == [0, 1]


def test_ranks_form_a_group_and_return_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    def work(mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        allranks.init_process_group()
        total = mine * (allranks.get_rank() + 1)
        allranks.all_reduce(total)
        print("done")
        allranks.destroy_process_group()
        return total, torch.full((10 << 18,), float(allranks_rank()))

    def allranks_rank() -> int:
        return int(os.environ["RANK"])

    results = allranks.run(work, (torch.ones(3),), n=2, show="0")
    for number, (total, large) in enumerate(results):
        assert total.tolist() == [3.0, 3.0, 3.0]
        assert torch.equal(large, torch.full((10 << 18,), float(number)))
    assert capsys.readouterr().out == "done\n"


def test_ranks_have_different_random_state() -> None:
    drawn = allranks.run(lambda: (torch.initial_seed(), torch.rand(1).item()), n=2, show="none")
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [2, 2]


def test_exception_of_a_rank_is_raised_in_the_caller(light: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if rank() == 1:
            raise OddError("boom", rank())
        time.sleep(60)

    with pytest.raises(OddError) as caught:
        allranks.run(fail, n=2)
    assert caught.value.args == ("boom", 1)
    told = caught.value.__cause__
    assert isinstance(told, allranks.RankError)
    assert told.rank == 1
    assert str(told).startswith(f"rank 1 (host {os.uname().nodename}, pid ")
    assert 'raise OddError("boom", rank())' in str(told)
    assert "allranks/launch" not in str(told)
    assert capsys.readouterr().err == ""


def _raise_locked() -> None:
    raise LockedError


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (_raise_locked, "LockedError: locked"),
        (lambda: sys.exit(3), r"rank 1 \(host \S+, pid \d+\) exited with code 3"),
        (lambda: os._exit(0), "rank 1 exited with code 0 before .*fail returned"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 \(host \S+, pid \d+\) was killed by SIGKILL"),
    ],
    ids=["not picklable", "sys.exit", "os._exit", "killed"],
)
def test_abnormal_exit_of_a_rank_raises_rank_error(light: Launcher, last: Any, text: str) -> None:
    def fail() -> None:
        if rank() == 1:
            last()

    with pytest.raises(allranks.RankError, match=text) as caught:
        allranks.run(fail, n=2)
    assert caught.value.rank == 1


def test_unpicklable_function_or_result_raises_usage_error(light: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def work() -> None:
        lock.acquire()

    with pytest.raises(allranks.UsageError, match="work or one of its arguments cannot be pickled for the ranks"):
        allranks.run(work, n=1)
    with pytest.raises(
        allranks.UsageError, match="the result of the function cannot be pickled for the caller: lock"
    ) as caught:
        allranks.run(lambda: threading.Lock() if rank() else None, n=2)
    assert "rank 1" in str(caught.value.__cause__)
    with pytest.raises(allranks.UsageError, match=r"<lambda> called sys.exit\(0\)"):
        allranks.run(lambda: sys.exit(0), n=1)
    light.write("def work():\n    return 1\n", "only_here.py")
    monkeypatch.syspath_prepend(str(light.folder))
    fn = importlib.import_module("only_here").work
    assert allranks.run(fn, n=1) == [1]
    (light.folder / "only_here.py").unlink()
    with pytest.raises(allranks.UsageError, match=r"cannot be unpickled: ModuleNotFoundError: .*only_here"):
        allranks.run(fn, n=1)
    del sys.modules["only_here"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 1, "threads": 0}, "threads=0"),
        ({"n": 1, "show": "1"}, "show='1' is not one of '0', 'all', 'none'"),
        ({"n": 1, "env": {"A=": "1"}}, "'A=' is not a variable name"),
        ({"n": 3, "hosts": ["localhost:2"]}, "3 ranks do not fit"),
        ({"hosts": "a b c:"}, "hosts"),
        ({"n": 1, "hosts": "nobody.invalid"}, "nobody.invalid: ssh cannot connect"),
    ],
)
def test_wrong_arguments(light: Launcher, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((allranks.UsageError, allranks.ConfigError), match=text):
        allranks.run(rank, **wrong)


def test_timeout_reports_where_each_rank_is_blocked(light: Launcher) -> None:
    def wait() -> None:
        time.sleep(60)

    with pytest.raises(
        allranks.TimeoutError, match=r"wait did not return on all ranks within 2 s\n  ranks 0-1: at .* in wait"
    ):
        allranks.run(wait, n=2, timeout=2)


def test_timeout_before_ranks_start(light: Launcher) -> None:
    light.write("import time\ntime.sleep(60)\n", "fake/torch.py")
    with pytest.raises(allranks.TimeoutError, match="rank did not start on all ranks within 1 s"):
        allranks.run(rank, n=1, timeout=1)


def test_threads(light: Launcher) -> None:
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = allranks.run(lambda: number + rank(), n=2)

    threads = [threading.Thread(target=call, args=(number,)) for number in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {10: [10, 11], 20: [20, 21]}


SCRIPT = """
import os, sys, time
import allranks

print("once")

def wait():
    try:
        print("here", flush=True)
        time.sleep(60)
    finally:
        print("left", flush=True)

try:
    allranks.run(wait, n=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupted_or_killed_caller_leaves_no_processes(light: Launcher) -> None:
    path = light.write(SCRIPT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, bufsize=0)
        light.started.append(process)
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(3))
        assert lines == [b"[0] here\n", b"[1] here\n", b"once\n"]
        process.send_signal(number)
        rest = process.stdout.read()
        code = process.wait(20)
        if number == signal.SIGINT:
            assert code == 0
            assert sorted(rest.splitlines()) == [b"[0] left", b"[1] left", b"interrupted"]
        else:
            assert code == -number
        assert light.wait_gone() == []


LOOP = """
import allranks, os, sys, time

def train():
    for step in (loop := allranks.progress(range(40), name="step")):
        if step == 20:
            print("half")
        for _ in allranks.progress(range(2), name="within"):  # which does not move the bar
            time.sleep(0.01)
        loop.note(f"loss {step}")
    return os.environ["RANK"]
"""


def test_progress_bar_on_a_terminal_is_below_the_output(light: Launcher) -> None:
    """Check that the bar is below the output of the ranks, moves, and stays after the ranks have exited."""
    shown = on_terminal(LOOP + "print(allranks.run(train, n=2, progress=True))", {"TERM": "xterm", "NO_COLOR": "1"})
    assert re.search(r"train: \S+ step \d+/40, [\d.]+/s, 0:\d\d left, loss \d+, 2 ranks, 0:\d\d", shown), shown
    screen = Terminal(columns=80)
    screen.feed(shown.encode())
    assert sorted(screen.rows[:2]) == ["[0] half", "[1] half"]
    assert re.fullmatch(r"train: [\u2501#]{16} step 40/40, [\d.]+/s, loss 39, done, 0:\d\d", screen.rows[2]), shown
    assert screen.rows[3:] == ["['0', '1']"]


def test_progress_bar_is_not_written_to_a_file(light: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    assert allranks.run(lambda: list(allranks.progress("ab")), n=2, progress=True) == [["a", "b"]] * 2
    assert capfd.readouterr() == ("", "")
    assert list(allranks.progress(iter("ab"))) == ["a", "b"]  # outside of a rank


@pytest.fixture
def kernel(light: Launcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Notebook kernel with an empty torch."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(light.folder / name))
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(light.folder), stderr=subprocess.DEVNULL)
    client.interrupt = manager.interrupt_kernel
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_progress_bar_in_a_notebook_is_updated_in_place(light: Launcher, kernel: Any) -> None:
    """Check that one output is updated in place and stays unchanged if a rank fails."""
    bars: list[tuple[str, str, str]] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            bars.append((message["msg_type"], content["transient"]["display_id"], content["data"]["text/plain"]))
            assert "<progress" in content["data"]["text/html"]

    run = "assert allranks.run(train, n=2, progress=True) == ['0', '1']"
    reply = kernel.execute_interactive(LOOP + run, timeout=60, output_hook=hook)
    assert reply["content"]["status"] == "ok"
    assert [kind for kind, _, _ in bars] == ["display_data", *["update_display_data"] * (len(bars) - 1)]
    assert len({place for _, place, _ in bars}) == 1
    texts = [text for _, _, text in bars]
    assert any(re.match(r"train \d+%: step \d+/40, ", text) for text in texts[:-1]), texts
    assert re.fullmatch(r"train 100%: step 40/40, .*loss 39, done, 0:\d\d", texts[-1])

    bars.clear()
    fail = (
        "def fail():\n    for _ in allranks.progress(range(4)):\n        1 / 0\nallranks.run(fail, n=1, progress=True)"
    )
    reply = kernel.execute_interactive(fail, timeout=60, output_hook=hook)
    assert reply["content"]["ename"] == "ZeroDivisionError"
    assert re.fullmatch(r"fail 0%: 0/4, stopped, 0:\d\d", bars[-1][2])


def execute(client: Any, code: str, then: Callable[[str], object] = lambda text: None) -> tuple[str, str, str]:
    """Run a cell. Return its status, its output, and its value or traceback.

    Args:
        client: client of the kernel.
        code: source of the cell.
        then: callback that receives each part of the output.
    """
    printed, value = "", ""

    def hook(message: dict[str, Any]) -> None:
        nonlocal printed, value
        content = message["content"]
        if message["msg_type"] == "stream":
            printed += content["text"]
            then(content["text"])
        elif message["msg_type"] == "execute_result":
            value = content["data"]["text/plain"]
        elif message["msg_type"] == "error":
            value = "\n".join(content["traceback"])

    reply = client.execute_interactive(code, timeout=30, output_hook=hook)
    return reply["content"]["status"], printed, value


def test_notebook_functions_run_in_ranks_and_can_be_interrupted(light: Launcher, kernel: Any) -> None:
    light.write("def double(x):\n    return 2 * x\n", "beside.py")
    define = """
import os, time
import allranks
from beside import double

class Odd(Exception):
    pass

def work(x):
    rank = int(os.environ["RANK"])
    print("line of", rank)
    if x < 0:
        raise Odd("boom")
    return double(x + rank)
"""
    assert execute(kernel, define) == ("ok", "", "")
    status, printed, value = execute(kernel, "allranks.run(work, (10,), n=2)")
    assert (status, sorted(printed.splitlines()), value) == ("ok", ["[0] line of 0", "[1] line of 1"], "[20, 22]")
    catch = "try:\n    allranks.run(work, (-1,), n=2)\nexcept Odd as error:\n    print(error.__cause__)"
    status, printed, _ = execute(kernel, catch)
    assert status == "ok"
    assert 'raise Odd("boom")' in printed  # the cell is not a file, but the traceback contains its source

    sleep = "from time import sleep\ndef rest():\n    print('up')\n    sleep(60)\nallranks.run(rest, n=1)"
    status, printed, value = execute(kernel, sleep, then=lambda text: kernel.interrupt() if "up" in text else None)
    assert (status, printed) == ("error", "[0] up\n")
    assert "KeyboardInterrupt" in value
    assert execute(kernel, "allranks.run(double, (4,), n=1)") == ("ok", "", "[8]")


MAIN = """
import dataclasses, multiprocessing, os, sys
import allranks

@dataclasses.dataclass
class Result:
    value: int

class Sub(Result):
    pass

def square(x):
    return Sub(x * x)

def pool(context):
    with multiprocessing.get_context(context).Pool(2) as made:
        found = made.map(square, [1, 2, 3])
    assert all(type(each) is Sub for each in found), found
    return [each.value for each in found]

if __name__ == "__main__":
    if "RANK" in os.environ:
        print(pool("spawn"))
    else:
        for context in ("fork", "spawn", "forkserver"):
            found = allranks.run(pool, (context,), n=2)
            assert found == [[1, 4, 9]] * 2, found
"""


@pytest.mark.parametrize("way", ["file", "module"])
def test_classes_of_the_main_program_work_in_child_processes_of_ranks(light: Launcher, way: str) -> None:
    light.write(MAIN, "program.py")
    words = [sys.executable, *(["-m", "program"] if way == "module" else ["program.py"])]
    done = light.open(words, light.environ())
    _, errors = done.communicate(timeout=100)
    assert done.returncode == 0, errors.decode()
    assert not errors


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_classes_of_a_script_work_in_child_processes_of_ranks(launcher: Launcher, start: str) -> None:
    done = launcher.run("--start", start, "-n", "1", str(launcher.write(MAIN)))
    assert (done.code, done.out) == (0, "[0] [1, 4, 9]\n"), done
