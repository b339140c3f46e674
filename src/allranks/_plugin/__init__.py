"""The plugin: ``torch.distributed.init_process_group("allranks")``.

torch finds it by the entry points in pyproject.toml. The user imports nothing. The features that torch builds on its
groups (DistributedDataParallel, FSDP, DTensor, DCP, ...) then run on the native engine:

    work         torch's Work around allranks's Work
    window       torch's windows around allranks's windows
    calls        torch's calls, as its C++ passes them to a backend
    operators    torch's operators on these groups, for code that observes operators
    group        torch's ProcessGroup around allranks's ProcessGroup
    creation     torch's groups on the backend, each around a group of allranks
    torch_group  registers a group of allranks with torch, the opposite direction
    adapt        torch's functions that support only its own groups
    gloo         groups of allranks in programs that request gloo
    recorder     torch's Flight Recorder in these programs
    env_rendezvous  torch's env:// in an elastic job
    names        the names of the backend

This file is loaded whenever torch is loaded, so its import must take no measurable time.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from allranks._plugin.env_rendezvous import serve_elastic_jobs
from allranks._plugin.names import INSTEAD_OF_GLOO, NAME
from allranks._watch.hooks import install

__all__ = ["INSTEAD_OF_GLOO", "NAME", "register"]


def register() -> None:
    """Register the backend with torch.distributed. torch calls this."""
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, NAME.upper()):
        return
    c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    serve_elastic_jobs()
    install(c10d.distributed_c10d)
    if os.environ.get(INSTEAD_OF_GLOO, "0") not in ("", "0"):
        from allranks._plugin.gloo import stand_in

        stand_in()


def _create(about: Any, options: Any) -> Any:
    from allranks._plugin.creation import asks_for_default, create, helper_of

    caller = sys._getframe(1)
    return create(about, options, helper_of(caller), NAME, asks_for_default(caller))
