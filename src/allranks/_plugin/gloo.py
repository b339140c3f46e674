"""Our groups in the place of torch's gloo, for programs that ask for ``"gloo"`` and are not to be changed.

``allranks run --instead-of-gloo`` or the variable ALLRANKS_INSTEAD_OF_GLOO. torch makes a gloo group by calling
``ProcessGroupGloo``; the class here answers to that name. To torch and to the program the backend stays "gloo".
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as c10d

__all__ = ["stand_in"]

_c10d: Any = c10d
_gloo: Any = None  # torch's, once it has been replaced


def stand_in() -> None:
    """Lets torch make ours where it would make a group on gloo."""
    global _gloo
    if _gloo is not None or not _c10d.is_gloo_available():
        return
    _gloo = _c10d.ProcessGroupGloo
    if hasattr(_c10d.Backend, "_ensure_backend_registered"):  # torch from 2.15 on: whoever registers first
        _c10d.Backend.register_backend("gloo", _create, extended_api=True, devices=["cpu", "cuda"])
    else:
        _c10d.distributed_c10d.ProcessGroupGloo = _c10d.ProcessGroupGloo = InsteadOfGloo


def _create(about: Any, options: Any) -> Any:
    from allranks._plugin.creation import asks_for_default, create, helper_of

    caller = sys._getframe(1)
    _say(about.group_rank, about.global_ranks_in_group)
    return create(about, options, helper_of(caller), "gloo", asks_for_default(caller))


def _say(rank: int, ranks: Any) -> None:
    if not ranks and rank == 0:
        print("allranks: gloo is asked for, and replaced: the groups are ours (--instead-of-gloo)", file=sys.stderr)


class _CalledByTorch(type):
    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> Any:
        from allranks._plugin.creation import asks_for_default, create, helper_of

        caller = sys._getframe(1)
        helper = helper_of(caller)
        if helper is None:  # a program that makes groups by hand
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
    """In the place of torch's ProcessGroupGloo."""
