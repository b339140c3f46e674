"""Timelines: calls of several processes on one clock, the files drawn from them, and refused input."""

import gzip
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import defaultdict

import pytest
import torch

import allranks as dist
from allranks._trace import chrome, page
from allranks._trace.files import open_trace
from allranks._trace.matching import RecordedProcess, read_process
from allranks._trace.reader import RecordedCall, RecordedGroup, TraceError, TraceReader
from allranks._trace.timeline import build, read
from allranks.testing import run_ranks
from support.prompt import PROMPT_S

MS = 1_000_000
STEPS = """
import sys, time, torch, allranks as dist
dist.init_process_group()
rank = dist.get_rank()
for i in range(5):
    time.sleep(0.02 * (rank == 1))
    dist.all_reduce(torch.ones(4))
dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
"""


def call(index, verb, begin, end, **more):
    known = {
        "index": index, "group": 1, "verb": verb, "purpose": "", "number": index, "tag": 0, "dtype": "float32",
        "op": "", "count": 4, "peer": -1, "site": "", "entered_ns": begin, "met_ns": 0, "returned_ns": end, "last": -1,
        "outcome": "", "async_op": False, "awaited": False,
    }  # fmt: skip
    return RecordedCall(**{**known, **more})


def process(number, rank, calls, host="node0", clock=0, name="world", size=2, wall=10**18):
    group = RecordedGroup(1, name, "native", True, rank, size, tuple(range(size)), len(calls), 0, 0)
    return RecordedProcess(number, "", rank, size, 100 + rank, host, clock, wall, {1: group}, calls)


def wire(timeline):
    """Return the events after a round trip through JSON, as a reader of the file gets them."""
    return json.loads(json.dumps(list(chrome.events(timeline))))


def test_waits_and_messages_are_drawn_as_arrows():
    calls = [
        [call(1, "all_reduce", 1 * MS, 9 * MS), call(2, "send", 10 * MS, 11 * MS, number=0, peer=1, tag=3)],
        [call(1, "all_reduce", 5 * MS, 8 * MS), call(2, "recv", 12 * MS, 13 * MS, number=0, peer=0, tag=3)],
    ]
    found = build([process(rank, rank, calls[rank]) for rank in range(2)])
    assert [(s.title, s.begin, s.waited_until, s.end, s.last) for s in found.slices] == [
        ("all_reduce #1", 0, 4 * MS, 8 * MS, 1),
        ("send to rank 1", 9 * MS, 9 * MS, 10 * MS, -1),
        ("all_reduce #1", 4 * MS, 4 * MS, 7 * MS, 1),
        ("recv from rank 0", 11 * MS, 11 * MS, 12 * MS, -1),
    ]
    assert [(a.kind, a.source, a.source_ns, a.target, a.target_ns) for a in found.arrows] == [
        ("arrival", 2, 4 * MS, 0, 4 * MS),
        ("message", 1, 9 * MS, 3, 12 * MS),
    ]
    assert [(late.rank, late.times, late.waited) for late in found.late] == [(1, 1, 4 * MS)]
    assert (found.compared, found.error, found.end) == (1, 0.0, 12 * MS)


def test_clocks_of_hosts_are_aligned():
    chance = random.Random(1)
    ahead = 123_456_789_012_345
    calls = [[], []]
    for i in range(200):
        entered = [i * 10 * MS + chance.randrange(0, 3 * MS) for _ in range(2)]
        for rank in range(2):
            end = max(entered) + 5_000 + chance.randrange(0, 30_000)
            shift = ahead * rank
            calls[rank].append(call(i + 1, "barrier", entered[rank] + shift, end + shift))
    clocks = (calls[0][0].entered_ns, calls[1][0].entered_ns)
    hosts = [process(r, r, calls[r], host=f"node{r}", clock=clocks[r], wall=10**18 + r * 40 * MS) for r in range(2)]
    found = build(hosts)
    assert [clock.host for clock in found.clocks] == ["node0", "node1"]
    assert abs(found.clocks[1].added + ahead) <= found.clocks[1].error <= 50_000
    assert found.clocks[1].calls == 200
    assert found.error == found.clocks[1].error
    rows = defaultdict(list)
    for each in found.slices:
        rows[each.row].append(each)
    right = 0
    for one, other in zip(*rows.values(), strict=True):
        late = one.call.entered_ns + ahead - other.call.entered_ns
        right += one.last == (0 if late > 0 else 1)
        assert one.last in (-1, 0 if late > 0 else 1)  # the rank is right, or it is unknown (-1)
    assert right > 180
    stated = chrome.other_data(found)
    assert stated["error between any two ranks (us)"] == round(found.error / 1e3, 1)
    assert stated["clocks"][1]["host"] == "node1"


