"""``allranks bench``: what it prints and writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allranks", "bench", *arguments], capture_output=True, text=True, check=False
    )


def test_against_gloo(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    done = bench(
        "all_reduce", "-n", "2", "--against", "gloo", "--min", "4", "--max", "64K", "--factor", "128", "--blocks", "3",
        "--json", str(figures), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, *rows = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    figures_of = ["us", "algbw", "busbw", "#wrong"]
    assert head.split() == ["bytes", "count", "type", "native:", *figures_of, "gloo:", *figures_of, "gloo/native"]
    assert [row.split()[:3] for row in rows] == [
        ["4", "1", "float32"],
        ["512", "128", "float32"],
        ["65536", "16384", "float32"],
    ]
    assert all(row.split()[6] == row.split()[10] == "0" for row in rows)
    assert "# wrong elements: 0" in done.stdout
    report = json.loads(figures.read_text())
    assert (report["verb"], report["ranks"], report["op"], report["dtype"]) == ("all_reduce", 2, "SUM", "float32")
    for row in report["rows"]:
        native, gloo = row["timings"]["native"], row["timings"]["gloo"]
        assert row["ratios"]["gloo"] == pytest.approx(gloo["median_s"] / native["median_s"])
        assert native["fastest_s"] <= native["median_s"] <= native["slowest_s"]
        assert native["algbw_gb_s"] == pytest.approx(row["nbytes"] / native["median_s"] / 1e9)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_alone_with_another_dtype() -> None:
    done = bench(
        "all_reduce", "-n", "3", "--max", "4K", "--factor", "32", "--blocks", "1", "--dtype", "bfloat16", "--op", "MAX"
    )
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout
    assert "# wrong elements: 0" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["all_redoce"],
        ["all_reduce", "--against", "carrier-pigeon"],
        ["all_reduce", "-n", "0"],
        ["all_reduce", "--max", "many"],
        ["all_reduce", "--dtype", "float31"],
        ["all_reduce", "--op", "AVG", "--dtype", "int32"],
        ["all_reduce", "--json", "/no/such/folder/figures.json"],
    ],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
