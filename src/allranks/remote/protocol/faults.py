"""What goes wrong on a worker: what stands there for a tensor, and what the master raises."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import NamedTuple

import torch

from allranks._base.errors import RemoteError
from allranks.launch.ranks.function import unpack_error
from allranks.remote.protocol.wire import Fault

__all__ = ["GIVEN", "LEAVES", "Given", "Poison", "Poisoned", "error_of", "given"]


class Poison(NamedTuple):
    """Stands where a tensor would be, had nothing gone wrong."""

    fault: Fault


class Poisoned(Exception):
    """A poisoned tensor was asked for."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


GIVEN: list[torch.Tensor] = []
"""On a worker, the tensors of the arguments that are being unpickled."""


LEAVES: dict[int, torch.Tensor] = {}
"""Those of them whose gradient the master holds, by number."""


def given(number: int, parameter: bool, is_leaf: bool) -> torch.Tensor:
    """A tensor among the arguments of a function, where they are unpickled.

    Args:
        number: among them.
        parameter: it is a parameter.
        is_leaf: it requires a gradient, and is no result.
    """
    tensor = GIVEN[number]
    if parameter:
        tensor = torch.nn.Parameter(tensor, is_leaf)
    elif is_leaf:
        tensor = tensor.detach().requires_grad_()
    if is_leaf:
        LEAVES[number] = tensor
    return tensor


@dataclass(frozen=True)
class Given:
    """Stands for a tensor in the pickled result of a function."""

    number: int


def error_of(fault: Fault, line: str, raw: bool, more: int = 0) -> Exception:
    """The exception for a fault.

    Args:
        fault: what the worker has reported.
        line: of the program.
        raw: the call that is waited for has raised it: as it would here, where the type is torch's or Python's.
        more: how many others there are.
    """
    original = unpack_error(fault.pickled) or _original(fault)
    if raw and original is not None:
        return original
    where = f" (queued at {line})" if line else ""
    text = f"{fault.op} failed on worker {fault.rank}{where}: {fault.kind}: {fault.error}"
    if more:
        text += f"\n  and {more} more operations failed."
    text += "\n  on the worker:\n    " + fault.traceback.rstrip().replace("\n", "\n    ")
    kind = RemoteError if original is None else _caught_as(type(original))
    error = kind(text, fault.rank, fault.op, line, fault.traceback)
    error.__cause__ = original
    return error


def _original(fault: Fault) -> Exception | None:
    """What was raised there, where the type is Python's or torch's."""
    for space in (builtins, torch, torch.linalg, torch._C):
        kind = getattr(space, fault.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(fault.error)
            except TypeError:  # it is made of something else than a text
                return None
    return None


def _caught_as(kind: type[Exception]) -> type[RemoteError]:
    """`RemoteError` that is caught as another type, too."""
    if issubclass(RemoteError, kind):
        return RemoteError
    try:
        both = type("RemoteError", (RemoteError, kind), {"__module__": "allranks"})
        both("", 0)
    except TypeError:  # they cannot be one object
        return RemoteError
    return both
