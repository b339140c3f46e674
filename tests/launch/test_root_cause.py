"""Which failure is the cause, and how it is told."""

from __future__ import annotations

import signal

import pytest

from allranks._base.errors import PeerLostError
from allranks.launch.agents.agent_command import last_message
from allranks.launch.policy.root_cause import SETTLE_S, Failure, RootCause, consequence
from allranks.launch.ranks.rank import is_echo
from allranks.launch.reporter import Reporter
from allranks.launch.runtime.last_words import describe_failure, describe_interrupt
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


def test_nothing_failed() -> None:
    assert RootCause().settles_at() is None


def test_a_failure_of_its_own_settles_at_once() -> None:
    assert collect(raised(1, 5.0)).settles_at() == 5.0


def test_an_echo_waits_for_its_cause() -> None:
    collected = collect(raised(0, 5.0, echo=True))
    assert collected.settles_at() == 5.0 + SETTLE_S
    collected.add(Failure(1, 101, -signal.SIGKILL, 5.1))
    assert collected.settles_at() == 5.0
    assert collected.select().rank == 1


def test_echoes_alone_the_first_is_named() -> None:
    assert collect(raised(0, 5.1, echo=True), raised(1, 5.0, echo=True)).select().rank == 1


def test_the_first_of_several_is_named_by_the_ranks_own_clocks() -> None:
    assert collect(raised(0, 5.1), raised(1, 5.0)).select().rank == 1


def test_a_killed_rank_precedes_what_was_seen_in_the_same_moment() -> None:
    assert collect(raised(0, 5.0), Failure(1, 101, -signal.SIGSEGV, 5.001)).select().rank == 1


def test_a_report_counts_for_more_than_the_exit_that_follows() -> None:
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
def test_a_failure_in_words(status: int, words: str, code: int) -> None:
    failure = Failure(1, 7, status, 0.0)
    assert str(failure) == words
    assert failure.exit_code == code


def test_the_last_words_name_others_that_failed_by_themselves() -> None:
    failures = [raised(n, n) for n in range(3)] + [raised(3, 3.0, title="KeyError: 1"), raised(4, 4.0, echo=True)]
    assert describe_failure(failures[0], failures, [], Reporter()).decode().splitlines() == [
        "allranks run: rank 0 (pid 100) exited with code 1",
        "Traceback",
        "ValueError: x",
        "allranks run: also failed: ranks 1-2: ValueError: x",
        "allranks run: also failed: rank 3: KeyError: 1",
    ]
    assert b"also" not in describe_failure(failures[0], failures, [], Reporter(quiet=True))


def test_the_last_words_show_output_that_was_hidden() -> None:
    failure = Failure(0, 1, 3, 0.0)
    assert describe_failure(failure, [failure], [b"\xff"], Reporter()).endswith(b"code 3\n\xff")


def test_the_last_words_explain_a_kill_that_nobody_sent() -> None:
    failure = Failure(0, 1, -signal.SIGKILL, 0.0)
    said = b"allranks run: rank 0 (pid 1) was killed by SIGKILL (often the kernel, out of memory)"
    assert describe_failure(failure, [failure], [], Reporter()) == said
    assert b"memory" not in describe_failure(Failure(0, 1, -signal.SIGTERM, 0.0), [], [], Reporter())


def test_the_last_words_name_who_left_before_an_echo() -> None:
    said = b"allranks run: ranks 1-2 had already exited with code 0"
    assert (
        describe_failure(raised(0, 1.0, echo=True), [], [], Reporter(quiet=True), left=[1, 2]).splitlines()[-1] == said
    )
    assert said not in describe_failure(raised(0, 1.0), [], [], Reporter(), left=[1, 2])


def test_an_interrupt_says_where_each_rank_was() -> None:
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


def test_what_is_an_echo() -> None:
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


def test_an_exception_that_refers_to_itself_is_looked_at_once() -> None:
    one, two = ValueError(), KeyError()
    one.__context__, two.__context__ = two, one
    assert not is_echo(one)


def test_a_group_is_an_echo_if_all_in_it_are() -> None:
    class Group(Exception):  # python 3.10 has no ExceptionGroup
        def __init__(self, *exceptions: Exception) -> None:
            self.exceptions = exceptions

    lost = PeerLostError("rank 1 died", 1)
    assert is_echo(Group(lost, lost))
    assert not is_echo(Group(lost, ValueError()))


def test_a_consequence_stands_before_the_advice() -> None:
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
