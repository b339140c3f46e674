"""The places of threads: which of them wait for a rank, and where the others are."""

from __future__ import annotations

import multiprocessing.queues
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks._trace.kernel import kernel_wait, process_state
from allranks._trace.stacks import Frame, place
from allranks._watch.threads import ThreadPlace, expression, places
from allranks._watch.watcher import native_stacks

pytestmark = pytest.mark.quick


@contextmanager
def thread_in(function: Callable[[], object]) -> Iterator[ThreadPlace]:
    """Yield the place of a thread that executes a function, once it is blocked.

    A thread that waits for the GIL is also in a call of the kernel, but not in two samples at the same place.
    """
    pytest.importorskip("torch.distributed")
    thread = threading.Thread(target=function, name="under test", daemon=True)
    thread.start()
    until = time.monotonic() + 10
    found = before = None
    while time.monotonic() < until:
        found = next((each for each in places() if each.thread == thread.ident), None)
        if found is not None and found.kernel.call and before == (found.site, found.kernel):
            break
        before = found and (found.site, found.kernel)
        time.sleep(0.01)
    assert found is not None
    yield found


def test_lock_is_no_wait_for_a_rank() -> None:
    lock = threading.Lock()
    lock.acquire()

    def waits() -> None:
        lock.acquire()

    with thread_in(waits) as found:
        assert found.kernel.describe() == "blocked in a lock"
        assert found.elsewhere
        assert "test_threads.py" in found.site
        if sys.version_info >= (3, 11):
            assert found.expression == "lock.acquire()"
    lock.release()


def test_descriptor_of_a_blocked_read_is_named() -> None:
    read, write = os.pipe()

    def waits() -> None:
        os.read(read, 1)

    with thread_in(waits) as found:
        assert (found.kernel.call, found.kernel.descriptor) == ("read", read)
        assert found.kernel.describe().startswith(f"blocked in read of {os.readlink(f'/proc/self/fd/{read}')}")
        assert found.elsewhere
    os.write(write, b"1")
    os.close(read)
    os.close(write)


def test_local_variable_whose_method_is_executed_is_found() -> None:
    event = threading.Lock()
    event.acquire()

    def waits() -> None:
        mine = event
        mine.acquire()

    with thread_in(waits) as found:
        assert found.waited is event
    event.release()


def test_expression_of_a_position_without_source_is_empty() -> None:
    code = compile("x = 1", "<nowhere>", "exec")
    assert expression(code, 0) == ""


def test_activity_below_the_program_is_named() -> None:
    own = Frame("/home/me/train.py", "3", "main")
    loader = Frame("/x/site-packages/torch/utils/data/dataloader.py", "1", "_next_data")
    queue = Frame(multiprocessing.queues.__file__, "1", "get")
    assert place([queue, loader, own]) == "/home/me/train.py:3 in main (waiting for its data loader)"
    assert place([own, loader]) == "/home/me/train.py:3 in main"
    assert place([loader]) == f"{loader.file}:1 in _next_data"
    assert place([]) == ""


def test_process_that_does_not_exist_is_gone() -> None:
    missing = 2**22 + 1  # above the highest pid of Linux
    assert process_state(missing) == "gone"
    assert kernel_wait(missing).describe() == ""


def test_py_spy_is_called_for_native_stacks_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_stacks(17) == ""
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "py-spy").chmod(0o755)
    assert native_stacks(17) == "dump --native --pid 17\n"
