"""``allranks run --mode master``: only rank 0 runs the script, and the other ranks are its workers."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from support.launcher_process import Launcher

SUPPORT = str(Path(__file__).parents[1] / "support")

MASTER = """
    import os, signal, sys, time
    from allranks.remote.bootstrap.workers import gather_workers

    workers = gather_workers("env://", serve="stand_in:serve", timeout_s=60)

    def group(name, *ranks):
        for rank in ranks:
            workers.connections[rank - 1].socket.sendall(f"group {name} {' '.join(map(str, ranks))}".encode())
        return [workers.connections[rank - 1].socket.recv(100).decode() for rank in ranks]

    assert group("all", 1, 2) == ["[3.0, 3.0]"] * 2
    os.kill(workers.connections[0].pid, signal.SIGKILL)
    print(workers.how_ended(1), flush=True)
    workers.respawn(1)
    assert group("new", 2, 1) == ["[3.0, 3.0]"] * 2
    print("here", os.environ["RANK"], sys.argv[1:], flush=True)
    workers.connections[0].socket.sendall(b"sleep")
    os.kill(workers.connections[1].pid, signal.SIGSTOP)
    time.sleep(1000)
"""


def environ() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "src"), SUPPORT])}


def test_killed_worker_is_replaced_and_ctrl_c_ends_all_workers(launcher: Launcher) -> None:
    """Kill and restart a worker, then stop the master with Ctrl-C.

    When the master exits, one worker is busy and the other is stopped with SIGSTOP.
    """
    path = launcher.write(MASTER)
    process = launcher.start("--mode", "master", "-n", "3", str(path), "word", real_torch=True, environ=environ())
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] killed by signal 9 (SIGKILL)\n"
    assert process.stdout.readline() == b"[0] here 0 ['word']\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert re.search(rb"rank 1 \(pid \d+\) was killed by SIGKILL; the other ranks continue", err)
    assert b"script.py:" in err


def test_invalid_master_mode_options_are_rejected(launcher: Launcher) -> None:
    script = str(launcher.write("print('never')"))
    for words, message in (
        (
            ("-n", "1", script),
            "--mode master: rank 0 is the master and needs at least one worker.\n  Use -n 2 or more.",
        ),
        (("-n", "2", "--", "true"), "--mode master requires a python program"),
    ):
        done = launcher.run("--mode", "master", *words)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
    assert "invalid choice: 'both'" in launcher.run("--mode", "both", "-n", "2", script).err
