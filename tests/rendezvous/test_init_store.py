"""init_process_group(store=...) and object collectives without pickle, with two real ranks."""

from __future__ import annotations

import collections
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torchs

import allranks as dist
from allranks.testing import run_ranks

SECRET = "a secret of the tests, long enough"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_group_initializes_with_allranks_and_torch_stores(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(2)]

    def body() -> None:
        rank = int(os.environ["RANK"])
        makers: dict[str, Any] = {
            "ours, tcp": lambda: dist.TCPStore("127.0.0.1", ports[0], 2, rank == 0, 30),
            "ours, file": lambda: dist.FileStore(str(tmp_path / "ours"), 2),
            "ours, prefix": lambda: dist.PrefixStore("p", dist.FileStore(str(tmp_path / "prefix"), 2)),
            "torch's, tcp": lambda: torchs.TCPStore("127.0.0.1", ports[1], 2, rank == 0),
            "torch's, file": lambda: torchs.FileStore(str(tmp_path / "theirs"), 2),
            "both": lambda: dist.PrefixStore("p", torchs.FileStore(str(tmp_path / "both"), 2)),
        }
        for name, make in makers.items():
            store = make()
            for backend in ("native", "gloo") if name == "ours, file" else ("native",):
                dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=30)
                total = torch.tensor([rank + 1])
                dist.all_reduce(total)
                assert total.item() == 3, name
                dist.destroy_process_group()
            if isinstance(store, dist.Store):
                store.barrier("done", 2)
                store.add("left", 1)  # the server of rank 0 waits for this counter
                store.close()

    run_ranks(2, body, init=False, env={"ALLRANKS_SECRET": SECRET}, timeout_s=80)
    assert not (tmp_path / "ours").exists()


def test_hash_store_needs_rank_and_world_size() -> None:
    for store in (dist.HashStore(), torchs.HashStore()):
        with pytest.raises(dist.ConfigError, match="RANK and WORLD_SIZE are not set"):
            dist.init_process_group(store=store)
        with pytest.raises(dist.ConfigError, match="WORLD_SIZE is not set"):
            dist.init_process_group(store=store, rank=1)
        with pytest.raises(dist.JoinError, match=r"missing rank 1\."):
            dist.init_process_group(store=store, rank=0, world_size=2, timeout=0.1)
    with pytest.raises(dist.UsageError, match="has no method set, get"):
        dist.init_process_group(store=object(), rank=0, world_size=2)


Point = collections.namedtuple("Point", "x")
PLAIN: Any = {
    "none": None, "number": -3, "large": 1 << 80, "real": 0.5, "text": "ä", "bytes": b"\x80\x05",
    "list": [1, [2]], ("a", 1): (1, (2, "b")), "set": {1, 2}, "flags": [True, False], 7: {},
}  # fmt: skip


def test_object_collectives_work_without_pickle() -> None:
    def body() -> None:
        rank = dist.get_rank()
        tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3, dtype=torch.bfloat16), torch.empty(0, 2)]
        mine = {**PLAIN, "rank": rank, "tensors": tensors}
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, mine)
        for r, row in enumerate(rows):
            assert row["rank"] == r
            assert {key: row[key] for key in PLAIN} == PLAIN
            assert type(row["a", 1]) is tuple
            for sent, come in zip(tensors, row["tensors"], strict=True):
                assert sent.dtype == come.dtype
                assert torch.equal(sent, come)
        for wrong, name in (
            (Point(1), "Point"),
            ([{"a": lambda: 0}], "function"),
            (torch.nn.Parameter(tensors[0]), "Parameter"),
        ):
            with pytest.raises(dist.UsageError, match=rf"cannot encode {name}.*ALLRANKS_PICKLE"):
                dist.all_gather_object(rows, wrong)
        calls: list[Any] = [
            lambda: dist.all_gather_object([None, None], Point(1) if rank else 0),
            lambda: dist.broadcast_object_list([Point(1)], 1),
            lambda: dist.scatter_object_list([None], [Point(1)] * 2 if rank == 1 else None, 1),
            lambda: dist.gather_object(Point(1) if rank else 0, [None, None] if rank == 0 else None, 0),
            lambda: dist.recv_object_list([None], 1) if rank == 0 else dist.send_object_list([Point(1)], 0),
        ]
        if rank == 1:  # rank 1 permits pickle, so the settings of the ranks differ
            os.environ["ALLRANKS_PICKLE"] = "1"
        for call in calls:
            if rank == 1:
                call()
            else:
                with pytest.raises(dist.MismatchError, match="rank 1 sent a pickle"):
                    call()

    run_ranks(2, body, env={"ALLRANKS_PICKLE": "0"}, timeout_s=60)
