"""Agent that has connected to the launcher, tested from the launcher's end of the connection."""

from __future__ import annotations

import fcntl
import secrets
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from allranks._cluster.host import usable_cpus
from allranks._net.listener import Listener
from allranks.launch.agents.link import Link, to_agent
from allranks.launch.spec.events import Exited, Output
from allranks.launch.spec.messages import (
    AgentHello,
    AgentReady,
    EndAgent,
    Finish,
    Finished,
    Message,
    Prepare,
    StartRanks,
)
from allranks.launch.spec.options import RankOptions
from allranks.launch.spec.stdio import Stdio
from allranks.launch.spec.target import Target
from support.launcher_process import Launcher

PATIENCE_S = 30.0
PREPARE = Prepare(RankOptions(Target("command", "true")), 1, "", {}, b"", "", serves=True, spans=False)


@dataclass
class Leader:
    """Launcher's end of the connection.

    Attributes:
        link: connection to the agent.
        agent: process of the agent.
        heard: received messages that ``hear`` has not returned yet.
    """

    link: Link[Message]
    agent: subprocess.Popen[bytes]
    heard: list[Message] = field(default_factory=list)

    def hear(self, is_last: Callable[[Message], bool]) -> list[Message]:
        """Return the messages of the agent up to the first message for which ``is_last`` is true."""
        until = time.monotonic() + PATIENCE_S
        while True:
            for number, message in enumerate(self.heard, 1):
                if is_last(message):
                    said, self.heard = self.heard[:number], self.heard[number:]
                    return said
            self.heard += self.link.await_one(until)

    def start(self, prepare: Prepare) -> None:
        """Start a round of one rank."""
        self.link.send(prepare)
        self.hear(lambda message: isinstance(message, AgentReady))
        self.link.send(StartRanks(0, 1, 1, 0, 1, (), 29500, "run", 0, 0, 0, 1, (Stdio(),)))

    def finish(self) -> list[Message]:
        """End the round. Return its messages."""
        events = self.hear(lambda message: isinstance(message, Exited))
        self.link.send(Finish())
        return events + self.hear(lambda message: isinstance(message, Finished))


@pytest.fixture
def leader(launcher: Launcher) -> Iterator[Leader]:
    secret = secrets.token_hex(32)
    door = Listener(["127.0.0.1"], 0, secret.encode())
    launcher.program = ("allranks.launch.agents.serve",)
    agent = launcher.start("--dial", f"127.0.0.1:{door.port}", environ={"ALLRANKS_SECRET": secret})
    try:
        assert select.select([door.wake], [], [], PATIENCE_S)[0]
        (sock,) = door.take()
    finally:
        door.close()
    link = to_agent(fd := sock.detach(), fd)
    made = Leader(link, agent)
    made.hear(lambda message: isinstance(message, AgentHello))
    link.trust()
    yield made
    link.send(EndAgent(7))
    assert agent.wait(PATIENCE_S) == 7
    link.close()


def wait_until_full(fd: int) -> None:
    """Wait until an unread socket receives no more bytes."""
    before, now, until = -1, 0, time.monotonic() + PATIENCE_S
    while not before == now > 0:
        assert time.monotonic() < until
        time.sleep(0.2)
        before, (now,) = now, struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))


def output(events: list[Message]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Output))


def test_rank_that_writes_faster_than_the_launcher_reads_blocks(leader: Leader) -> None:
    """Fill the one socket on which the agent also receives requests."""
    size = 30_000_000  # more than the buffers of two sockets
    command = Target("command", "bash", ("-c", f"head -c {size} /dev/zero"))
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(command)))
    wait_until_full(leader.link.read_fd)
    events = leader.finish()
    assert len(output(events)) == size
    assert [event.status for event in events if isinstance(event, Exited)] == [0]


def test_number_of_threads_of_a_round_does_not_affect_the_next_round(leader: Leader, launcher: Launcher) -> None:
    script = launcher.write("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    target = Target("script", str(script))
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(target, threads=77)))
    assert output(leader.finish()) == b"77\n"
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(target)))
    assert output(leader.finish()) == b"%d\n" % usable_cpus()
