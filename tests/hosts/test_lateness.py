"""Who came last to a call of ranks on several hosts, and how late: each host has a clock of its own."""

import time

import pytest
import torch

import allranks as dist
from allranks._trace import memory
from hosts.test_hosts import on_hosts

STEPS = 10


@pytest.mark.parametrize(("places", "late"), [([0, 1], 1), ([0, 0, 1, 1], 2), ([0, 1, 1, 2], 0)], ids=str)
def test_a_rank_that_is_late_is_named_on_all_hosts(four_hosts, places, late):
    def body():
        dist.barrier()
        time.sleep(0.2)  # the first round trips show how far the clocks are apart
        before = memory.reader().groups()[1].late[late]
        for _ in range(STEPS):
            time.sleep(0.05 * (dist.get_rank() == late))
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1 << 18))  # the ranks of a host meet once more: that is not when all had come
        reader = memory.reader()
        group = reader.groups()[1]
        calls = [call for call in reader.calls() if call.group == 1 and not call.purpose][-STEPS - 1 : -1]
        return group.late[late] - before, [(c.last, c.entered_ns <= c.met_ns <= c.returned_ns) for c in calls]

    results = on_hosts(four_hosts, places, body)
    for lateness, calls in results:
        # On a busy machine another rank may be later still. Then that is what all hosts find.
        named = sum(last == late for last, _ in calls)
        assert STEPS - 3 <= named <= lateness.times <= named + 1
        assert 0.02 * named < lateness.seconds < STEPS
        assert all(within for _, within in calls)
    for lasts in zip(*([last for last, _ in calls] for _, calls in results), strict=True):
        assert len(set(lasts) - {-1}) <= 1


def test_a_rank_that_does_not_come_was_not_waited_for_by_the_last_of_its_host(four_hosts):
    """A call that another host's rank has not begun has not been met, whatever the ranks here have done."""

    def body():
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(3)
            return None
        with pytest.raises(dist.TimeoutError):
            dist.all_reduce(torch.ones(1))
        call = memory.reader().last(1)[0]
        return call.verb, call.outcome, call.last, call.met_ns

    results = on_hosts(four_hosts, [0, 0, 1], body, timeout_s=1.0)
    assert results[:2] == [("all_reduce", "timeout", -1, 0)] * 2
