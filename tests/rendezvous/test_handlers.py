"""Rendezvous handlers that a program registers: the example of docs/extending.md with real ranks, and bad handlers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks import ConfigError, UsageError

ROOT = Path(__file__).parents[2]
RANK = """
import sys, torch
import allranks as dist
import note
folder, rank = sys.argv[1], int(sys.argv[2])
for turn in range(2):
    dist.init_process_group(init_method=f"note://localhost{folder}/note", rank=rank, world_size=2, timeout=60)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.barrier()
    print(dist.get_rank(), dist.get_world_size(), ones.tolist(), flush=True)
    dist.destroy_process_group()
    folder += "/again"
"""


def example() -> str:
    (text,) = re.findall(r"<!-- note.py -->\n```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    return str(text)


def test_documented_handler_joins_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "note.py").write_text(example())
    folder = tmp_path / "shared"
    (folder / "again").mkdir(parents=True)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "ALLRANKS_SECRET": "a secret of the tests"}
    command = [sys.executable, "-W", "error", "-c", RANK, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=100)
        assert (rank.returncode, out) == (0, f"{number} 2 [2.0, 2.0, 2.0]\n" * 2), err
    assert [path.name for path in folder.rglob("*")] == ["again"]


def test_handler_receives_same_url_and_timeout_as_in_torch() -> None:
    seen: list[Any] = []

    def handler(url: str, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        try:
            seen.append((url, timeout))
            yield allranks.HashStore(), 0, 1
        finally:
            seen.append("closed")

    allranks.register_rendezvous_handler("mine", handler)
    for arguments, url in (
        ({}, "mine://here/a"),
        ({"rank": 0, "world_size": 1}, "mine://here/a?rank=0&world_size=1"),
    ):
        allranks.init_process_group(init_method="mine://here/a", timeout=7, **arguments)
        assert (allranks.get_rank(), allranks.get_world_size()) == (0, 1)
        allranks.destroy_process_group()
        assert seen == [(url, timedelta(seconds=7)), "closed"]
        seen.clear()


def test_unknown_scheme_error_lists_known_schemes() -> None:
    with pytest.raises(ConfigError) as caught:
        allranks.init_process_group(init_method="mine://here")
    expected = "Expected one of env://, tcp://HOST:PORT, file:///PATH, or none."
    assert str(caught.value) == f"init_method='mine://here' is not known. {expected}"
    allranks.register_rendezvous_handler("other", lambda url, timeout: iter([(allranks.HashStore(), 0, 1)]))
    with pytest.raises(ConfigError, match=r"file:///PATH, other://, or none"):
        allranks.init_process_group(init_method="mine://here")


def test_scheme_can_be_registered_only_once() -> None:
    def handler(url: str, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        yield allranks.HashStore(), 0, 1

    allranks.register_rendezvous_handler("mine", handler)
    for scheme in ("mine", "env", "tcp", "file"):
        with pytest.raises(UsageError, match=f"{scheme}:// already has a handler"):
            allranks.register_rendezvous_handler(scheme, handler)
    for scheme in ("", "Mine", "mine://", 5):
        with pytest.raises(UsageError, match="is not a URL scheme"):
            allranks.register_rendezvous_handler(scheme, handler)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is None, not a function"):
        allranks.register_rendezvous_handler("none", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [(), [5], [("store", 0)], [(None, "0", 1)]])
def test_invalid_handler_result_raises_usage_error(given: Any) -> None:
    allranks.register_rendezvous_handler("mine", lambda url, timeout: iter(given))
    with pytest.raises(
        UsageError, match=r"'mine://x': the handler of mine:// returned .*yields \(store, rank, world_size\)"
    ):
        allranks.init_process_group(init_method="mine://x")
    assert not allranks.is_initialized()


def test_handler_rank_out_of_range_raises_config_error() -> None:
    allranks.register_rendezvous_handler("mine", lambda url, timeout: iter([(allranks.HashStore(), 2, 2)]))
    with pytest.raises(ConfigError, match="2 is out of range"):
        allranks.init_process_group(init_method="mine://x")


def test_handler_exception_propagates_to_caller() -> None:
    def handler(url: str, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        raise KeyError("mine")
        yield

    allranks.register_rendezvous_handler("mine", handler)
    with pytest.raises(KeyError, match="mine"):
        allranks.init_process_group(init_method="mine://x")
    assert not allranks.is_initialized()
