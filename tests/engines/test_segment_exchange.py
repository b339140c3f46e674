"""Exchange of memory between the ranks of a host. Unauthenticated processes cause no delay and receive nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from allranks import _core
from allranks._base.errors import JoinError
from allranks._base.forks import Descriptor
from allranks._engines.native.connect import SegmentExchange

NOBODY = 65534
RANKS = 3
WAITED_S = 5.0  # an earlier version waited this long for each silent connection, one after another

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user requires root")


def memory() -> Descriptor:
    return Descriptor.of(lambda: _core.create_memory(4096))


def name(offer: SegmentExchange) -> str:
    return f"\0allranks-{offer.record[:7].hex()}"


@contextlib.contextmanager
def child(user: int, begin: Callable[[], object]) -> Iterator[None]:
    """Run ``begin`` in a child process of this user. The child stays until the context exits."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(user)
            kept = begin()
            os.write(told, b"!")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(heard, 1) == b"!"
        yield
    finally:
        os.close(heard)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def connected(to: str, word: bytes = b"") -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(to)
    stranger.sendall(word)
    return stranger


def meet(offers: list[SegmentExchange]) -> None:
    """Exchange segments and sockets between all ranks, and close them."""
    records = [offer.record for offer in offers]
    with ThreadPoolExecutor(len(offers)) as pool:
        met = [pool.submit(offer.meet, rank, records, 30.0) for rank, offer in enumerate(offers)]
        for rank, one in enumerate(met):
            segments, sockets = one.result()
            assert len({os.fstat(segment.fileno()).st_ino for segment in segments}) == len(offers)
            assert [sock is None for sock in sockets] == [r == rank for r in range(len(offers))]
            for segment in segments:
                segment.close()
            for sock in sockets:
                if sock is not None:
                    sock.close()


@pytest.fixture
def offers() -> Iterator[list[SegmentExchange]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SegmentExchange(memory())) for _ in range(RANKS)]


@pytest.mark.parametrize("word", [b"", b"hello", b"x" * 20], ids=["silent", "short", "wrong"])
@pytest.mark.parametrize("user", [0, pytest.param(NOBODY, marks=as_root)], ids=["own", "another"])
def test_unauthenticated_connections_do_not_delay_the_exchange(
    offers: list[SegmentExchange], user: int, word: bytes
) -> None:
    names = [name(offer) for offer in offers]
    with child(user or os.getuid(), lambda: [connected(each, word) for each in names for _ in range(5)]):
        began = time.monotonic()
        meet(offers)
        assert time.monotonic() - began < WAITED_S


@as_root
def test_listener_of_another_user_receives_nothing(offers: list[SegmentExchange]) -> None:
    with SegmentExchange(memory()) as gone:
        taken = name(gone)
    heard, told = os.pipe()

    def listen() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(taken)
        listener.listen()
        if os.fork() == 0:
            signal.alarm(20)
            os.write(told, b"heard: " + listener.accept()[0].recv(100))
            os._exit(0)
        return listener

    with child(NOBODY, listen), pytest.raises(JoinError, match=f"rank 0 runs as user {NOBODY}"):
        offers[1].meet(1, [gone.record, offers[1].record], 30.0)
    assert os.read(heard, 100) == b"heard: "
    os.close(heard)
    os.close(told)


def test_exchange_fails_promptly_if_a_rank_has_exited() -> None:
    """Detect the exit of a rank: a waiting rank checks the address of the missing one, which refuses connections."""
    here, ended = (SegmentExchange(memory()) for _ in range(2))
    records = [here.record, ended.record]
    ended.__exit__()
    with here, pytest.raises(JoinError, match="rank 1 exited while the ranks were connecting"):
        here.meet(0, records, 30.0)


# Tests of one memory that all ranks share: the memory of a group that is created from another group.


@contextlib.contextmanager
def sharing() -> Iterator[list[SegmentExchange]]:
    with contextlib.ExitStack() as stack:
        memories = [memory(), *[None] * (RANKS - 1)]
        yield [stack.enter_context(SegmentExchange(each)) for each in memories]


