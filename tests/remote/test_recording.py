"""Recordings of the commands that workers execute: merged short commands, counts, and the timeline."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import allranks as ar
from allranks._trace import chrome, memory, page
from allranks._trace.files import open_trace
from allranks._trace.inspection import usage
from allranks._trace.matching import read_process
from allranks._trace.reader import COMMAND
from allranks._trace.stats import JobStats, RankStats, prometheus, rank_stats
from allranks._trace.timeline import read
from allranks.remote.worker.recording import ALONE_NS, TOGETHER_NS, CommandSlices
from support import warm

US = 1_000


@pytest.fixture
def slices():
    found = []
    return CommandSlices(lambda *each: found.append(each)), found


def test_long_command_has_its_own_slice(slices):
    put, found = slices
    put.add(1, 0, 5 * US)
    put.add(2, 5 * US, 5 * US + ALONE_NS)
    put.add(3, 30 * US, 31 * US)
    put.flush()
    assert found == [(1, 1, 0, 5 * US), (2, 1, 5 * US, 25 * US), (3, 1, 30 * US, 31 * US)]


def test_short_commands_share_a_slice_named_after_the_longest(slices):
    put, found = slices
    for number, took in enumerate((2, 9, 3)):
        put.add(number, 10 * number * US, (10 * number + took) * US)
    put.flush()
    put.flush()
    assert found == [(1, 3, 0, 23 * US)]


def test_pause_between_commands_starts_a_new_slice(slices):
    put, found = slices
    put.add(1, 0, 5 * US)
    put.add(1, 5 * US + ALONE_NS + 1, 10 * US + ALONE_NS)
    put.flush()
    assert [each[1] for each in found] == [1, 1]


def test_number_of_slices_is_bounded_for_many_short_commands(slices):
    put, found = slices
    for number in range(300_000):  # one second of commands
        put.add(1, 3333 * number, 3333 * (number + 1))
    put.flush()
    assert sum(each[1] for each in found) == 300_000
    assert len(found) <= 1.1e9 / TOGETHER_NS
    assert all(end - begin <= TOGETHER_NS for _, _, begin, end in found)


def test_recorded_part_of_a_program_is_in_the_timeline(mw, tmp_path):
    x = torch.ones(8, device="worker:1")
    y = torch.ones(500, 500, device="worker:2")
    with ar.trace.record(tmp_path / "traces") as file:
        for _ in range(1000):
            x = x + 1
        for _ in range(3):
            y = y @ y
        mw.remote(time.sleep, on=2)(0.03).result()
        x.to("worker:2")
        mw.synchronize()
    assert file == tmp_path / "traces" / "rank-0.trace"
    for _ in range(100):
        x = x + 1  # after the recording, so not recorded
    assert x.sum().item() == 8 * 1101
    timeline = read([tmp_path / "traces"])
    assert [process.rank for process in timeline.processes] == [0, 1, 2]
    rows = {(timeline.processes[row.process].rank, row.title) for row in timeline.rows}
    assert {(0, "waits for workers"), (1, "commands"), (2, "commands"), (1, "messages"), (2, "messages")} <= rows
    counts, seen = {1: 0, 2: 0}, []
    for each in timeline.slices:
        rank = timeline.processes[timeline.rows[each.row].process].rank
        if each.call.verb == COMMAND:
            counts[rank] += each.call.count
            seen.append((rank, each.title, each.end - each.begin))
    assert 1000 <= counts[1] <= 1030, counts
    assert 3 <= counts[2] <= 30, counts
    assert any(rank == 1 and title.startswith("aten::add") for rank, title, _ in seen)
    assert any(rank == 2 and title == "remote sleep" and took >= 30e6 for rank, title, took in seen), seen
    assert any(each.title == "a wait for worker 2" for each in timeline.slices)
    assert sum(arrow.kind == "message" for arrow in timeline.arrows) >= 1
    events = list(chrome.events(timeline))
    assert {"commands": 1} in [event.get("args") for event in events]
    page.write(timeline, tmp_path / "t.html")
    assert "commands of less than 20 us" in (tmp_path / "t.html").read_text()


def test_record_refuses_an_unusable_path_and_a_second_recording(mw, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ar.UsageError, match="cannot record"), ar.trace.record(tmp_path / "file"):
        pass
    with ar.trace.record(tmp_path / "traces"):
        with pytest.raises(ar.UsageError, match="already"), ar.trace.record(tmp_path / "more"):
            pass
    with ar.trace.record(tmp_path / "traces"):  # all previous recordings have ended
        mw.synchronize()
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"rank-{rank}{again}.trace" for rank in range(3) for again in ("", ".1")
    }


JOB = """
import torch, allranks as ar
mw = ar.init_master_worker()
x = torch.ones(8, device="worker:1")
for _ in range(5000):
    x = x + 1
assert x[0].item() == 5001
"""


def test_launcher_traces_and_counts_commands_of_a_job(tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["run", "--mode", "master", "-n", "3", "--trace", "traces", "--stats", "job.py"]
    done = warm.run([sys.executable, "-m", "allranks", *words], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    (commands,) = re.findall(r" rank 1 +([0-9,]+) ", done.stderr)
    assert int(commands.replace(",", "")) >= 5000, done.stderr
    process = read_process(0, "", open_trace(tmp_path / "traces" / "rank-1.trace"))
    assert sum(call.count for call in process.alone) >= 5000
    assert not any(call.verb == COMMAND for call in process.calls)
    assert len(process.alone) < 2500
    assert (tmp_path / "traces" / "rank-0.trace").exists()


def test_statistics_contain_the_commands_of_each_worker():
    stats = JobStats([RankStats(0, "a", 10.0), RankStats(1, "a", 10.0, (), 123_456, 4.0)])
    assert stats.lines() == [
        "2 ranks, 10.0 s, 0% of it in calls",
        "  worker  commands  seconds  of the time",
        "  rank 1   123,456     4.00        40.0%",
    ]
    assert json.loads(json.dumps(stats.as_json()))["workers"][0]["commands"] == 123_456
    assert 'allranks_commands_total{rank="1",host="a"} 123456' in prometheus(stats.workers)


def test_worker_counts_its_commands(mw):
    def recorded():
        reader = memory.reader()
        return usage(0, tuple(reader.groups().values())), rank_stats(1, reader, time.monotonic_ns())

    before, _ = mw.remote(recorded, on=1)().result()
    x = torch.ones(8, device="worker:1")
    for _ in range(500):
        x = x + 1
    after, stats = mw.remote(recorded, on=1)().result()
    assert 500 - 64 <= after.commands - before.commands <= 600
    assert stats.commands >= after.commands
    assert stats.command_seconds > 0
