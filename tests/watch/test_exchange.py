"""Requests between watchers, on real sockets: answers, silent and exited ranks, wrong tokens, foreign clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from allranks._trace.state import RankState
from allranks._watch import exchange
from allranks._watch.exchange import Collect, InspectProcess, Peer, RankAnswer, Request, Server

pytestmark = pytest.mark.quick

TOKEN = b"0123456789abcdef"
NAME = f"allranks-watch-test-{os.getpid()}"


def peer(rank: int, port: int) -> Peer:
    """Return a rank of another host, at a port of this one."""
    return Peer(rank, 1, "", "there", "other", "", ("127.0.0.1",), port)


def ask(
    peers: list[Peer], request: Request, token: bytes, timeout_s: float
) -> tuple[dict[int, RankAnswer], dict[int, str]]:
    return exchange.ask(peers, request, token, "m", timeout_s)


def respond(request: Request) -> RankAnswer:
    assert isinstance(request, Collect | InspectProcess)
    return RankAnswer(RankState(7, 1, "running", 0.0), place=f"{type(request).__name__}")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(NAME, ["127.0.0.1"], TOKEN, respond)
    yield made
    made.close()


def test_each_rank_answers(server: Server) -> None:
    peers = [peer(rank, server.port) for rank in range(300)]  # more than the connections at a time
    answers, problems = ask(peers, Collect(0, 10.0), TOKEN, 20.0)
    assert sorted(answers) == list(range(300))
    assert {answer.place for answer in answers.values()} == {"Collect"}
    assert problems == {}


def test_exited_rank_is_distinguished_from_a_silent_one(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
        closed.close()
        peers = [peer(0, server.port), peer(1, silent.getsockname()[1]), peer(2, free)]
        answers, problems = ask(peers, Collect(0, 10.0), TOKEN, 1.0)
    assert sorted(answers) == [0]
    assert problems == {1: "does not answer", 2: "has exited"}


def test_stopped_process_does_not_answer() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import test_exchange as t\n"
        "print(t.Server(t.NAME + 'x', ['127.0.0.1'], t.TOKEN, t.respond).port, flush=True); time.sleep(60)"
    )
    here = os.path.dirname(__file__)
    with subprocess.Popen([sys.executable, "-c", program, here], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert ask([peer(0, port)], Collect(0, 1.0), TOKEN, 10.0)[1] == {}
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # all threads have stopped
            assert ask([peer(0, port)], Collect(0, 1.0), TOKEN, 0.5)[1] == {0: "does not answer"}
        finally:
            process.kill()


def test_other_token_gets_no_answer(server: Server) -> None:
    answers, problems = ask([peer(0, server.port)], Collect(0, 1.0), b"x" * 16, 2.0)
    assert answers == {}
    assert problems == {0: "does not answer"}


def test_foreign_clients_do_not_end_the_server(server: Server) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(data)
    answers, _ = ask([peer(0, server.port)], Collect(0, 1.0), TOKEN, 10.0)
    assert 0 in answers


def test_unreachable_host_is_reported(server: Server) -> None:
    far = Peer(1, 1, "", "far", "other", "", ("2001:db8::1",), 9)  # for documentation: no network has it
    answers, problems = ask([peer(0, server.port), far], Collect(0, 1.0), TOKEN, 1.0)
    assert 0 in answers
    assert problems[1].startswith("cannot be reached")


def test_rank_of_the_same_host_is_asked_without_a_port() -> None:
    server = Server(NAME + "-local", [], TOKEN, respond)
    local, gone = (Peer(rank, 1, "", "here", "m", name) for rank, name in ((0, NAME + "-local"), (1, NAME + "-gone")))
    try:
        assert server.port == 0
        answers, problems = ask([local, gone], Collect(0, 1.0), TOKEN, 2.0)
    finally:
        server.close()
    assert sorted(answers) == [0]
    assert problems == {1: "has exited"}
