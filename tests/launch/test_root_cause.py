"""Selection of the failure that is the cause, and its description."""

from __future__ import annotations

import signal

import pytest

from allranks._base.errors import PeerLostError
from allranks.launch.agents.agent_command import last_message
from allranks.launch.policy.root_cause import SETTLE_S, Failure, RootCause, consequence
from allranks.launch.ranks.rank import is_echo
from allranks.launch.reporter import Reporter
from allranks.launch.runtime.summaries import describe_failure, describe_interrupt
from allranks.launch.spec.events import FailureReport


def raised(rank: int, at: float, echo: bool = False, title: str = "ValueError: x") -> Failure:
    return Failure(
        rank, 100 + rank, 1, at, FailureReport(1, title=title, text=f"Traceback\n{title}\n", echo=echo, at=at)
    )


def collect(*failures: Failure) -> RootCause:
    collected = RootCause()
    for failure in failures:
        collected.add(failure)
    return collected


def test_root_cause_without_failures_is_not_settled() -> None:
    assert RootCause().settles_at() is None


def test_failure_that_is_no_echo_settles_immediately() -> None:
    assert collect(raised(1, 5.0)).settles_at() == 5.0


def test_an_echo_waits_for_its_cause() -> None:
    collected = collect(raised(0, 5.0, echo=True))
    assert collected.settles_at() == 5.0 + SETTLE_S
    collected.add(Failure(1, 101, -signal.SIGKILL, 5.1))
    assert collected.settles_at() == 5.0
    assert collected.select().rank == 1


def test_first_echo_is_selected_if_all_failures_are_echoes() -> None:
    assert collect(raised(0, 5.1, echo=True), raised(1, 5.0, echo=True)).select().rank == 1


def test_first_failure_by_the_clocks_of_the_ranks_is_selected() -> None:
    assert collect(raised(0, 5.1), raised(1, 5.0)).select().rank == 1


def test_killed_rank_precedes_a_failure_at_the_same_time() -> None:
    assert collect(raised(0, 5.0), Failure(1, 101, -signal.SIGSEGV, 5.001)).select().rank == 1


def test_failure_report_takes_precedence_over_the_exit_that_follows() -> None:
    collected = collect(raised(0, 5.0, echo=True), Failure(0, 100, 1, 5.05))
    assert collected.failures[0].echo


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (3, "rank 1 (pid 7) exited with code 3", 3),
        (-9, "rank 1 (pid 7) was killed by SIGKILL", 137),
        (-11, "rank 1 (pid 7) was killed by SIGSEGV", 139),
        (-40, "rank 1 (pid 7) was killed by signal 40", 168),
    ],
)
def test_failure_has_a_description_and_an_exit_code(status: int, words: str, code: int) -> None:
    failure = Failure(1, 7, status, 0.0)
    assert str(failure) == words
    assert failure.exit_code == code


def test_failure_message_lists_other_ranks_that_failed_independently() -> None:
    failures = [raised(n, n) for n in range(3)] + [raised(3, 3.0, title="KeyError: 1"), raised(4, 4.0, echo=True)]
    assert describe_failure(failures[0], failures, [], Reporter()).decode().splitlines() == [
        "allranks run: rank 0 (pid 100) exited with code 1",
        "Traceback",
        "ValueError: x",
        "allranks run: also failed: ranks 1-2: ValueError: x",
        "allranks run: also failed: rank 3: KeyError: 1",
    ]
    assert b"also" not in describe_failure(failures[0], failures, [], Reporter(quiet=True))


def test_failure_message_contains_hidden_output() -> None:
    failure = Failure(0, 1, 3, 0.0)
    assert describe_failure(failure, [failure], [b"\xff"], Reporter()).endswith(b"code 3\n\xff")


def test_failure_message_suggests_a_reason_for_sigkill() -> None:
    failure = Failure(0, 1, -signal.SIGKILL, 0.0)
    said = b"allranks run: rank 0 (pid 1) was killed by SIGKILL (often the kernel, out of memory: check dmesg)"
    assert describe_failure(failure, [failure], [], Reporter()) == said
    assert b"memory" not in describe_failure(Failure(0, 1, -signal.SIGTERM, 0.0), [], [], Reporter())


def test_failure_message_lists_ranks_that_exited_before_an_echo() -> None:
    said = b"allranks run: ranks 1-2 had already exited with code 0"
    assert (
        describe_failure(raised(0, 1.0, echo=True), [], [], Reporter(quiet=True), left=[1, 2]).splitlines()[-1] == said
    )
    assert said not in describe_failure(raised(0, 1.0), [], [], Reporter(), left=[1, 2])


def test_interrupt_message_locates_each_rank() -> None:
    reports = [FailureReport(130, where="train.py:7 in step", interrupted=True)] * 2 + [
        FailureReport(1, text="Traceback\nOops\n")
    ]
    failures = [Failure(rank, rank, report.code, 0.0, report) for rank, report in enumerate(reports)]
    assert describe_interrupt("SIGINT", failures, Reporter()).decode().splitlines() == [
        "allranks run: stopped by SIGINT",
        "allranks run: rank 2 (pid 2) exited with code 1",
        "Traceback",
        "Oops",
        "allranks run: ranks 0-1: at train.py:7 in step",
    ]


def caught(outer: BaseException, cause: BaseException | None = None, context: BaseException | None = None) -> bool:
    outer.__cause__, outer.__context__ = cause, context
    return is_echo(outer)


def test_exception_caused_by_the_loss_of_a_peer_is_an_echo() -> None:
    lost = PeerLostError("rank 1 died", 1)
    assert is_echo(lost)
    assert caught(ValueError(), cause=lost)
    assert caught(SystemExit(3), context=lost)
    assert caught(ValueError(), cause=caught_by(lost))
    assert not caught(ValueError(), cause=KeyError())


def caught_by(error: BaseException) -> BaseException:
    middle = RuntimeError()
    middle.__context__ = error
    return middle


def test_circular_chain_of_exceptions_is_traversed_once() -> None:
    one, two = ValueError(), KeyError()
    one.__context__, two.__context__ = two, one
    assert not is_echo(one)


def test_exception_group_is_an_echo_if_all_its_exceptions_are() -> None:
    class Group(Exception):  # python 3.10 has no ExceptionGroup
        def __init__(self, *exceptions: Exception) -> None:
            self.exceptions = exceptions

    lost = PeerLostError("rank 1 died", 1)
    assert is_echo(Group(lost, lost))
    assert not is_echo(Group(lost, ValueError()))


def test_consequence_is_inserted_before_the_advice() -> None:
    assert consequence("node1: lost", "rank 2 terminated with it") == "node1: lost; rank 2 terminated with it"
    why = "node1: garbled output.\n  Make the shell silent."
    assert consequence(why, "continuing without it") == (
        "node1: garbled output; continuing without it\n  Make the shell silent."
    )


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("", ""),
        ("motd\n\nssh: connect to host a: refused\n", "ssh: connect to host a: refused"),
        (
            "Traceback\n  File x\nConfigError: no secret.\n  Set ALLRANKS_SECRET.\n",
            "ConfigError: no secret.\n  Set ALLRANKS_SECRET.",
        ),
        ("  indented only\n", "indented only"),
    ],
)
def test_last_message_has_cause_and_advice(stderr: str, message: str) -> None:
    assert last_message(stderr) == message
