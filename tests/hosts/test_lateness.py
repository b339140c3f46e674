"""Last rank to arrive at a call on several hosts, and its delay. Each host has its own clock."""

import time

import pytest
import torch

import allranks as dist
from allranks._trace import memory
from hosts.test_hosts import on_hosts

STEPS = 10


@pytest.mark.parametrize(("places", "late"), [([0, 1], 1), ([0, 0, 1, 1], 2), ([0, 1, 1, 2], 0)], ids=str)
def test_late_rank_is_reported_on_all_hosts(four_hosts, places, late):
    def body():
        dist.barrier()
        time.sleep(0.2)  # the first round trips measure the offsets between the clocks
        before = memory.reader().groups()[1].late[late]
        for _ in range(STEPS):
            time.sleep(0.05 * (dist.get_rank() == late))
            dist.all_reduce(torch.ones(1))
        # its last phase within a host must not count as the time at which all ranks arrived
        dist.all_reduce(torch.ones(1 << 18))
        reader = memory.reader()
        group = reader.groups()[1]
        calls = [call for call in reader.calls() if call.group == 1 and not call.purpose][-STEPS - 1 : -1]
        return group.late[late] - before, [(c.last, c.entered_ns <= c.met_ns <= c.returned_ns) for c in calls]

    results = on_hosts(four_hosts, places, body)
    for lateness, calls in results:
        # On a busy machine another rank can arrive even later. Then all hosts report that rank.
        named = sum(last == late for last, _ in calls)
        assert STEPS - 3 <= named <= lateness.times <= named + 1
        assert 0.02 * named < lateness.seconds < STEPS
        assert all(within for _, within in calls)
    for lasts in zip(*([last for last, _ in calls] for _, calls in results), strict=True):
        assert len(set(lasts) - {-1}) <= 1


def test_incomplete_call_has_no_last_rank(four_hosts):
    """All ranks of this host have entered the call, but a rank of another host has not."""

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
