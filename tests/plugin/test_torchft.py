"""torchft's Manager on a group of allranks: a killed replica rejoins, and all replicas have the same weights.

torchft is in a separate environment (`make torchft`). Without it the test is skipped. If ALLRANKS_TEST_ALL=1, as in CI,
it fails instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / "build" / "torchft-venv" / "bin"
EXAMPLE = ROOT / "examples" / "torchft" / "train.py"
STEPS = 20
ALONE = "with 2 replicas"  # printed by the surviving replicas for each step


class Program:
    """A process whose output lines are stored when they arrive."""

    def __init__(self, *words: object, **environ: str) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            list(map(str, words)),
            env={**clean, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)  # one by one, because another thread reads the list concurrently

    def end(self) -> int:
        """Wait until the process exits; return the exit code."""
        code = self.process.wait(60)
        self._reader.join()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def until(true: Callable[[], object], programs: list[Program]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, [program.lines[-20:] for program in programs]
        assert all(program.process.poll() is None for program in programs), [p.lines[-20:] for p in programs]
        time.sleep(0.02)


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """Run torchft's lighthouse; yield its address."""
    options = ("--bind", "[::]:0", "--min_replicas", 2, "--join_timeout_ms", 1000)
    running = Program(BIN / "torchft_lighthouse", *options)
    said = "Lighthouse listening on: "
    try:
        until(lambda: any(said in line for line in running.lines), [running])
        yield next(line for line in running.lines if said in line).partition(said)[2].strip()
    finally:
        running.kill()


def test_killed_replica_rejoins_with_the_same_weights() -> None:
    if not BIN.exists():
        missing = f"there is no {BIN.relative_to(ROOT)} with torchft: make torchft"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    programs: list[Program] = []
    with lighthouse() as address:

        def start(replica: int, *further: object) -> Program:
            words = (BIN / "python", EXAMPLE, "--replica", replica, "--steps", STEPS, *further)
            programs.append(Program(*words, TORCHFT_LIGHTHOUSE=address))
            return programs[-1]

        try:
            killed, *replicas = start(0, "--die-after", STEPS // 2), start(1), start(2)
            assert killed.end() == -signal.SIGKILL, killed.lines[-20:]
            marks = [len(survivor.lines) for survivor in replicas]
            until(
                lambda: all(ALONE in "".join(p.lines[mark:]) for p, mark in zip(replicas, marks, strict=True)),
                replicas,
            )
            replicas.append(start(0))
            codes = [replica.end() for replica in replicas]
        finally:
            for program in programs:
                program.kill()
    ends = [replica.lines[-1] for replica in replicas]
    assert codes == [0, 0, 0], [replica.lines[-20:] for replica in replicas]
    assert ends[0].startswith("weights "), ends
    assert len(set(ends)) == 1, ends
