"""Buckets: groups of gradients that are reduced together, and their memory.

A parameter of 1 MiB or more forms its own bucket. Its gradient is reduced in place, in its ``.grad``. Only smaller
gradients are copied together into a flat buffer. On a CPU, copying a gradient costs about as much as reducing it
through shared memory. If every gradient used a flat buffer, as in torch, the copies would take most of the time.

`reducer` decides when a bucket starts, and which operation reduces it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from allranks._api.shared import empty_shared
from allranks._base.errors import UsageError
from allranks._group.process_group import ProcessGroup

__all__ = ["ALONE_BYTES", "Bucket", "bucket_memory", "plan"]

# A small first bucket can start early (the value of torch).

# From this size on, copying into a flat buffer and back costs more than a separate all-reduce.
ALONE_BYTES = 1 << 20


# From this size on, reducing in shared memory saves more than its second wait costs.
_SHARED_BYTES = 256 << 10


def bucket_memory(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None) -> Tensor:
    """Allocate a flat bucket: one dimension, not initialized.

    A bucket of 256 KiB or more on the CPU is memory that the ranks of ``group`` share. All ranks call this function for
    the same buckets in the same order, when the model is wrapped.
    """
    if group is None or device.type != "cpu" or numel * dtype.itemsize < _SHARED_BYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return empty_shared(numel, dtype, group)


class Bucket:
    """Gradients that are reduced together: one gradient in place, or several in a flat buffer.

    In every backward, the caller calls `fill`, reduces the tensor that it returns, and calls `give_back`.

    Attributes:
        flat: The bucket has several parameters and a buffer. A message can then carry a mark after the gradients.
        mark: The mark, one element. It is valid after `fill` and the reduction.
    """

    mark: Tensor

    def __init__(self, members: list[tuple[int, nn.Parameter]], group: ProcessGroup | None, as_view: bool) -> None:
        self.indices = [index for index, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.flat = len(members) > 1
        self._dtype = self.parameters[0].dtype  # the model may be converted later; `reducer` detects that
        self._device = self.parameters[0].device
        self._as_view = as_view
        self._in_place = False
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        if self.flat:
            numel = sum(p.numel() for p in self.parameters) + 1  # one more element for the mark
            self._lie_in(bucket_memory(numel, self._dtype, self._device, group))

    def fill(self, used: Container[int], mark: bool | None = None) -> Tensor:
        """Return one flat tensor with the gradients of this rank; missing gradients are zeros.

        Args:
            used: Indices of the parameters that have a gradient on any rank. The ``.grad`` of the others is not
                changed.
            mark: If not None (`flat` buckets only), the value of the last element, after the gradients.
        """
        only = self.parameters[0].grad
        # The gradient is reduced where it is only if it is the dense tensor that the other ranks expect.
        self._in_place = (
            not self.flat
            and only is not None
            and only.layout is torch.strided
            and only.is_contiguous()
            and only.dtype == self._dtype
            and not (self._views and only is self._views[0])
        )
        if self._in_place:
            assert only is not None
            return only.detach().view(-1)
        if self._buffer is None:  # possibly on this rank only: its single gradient is missing or not contiguous
            self._lie_in(self.empty(marked=True))
        assert self._buffer is not None
        self._gather(used)
        if mark is None:
            return self._gradients
        self.mark.fill_(mark)
        return self._buffer

    def empty(self, marked: bool) -> Tensor:
        """Return the contribution of a rank without gradients: zeros in new memory."""
        return torch.zeros(sum(p.numel() for p in self.parameters) + marked, dtype=self._dtype, device=self._device)

    def give_back(self, used: Container[int]) -> None:
        """Copy the means into the ``.grad`` of the parameters in ``used``."""
        if self._in_place:
            return
        to: list[Tensor] = []
        means: list[Tensor] = []
        for index, parameter, view in zip(self.indices, self.parameters, self._views, strict=True):
            gradient = parameter.grad
            if index not in used or gradient is view:
                continue
            if self._as_view:
                parameter.grad = view
                continue
            # Only other ranks had a gradient, so backward has not created one here.
            if gradient is None:
                gradient = parameter.grad = torch.empty_like(parameter)
            to.append(gradient)
            means.append(view)
        _copy(to, means)

    def _lie_in(self, buffer: Tensor) -> None:
        self._buffer, self._gradients, self.mark = buffer, buffer[:-1], buffer[-1]
        parts = torch.split(self._gradients, [p.numel() for p in self.parameters])
        self._parts = parts
        self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _gather(self, used: Container[int]) -> None:
        to: list[Tensor] = []
        gradients: list[Tensor] = []
        for number, (index, parameter) in enumerate(zip(self.indices, self.parameters, strict=True)):
            gradient, view = parameter.grad, self._views[number]
            if self._as_view and view.data_ptr() != self._parts[number].data_ptr():
                # The view was in .grad, and a method such as Module.to() has replaced its memory, possibly many steps
                # ago.
                view = self._views[number] = self._parts[number].view(parameter.shape)
            if index not in used:
                if gradient is view:  # the gradient must not change, so it must leave the buffer
                    parameter.grad = gradient.clone()
                gradient = None
            if gradient is None:
                view.zero_()
            elif gradient.layout is not torch.strided:
                raise UsageError(
                    "DistributedDataParallel: sparse gradients are not supported (Embedding(sparse=True)).\n"
                    "  Omit sparse=True, or freeze the layer."
                )
            elif gradient is not view:  # after zero_grad(set_to_none=False), backward has accumulated into the views
                to.append(view)
                gradients.append(gradient)
        _copy(to, gradients)


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    # One call for all gradients instead of one for each.
    if to:
        with torch.no_grad():  # create_graph=True creates gradients that require gradients
            torch._foreach_copy_(to, values)


def plan(
    parameters: list[nn.Parameter], caps: Iterable[float], group: ProcessGroup | None, as_view: bool
) -> list[Bucket]:
    """Assign parameters, in reverse order, to buckets in the order in which backward completes the buckets.

    Args:
        parameters: The parameters of the model, in its order.
        caps: The maximum bytes of the first flat bucket, of the second, and so on. The last value applies to the rest.
        group: The ranks that share the memory of flat buckets. None: the memory is not shared.
        as_view: The ``.grad`` of parameters in flat buckets become views.
    """
    done: list[list[tuple[int, nn.Parameter]]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
    *first, last = caps
    limits: Any = itertools.chain(first, itertools.repeat(last))
    limit = next(limits)
    for index, parameter in reversed(list(enumerate(parameters))):
        # Large gradients are reduced in place, so they need no buffer.
        if parameter.nbytes >= ALONE_BYTES:
            done.append([(index, parameter)])
            continue
        key = (parameter.dtype, parameter.device)
        members = filling.setdefault(key, [])
        if members and parameter.nbytes + sum(p.nbytes for _, p in members) > limit:
            done.append(members)
            limit = next(limits)
            members = filling[key] = []
        members.append((index, parameter))
    # The last member has the lowest index, so its gradient completes the bucket.
    rest = sorted(filling.values(), key=lambda members: members[-1][0], reverse=True)
    return [Bucket(members, group, as_view) for members in done + [members for members in rest if members]]
