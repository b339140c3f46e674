"""Who goes on after a loss, over hundreds of simulated groups; and what they know of a store that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import cast

import pytest
from succession_simulation import Group

from allranks._rendezvous.board import Board
from allranks._rendezvous.finders.interface import Finder
from allranks._rendezvous.join_protocol import Act, Answer, Lost, Member, Steps
from allranks._store import Store, StoreClient
from allranks._store.wire import Late, Peek, Wait

SERVER = """
from allranks._store import StoreServer
with StoreServer.unix().start() as server:
    print(server.address, flush=True)
    input()
"""


@pytest.mark.parametrize("block", range(5))
def test_simulated_groups(block: int) -> None:
    for seed in range(block * 60, (block + 1) * 60):
        try:
            Group(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class Known:
    """The finder of a store whose address is known."""

    def __init__(self, address: str, me: Member) -> None:
        self.me, self.address = me, address

    def find_again(self, timeout_s: float) -> Store:
        return StoreClient.connect(self.address, timeout_s=timeout_s)


def asked(board: Board, act: Act) -> Answer:
    def steps() -> Steps[Answer]:
        _, answer = yield act
        return answer

    return board.drive(steps(), lambda missing: frozenset())


def test_a_store_that_is_busy_is_late_and_one_that_ended_is_lost() -> None:
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        me = Member(0, os.getpid(), "here", "here", 1)
        board = Board(cast("Finder", Known(server.stdout.readline().strip(), me)), me, "")
        board.write("there", b"1")
        wait = Wait([f"{board.prefix}key"], 0.05, True)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert asked(board, wait) == Late(wait.keys)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert board.read("there") == b"1"
        server.communicate("\n", timeout=60)
        assert isinstance(asked(board, Peek([f"{board.prefix}there"])), Lost)
