"""``--stats`` and ``--metrics``: statistics of the calls of a real job, even if ranks fail."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from allranks._trace.stats import GroupStats, RankStats, VerbStats
from allranks.launch.reporter import Reporter
from allranks.launch.runtime import statistics
from allranks.launch.runtime.statistics import Statistics
from support.launcher_process import Launcher

LATE = """
import sys, time, torch, allranks as dist
dist.init_process_group()
for _ in range(50):
    time.sleep(0.01 * (dist.get_rank() == 1))
    dist.all_reduce(torch.ones(10))
if "fail" in sys.argv and dist.get_rank() == 2:
    sys.exit(3)
if "kill" in sys.argv and dist.get_rank() == 2:
    import os
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("fail", 3), ("kill", 137)])
def test_statistics_name_the_rank_that_arrives_last(launcher: Launcher, end: str, code: int) -> None:
    done = launcher.run("-n", "3", "--stats", launcher.write(LATE), end, real_torch=True)
    assert done.code == code
    assert re.search(r"^allranks run: 3 ranks, [\d.]+ s, \d+% of it in calls$", done.err, re.M), done.err
    assert re.search(r"^  all_reduce +1[45]\d +5\.\d KiB ", done.err, re.M), done.err
    (rank,) = re.findall(
        r"^allranks run: warning: rank (\d) .*arrived last in \d+ of \d+ calls of group 'world'", done.err, re.M
    )
    assert rank == "1"


def test_statistics_are_not_printed_without_the_option(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", launcher.write(LATE), real_torch=True)
    assert (done.code, done.err) == (0, "")


def test_statistics_report_that_no_rank_has_made_a_call(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", "--stats", launcher.write(""))
    assert done.err == "allranks run: no rank has made a call\n"


def test_metrics_file_is_readable_by_prometheus(launcher: Launcher, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    file = tmp_path / "job.prom"
    file.write_text("old")
    done = launcher.run("-n", "3", "--metrics", str(file), launcher.write(LATE), real_torch=True)
    assert (done.code, done.err) == (0, "")
    families = {family.name: family for family in text_string_to_metric_families(file.read_text())}
    assert [sample.value for sample in families["allranks_calls"].samples if sample.labels["verb"] == "all_reduce"] == [
        50.0
    ] * 3
    assert file.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["job.prom", "script.py"]


def test_job_continues_if_the_metrics_file_cannot_be_written(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run(
        "-n", "2", "--metrics", str(tmp_path / "no" / "job.prom"), launcher.write(LATE), real_torch=True
    )
    assert done.code == 0
    assert (
        done.err
        == f"allranks run: --metrics {tmp_path}/no/job.prom: cannot write the file: No such file or directory\n"
    )


def test_metrics_file_is_written_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(statistics.time, "monotonic", lambda: clock[0])
    file = tmp_path / "job.prom"
    of_job = Statistics(False, file, Reporter())

    def report(calls: int) -> None:
        group = GroupStats("world", (0, 1), {"all_reduce": VerbStats(calls, 0, 0.0, 0.0)})
        of_job.take(RankStats(0, "here", 1.0, (group,)))
        of_job.write_if_due()

    of_job.write_if_due()
    assert not file.exists()  # no rank has reported yet
    for clock[0], calls, written in ((1.0, 3, 3), (2.0, 4, 3), (11.0, 5, 5)):
        report(calls)
        assert f'verb="all_reduce"}} {written}\n' in file.read_text()
    before = file.stat().st_ino
    clock[0] = 100.0
    of_job.write_if_due()
    assert file.stat().st_ino == before  # the data has not changed
    report(6)
    report(7)
    assert of_job.conclude() == b""
    assert 'verb="all_reduce"} 7\n' in file.read_text()


@pytest.mark.parametrize(
    ("seconds", "quiet", "told"), [(100.0, False, True), (100.0, True, False), (30.0, False, False)]
)
def test_straggler_of_a_long_job_is_named_without_the_stats_option(seconds: float, quiet: bool, told: bool) -> None:
    of_job = Statistics(False, None, Reporter("allranks run", quiet))
    for rank in range(3):
        world = GroupStats(
            "world", (0, 1, 2), {"all_reduce": VerbStats(1000, 4096, 20.0, 15.0)}, 1000, {2: (900, 12.0)}
        )
        of_job.take(RankStats(rank, "here", seconds, (world,)))
    line = of_job.conclude().decode()
    assert line.startswith("allranks run: warning: rank 2 (here) arrived last in 900 of 1,000 calls") == told
    assert bool(line) == told