def test_unconnected_hosts_have_unknown_clock_error():
    alone = [process(r, r, [call(1, "barrier", 5 + r, 9 + r)], f"node{r}", r, f"g{r}", wall=10**18 + r) for r in (0, 1)]
    found = build(alone)
    assert (found.error, found.clocks[1].error) == (None, None)
    assert chrome.other_data(found)["clocks"][1]["error (us)"] == "not known"


def test_unfinished_call_is_drawn_to_the_end():
    there = [call(1, "barrier", 1 * MS, 0)], [call(1, "send", 5 * MS, 6 * MS, number=0, peer=0)]
    found = build([process(rank, rank, there[rank]) for rank in range(2)])
    hung = found.slices[0]
    assert (hung.ended, hung.end, hung.waited_until) == (False, 5 * MS, 5 * MS)
    assert chrome.slice_arguments(hung)["outcome"] == "not finished"


def test_restarted_rank_gets_separate_rows():
    before = [process(r, r, [call(1, "barrier", 10 + r, 20)]) for r in range(2)]
    later = [process(2 + r, r, [call(1, "barrier", 10**10 + 10 + r, 10**10 + 20)]) for r in (0, 1)]
    alone = process(4, 1, [call(1, "barrier", 5 * 10**9, 5 * 10**9 + 9)])
    found = build([*before, alone, *later])
    pairs = [(found.slices[a.source].call.entered_ns, found.slices[a.target].call.entered_ns) for a in found.arrows]
    assert pairs == [(11, 10), (10**10 + 11, 10**10 + 10)]
    names = [chrome.name_of(found, each) for each in found.processes]
    assert names == [f"rank {n} (node0)" for n in ("0", "0.1", "1", "1.1", "1.2")]


def test_messages_match_although_some_are_missing():
    sends = [call(i, "send", i * MS, i * MS + 1, number=0, peer=1) for i in range(1, 6)]
    recvs = [call(i, "recv", (i + 3) * MS, (i + 3) * MS + 1, number=0, peer=0) for i in range(1, 3)]
    late = process(1, 1, recvs, clock=3 * MS + 1, wall=10**18 + 3 * MS + 1)
    found = build([process(0, 0, sends), late])
    assert [(a.source_ns, a.target_ns) for a in found.arrows] == [(3 * MS, 3 * MS + 1), (4 * MS, 4 * MS + 1)]
    from_any = [call(1, "recv", 9 * MS, 9 * MS + 1, number=0), *recvs]
    assert build([process(0, 0, sends), process(1, 1, from_any)]).arrows == ()


def test_overlapping_calls_use_separate_lanes():
    calls = [call(1, "all_reduce", 10, 50), call(2, "all_reduce", 20, 40), call(3, "all_reduce", 45, 60)]
    found = build([process(0, 0, calls, size=1)])
    assert [(s.call.index, s.lane) for s in found.slices] == [(1, 0), (2, 1), (3, 1)]
    assert found.rows[0].lanes == 2


def test_last_s_limits_the_timeline():
    calls = [call(i, "barrier", i * MS, i * MS + 10) for i in range(1, 101)]
    found = build([process(0, 0, calls, size=1)], last_s=0.01)
    assert [s.call.index for s in found.slices] == list(range(91, 101))
    assert found.slices[0].begin >= 0


