"""``allranks.logging``: one file per rank, terminal output from rank 0, and no interference with other logging."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import allranks.logging
from allranks import ConfigError, UsageError

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in JOB}


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the root logger and the exception hooks."""
    root, hooks = logging.getLogger(), (sys.excepthook, __import__("threading").excepthook)
    handlers, level = list(root.handlers), root.level
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    sys.excepthook, __import__("threading").excepthook = hooks


def run(folder: Path, program: str, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, *command, "program.py"],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_rank_writes_records_to_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = allranks.logging.configure(3, folder=tmp_path / "new" / "folder")
    assert logger.name == "Process-3"
    logger.info("Initialized")
    logging.getLogger("another.library").warning("100%% of %s", "it")
    logger.debug("not at this level")
    written = (tmp_path / "new" / "folder" / "process_3.log").read_text().splitlines()
    assert [re.sub(f"^{STAMP} ", "", line) for line in written] == ["[INFO]: Initialized", "[WARNING]: 100% of it"]
    assert capsys.readouterr().err == ""  # Only rank 0 writes to the terminal.


def test_repeated_configure_writes_each_record_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(logging.getLogger().handlers)
    for _ in range(3):
        logger = allranks.logging.configure(0, "debug", tmp_path)
    assert len(logging.getLogger().handlers) == before + 2
    logger.debug("once")
    assert (tmp_path / "process_0.log").read_text().count("once") == 1
    assert capsys.readouterr().err.count("[DEBUG]: once\n") == 1
    allranks.logging.configure(1, folder=tmp_path, console="none").info("elsewhere")
    assert "elsewhere" not in (tmp_path / "process_0.log").read_text()


def test_format_can_contain_rank_and_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = socket.gethostname()
    logger = allranks.logging.configure(2, folder=tmp_path, console="all", format="%(rank)s@%(host)s %(message)s")
    logger.error("lost")
    assert (tmp_path / "process_2.log").read_text() == f"2@{host} lost\n"
    assert re.fullmatch(rf"\[{host}:2\] {STAMP} \[ERROR\]: lost\n", capsys.readouterr().err)


def test_default_rank_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allranks.logging.configure(folder=tmp_path, console="none").name == "Process-0"
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ConfigError, match="WORLD_SIZE is not set"):
        allranks.logging.configure(folder=tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "node0:29500")
    assert allranks.logging.configure(folder=tmp_path, console="none").name == "Process-5"
    assert allranks.logging.configure("main", folder=tmp_path, console="none").name == "Process-main"


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"console": "1"}])
def test_wrong_arguments(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="must be"):
        allranks.logging.configure(0, folder=tmp_path, **wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_uncaught_exceptions_are_logged_to_the_file(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
import threading
from allranks.logging import configure
configure(0)
configure(0)
thread = threading.Thread(target=lambda: [][7], name="loader")
thread.start()
thread.join()
raise ValueError("no such data set")
""",
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no such") == done.stderr.count("IndexError") == 1  # unchanged by configure()
    logged = (tmp_path / "process_0.log").read_text()
    assert "[CRITICAL]: Uncaught exception in thread loader\nTraceback" in logged
    assert logged.count("IndexError: list index out of range") == 1
    assert re.search(rf"{STAMP} \[CRITICAL\]: Uncaught exception\nTraceback", logged)
    assert logged.endswith("ValueError: no such data set\n")


def test_failed_rank_logs_its_exception_and_launcher_prints_it_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
import allranks as dist, allranks.logging
dist.init_process_group()
log = allranks.logging.configure(folder="logs")
log.info("here")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("no such data set")
dist.barrier()
""",
        "-m", "allranks", "run", "-n", "2",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no such data set") == 1, done.stderr
    assert (tmp_path / "logs" / "process_1.log").read_text().endswith("ValueError: no such data set\n")


def test_terminal_output_is_colored_and_keeps_brackets(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import allranks.logging\nallranks.logging.configure(0).info('here [b]')\n")
    near, far = os.openpty()
    with os.fdopen(near, "rb", buffering=0) as near_file:
        done = subprocess.Popen(
            [sys.executable, "program.py"], cwd=tmp_path, stderr=far,
            env={**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "80"},
        )  # fmt: skip
        os.close(far)
        shown = near_file.read(4096).decode()
        assert done.wait(60) == 0
    assert "\x1b[" in shown
    assert "here [b]" in re.sub(r"\x1b\[[\d;]*m", "", shown)


def test_allranks_logging_does_not_shadow_the_standard_module(tmp_path: Path) -> None:
    code = "import logging, sys, allranks.logging; print(logging is allranks.logging.logging, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "True False\n"
    assert "logging" not in allranks.__all__  # Users may write: from allranks import *
