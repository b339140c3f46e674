"""What goes wrong on a worker: what stands there for a tensor, and what the master raises."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import NamedTuple

import torch

from allranks._errors import AllranksError
from allranks.remote.wire import Fault

__all__ = ["Given", "Poison", "RemoteError", "Spoilt", "WorkerLost"]


class Poison(NamedTuple):
    """Stands where a tensor would be, had nothing gone wrong."""

    fault: Fault


class Spoilt(Exception):
    """A poisoned tensor was asked for."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


@dataclass(frozen=True)
class Given:
    """Stands for a tensor among the pickled arguments of a function."""

    number: int


class RemoteError(AllranksError):
    """An operation failed on a worker. What depends on it raises this; the worker goes on.

    Attributes:
        rank: of the worker.
        operation: what failed.
        line: ``file:line`` of the master's program that queued it.
        traceback: of the worker.
    """

    rank = 0
    operation = ""
    line = ""
    traceback = ""

    @classmethod
    def of(cls, fault: Fault, line: str, raw: bool, more: int = 0) -> Exception:
        """The exception for a fault.

        Args:
            fault: what the worker said.
            line: of the program.
            raw: the call that is waited for has raised it: as it would here, where the type is torch's or Python's.
            more: how many others there are.
        """
        if raw:
            kind = getattr(builtins, fault.kind, None) or getattr(torch, fault.kind, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind(fault.error)
        where = f" (queued at {line})" if line else ""
        said = f"{fault.op} failed on worker {fault.rank}{where}: {fault.kind}: {fault.error}"
        if more:
            said += f"\n  and {more} more operations failed."
        made = cls(f"{said}\n  on the worker:\n    " + fault.traceback.rstrip().replace("\n", "\n    "))
        made.rank, made.operation, made.line, made.traceback = fault.rank, fault.op, line, fault.traceback
        return made


class WorkerLost(AllranksError):
    """A worker is gone, and with it its tensors. ``respawn`` starts another in its place."""
