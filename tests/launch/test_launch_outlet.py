"""Writing without waiting for the reader, whatever the output is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.launch.output.outlet import Outlet

DATA = bytes(range(256)) * 4096 * 4


def pipe() -> tuple[int, int]:
    return os.pipe()


def sockets() -> tuple[int, int]:  # cannot be opened again
    ear, mouth = socket.socketpair()
    return ear.detach(), mouth.detach()


@pytest.fixture(params=[pipe, sockets])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    make: Callable[[], tuple[int, int]] = request.param
    ear, mouth = make()
    yield ear, mouth
    os.close(mouth)


def test_what_is_not_read_waits_and_nothing_is_lost(ends: tuple[int, int]) -> None:
    ear, mouth = ends
    outlet = Outlet(mouth)
    outlet.put(DATA)
    outlet.flush()
    assert 0 < outlet.backlog < len(DATA)
    assert os.get_blocking(mouth)  # it is the shell's too
    read = bytearray()
    while len(read) < len(DATA):
        read += os.read(ear, 1 << 16)
        outlet.flush()
    assert bytes(read) == DATA
    assert outlet.backlog == 0
    outlet.close()
    os.close(ear)


def test_reader_that_goes_is_told_of_once(ends: tuple[int, int]) -> None:
    ear, mouth = ends
    outlet = Outlet(mouth)
    os.close(ear)
    outlet.put(b"x")
    with pytest.raises(BrokenPipeError):
        outlet.flush()
    outlet.put(b"x")
    outlet.flush()
    assert outlet.backlog == 0
    outlet.close()


def test_file_is_written_where_others_write_on(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(b"before ")
        outlet = Outlet(file.fileno())
        outlet.put(b"ours ")
        outlet.flush()
        outlet.close()
        file.write(b"after")
    assert (tmp_path / "file").read_bytes() == b"before ours after"
