"""The Python interface of the outbox: handles that free their ids, interruptible waits, forks and refused calls."""

import array
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from allranks._core import Outbox, Ref, receive

NEVER = 3.6e9  # us: the timer never fires, so only flush() sends
HEAD = struct.Struct("<HI")


@contextmanager
def connected(count: int = 1, **options: int) -> Iterator[tuple[Outbox, list[socket.socket]]]:
    """Create an outbox with `count` workers; yield it and the sockets of the workers."""
    pairs = [socket.socketpair() for _ in range(count)]
    with closing(Outbox(NEVER, **options)) as outbox:
        for here, there in pairs:
            outbox.add(here.fileno())
            there.settimeout(60)
        yield outbox, [there for _, there in pairs]
    for pair in pairs:
        for end in pair:
            end.close()


def read(worker: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        size = worker.recv_into(rest)
        assert size > 0, "the stream was closed"
        rest = rest[size:]
    return bytes(data)


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def test_call_sends_its_frame_and_a_deleted_ref_sends_a_free() -> None:
    with connected() as (outbox, [worker]):
        target = outbox.target((0,))
        x, y = outbox.reserve(target, 2)
        assert (x.id, y.id, x.target) == (0, 1, target)
        result = outbox.call(target, 70_000, 300, [x, y], 1, b"values")
        assert isinstance(result, Ref)
        assert outbox.live == 3
        assert outbox.call(target, 70_000, 16, (result,), 0) is None
        expected = struct.pack("<HI", 2, 70_000)
        expected += struct.pack("<H", 300) + words(x.id, y.id, result.id) + b"values"
        expected += struct.pack("<H", 16) + words(result.id)
        died = weakref.ref(result)
        freed = result.id
        del result
        assert died() is None
        assert outbox.live == 2
        pair = outbox.call(target, 70_000, 17, (), 2)
        assert isinstance(pair, list)
        expected += struct.pack("<HH", 0, 1) + words(freed) + struct.pack("<H", 17) + words(*(ref.id for ref in pair))
        assert freed in [ref.id for ref in pair]
        assert outbox.pending(0) == len(expected)
        assert outbox.sent(0) == 0
        outbox.flush()
        assert read(worker, len(expected)) == expected
        assert (outbox.pending(0), outbox.sent(0), outbox.failure(0)) == (0, len(expected), 0)
        assert outbox.calls == 3


def test_call_sends_a_thousand_outputs_and_inputs_in_order() -> None:
    with connected(chunk_bytes=64) as (outbox, [worker]):
        target = outbox.target([0])
        refs = outbox.call(target, 0, 16, (), 1000)
        assert isinstance(refs, list)
        outbox.call(target, 0, 17, refs, 0)
        outbox.flush()
        read(worker, HEAD.size + 2)
        assert read(worker, 4000) == words(*(ref.id for ref in refs))
        assert read(worker, 4002)[2:] == words(*(ref.id for ref in refs))


@pytest.mark.parametrize("payload", [b"0123", bytearray(b"0123"), memoryview(b"012345")[:4], array.array("I", [7])])
def test_messages_carry_any_buffer(payload: bytes) -> None:
    with connected() as (outbox, [worker]):
        target = outbox.target([0])
        outbox.put(target, b"head", payload)
        outbox.put(target, b"alone")
        outbox.flush()
        assert read(worker, HEAD.size + 8) == HEAD.pack(1, 8) + b"head" + bytes(payload)
        assert read(worker, HEAD.size + 5) == HEAD.pack(1, 5) + b"alone"


def test_large_message_is_sent_without_a_flush() -> None:
    payload = os.urandom(8 << 20)
    with connected() as (outbox, [worker]):
        outbox.put(outbox.target([0]), b"", payload)
        assert read(worker, HEAD.size) == HEAD.pack(1, len(payload))
        assert read(worker, len(payload)) == payload


def test_view_has_the_id_of_its_base() -> None:
    with connected(2) as (outbox, workers):
        both, first, second = outbox.target([0, 1]), outbox.target([0]), outbox.target([1])
        whole = outbox.call(both, 1, 16, (), 1)
        part = outbox.view(whole, first)
        assert (part.id, part.target) == (whole.id, first)
        with pytest.raises(ValueError, match=f"to target {first} belongs to target {both}"):
            outbox.call(first, 1, 16, (whole,), 0)
        with pytest.raises(ValueError, match=f"target {both} has workers that are not in target {first}"):
            outbox.view(part, both)
        with pytest.raises(ValueError, match=f"belongs to target {first}"):
            outbox.call(second, 1, 16, (part,), 0)
        del whole
        assert outbox.live == 1
        outbox.call(first, 1, 17, (part,), 0)
        del part
        assert outbox.live == 0
        outbox.flush()
        call = HEAD.pack(2, 1) + struct.pack("<HI", 16, 0)
        free = struct.pack("<HHI", 0, 1, 0)
        assert read(workers[0], 26) == call + struct.pack("<HI", 17, 0) + free
        assert read(workers[1], 20) == call + free


def test_refs_are_freed_from_any_thread_and_from_cycles() -> None:
    with connected() as (outbox, _):
        target = outbox.target([0])
        refs = outbox.reserve(target, 20_000)
        parts = [refs[i::4] for i in range(4)]
        del refs
        threads = [threading.Thread(target=part.clear) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outbox.live == 0
        cycle: list[object] = [*outbox.reserve(target, 3)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert outbox.live == 0


def test_signal_handler_interrupts_a_wait_for_a_slow_worker() -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with connected(2, limit_bytes=1 << 16) as (outbox, workers):
            slow, quick = outbox.target([0]), outbox.target([1])
            argument = outbox.call(slow, 1, 16, (), 1)

            def blocked() -> bool:
                calls = outbox.calls
                time.sleep(0.1)
                return outbox.pending(0) > 1 << 15 and outbox.calls == calls

            def interrupt() -> None:
                while not blocked():
                    pass
                outbox.put(quick, b"others go on")  # possible only because the blocked call has released the GIL
                outbox.flush()
                os.kill(os.getpid(), signal.SIGUSR1)

            def queue() -> None:
                for i in range(1_000_000):
                    outbox.call(slow, i, 16, (argument,), 1)

            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            with pytest.raises(Stopped):
                queue()
            interrupter.join()
            assert read(workers[1], HEAD.size + 12)[HEAD.size :] == b"others go on"
            assert outbox.live == 1
            outbox.lose(0)
            queue()
            assert outbox.pending(0) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_worker_that_does_not_read_retains_no_frames_of_other_workers() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with connected(2) as (outbox, workers):
        slow, quick = outbox.target([0]), outbox.target([1])
        outbox.put(slow, bytes(1 << 20))
        outbox.flush()
        payload, count = bytes(4000), 20_000

        def drain() -> None:
            for _ in range(count):
                read(workers[1], HEAD.size + len(payload))

        reader = threading.Thread(target=drain)
        reader.start()
        before = resident()
        for _ in range(count):
            outbox.call(slow, 1, 16, (), 0)
            outbox.put(quick, payload)
        outbox.flush()
        reader.join()
        assert resident() - before < count * len(payload) / 2
        assert outbox.pending(0) > count


def test_replaced_worker_receives_only_calls_after_its_replacement() -> None:
    with connected() as (outbox, [_]):
        target = outbox.target([0])
        outbox.call(target, 5, 16, (), 0)
        outbox.lose(0)
        outbox.call(target, 5, 17, (), 0)
        here, there = socket.socketpair()
        with here, there:
            outbox.replace(0, here.fileno())
            outbox.call(target, 5, 18, (), 0)
            outbox.flush()
            assert there.recv(100) == HEAD.pack(2, 5) + struct.pack("<H", 18)
            outbox.lose(0)


def refusals(outbox: Outbox, ref: Ref) -> list[tuple[Callable[[], object], type[Exception], str]]:
    other = Outbox()
    other.add(0)
    other.target([0])
    return [
        (lambda: outbox.call(9, 1, 16, (), 0), ValueError, "no target 9"),
        (lambda: outbox.call(0, 1, 15, (), 0), ValueError, "no template has the number 15"),
        (lambda: outbox.call(0, 1, 16, (3,), 0), TypeError, "an input of a call is not a Ref"),  # type: ignore
        (lambda: other.call(0, 1, 16, (ref,), 0), ValueError, "an input of a call belongs to another outbox"),
        (lambda: outbox.target([]), ValueError, "a target needs at least one worker"),
        (lambda: outbox.target([0, 0]), ValueError, "worker 0 is listed twice"),
        (lambda: outbox.target([4]), ValueError, "no worker 4"),
        (lambda: outbox.lose(-1), ValueError, "no worker -1"),
        (lambda: outbox.put(0, b"", "text"), TypeError, "a payload must be bytes, or a contiguous buffer"),  # type: ignore
        (lambda: outbox.view(ref, 9), ValueError, "no target 9"),
        (lambda: Ref(), TypeError, "cannot create"),
    ]


def test_refused_calls_are_not_queued() -> None:
    with connected() as (outbox, _):
        target = outbox.target([0])
        [ref] = outbox.reserve(target, 1)
        for wrong, error, match in refusals(outbox, ref):
            with pytest.raises(error, match=match):
                wrong()
        assert outbox.pending(0) == 0
        assert (outbox.live, outbox.calls) == (1, 0)


def test_closed_outbox_refuses_every_call() -> None:
    with connected() as (outbox, _):
        target = outbox.target([0])
        refs = outbox.reserve(target, 1)
        outbox.close()
        outbox.close()
        calls: list[Callable[[], object]] = [
            outbox.flush,
            lambda: outbox.add(0),
            lambda: outbox.pending(0),
            lambda: outbox.call(target, 1, 16, refs, 0),
            lambda: outbox.put(target, b""),
            lambda: outbox.reserve(target, 1),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="the outbox is closed"):
                call()
        refs.clear()
        assert outbox.live == 0


FORK = """
import os, signal, socket, threading
from allranks._core import Outbox

here, there = socket.socketpair()
outbox = Outbox(delay_us=20)
outbox.add(here.fileno())
target = outbox.target([0])
stop = threading.Event()

def queue():
    while not stop.is_set():
        outbox.call(target, 1, 16, (), 1)

def drain():
    while there.recv(1 << 16):
        pass

threads = [threading.Thread(target=queue), threading.Thread(target=drain)]
for thread in threads:
    thread.start()
refs = outbox.reserve(target, 1000)
for i in range(20):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        del refs
        try:
            outbox.call(target, 1, 16, (), 1)
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            os._exit(3)
        outbox.close()
        del outbox
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert outbox.live >= 1000
stop.set()
threads[0].join()
outbox.flush()
outbox.close()
here.shutdown(socket.SHUT_RDWR)
threads[1].join()
"""

LEFT = """
import socket
from allranks._core import Outbox

here, there = socket.socketpair()
outbox = Outbox(delay_us=10)
outbox.add(here.fileno())
target = outbox.target([0])
refs = outbox.reserve(target, 100)
class Late:
    def __init__(self):
        self.ref = outbox.call(target, 1, 16, refs, 1)
    def __del__(self):
        self.ref = None
late = Late()
late.me = late
for _ in range(100):
    outbox.put(target, b"x" * 10_000)
"""


@pytest.mark.parametrize("program", [FORK, LEFT], ids=["forked", "left open at the end"])
def test_process_exits_cleanly_after_forks_and_with_an_open_outbox(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_echo_that_arrives_with_other_frames_is_passed_to_the_caller() -> None:
    with connected() as (outbox, (worker,)):
        target = outbox.target([0])
        buffer = bytearray(64)
        for number in (1, 2):
            outbox.echo(target, number)
        outbox.call(target, 7, 16, (), 0)
        outbox.flush()
        # receive() answers an echo itself only if the echo arrives alone.
        assert receive(worker.fileno(), buffer, 0, True) == 20
        assert buffer[:20] == b"\x03\0\x01\0\0\0\x03\0\x02\0\0\0\x02\0\x07\0\0\0\x10\0"
    with connected() as (outbox, (worker,)):
        outbox.echo(outbox.target([0]), 5)
        assert receive(worker.fileno(), buffer, 10, False) == 6
        assert buffer[10:16] == b"\x03\0\x05\0\0\0"
        with pytest.raises(ValueError, match="no room"):
            receive(worker.fileno(), buffer, 64, True)


def test_echo_that_arrives_alone_is_answered_without_python() -> None:
    master, worker = socket.socketpair()
    with closing(master), closing(worker):
        master.sendall(b"\x03\0\x07\0\0\0")
        threading.Timer(0.2, master.shutdown, [socket.SHUT_WR]).start()
        assert receive(worker.fileno(), bytearray(64), 0, True) == 0
        assert master.recv(64) == b"\0\0\0\0\x07\0\0\0"
