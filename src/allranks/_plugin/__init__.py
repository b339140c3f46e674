"""The plugin: ``torch.distributed.init_process_group("allranks")``.

torch finds it by the entry points in pyproject.toml, with nothing imported by the user. What torch itself builds on its
groups (DistributedDataParallel, FSDP, DTensor, DCP, ...) then runs on the native engine:

    work     torch's Work around ours
    group    torch's ProcessGroup around ours
    worlds   making such groups, and torch_group

This file is loaded whenever torch is, and must cost nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "allranks"


def register() -> None:
    """Tells torch.distributed of the backend."""
    import torch.distributed as c10d

    if c10d.is_available() and not hasattr(c10d.Backend, NAME.upper()):
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(about: Any, options: Any) -> Any:
    from allranks._plugin.worlds import create

    return create(about, options)
