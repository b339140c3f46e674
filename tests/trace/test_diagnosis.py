"""Diagnosis of waits: which rank waits for which, from constructed states, and the text of the reports."""

import msgspec
import pytest

from allranks._trace.diagnosis import diagnose
from allranks._trace.kernel import KernelWait
from allranks._trace.state import CallState, GroupState, RankState

WORLD = (0, 1, 2, 3)


def call(number=42, verb="all_reduce", peer=-1, group="world", ranks=WORLD, site="train.py:88", seconds=10.0, **more):
    title = f"{verb} #{number}"
    if verb in ("send", "recv"):
        number, title = 0, f"{verb} {'to' if verb == 'send' else 'from'} {f'rank {peer}' if peer >= 0 else 'any rank'}"
    fields = {"waits": True, "ended": False, "outcome": "", "last": -1, "met": False, "tag": 0} | more
    return CallState(
        index=1, title=title, verb=verb, group=group, ranks=ranks, number=number, dtype="float32", count=4, peer=peer,
        site=site, began=0.0, seconds=seconds, **fields,
    )  # fmt: skip


def rank(number, waits=None, done=41, process="sleeping", groups=(), **more):
    begun = waits.number if waits is not None and waits.group == "world" and waits.number else done
    return RankState(
        number, 100 + number, process, 0.0, True, more.pop("kernel", KernelWait()), (waits,) if waits else (),
        more.pop("last", call(begun, ended=True, waits=False)),
        groups=(GroupState("world", WORLD, "native", begun, True), *groups), **more,
    )  # fmt: skip


def lines(*states, hosts=None, places=None):
    return diagnose(states).lines(hosts, places)


def test_late_rank_is_reported_with_its_state():
    waiting = [rank(r, call(seconds=10 + r)) for r in range(3)]
    assert lines(*waiting, rank(3, process="running"), places={3: "data.py:31 in load"}) == [
        "ranks 0-2 have waited 12 s in all_reduce #42 (train.py:88) for rank 3, which is at data.py:31 in load; its "
        "process is running"
    ]
    assert lines(*waiting, rank(3, process="stopped"), hosts={3: "node1"}) == [
        "ranks 0-2 have waited 12 s in all_reduce #42 (train.py:88) for rank 3 (node1), whose process is stopped, "
        "after all_reduce #41 (train.py:88)"
    ]
    gone = rank(3, process="gone", last=call(41, site=""), near="train.py:80")
    assert lines(*waiting, gone)[0].endswith("whose process has exited, after all_reduce #41 (near train.py:80)")
    assert lines(*waiting, RankState(3, 1, "in uninterruptible sleep", 0.0))[0].endswith(
        "for rank 3, whose process is in uninterruptible sleep"
    )
    assert lines(*waiting)[0].endswith("for rank 3, whose state is not known")


def test_several_late_ranks_are_reported_in_one_line():
    said = lines(rank(0, call()), *map(rank, (1, 2, 3)), places={r: f"data.py:{r} in load" for r in (1, 2, 3)})
    assert said == [
        "rank 0 has waited 10 s in all_reduce #42 (train.py:88) for rank 1, which is at data.py:1 in load; its process "
        "is sleeping; rank 2, which is at data.py:2 in load; its process is sleeping; rank 3, which is at data.py:3 in "
        "load; its process is sleeping"
    ]


def test_chain_of_waits_ends_at_rank_that_does_not_wait():
    pair = (1, 2)
    states = [
        rank(0, call()),
        rank(1, call(7, "broadcast", group="tp", ranks=pair, site="tp.py:3"), groups=()),
        rank(2, call(verb="recv", peer=3, site="pipe.py:5")),
        rank(3),
    ]
    found = diagnose(states)
    assert found.late == (3,)
    assert found.circles == ()
    assert found.waiting_for(3) == [0, 1, 2]
    # The line names a call that waits for rank 3 directly.
    assert found.lines()[0].startswith("ranks 0-2 have waited 10 s in all_reduce #42 (train.py:88) for rank 3, whose")


def test_two_ranks_that_receive_from_each_other_are_a_deadlock():
    states = [rank(0, call(verb="recv", peer=1, site="a.py:1")), rank(1, call(verb="recv", peer=0, site="a.py:2"))]
    assert lines(*states) == [
        "deadlock: ranks 0-1 have waited for each other for 10 s: rank 0 in recv from rank 1 (a.py:1) for rank 1; "
        "rank 1 in recv from rank 0 (a.py:2) for rank 0"
    ]


def test_matched_message_is_not_a_wait():
    """If both sides have called, the data is in transit, for any time.

    A call with another tag, direction or group is not the other side.
    """

    def said(process="running", source=0, **more):
        receives = rank(1, call(verb="recv", peer=source, **more), process=process)
        return lines(rank(0, call(verb="send", peer=1)), receives)

    assert said() == []
    assert said(source=-1) == []
    assert said(waits=False) == []  # irecv: the rank computes while the message is in transit
    assert said("stopped")[0].startswith("rank 0 has waited 10 s in send to rank 1 (train.py:88) for rank 1, whose")
    for other in ({"tag": 7}, {"group": "tp"}):
        assert said(**other)[0].startswith("deadlock: ranks 0-1")
    both = [rank(r, call(verb="send", peer=1 - r)) for r in range(2)]
    assert lines(*both)[0].startswith("deadlock: ranks 0-1")
    late = rank(1, call(verb="recv", peer=0, ended=True, waits=False))
    assert lines(rank(0, call(verb="send", peer=1)), late)[0].startswith("rank 0 has waited 10 s in send to rank 1")


