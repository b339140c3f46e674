"""The tutorial notebook runs in a real kernel: it trains, loses a worker, continues, and draws plots.

The notebook is stored without outputs. If ALLRANKS_TUTORIAL=FOLDER is set, the test writes the plots there for
inspection.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial" / "tutorial.ipynb"
PNG = b"\x89PNG\r\n"


def pictures(message: dict[str, Any]) -> list[bytes]:
    data = message["content"].get("data", {})
    return [base64.b64decode(data["image/png"])] if "image/png" in data else []


@pytest.mark.timeout(300)
def test_tutorial_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), stderr=subprocess.DEVNULL)
    printed, shown = "", [[] for _ in codes]
    try:
        for number, code in enumerate(codes):

            def hook(message: dict[str, Any], number: int = number) -> None:
                nonlocal printed
                if message["msg_type"] == "stream":
                    printed += message["content"]["text"]
                shown[number] += pictures(message)

            reply = client.execute_interactive(code, timeout=200, output_hook=hook)
            content = reply["content"]
            assert content["status"] == "ok", "\n".join(content["traceback"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert len(shown[3]) > 10  # The notebook redraws the loss while it trains.
    assert len(shown[4]) > 10
    assert all(each.startswith(PNG) for part in shown for each in part)
    assert (killed := re.search(r"worker 2 was process (\d+), and is process (\d+)", printed)), printed
    assert killed[1] != killed[2]
    assert (ended := re.search(r"(\d+)% of unseen digits .* from ([\d.]+) to ([\d.]+)", printed)), printed
    assert int(ended[1]) > 80
    assert float(ended[3]) < float(ended[2]) / 3
    assert len(shown[-1]) == 1  # the timeline
    if folder := os.environ.get("ALLRANKS_TUTORIAL"):
        Path(folder, "loss.png").write_bytes(shown[5][-1])
        Path(folder, "timeline.png").write_bytes(shown[-1][0])
        Path(folder, "printed.txt").write_text(printed)
