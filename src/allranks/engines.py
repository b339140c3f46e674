"""The interface for packages that provide an engine. docs/extending.md has an example.

    EngineSpec      describes the engine; the package's entry point names it
    GroupSetup      the group for which an engine is created
    BytesEngine     base class of engines that exchange bytes; it implements all verbs
    FlatEngine      base class of engines that have collectives of their own, on flat tensors
    Engine          the interface of every engine: all verbs, on tensors as users pass them
    Progress        a call that has begun; Pending: one whose end another thread reports
    INTERFACE       the version of this interface

``EngineSpec``, ``GroupSetup`` and ``INTERFACE`` do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from allranks._engines.spec import INTERFACE, EngineSpec, GroupSetup

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._engines.bytes_engine import BytesEngine, Pending
    from allranks._engines.flat import FlatEngine, Progress

__all__ = ["INTERFACE", "BytesEngine", "Engine", "EngineSpec", "FlatEngine", "GroupSetup", "Pending", "Progress"]

_WITH_TORCH = {
    "BytesEngine": "bytes_engine",
    "Engine": "base",
    "FlatEngine": "flat",
    "Pending": "bytes_engine",
    "Progress": "flat",
}

EngineSpec.__module__ = GroupSetup.__module__ = __name__


def _load(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    thing = getattr(importlib.import_module(f"allranks._engines.{_WITH_TORCH[name]}"), name)
    thing.__module__ = __name__
    globals()[name] = thing
    return thing


if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    __getattr__ = _load
