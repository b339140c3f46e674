"""Imported by every generated program: kills its process at one chosen moment, and prints digests of its results.

The file is copied next to each program, so that a program can run alone:

    allranks run -n 2 --elastic 2 program.py               # undisturbed
    KILL=1:7 allranks run -n 2 --elastic 2 program.py      # rank 1 is killed at its eighth call of die()
    KILL=1:7,1.1:0 allranks run ...                        # and its replacement process at its first call
"""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch

_rank = int(os.environ.get("RANK", "0"))
_pid = os.getpid()
# 0 for the first process of a rank; otherwise the number of the replacement process
_start = os.environ.get("ALLRANKS_START", "0")
_mine = {str(_rank), f"{_rank}.0"} if _start == "0" else {f"{_rank}.{_start}"}
_kills = [each.split(":") for each in os.environ.get("KILL", "").split(",") if each]
_visits = {visit for name, visit in _kills if name in _mine}
# State examines the variables of a program's modules. The number of calls of die() must not be one of them.
_VISITS = "RANDOM_PROGRAMS_VISITS"
os.environ[_VISITS] = "0"


def die(*_: object) -> None:
    """Kill this process if KILL names it and this call. Usable as a hook, therefore it accepts arguments."""
    if os.getpid() != _pid:  # a worker process of a DataLoader
        return
    if os.environ[_VISITS] in _visits:
        os.kill(_pid, signal.SIGKILL)
    os.environ[_VISITS] = str(int(os.environ[_VISITS]) + 1)


def report(**values: Any) -> None:
    """Print one line with the rank, the number of ranks, the number of calls of die(), and a digest of each value."""
    digests = " ".join(f"{name}={digest(value)}" for name, value in values.items())
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    print(f"END {rank} {size} {os.environ[_VISITS]} {digests}", flush=True)


def digest(value: Any) -> str:
    """Return a short hash of a module, an optimizer, or tensors, arrays and values in any containers."""
    found = hashlib.blake2b(digest_size=5)
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.nn.Module):  # includes the buffers that state_dict() omits
        _add(found, [*value.named_parameters(), *value.named_buffers()])
    elif hasattr(value, "full_tensor"):
        _add(found, value.full_tensor())
    elif isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, torch.Generator):
        _add(found, value.get_state())
    elif hasattr(value, "bit_generator"):
        _add(found, value.bit_generator.state)
    elif hasattr(value, "state_dict"):
        _add(found, value.state_dict())
    elif isinstance(value, dict):
        _add(found, list(value.items()))
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        found.update(b"[")
        for each in value:
            _add(found, each)
        found.update(b"]")
    elif hasattr(value, "tobytes"):
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        found.update(repr(value).encode())