def test_groups_called_in_different_order_are_a_deadlock():
    a = GroupState("a", (0, 1), "native", 1, True)
    b = GroupState("b", (0, 1), "native", 1, True)
    first = rank(0, call(1, group="a", ranks=(0, 1)), groups=(a, msgspec.structs.replace(b, number=0)))
    second = rank(1, call(1, group="b", ranks=(0, 1)), groups=(b, msgspec.structs.replace(a, number=0)))
    found = diagnose([first, second])
    assert found.circles == ((0, 1),)
    assert found.late == ()
    assert "all_reduce #1 of group 'a'" in found.lines()[0]


def test_cycle_of_three_excludes_rank_that_waits_for_it():
    states = [rank(r, call(verb="recv", peer=(r + 1) % 3)) for r in range(3)]
    found = diagnose([*states, rank(3, call(verb="recv", peer=0))])
    assert found.circles == ((0, 1, 2),)
    assert found.late == ()


def test_rank_stopped_inside_a_call_is_late():
    states = [rank(r, call()) for r in range(3)]
    assert diagnose([*states, rank(3, call())]).late == ()  # all ranks have entered the call, so data is in transit
    assert diagnose([*states, rank(3, call(), process="stopped")]).late == (3,)


def test_slow_transfer_and_unawaited_calls_are_not_waits():
    assert lines(*(rank(r, call(waits=False)) for r in range(3)), rank(3)) == []
    assert lines(*(rank(r, call(met=True)) for r in range(4))) == []


def test_receive_from_any_rank_waits_for_all_others():
    found = diagnose([rank(0, call(verb="recv")), rank(1), rank(2), rank(3)])
    assert found.late == (1, 2, 3)


@pytest.mark.parametrize(("seconds", "words"), [(10.4, "10 s"), (119, "119 s"), (301, "5 min"), (9000, "2.5 h")])
def test_durations_are_formatted(seconds, words):
    assert f"have waited {words} in" in lines(*(rank(r, call(seconds=seconds)) for r in range(3)), rank(3))[0]


def test_key_does_not_depend_on_duration():
    def found(seconds):
        return diagnose([*(rank(r, call(seconds=seconds)) for r in range(3)), rank(3)])

    assert found(10).key() == found(60).key()
    assert found(10).key() != diagnose([rank(0, call()), rank(3)]).key()


def test_wait_of_a_late_rank_in_the_kernel_is_reported():
    late = rank(3, kernel=KernelWait("read", "/mnt/data", 5, "folio_wait_bit"))
    assert lines(rank(0, call()), late, places={3: "data.py:2 in load"})[0].endswith(
        "its process is sleeping, blocked in read of /mnt/data (kernel: folio_wait_bit)"
    )
    for kernel, phrase in (
        (KernelWait("futex", channel="futex_do_wait"), "sleeping, blocked in a lock"),
        (KernelWait("clock_nanosleep"), "sleeping, in a timer"),
        (KernelWait("epoll_wait"), "sleeping, waiting for input"),
        (KernelWait(), "sleeping"),
    ):
        assert lines(rank(0, call()), rank(3, kernel=kernel), places={3: "a.py:1 in f"})[0].endswith(phrase)


def test_rank_that_cannot_report_its_state_is_reported_with_the_reason():
    late = RankState(3, 103, "running", 0.0)
    said = diagnose([*(rank(r, call()) for r in range(3)), late]).lines(
        problems={3: "does not answer"}, places={3: "a.py:1 in f"}
    )
    assert said[0].endswith("for rank 3, which does not answer, is at a.py:1 in f; its process is running")
    assert diagnose([rank(0, call())]).lines(problems={1: "is not started"})[0].startswith("rank 0 has waited 10 s")


def test_different_calls_under_one_number_are_out_of_step():
    odd = call(verb="barrier", site="train.py:99")
    said = lines(*(rank(r, call()) for r in range(3)), rank(3, odd))
    assert said == [
        "ranks 0-3 made different calls as collective 42 of the group: ranks 0-2 are in all_reduce #42 (train.py:88) of"
        " 4 float32; rank 3 is in barrier #42 (train.py:99) of 4 float32. Rank 3 differs from most ranks. All ranks"
        " must make the same calls in the same order."
    ]


def test_ended_call_with_another_verb_or_size_is_out_of_step():
    for verb, count in (("broadcast", 4), ("all_reduce", 5)):
        ended = msgspec.structs.replace(call(verb=verb, ended=True, waits=False), count=count)
        said = lines(rank(0, call()), rank(1, done=42, recent=(ended,)))
        assert said[0].startswith("ranks 0-1 ")
        assert f"rank 1 is in {verb} #42 (train.py:88) of {count} float32" in said[0]
        assert "differs" not in said[0]  # neither rank has the majority


def test_rank_out_of_step_is_not_reported_as_late_again():
    # Rank 1 is still in call 42, which the others have passed with another size.
    passed = call(ended=True, waits=False)
    behind = msgspec.structs.replace(call(), count=5)
    ahead = [rank(r, call(43), recent=(passed,)) for r in (0, 2, 3)]
    said = lines(*ahead, rank(1, behind))
    assert len(said) == 1
    assert "Rank 1 differs from most ranks." in said[0]


def test_root_that_is_unknown_on_one_rank_is_not_out_of_step():
    first, second = call(verb="broadcast", peer=-1), call(verb="broadcast", peer=0)
    assert diagnose([rank(0, first), rank(1, second)]).mismatches == ()
    other = call(verb="broadcast", peer=1)
    assert [m.odd for m in diagnose([rank(0, second), rank(1, other), rank(2, second)]).mismatches] == [(1,)]
