"""Recording of calls: the core writes it, and the reader returns its calls or refuses damaged data."""

import contextlib
import mmap
import os
import signal
import struct
import time

import pytest
import torch

import allranks as dist
from allranks import _core
from allranks._trace import memory
from allranks._trace.reader import DTYPES, OPS, PURPOSES, TraceError, TraceReader, memory_bytes
from allranks.testing import run_ranks
from support.prompt import PROMPT_S


def recorded(records=8, members=2):
    """Return a recorder and its memory."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, _core.trace_bytes(records, members))
    view = mmap.mmap(fd, 0)
    return _core.Recorder(fd, records, 1, 2, members, "here"), view


def call(recorder, group, number, site=""):
    return recorder.begin(group, 1, 10, 0, 5, -1, number, 20, site, True)


def test_open_and_finished_calls_are_read():
    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 1, [0, 1])
    running = call(recorder, group, 1, "train.py:12 in step")
    reader = TraceReader(view)
    (found,) = reader.open_calls()
    assert (found.title, found.dtype, found.op, found.count) == ("all_reduce #1", "float32", "SUM", 5)
    assert (found.site, found.async_op, found.returned_ns) == ("train.py:12 in step", True, 0)
    running.end(True)
    assert reader.open_calls() == []
    (found,) = reader.last(10)
    assert found.returned_ns >= found.entered_ns > 0
    assert found.outcome == ""
    call(recorder, group, 2).end(False)
    assert [c.outcome for c in reader.last(10)] == ["", "failed"]
    totals = reader.groups()[group].totals["all_reduce"]
    assert (totals.calls, totals.bytes) == (1, 20)  # only successful calls count


def test_only_newest_calls_are_kept():
    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 0, [0, 1])
    first = call(recorder, group, 1)
    for number in range(2, 21):
        call(recorder, group, number).end(True)
    first.end(True)  # a newer call has reused its slot
    reader = TraceReader(view)
    assert reader.count == 20
    assert [c.number for c in reader.calls()] == list(range(13, 21))
    assert [c.number for c in reader.last(3)] == [18, 19, 20]


def test_full_tables_of_groups_and_call_sites_are_handled():
    recorder, view = recorded()
    numbers = [recorder.add_group(f"g{i}", "native", 0, [3, 1]) for i in range(140)]
    assert numbers[:127] == list(range(1, 128))
    assert set(numbers[127:]) == {0}  # the table is full
    recorder.close_group(5)
    assert recorder.add_group("again", "native", 1, [3, 1]) == 5
    group = TraceReader(view).groups()[5]
    assert (group.name, group.rank, group.ranks, group.open) == ("again", 1, (3, 1), True)
    for number in range(3000):
        call(recorder, 5, number, f"train.py:{number} in step").end(True)
    assert all(c.site in ("", f"train.py:{c.number} in step") for c in TraceReader(view).calls())


def test_long_call_site_keeps_its_end():
    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 0, [0])
    call(recorder, group, 1, "ä" * 200 + "/train.py:1 in step").end(True)
    (found,) = TraceReader(view).calls()
    assert found.site.endswith("ä/train.py:1 in step")
    assert 100 < len(found.site.encode()) < 120


@pytest.mark.parametrize("data", [b"", b"x" * 5000, b"allrtrc\0", bytes(4096)], ids=["empty", "text", "short", "zeros"])
def test_non_trace_data_is_refused(data):
    with pytest.raises(TraceError, match=r"a\.trace is not a trace of allranks"):
        TraceReader(data, "a.trace")


def test_other_version_is_refused_and_truncated_data_is_read():
    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 0, [0, 1])
    for number in range(1, 6):
        call(recorder, group, number).end(True)
    whole = bytes(view)
    newer = whole[:8] + struct.pack("<I", 2) + whole[12:]
    with pytest.raises(TraceError, match=r"another version of allranks \(layout 2, not 1\)"):
        TraceReader(newer, "a.trace")
    for size in range(0, len(whole), 997):
        try:
            read = list(TraceReader(whole[:size]).calls())
        except TraceError:
            continue
        assert [c.number for c in read] == list(range(1, len(read) + 1))  # the calls before the truncation are complete


def test_damaged_data_is_refused_or_read():
    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 0, [0, 1])
    for number in range(1, 6):
        call(recorder, group, number, "train.py:1 in step").end(True)
    whole = bytes(view)
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        data = bytearray(whole)
        for at in torch.randint(8, 4096 + 512, (4,), generator=generator).tolist():
            data[at % len(data)] = int(torch.randint(256, (1,), generator=generator))
        with contextlib.suppress(TraceError):
            reader = TraceReader(data)
            list(reader.calls())
            reader.groups()


@pytest.mark.parametrize("members", [1, 2, 64, 1000, 5000])
def test_memory_sizes_match_the_core(members):
    for records in (8, memory.RECORDS):
        assert memory_bytes(records, members) == _core.trace_bytes(records, members)


def test_names_match_the_core():
    assert {name: DTYPES.index(name) for name in DTYPES} == _core.DTYPES
    assert {name: OPS.index(name) for name in OPS} == _core.REDUCE_OPS
    assert set(PURPOSES[1:]) == _core.PURPOSES


def test_ranks_record_their_calls():
    def body():
        rank = dist.get_rank()
        for _ in range(3):
            dist.all_reduce(torch.ones(2, 3))
        time.sleep(0.2 * (rank == 1))
        dist.barrier()
        work = dist.isend(torch.ones(7), 1, tag=5) if rank == 0 else dist.irecv(torch.ones(7), 0, tag=5)
        work.wait()
        reader = memory.reader()
        group = reader.groups()[1]
        calls = list(reader.calls())
        return group, [(c.title, c.count, c.tag, c.last, c.returned_ns > 0, c.met_ns > 0, c.site) for c in calls]

    results = run_ranks(2, body)
    for rank, (group, calls) in enumerate(results):
        assert (group.name, group.engine, group.rank, group.ranks) == ("world", "native", rank, (0, 1))
        assert [c[:2] for c in calls[:4]] == [(f"all_reduce #{n}", 6) for n in (1, 2, 3)] + [("barrier #4", 0)]
        assert calls[3][3] == 1  # rank 1 arrived last
        assert calls[4][:3] == (("send to 1", "recv from 0")[rank], 7, 5)
        assert all(ended for *_, ended, _, _ in calls)
        assert all(met for *_, met, _ in calls[:4])
        assert group.totals["all_reduce"].calls == 3
        assert group.totals["all_reduce"].bytes == 72
        assert group.late[1].times + group.late[0].times == group.compared == 4
        assert 0.15 < group.late[1].seconds < PROMPT_S
    assert results[0][0].totals["barrier"].waiting > 0.15
    assert "test_reader.py" in results[0][1][3][6]  # the call site is recorded because the call took long


def test_memory_of_killed_rank_is_readable():
    fd = memory.create_memory(2)

    path = f"/proc/{os.getpid()}/fd/{fd}"

    def body():
        if os.environ["RANK"] == "0":
            os.environ[memory.MEMORY] = path
        dist.init_process_group()
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(2, body, init=False, may_die=(0,))
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        (call,) = (c for c in TraceReader(bytes(view)).calls() if not c.purpose)
    assert call.title == "all_reduce #1"
    os.close(fd)


def test_forked_child_records_nothing():
    def body():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if memory.reader() is None else 1)
        return os.waitpid(pid, 0)[1]

    assert run_ranks(2, body) == [0, 0]


def test_recording_can_be_disabled():
    def body():
        dist.all_reduce(torch.ones(2))
        return memory.reader() is None, dist.stats().calls

    assert run_ranks(2, body, env={memory.RECORD_SWITCH: "0"}) == [(True, 1)] * 2


def test_single_rank_is_never_late():
    def body():
        dist.all_reduce(torch.ones(2))
        group = memory.reader().groups()[1]
        return group.compared, group.late[0].times

    assert run_ranks(1, body) == [(0, 0)]
