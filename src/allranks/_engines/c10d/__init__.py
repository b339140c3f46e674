"""gloo and nccl: the engines inside torch.

``engine`` contains the verbs. ``store`` is the store on which the engines exchange their addresses.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from allranks._engines.spec import INTERFACE, EngineSpec

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._engines.spec import GroupSetup

__all__ = ["GLOO", "NCCL"]


def _make(name: str, setup: GroupSetup) -> Engine:
    from allranks._engines.c10d.engine import C10dEngine

    rank, members, exchange, group_name, timeout_s, _ = setup
    return C10dEngine(name, rank, members, exchange, group_name, timeout_s)


def _available(name: str) -> bool:
    import torch.distributed

    return bool(getattr(torch.distributed, f"is_{name}_available")())


def _spec(name: str, device: str, needs: str) -> EngineSpec:
    missing = f"requires a torch that is built {needs}; this torch was built without {name}"
    return EngineSpec(name, partial(_make, name), INTERFACE, (device,), partial(_available, name), missing)


GLOO = _spec("gloo", "cpu", "with gloo")
NCCL = _spec("nccl", "cuda", "for CUDA")
