"""Engines of installed packages: refused packages, their error messages, and no effect on other engines."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import allranks as dist
from allranks._engines import check_backend, engines_of, make_engine, meetings, moves, registry
from allranks._engines.spec import RECORD_BYTES
from allranks._rendezvous.rendezvous import Member
from allranks.engines import EngineSpec, GroupSetup
from allranks.tools.doctor import software
from support.own_engine import brought

SPEC = "from allranks.engines import EngineSpec\nENGINE = EngineSpec({name!r}, make=None, interface={interface})\n"
HERE = re.escape(dist.__version__)


def spec(name: str = "mine", interface: int = 1) -> str:
    return SPEC.format(name=name, interface=interface)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_loaded", {})
    return tmp_path


WRONG = {
    "too new": (
        "early", spec(interface=7), "mine = early:ENGINE",
        rf"backend 'mine': early 1.0 requires version 7 of the engine interface, but this allranks \({HERE}\) supports "
        r"version 1\.\n  Install a newer allranks, or an older early",
    ),
    "too old": (
        "late", spec(interface=0), "mine = late:ENGINE",
        r"late 1.0 requires version 0 .* supports version 1\.\n  Install a newer late, or an older allranks",
    ),
    "cannot be imported": (
        "broken", "import nothing_like_it\n", "mine = broken:ENGINE",
        r"broken 1.0 cannot be loaded \(broken:ENGINE\): ModuleNotFoundError: No module named 'nothing_like_it'\.\n  "
        rf"Install a release that supports this allranks \({HERE}, engine interface version 1\), or uninstall it",
    ),
    "names nothing": ("empty", "", "mine = empty:ENGINE", r"empty 1.0 cannot be loaded .*AttributeError"),
    "names something else": (
        "other", "ENGINE = 5\n", "mine = other:ENGINE", r"other 1.0 names other:ENGINE, which is a int\. Expected"
    ),
    "has another name": (
        "twofold", spec("yours"), "mine = twofold:ENGINE", r"twofold 1.0 names .* name is 'yours'\. Expected 'mine'"
    ),
    "cannot report": (
        "unsure", spec().replace("interface", "available=lambda: 1 / 0, interface"), "mine = unsure:ENGINE",
        r"unsure 1.0 cannot report whether it is available: ZeroDivisionError",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "text", "point", "error"), WRONG.values(), ids=WRONG)
def test_invalid_engine_package_is_named(site: Path, module: str, text: str, point: str, error: str) -> None:
    brought(site, module, text, point)
    with pytest.raises(dist.ConfigError, match=error):
        dist.init_process_group("mine")
    assert not dist.is_backend_available("mine")
    assert dist.is_backend_available("native")
    finding = software.engines()
    assert finding.verdict == "warn"
    assert "native, tcp" in finding.measured
    assert f"{module} 1.0" in finding.advice


def test_packages_cannot_replace_built_in_engine_names(site: Path) -> None:
    brought(site, "clash", spec("native"), "native = clash:ENGINE", "allranks = clash:ENGINE")
    assert registry.find("native") is registry.BUILT_IN["native"]
    finding = software.engines()
    assert "backend 'native': clash 1.0 provides an engine of this name, which allranks reserves" in finding.advice
    assert "backend 'allranks': clash 1.0 provides" in finding.advice


def test_two_packages_with_the_same_engine_name_are_refused(site: Path) -> None:
    for module in ("one", "two"):
        brought(site, module, spec(), f"mine = {module}:ENGINE")
    with pytest.raises(dist.ConfigError, match=r"(one 1.0 and two|two 1.0 and one) 1.0 provide an engine of this name"):
        dist.init_process_group("mine")


def test_invalid_engine_name_is_refused(site: Path) -> None:
    brought(site, "odd", spec("My-Engine"), "My-Engine = odd:ENGINE")
    with pytest.raises(
        dist.ConfigError, match=r"odd 1.0 provides an engine with an invalid name\. Expected lowercase letters"
    ):
        dist.init_process_group("My-Engine")


def test_unavailable_engine_reports_the_missing_requirement(site: Path) -> None:
    text = spec().replace("interface", "available=lambda: False, missing='needs a wire', interface")
    brought(site, "wired", text, "mine = wired:ENGINE")
    with pytest.raises(dist.ConfigError, match=r"backend 'mine' needs a wire\.\n  Pass backend='native'"):
        dist.init_process_group("mine")
    finding = software.engines()
    assert finding.verdict == "ok"
    assert "mine" in finding.measured.partition("not available: ")[2]


def test_doctor_lists_installed_engines(site: Path) -> None:
    brought(site, "good", spec(), "mine = good:ENGINE", version="2.5")
    assert "mine (good 2.5)" in software.engines().measured


def test_unknown_backend_error_lists_installed_engines(site: Path) -> None:
    brought(site, "good", spec(), "mine = good:ENGINE")
    with pytest.raises(dist.ConfigError, match=r"unknown backend 'nine': expected 'native', .*'nccl', 'mine'"):
        dist.init_process_group("nine")


def test_built_in_engines_read_no_entry_points(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(registry, "_entry_points", never)
    dist.init_process_group("native")
    dist.new_group(backend="gloo")
    dist.destroy_process_group()
    assert registry.is_known("nccl")
    assert registry.is_known("allranks")


def test_engines_are_listed_without_torch() -> None:
    program = (
        "import json, sys\n"
        "from allranks._engines import registry\n"
        "from allranks.engines import EngineSpec\n"
        "print(json.dumps([registry.names(), 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, torch = json.loads(done.stdout)
    assert names[:5] == ["native", "tcp", "gloo", "mpi", "nccl"]
    assert not torch


def make(monkeypatch: pytest.MonkeyPatch, calls: Sequence[bytes], size: int) -> tuple[list[bytes], list[list[bytes]]]:
    """Create an engine that exchanges these records. Return the records that it sends and those that it receives."""
    seen: list[bytes] = []
    got: list[list[bytes]] = []

    def exchange(record: bytes) -> list[bytes]:
        seen.append(record)
        return [record] * size

    def connect(setup: GroupSetup) -> Any:
        got.extend(setup.exchange(record) for record in calls)
        return object()

    monkeypatch.setitem(registry._loaded, "mine", EngineSpec("mine", connect, 1, devices=("cpu", "cuda")))
    members = [Member(r, os.getpid(), "host", f"machine {r}", size) for r in range(size)]
    make_engine("mine", 0, members, exchange, "some", 1.0)
    return seen, got


def test_engine_may_exchange_at_most_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the number of exchanges: ranks outside the group take part in exactly one for each engine."""
    full = b"me".ljust(RECORD_BYTES, b"\0")
    assert make(monkeypatch, [b"me"], 2) == ([full], [[full, full]])
    assert make(monkeypatch, [], 2) == ([bytes(RECORD_BYTES)], [])
    assert make(monkeypatch, [b"me"], 1) == ([], [[full]])
    with pytest.raises(dist.ConfigError, match="the mine engine calls the exchange of a group twice"):
        make(monkeypatch, [b"me", b"me"], 2)
    with pytest.raises(dist.ConfigError, match=r"the mine engine exchanges a record of 27 bytes\. Expected"):
        make(monkeypatch, [bytes(27)], 2)


def test_engine_for_several_devices_needs_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch, [], 2)
    assert check_backend("mine") == "mine"
    assert engines_of("mine") == {"cpu": "mine", "cuda": "mine"}
    assert meetings("mine") == 1
    assert moves("mine", "cuda")
    assert not moves("mine", "xpu")
    with pytest.raises(dist.ConfigError, match="'xpu:mine' is invalid"):
        check_backend("xpu:mine")
