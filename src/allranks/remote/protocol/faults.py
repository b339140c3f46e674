"""Errors on a worker: the placeholder for a missing tensor, and the exception that the master raises."""

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
    """The placeholder for a tensor that could not be computed."""

    fault: Fault


class Poisoned(Exception):
    """A command needs a tensor, snapshot or group that could not be created."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


# A module variable, because unpickling calls `given` by name and passes only a number.
GIVEN: list[torch.Tensor] = []
"""On a worker, the tensors among the arguments that are being unpickled."""


LEAVES: dict[int, torch.Tensor] = {}
"""The tensors of `GIVEN` whose gradients the master holds, by their number."""


def given(number: int, parameter: bool, is_leaf: bool) -> torch.Tensor:
    """Return a tensor among the arguments of a function. Called when a worker unpickles them.

    Args:
        number: Its position in `GIVEN`.
        parameter: It is a parameter.
        is_leaf: It requires a gradient, and is not the result of an operation.
    """
    tensor = GIVEN[number]
    if parameter:
        tensor = torch.nn.Parameter(tensor, is_leaf)
    elif is_leaf:
        # A new leaf, so that the gradient is not stored on the worker's own tensor.
        tensor = tensor.detach().requires_grad_()
    if is_leaf:
        LEAVES[number] = tensor
    return tensor


@dataclass(frozen=True)
class Given:
    """The placeholder for a tensor in the pickled result of a function."""

    number: int


def error_of(fault: Fault, line: str, raw: bool, more: int = 0) -> Exception:
    """Return the exception for a fault.

    Args:
        fault: The fault that the worker has reported.
        line: The call site, or "".
        raw: The call that the caller waits for has raised it. Its original exception is returned, as in a local call,
            if its type is one of torch or Python or if it could be pickled.
        more: The number of other faults.
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
    """Recreate the exception that the worker raised; None if its type is neither built in nor torch's."""
    for space in (builtins, torch, torch.linalg, torch._C):
        kind = getattr(space, fault.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(fault.error)
            except TypeError:  # its constructor needs more than a message
                return None
    return None


def _caught_as(kind: type[Exception]) -> type[RemoteError]:
    """Return a type of `RemoteError` that ``except kind`` also catches."""
    if issubclass(RemoteError, kind):
        return RemoteError
    try:
        both = type("RemoteError", (RemoteError, kind), {"__module__": "allranks"})
        # The class alone does not show whether its constructor accepts these arguments.
        both("", 0)
    except TypeError:  # the two types have incompatible memory layouts or constructors
        return RemoteError
    return both
