"""The native engine of allranks: shared memory within a host, TCP between hosts; and the tcp engine: TCP alone.

``engine`` contains the verbs, ``connect`` and ``tcp`` the connections, ``errors`` the texts of failures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks._engines.spec import INTERFACE, EngineSpec

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._engines.spec import GroupSetup

__all__ = ["NATIVE", "TCP"]


def _make_native(setup: GroupSetup) -> Engine:
    from allranks._engines.native.engine import NativeEngine

    return NativeEngine(*setup)


def _make_tcp(setup: GroupSetup) -> Engine:
    from allranks._engines.native.engine import TcpEngine

    return TcpEngine(*setup)


NATIVE = EngineSpec("native", _make_native, INTERFACE)
TCP = EngineSpec("tcp", _make_tcp, INTERFACE)
