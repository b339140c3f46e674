"""An agent that has dialled in, seen from the launcher's end of the connection."""

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
    """The launcher's end.

    Attributes:
        link: to the agent.
        agent: its process.
        heard: what it has said and nobody has asked for yet.
    """

    link: Link[Message]
    agent: subprocess.Popen[bytes]
    heard: list[Message] = field(default_factory=list)

    def hear(self, is_last: Callable[[Message], bool]) -> list[Message]:
        """What the agent says, up to the message that is asked for."""
        until = time.monotonic() + PATIENCE_S
        while True:
            for number, message in enumerate(self.heard, 1):
                if is_last(message):
                    said, self.heard = self.heard[:number], self.heard[number:]
                    return said
            self.heard += self.link.await_one(until)

    def start(self, prepare: Prepare) -> None:
        """Starts a round of one rank."""
        self.link.send(prepare)
        self.hear(lambda message: isinstance(message, AgentReady))
        self.link.send(StartRanks(0, 1, 1, 0, 1, (), 29500, "run", 0, 0, 0, 1, (Stdio(),)))

    def finish(self) -> list[Message]:
        """Ends it. Returns what was heard of it."""
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
    """Waits until no more bytes come to a socket that nobody reads."""
    before, now, until = -1, 0, time.monotonic() + PATIENCE_S
    while not before == now > 0:
        assert time.monotonic() < until
        time.sleep(0.2)
        before, (now,) = now, struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))


def output(events: list[Message]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Output))


def test_a_rank_that_writes_faster_than_the_launcher_reads_waits(leader: Leader) -> None:
    """On the one socket that the agent also listens to."""
    size = 30_000_000  # more than two sockets' buffers
    command = Target("command", "bash", ("-c", f"head -c {size} /dev/zero"))
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(command)))
    wait_until_full(leader.link.read_fd)
    events = leader.finish()
    assert len(output(events)) == size
    assert [event.status for event in events if isinstance(event, Exited)] == [0]


def test_threads_of_a_round_are_not_those_of_the_next(leader: Leader, launcher: Launcher) -> None:
    script = launcher.write("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    target = Target("script", str(script))
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(target, threads=77)))
    assert output(leader.finish()) == b"77\n"
    leader.start(msgspec.structs.replace(PREPARE, ranks=RankOptions(target)))
    assert output(leader.finish()) == b"%d\n" % usable_cpus()
