"""Measure the time in which ranks join a job: many lightweight ranks in one process, real sockets and a real server.

    taskset -c 0 python benchmarks/rendezvous.py --json benchmarks/rendezvous.json

The ranks and the server are two processes. If bound to one core they share it, which is intended, because their costs
are counted together. A rank is the state machine of ``allranks._rendezvous.join_protocol`` and a socket; torch is not
imported.

``joined`` is the time from the first rank's first packet until the last rank has received the confirmation that all
ranks have joined. ``members`` is the additional time until every rank has the table of all members. ``exchange``: each
rank sends a record of 64 bytes to each rank, which requires n * n records.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

from allranks._net.frames import FrameDecoder, pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, PROVED, ClientHandshake
from allranks._rendezvous.join_protocol import (
    TABLE,
    Connect,
    JoinProtocol,
    Leave,
    Lost,
    Member,
    Notify,
    Pause,
    exchange,
    unpack_members,
)
from allranks._store.wire import FRAME_LIMIT, PROTOCOL, WaitForKeys, decode_reply, encode

SECRET = b"a secret of this benchmark"
RANKS_PER_HOST = 8
SERVER = f"""
import sys
from allranks._store import StoreServer
with StoreServer.tcp("localhost", 0, {SECRET!r}).start() as server:
    print(server.address.rpartition(":")[2], flush=True)
    sys.stdin.read()
"""


class Rank:
    """A rank without a thread: it sends the requests of its state machine and passes received data to it."""

    def __init__(self, crowd, steps):
        self.crowd = crowd
        self.steps = steps
        self.sock = None
        self.result = None
        self.done = False
        self.due = None  # end of a pause

    def begin(self):
        self.perform(next(self.steps))

    def go_on(self, steps):
        self.steps, self.done = steps, False
        self.begin()

    def resume(self, answer):
        try:
            self.perform(self.steps.send((time.monotonic(), answer)))
        except StopIteration as end:
            self.result, self.done = end.value, True
            self.crowd.waiting -= 1

    def perform(self, act):
        if isinstance(act, Connect):
            self.decoder, self.handshake = FrameDecoder(HANDSHAKE_FRAME), ClientHandshake(PROTOCOL, SECRET)
            self.sock = socket.create_connection(("127.0.0.1", self.crowd.port), timeout=60)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.crowd.selector.register(self.sock, selectors.EVENT_READ, self)
            self.send(self.handshake.begin())
        elif isinstance(act, Leave):
            self.resume(None)
        elif isinstance(act, Notify):
            print(act.line)
            self.resume(None)
        elif isinstance(act, Pause):
            self.crowd.pauses.append((time.monotonic() + act.seconds, self))
        elif self.sock is None:
            self.resume(Lost("it closed the connection"))
        else:
            self.send(encode(act))

    def send(self, payload):
        self.sock.settimeout(60)
        try:
            self.sock.sendall(pack_frame(payload))
        except OSError:
            return  # the reader detects the error, too
        self.sock.setblocking(False)

    def read(self):
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self.crowd.lost += 1
            self.resume(Lost("it closed the connection"))
            return
        self.crowd.bytes += len(data)
        self.decoder.feed(data)
        frame = self.decoder.next()
        if frame is None:
            return
        if self.decoder.limit == FRAME_LIMIT:
            self.resume(decode_reply(frame))
            return
        if frame == PROVED:
            self.decoder.limit = FRAME_LIMIT
            self.resume(None)
            return
        self.send(self.handshake.prove(frame))
        self.handshake.check_server()

    def close(self):
        if self.sock is not None:
            self.crowd.selector.unregister(self.sock)
            self.sock.close()
            self.sock = None


class Crowd:
    """All ranks, and the event loop that drives them."""

    def __init__(self, port):
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.pauses = []
        self.bytes = self.waiting = self.lost = 0

    def turn(self, timeout_s):
        for key, _ in self.selector.select(timeout_s):
            if key.data.sock is key.fileobj:
                key.data.read()
        now = time.monotonic()
        due = [rank for at, rank in self.pauses if at <= now]
        self.pauses = [(at, rank) for at, rank in self.pauses if at > now]
        for rank in due:
            rank.resume(None)

    def run(self, starts):
        """Start an operation on every rank. Return the time until all have finished, and the received bytes."""
        began, before = time.perf_counter(), self.bytes
        self.waiting = len(starts)
        for count, start in enumerate(starts):
            start()
            if count % 16 == 0:
                self.turn(0)
        while self.waiting:
            self.turn(0.01 if self.pauses else 1.0)
        return time.perf_counter() - began, self.bytes - before


def read_table(prefix):
    _, answer = yield WaitForKeys([f"{prefix}/{TABLE}"], 60.0, True)
    return answer.values[0]


def resident_kib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def measure(size, with_exchange):
    """Return the figures of one job of ``size`` ranks."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        crowd = Crowd(int(server.stdout.readline()))
        before = resident_kib(server.pid)
        ranks = []
        for rank in range(size):
            host = rank // RANKS_PER_HOST
            me = Member(
                rank,
                10000 + 7 * rank,
                f"node{host}",
                hashlib.md5(b"%d" % host).hexdigest(),
                size,
                (f"10.{host >> 8}.{host & 255}.1",),
            )
            joining = JoinProtocol(me, f"bench.{rank}", time.monotonic(), 300.0, "the server", "", fresh=True)
            ranks.append(Rank(crowd, joining.steps()))
        joined_s, joined_bytes = crowd.run([rank.begin for rank in ranks])
        joined_kib = resident_kib(server.pid) - before
        members_s, members_bytes = crowd.run([lambda r=r: r.go_on(read_table(r.result)) for r in ranks])
        tables = {rank.result for rank in ranks}
        began = time.perf_counter()
        assert [m.rank for m in unpack_members(tables.pop())] == list(range(size))
        assert not tables, "the ranks have different members"
        figures = {
            "ranks": size,
            "joined_s": joined_s,
            "joined_bytes_per_rank": joined_bytes / size,
            "members_s": members_s,
            "members_bytes_per_rank": members_bytes / size,
            "unpack_s": time.perf_counter() - began,
            "server_joined_kib_per_rank": joined_kib / size,
            "server_members_kib_per_rank": (resident_kib(server.pid) - before) / size,
            "connections_again": crowd.lost,
        }
        if with_exchange:
            record = bytes(64)
            took_s, moved = crowd.run(
                [lambda i=i, r=r: r.go_on(exchange("x/", i, size, record, 300.0)) for i, r in enumerate(ranks)]
            )
            assert all(rank.result == [record] * size for rank in ranks[:: max(1, size // 10)])
            figures |= {"exchange_s": took_s, "exchange_bytes_per_rank": moved / size}
        for rank in ranks:
            rank.close()
        return figures
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[10, 100, 1000, 10000])
    parser.add_argument(
        "--exchange-up-to", type=int, default=1000, help="maximum number of ranks for n * n records (default: 1000)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    for size in args.sizes:
        if size + 100 > most:
            raise SystemExit(
                f"{size} ranks need this number of open files, but the limit of this process is {most} (ulimit -Hn)"
            )
        rows.append(measure(size, size <= args.exchange_up_to))
        print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
    if args.json:
        cores = len(os.sched_getaffinity(0))
        args.json.write_text(json.dumps({"machine": platform.machine(), "cores": cores, "jobs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
