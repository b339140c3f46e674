"""Groups of allranks instead of torch's gloo, for programs that request ``"gloo"`` and must not be changed.

Enabled by ``allranks run --instead-of-gloo`` or the variable ALLRANKS_INSTEAD_OF_GLOO. torch creates a gloo group with
a call of ``ProcessGroupGloo``. The class here replaces it under that name. For torch and for the program the name of
the backend stays "gloo".
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as c10d

from allranks._plugin.recorder import record_instead_of_gloo

__all__ = ["stand_in"]

_c10d: Any = c10d
_gloo: Any = None  # torch's class, after it has been replaced


def stand_in() -> None:
    """Let torch create a group of allranks whenever it would create a group on gloo."""
    global _gloo
    if _gloo is not None or not _c10d.is_gloo_available():
        return
    _gloo = _c10d.ProcessGroupGloo
    if hasattr(_c10d.Backend, "_ensure_backend_registered"):  # torch 2.15 and later: the first registration wins
        _c10d.Backend.register_backend("gloo", _create, extended_api=True, devices=["cpu", "cuda"])
        record_instead_of_gloo(os.environ)
    else:
        _c10d.distributed_c10d.ProcessGroupGloo = _c10d.ProcessGroupGloo = InsteadOfGloo


def _create(about: Any, options: Any) -> Any:
    from allranks._plugin.creation import asks_for_default, create, helper_of

    caller = sys._getframe(1)
    _say(about.group_rank, about.global_ranks_in_group)
    # None: torch ignores options of gloo, too.
    return create(about, None, helper_of(caller), "gloo", asks_for_default(caller))


def _say(rank: int, ranks: Any) -> None:
    if not ranks and rank == 0:
        print("allranks: the program requested gloo; its groups use allranks (--instead-of-gloo)", file=sys.stderr)


class _CalledByTorch(type):
    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> Any:
        from allranks._plugin.creation import asks_for_default, create, helper_of

        caller = sys._getframe(1)
        helper = helper_of(caller)
        if helper is None:  # a program that creates groups manually
            return _gloo(store, rank, size, timeout)
        ranks = helper["global_ranks_in_group"]
        _say(rank, ranks)
        about = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id=helper["group_name"],
            global_ranks_in_group=ranks,
        )
        return create(about, None, helper, "gloo", asks_for_default(caller))

    def __instancecheck__(cls, given: object) -> bool:
        from allranks._plugin.group import TorchGroup

        return isinstance(given, (TorchGroup, _gloo))

    def __getattr__(cls, name: str) -> Any:
        return getattr(_gloo, name)


class InsteadOfGloo(metaclass=_CalledByTorch):
    """Replacement of torch's ProcessGroupGloo."""
