"""What a package imports that brings an engine; docs/extending.md has an example.

    EngineSpec      describes the engine, and is what the package's entry point names
    GroupSetup      the group that an engine is made for
    BytesEngine     an engine that exchanges bytes gets all verbs from it
    FlatEngine      an engine that has collectives of its own, on flat tensors
    Engine          what every engine is: all verbs, on tensors as users give them
    Progress        a call that has begun; Pending: one whose end another thread reports
    INTERFACE       the version of all of this

``EngineSpec``, ``GroupSetup`` and ``INTERFACE`` come without torch.
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


if not TYPE_CHECKING:  # a checker that saw it would take every name for one that is here
    __getattr__ = _load