def test_events_nest_and_flows_have_both_ends(tmp_path):
    def body():
        with dist.trace.record(tmp_path):
            for i in range(10):
                works = [dist.all_reduce(torch.ones(1 << 12), async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
                dist.broadcast(torch.ones(3), i % 3)
                if dist.get_rank() < 2:
                    dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    run_ranks(3, body)
    found = wire(read([tmp_path]))
    assert len([e for e in found if e["ph"] == "X" and e["cat"] not in ("waiting", "met")]) == 3 * 40 + 20
    tracks = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        open_ = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1] <= event["ts"] + 1e-6:
                open_.pop()
            assert not open_ or event["ts"] + event["dur"] <= open_[-1] + 2e-3
            open_.append(event["ts"] + event["dur"])
    flows = defaultdict(dict)
    for event in found:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
            inside = [
                e
                for e in tracks[event["pid"], event["tid"]]
                if e["ts"] - 1e-3 <= event["ts"] <= e["ts"] + e["dur"] + 1e-3
            ]
            assert inside
    assert len([flow for flow in flows.values() if flow["s"]["name"] == "message"]) == 10
    assert len([flow for flow in flows.values() if flow["s"]["name"] == "arrival"]) > 20
    assert all(flow["s"]["ts"] <= flow["f"]["ts"] + 1e-3 for flow in flows.values())
    named = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert {name.split(" (")[0] for name in named} == {"rank 0", "rank 1", "rank 2"}
    assert {e["args"]["name"] for e in found if e["name"] == "thread_name"} >= {"world", "messages"}


def test_timeline_command_writes_all_formats(command, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    assert command("run", "-n", "2", "--trace", "traces", "steps.py").returncode == 0
    done = command(
        "trace", "timeline", "traces", *("-o", "a.json", "-o", "b.json.gz", "-o", "c.html", "-o", "d.png"), "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["ranks"], summary["calls"], summary["calls that are missing"]) == (2, 12, 0)
    assert summary["arrived last"][0]["rank"] == 1
    assert 60 < summary["arrived last"][0]["others waited (ms)"] < 1e3 * PROMPT_S
    whole = json.loads((tmp_path / "a.json").read_text())
    assert whole["otherData"] == summary
    assert whole == json.loads(gzip.decompress((tmp_path / "b.json.gz").read_bytes()))
    lines = {e["args"].get("line", "").rpartition("/")[2] for e in whole["traceEvents"] if e.get("cat") == "all_reduce"}
    assert "steps.py:7, shape (4,)" in lines
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert "http" not in (tmp_path / "c.html").read_text().replace("http-equiv", "")
    done = command("trace", "timeline", "traces/rank-1.trace")
    assert done.stdout.startswith("1 of 2 ranks, 6 calls in ")
    assert "no files of rank 0\n" in done.stdout


def test_record_command_runs_job_and_writes_timeline(command, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS + "sys.exit(3 * rank)\n")
    done = command("trace", "record", "-o", "out.html", "--", "-n", "2", "-q", "steps.py")
    assert done.returncode == 3
    assert "allranks trace record: 2 ranks, 12 calls in " in done.stderr
    assert "rank 1 arrived last in " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"steps.py", "out.html"}
    assert "all_reduce #5" in (tmp_path / "out.html").read_text()
    (tmp_path / "nothing.py").write_text("print(1)\n")
    done = command("trace", "record", "-o", "out.html", "--", "nothing.py")
    assert (done.returncode, done.stdout) == (2, "[0] 1\n")
    assert done.stderr.startswith("allranks trace record: error: no calls to draw: ")


def test_timeline_of_hanging_job_shows_open_call(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS + "if rank: print('here', flush=True); time.sleep(100)\ndist.barrier()\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    job = subprocess.Popen(
        [sys.executable, "-m", "allranks", "trace", "record", "-o", "out.json", "--", "-n", "2", "steps.py"],
        cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout.readline() == "[1] here\n"
    time.sleep(1.5)
    (folder,) = tmp_path.glob(".allranks-trace-*")
    found = read([folder])  # while the job runs
    hung = next(each for each in found.slices if not each.ended)
    assert hung.title == "barrier #6"
    assert hung.waited_until - hung.begin > 1e9
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    (hung,) = (e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["name"] == "barrier #6")
    assert hung["dur"] > 1e6
    assert hung["args"]["outcome"] == "not finished"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["record", "--", "x.py"], "-o FILE is missing"),
        (["record", "-o", "a.json"], "a program is missing: allranks trace record -o timeline.html -- -n 4 train.py"),
        (["record", "-o", "none/a.json", "--", "x.py"], "no such directory: "),
        (["timeline", "x", "-o", "a.bmpx"], "-o a.bmpx: unknown picture format 'bmpx'"),
        (["timeline", "x", "--profiler", "y"], "--profiler requires a timeline in *.json"),
        (["timeline", "none.trace"], "cannot read none.trace: No such file or directory"),
        (["timeline", "."], ". has no trace files (rank-N.trace)"),
        (["timeline", "text"], "text is not a trace of allranks"),
        (["timeline", "newer"], "newer was written by another version of allranks (layout 99, not 1)"),
        (["timeline", "cut"], "cut is damaged or truncated"),
        (["timeline", "unused"], "no calls to draw"),
    ],
)  # fmt: skip
def test_what_is_refused(command, tmp_path, words, says):
    from test_reader import recorded

    _, view = recorded()
    (tmp_path / "text").write_text("x" * 1000)
    (tmp_path / "unused").write_bytes(view)
    (tmp_path / "newer").write_bytes(bytes(view[:8]) + struct.pack("<I", 99) + bytes(view[12:]))
    (tmp_path / "cut").write_bytes(bytes(view[:1000]))
    done = command("trace", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"allranks trace {words[0]}: error: {says}")
    assert done.stderr.count("\n") <= 2  # what failed, and the action


