"""Rendezvous of a thousand ranks: a short run of ``benchmarks/rendezvous.py``, which publishes the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from allranks._rendezvous import rendezvous

SRC = Path(rendezvous.__file__).parents[2]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rendezvous.py"


def test_bytes_per_rank_stay_constant_with_a_thousand_ranks(tmp_path: Path) -> None:
    """Each of 1000 ranks transfers about as many bytes as each of 10 ranks, except for the table of members.

    No rank receives a separate message about every other rank.
    """
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "10", "1000", "--exchange-up-to", "10", "--json", str(file)]
    subprocess.run(command, check=True, timeout=100, env={"PYTHONPATH": str(SRC)}, capture_output=True)
    ten, thousand = json.loads(file.read_text())["jobs"]
    assert thousand["joined_bytes_per_rank"] < 2 * ten["joined_bytes_per_rank"] + 1000
    assert thousand["members_bytes_per_rank"] < 10 * 1000
    assert thousand["server_members_kib_per_rank"] < 100
    assert thousand["joined_s"] < 60.0  # detects a hang only; the benchmark measures the time