def share(offers: list[SegmentExchange]) -> None:
    records = [offer.record for offer in offers]
    with ThreadPoolExecutor(len(offers)) as pool:
        shared = [pool.submit(offer.share, rank, records, 30.0) for rank, offer in enumerate(offers)]
        inodes = set()
        for rank, one in enumerate(shared):
            (shared_by_all,), sockets = one.result()
            inodes.add(os.fstat(shared_by_all.fileno()).st_ino)
            connected_with = [r for r, sock in enumerate(sockets) if sock is not None]
            assert connected_with == (list(range(1, RANKS)) if rank == 0 else [0])
            shared_by_all.close()
            for sock in sockets:
                if sock is not None:
                    sock.close()
        assert len(inodes) == 1


@pytest.mark.parametrize("word", [b"", b"hello", b"x" * 20], ids=["silent", "short", "wrong"])
@pytest.mark.parametrize("user", [0, pytest.param(NOBODY, marks=as_root)], ids=["own", "another"])
def test_unauthenticated_connections_receive_no_memory_and_cause_no_delay(user: int, word: bytes) -> None:
    with sharing() as offers:
        names = [name(offer) for offer in offers]
        with child(user or os.getuid(), lambda: [connected(each, word) for each in names for _ in range(5)]):
            began = time.monotonic()
            share(offers)
            assert time.monotonic() - began < WAITED_S


@as_root
def test_memory_of_another_user_is_refused() -> None:
    with SegmentExchange(None) as gone:
        taken = name(gone)

    def listen() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(taken)
        listener.listen()
        return listener

    with (
        child(NOBODY, listen),
        SegmentExchange(None) as offer,
        pytest.raises(JoinError, match=f"rank 0 runs as user {NOBODY}"),
    ):
        offer.share(1, [gone.record, offer.record], 30.0)


def test_sharing_fails_promptly_if_a_receiver_has_exited() -> None:
    with sharing() as (first, second, ended):
        ended.__exit__()
        with ThreadPoolExecutor(2) as pool:
            records = [first.record, second.record, ended.record]
            tried = [pool.submit(offer.share, rank, records, 30.0) for rank, offer in enumerate((first, second))]
            with pytest.raises(JoinError, match="rank 2 exited while the ranks were connecting"):
                tried[0].result()
            (fetched,), sockets = tried[1].result()  # closed by the first rank after its error
        assert sockets[0] is not None
        assert sockets[0].recv(1) == b""
        sockets[0].close()
        fetched.close()


def test_sharing_fails_if_the_first_rank_has_exited() -> None:
    with sharing() as (first, second, _):
        first.__exit__()
        with pytest.raises(JoinError, match="cannot create the group: rank 0 did not send the shared memory"):
            second.share(1, [first.record, second.record], 30.0)


def test_forked_child_inherits_no_descriptors() -> None:
    """Check listeners, connections and memory that the core does not own yet."""
    others = _opened()
    with contextlib.ExitStack() as stack, sharing() as sharers, ThreadPoolExecutor(RANKS) as pool:
        meeting = [stack.enter_context(SegmentExchange(memory())) for _ in range(RANKS)]
        tried = [
            pool.submit(call, rank, [offer.record for offer in offers], 30.0)
            for offers, calls in (
                (meeting, [each.meet for each in meeting]),
                (sharers, [each.share for each in sharers]),
            )
            for rank, call in enumerate(calls)
        ]
        for one in tried:
            for part in itertools.chain(*one.result()):
                if part is not None:
                    stack.callback(part.close)
        ours = _opened() - others
        # Each rank of `meeting` has a listener and a memory, plus the received ones. The sharers have one memory.
        connections, memories = RANKS * (RANKS - 1) + 2 * (RANKS - 1), RANKS * RANKS + RANKS
        assert len(ours) == 2 * RANKS + connections + memories
        heard, told = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(told, repr(ours & _opened()).encode())
            os._exit(0)
        os.close(told)
        os.waitpid(pid, 0)
        with open(heard) as said:
            assert said.read() == "set()"


def _opened() -> set[str]:
    """Return the sockets and memory files that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {each for each in found if "memfd:" in each or "socket:" in each}
