"""Membership after a loss: hundreds of simulated groups, and a store that does not respond."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import cast

import pytest
from membership_simulation import Group

from allranks._elastic.membership_change import NEWCOMER, Proposal
from allranks._elastic.membership_store import MembershipStore
from allranks._elastic.replicas import choose_members
from allranks._rendezvous.finders.interface import Finder
from allranks._rendezvous.join_protocol import Act, Answer, Lost, Member, Steps
from allranks._store import Store, StoreClient
from allranks._store.wire import Peek, WaitForKeys, WaitTimedOut

SERVER = """
from allranks._store import StoreServer
with StoreServer.unix().start() as server:
    print(server.address, flush=True)
    input()
"""


@pytest.mark.parametrize("block", range(5))
def test_simulated_groups_keep_all_invariants_after_losses(block: int) -> None:
    for seed in range(block * 60, (block + 1) * 60):
        try:
            Group(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class Known:
    """Finder of a store with a known address."""

    def __init__(self, address: str, me: Member) -> None:
        self.me, self.address = me, address

    def find_again(self, timeout_s: float) -> Store:
        return StoreClient.connect(self.address, timeout_s=timeout_s)


def asked(membership: MembershipStore, act: Act) -> Answer:
    def steps() -> Steps[Answer]:
        _, answer = yield act
        return answer

    return membership.drive(steps(), lambda missing: frozenset())


def test_stopped_store_times_out_and_exited_store_is_lost() -> None:
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        me = Member(0, os.getpid(), "here", "here", 1)
        membership = MembershipStore(cast("Finder", Known(server.stdout.readline().strip(), me)), me, "")
        membership.write("there", b"1")
        wait = WaitForKeys([f"{membership.prefix}key"], 0.05, True)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert asked(membership, wait) == WaitTimedOut(wait.keys)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert membership.read("there") == b"1"
        server.communicate("\n", timeout=60)
        assert isinstance(asked(membership, Peek([f"{membership.prefix}there"])), Lost)


@pytest.mark.parametrize("replica", [2, 3])
def test_simulated_replicas_keep_all_invariants_after_losses(replica: int) -> None:
    for seed in range(30):
        try:
            Group(seed, replica).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def _chosen(size: int, full: list[int], new: list[int], places: dict[int, int] | None = None) -> list[int]:
    """Return the slots of the members, by rank. ``places`` overrides the position of a slot, which is its number."""
    proposals = [
        Proposal(
            slot,
            0,
            Member(slot, 1, "host", "machine", 9),
            progress=5 if slot in full else NEWCOMER,
            place=(places or {}).get(slot, slot),
            replica=size,
        )
        for slot in sorted(full + new)
    ]
    return [proposal.slot for proposal in choose_members(proposals)]


def test_only_whole_replicas_continue() -> None:
    assert _chosen(2, [0, 1, 2, 3], []) == [0, 1, 2, 3]
    assert _chosen(2, [0, 1, 2], []) == [0, 1]  # slot 2 waits
    assert _chosen(2, [1, 2], []) == [2, 1]  # halves of two replicas
    assert _chosen(2, [0, 1, 3, 4, 5], []) == [0, 1, 4, 5]  # the ranks of one host stay together
    assert _chosen(2, [0, 1, 3], [4, 5]) == [0, 1, 4, 5]
    assert _chosen(2, [0, 1], [2, 3]) == [0, 1, 2, 3]
    assert _chosen(2, [1, 2], [0, 3]) == [0, 1, 2, 3]  # both missing halves are replaced
    assert _chosen(2, [1, 2], [0]) == [2, 1]  # slot 0 cannot replace slot 2, the only holder of its shard
    assert _chosen(2, [0, 1], [3, 4]) == [0, 1, 4, 3]  # slot 3 has waited, slot 4 joins
    assert _chosen(2, [0, 1], [3, 5]) == [0, 1]
    assert _chosen(3, [0, 1, 2, 3, 5], [9, 7]) == [0, 1, 2, 3, 7, 5]
    assert _chosen(2, [0, 1], [8, 9], places={8: 3, 9: 2}) == [0, 1, 9, 8]
    assert _chosen(1, [0, 2], [3]) == [0, 2, 3]
    assert _chosen(2, [1, 3], []) == [1, 3]  # no rank has the other half: the program raises an error
    assert _chosen(2, [], [1, 2]) == [1, 2]
