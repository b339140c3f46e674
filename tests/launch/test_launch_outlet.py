"""Writes to any kind of output that do not wait for the reader."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.launch.output.nonblocking import NonblockingOutput

DATA = bytes(range(256)) * 4096 * 4


def pipe() -> tuple[int, int]:
    return os.pipe()


def sockets() -> tuple[int, int]:  # a socket cannot be reopened
    ear, mouth = socket.socketpair()
    return ear.detach(), mouth.detach()


@pytest.fixture(params=[pipe, sockets])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    make: Callable[[], tuple[int, int]] = request.param
    ear, mouth = make()
    yield ear, mouth
    os.close(mouth)


def test_unread_output_is_kept_without_loss(ends: tuple[int, int]) -> None:
    ear, mouth = ends
    outlet = NonblockingOutput(mouth)
    outlet.put(DATA)
    outlet.flush()
    assert 0 < outlet.backlog < len(DATA)
    assert os.get_blocking(mouth)  # the shell uses the same open file, so it must stay blocking
    read = bytearray()
    while len(read) < len(DATA):
        read += os.read(ear, 1 << 16)
        outlet.flush()
    assert bytes(read) == DATA
    assert outlet.backlog == 0
    outlet.close()
    os.close(ear)


def test_closed_reader_is_reported_once(ends: tuple[int, int]) -> None:
    ear, mouth = ends
    outlet = NonblockingOutput(mouth)
    os.close(ear)
    outlet.put(b"x")
    with pytest.raises(BrokenPipeError):
        outlet.flush()
    outlet.put(b"x")
    outlet.flush()
    assert outlet.backlog == 0
    outlet.close()


def test_outlet_and_other_writers_share_the_file_position(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(b"before ")
        outlet = NonblockingOutput(file.fileno())
        outlet.put(b"ours ")
        outlet.flush()
        outlet.close()
        file.write(b"after")
    assert (tmp_path / "file").read_bytes() == b"before ours after"