def test_damaged_trace_is_drawn_or_refused(tmp_path):
    from test_reader import call as begin
    from test_reader import recorded

    recorder, view = recorded()
    group = recorder.add_group("world", "gloo", 0, [0, 1])
    for number in range(1, 9):
        begin(recorder, group, number, "train.py:1 in </script>").end(True)
    whole, chance = bytes(view), random.Random(1)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(6):
            at = chance.choice([chance.randrange(8, 4096), chance.randrange(len(data) - 512, len(data))])
            data[at] = chance.randrange(256)
        try:
            found = build([read_process(i, "", TraceReader(data)) for i in range(2)])
        except TraceError:
            continue
        wire(found)
        page.write(found, tmp_path / "page.html")


def test_page_works_in_a_browser(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing = "there is no chromium to show a page"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    calls = [
        [call(i, "all_reduce", (10 * i + r) * MS, (10 * i + 5) * MS, site="</script>") for i in range(1, 5)]
        for r in (0, 1)
    ]
    page.write(build([process(rank, rank, calls[rank]) for rank in range(2)]), tmp_path / "page.html")
    poke = """<script>
      const was = to - from;
      canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -50, clientX: 600, cancelable: true}));
      const zoomed = to - from < was;
      reset();
      const slice = timeline.slices[0], corner = canvas.getBoundingClientRect();
      canvas.dispatchEvent(new PointerEvent("pointermove",
        {clientX: x(slice[BEGIN] + slice[LENGTH] / 2), clientY: y(slice) + 5 + corner.top}));
      const seen = new Set(pen.getImageData(0, 0, canvas.width, canvas.height).data);
      document.title = [zoomed, seen.size > 5, family(0).length, tip.textContent].join("|");
    </script></body>"""
    text = (tmp_path / "page.html").read_text()
    (tmp_path / "poked.html").write_text(text.replace("</body>", poke))
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         f"file://{tmp_path}/poked.html"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith(
        "true|true|1|all_reduce #1rank 0 (node0)\nat 0 ns, took 5 ms\nwaited 1 ms for other ranks\n"
    )
    assert "arrived last: rank 1" in title


def test_torch_profile_is_merged(command, tmp_path):
    def body():
        with dist.trace.record(tmp_path / "traces"):
            from torch.profiler import ProfilerActivity, profile, record_function

            with profile(activities=[ProfilerActivity.CPU]) as found:
                for _ in range(3):
                    with record_function("around"):
                        dist.all_reduce(torch.ones(4))
                torch.ones(300, 300) @ torch.ones(300, 300)
            found.export_chrome_trace(str(tmp_path / f"profile-{dist.get_rank()}.json"))

    run_ranks(2, body)
    profiles = sorted(str(path) for path in tmp_path.glob("profile-*.json"))
    done = command("trace", "timeline", "traces", "-o", "all.json", "--profiler", *profiles)
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = [e for e in events if e.get("pid") == rank and e["ph"] == "X"]
        around = sorted((e for e in mine if e["name"] == "around"), key=lambda e: e["ts"])
        calls = sorted((e for e in mine if e["name"].startswith("all_reduce #")), key=lambda e: e["ts"])
        assert len(around) == len(calls) == 3
        for outer, inner in zip(around, calls, strict=True):  # both use one clock, within 50 us
            assert outer["ts"] - 50 <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 50
        assert any(e["name"] == "aten::mm" for e in mine)
    (tmp_path / "other.json").write_text('{"traceEvents": [{"ph": "X", "pid": 1, "ts": 1, "dur": 1}]}')
    for name, data, says in (
        ("other.json", None, "belongs to a process that is not in the timeline (pid 1)"),
        ("cut.json", (tmp_path / "profile-0.json").read_text()[:500], "it is not JSON, or it is truncated"),
        ("list.json", "[1, 2]", "it has no list of events"),
    ):
        if data is not None:
            (tmp_path / name).write_text(data)
        done = command("trace", "timeline", "traces", "-o", "all.json", "--profiler", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"allranks trace timeline: error: {name} ")
        assert says in done.stderr


def test_file_is_readable_while_it_is_written(tmp_path):
    def body():
        with dist.trace.record(tmp_path) as file:
            for _ in range(5):
                dist.barrier()
            return len(list(open_trace(file).calls()))

    assert run_ranks(1, body) == [5]
