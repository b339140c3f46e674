"""Windows: memory of each rank that the other ranks read and write without a call of its owner."""

from __future__ import annotations

import json
import operator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allranks._base.errors import AllranksError, UsageError
from allranks._base.integers import integer_of
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call.work import Complete, Work
from allranks._engines.checks import check_tensor
from allranks._engines.native.window_memory import allocation_of

if TYPE_CHECKING:
    from allranks._engines.base import EngineWindow
    from allranks._group.base import BaseGroup

__all__ = ["Window"]

_ABOUT_BYTES = 512  # for the dtype and shape of a registered tensor, as JSON


class Window:
    """Memory of each rank of a group, in which the other ranks read and write. ``new_window`` creates it.

    The owner makes no call: ``put`` writes into its memory, and ``get`` reads it. ``put`` also sends a signal. The
    owner calls ``wait_signal`` before it reads the elements that another rank has written. Each wait consumes one
    signal of one rank. After it, everything that this rank has put before the signal is visible.

    Two ranks that write to the same elements at the same time, or one that writes while the owner reads, leave
    undefined values, as two threads do.
    """

    def __init__(self, group: BaseGroup, engine_window: EngineWindow) -> None:
        self._group = group
        self._window = engine_window
        self._tensor: Tensor | None = None  # kept if the window owns it
        self._mine: tuple[torch.dtype, torch.Size] | None = None  # of the registered tensor of this rank
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []  # of the registered tensors, by rank

    def __repr__(self) -> str:
        state = f"{self._mine[0]}, shape {tuple(self._mine[1])}" if self._mine else "not registered"
        return f"<Window of group {self._group.name!r}: {state}>"

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Register the memory of this rank. All ranks call it. Their tensors may have different sizes.

        Args:
            tensor: A contiguous tensor, or a contiguous part of one, from ``allocate_tensor``.
            owning: The window keeps the tensor's memory. Otherwise the program keeps it until ``tensor_deregister``.

        Raises:
            AllranksError: The tensor of a rank cannot be registered. Raised on every rank.

        Cost:
            Two small all_gathers, and one mapping of the memory of each rank of this host.
        """
        refused = self._why_not(tensor)
        about = b""
        if not refused:
            about = json.dumps([str(tensor.dtype).removeprefix("torch."), *tensor.shape]).encode()
            if len(about) > _ABOUT_BYTES:
                refused = f"the tensor has too many dimensions: {tensor.dim()}"
        abouts = self._window.register(None if refused else tensor, about[:_ABOUT_BYTES].ljust(_ABOUT_BYTES), refused)
        shapes = [json.loads(each) for each in abouts]
        self._shapes = [(getattr(torch, name), torch.Size(shape)) for name, *shape in shapes]
        self._mine = tensor.dtype, tensor.shape
        self._tensor = tensor.detach() if owning else None

    def _why_not(self, tensor: Tensor) -> str:
        """Return why the tensor cannot be registered. "" if it can."""
        if not isinstance(tensor, Tensor):
            return f"expected a torch.Tensor, not {type(tensor).__name__}"
        if self._mine is not None:
            return "double registration: the window has a tensor already.\n  Call tensor_deregister first."
        if not tensor.is_cpu or (tensor.numel() and allocation_of(tensor) is None):
            return (
                f"the tensor of shape {tuple(tensor.shape)} on {tensor.device} is not in shared memory (torch calls"
                " such memory a MemPool).\n  Create it with allocate_tensor."
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return "the tensor is not contiguous.\n  Register a contiguous part of a tensor."
        return ""

    def tensor_deregister(self) -> None:
        """Withdraw the memory of all ranks. All ranks call it. Data that was put before has arrived afterwards."""
        self.check_registered("tensor_deregister")
        self._window.deregister()
        self._tensor, self._mine, self._shapes = None, None, []

    def put(self, tensor: Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool = False) -> Work | None:
        """Write a tensor into the memory of a rank, and send it a signal.

        Args:
            tensor: The elements to write. When ``put`` returns, the program may change them.
            dst_rank: The rank of the group whose memory is written. It may be this rank.
            target_offset_nelems: Where the first element goes: its number in the flattened registered tensor.
            async_op: Return a Work, which is complete. For compatibility.

        Raises:
            UsageError: The window is not registered, the dtypes differ, or an element would be outside of the memory.
            PeerLostError: The rank is lost.

        Cost:
            On one host, one copy of the tensor and no system call, unless the rank sleeps in ``wait_signal``. Between
            hosts, one message.
        """
        rank = self._peer("put", dst_rank)
        given = self._elements("put", check_tensor("put", tensor), rank, target_offset_nelems)
        self._window.put(_bytes(given.contiguous()), rank, operator.index(target_offset_nelems) * tensor.element_size())
        return Complete([]) if async_op else None

    def get(self, tensor: Tensor, src_rank: int, source_offset_nelems: int, async_op: bool = False) -> Work | None:
        """Read elements of the memory of a rank into a tensor.

        Args:
            tensor: Receives the elements.
            src_rank: The rank of the group whose memory is read. It may be this rank.
            source_offset_nelems: The number of the first element in the flattened registered tensor.
            async_op: Return a Work, which is complete. For compatibility.

        Raises:
            UsageError, PeerLostError: See ``put``.

        Cost:
            On one host, one copy. Between hosts, one round trip.
        """
        rank = self._peer("get", src_rank)
        into = self._elements("get", check_tensor("get", tensor), rank, source_offset_nelems)
        room = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
        self._window.get(_bytes(room), rank, operator.index(source_offset_nelems) * tensor.element_size())
        if room is not into:
            into.copy_(room)
        return Complete([tensor]) if async_op else None

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return the registered tensor of a rank of this host, in its memory. The rank may be this rank.

        Use it until ``tensor_deregister``. Elements change when a rank writes them.

        Raises:
            UsageError: The rank is on another host, or the window is not registered.
        """
        self.check_registered("map_remote_tensor")
        number = self._peer("map_remote_tensor", rank)
        dtype, shape = self._shapes[number]
        if not shape.numel():
            return torch.empty(shape, dtype=dtype, device="cpu")
        view = self._window.view(number)
        if view is None:
            raise UsageError(
                f"map_remote_tensor on group '{self._group.name}': rank {number} is on another host, so its memory"
                " cannot be mapped.\n  Call get and put."
            )
        return view.view(dtype).view(shape)

    def shares_memory(self, rank: int) -> bool:
        """Return whether ``map_remote_tensor`` is possible for a rank: it is on the same host."""
        return self._window.shares_memory(self._peer("shares_memory", rank))

    def signal(self, peer_rank: int, async_op: bool = False) -> Work | None:
        """Send a signal to a rank. It arrives after everything that this rank has put to it before.

        Args:
            peer_rank: The rank of the group that waits for it.
            async_op: Return a Work, which is complete. For compatibility.

        Raises:
            UsageError, PeerLostError: See ``put``.
        """
        rank = self._peer("signal", peer_rank)
        self.check_registered("signal")
        self._window.signal(rank)
        return Complete([]) if async_op else None

    def wait_signal(
        self, peer_rank: int, async_op: bool = False, timeout: timedelta | float | None = None
    ) -> Work | None:
        """Wait for one signal of a rank, from ``signal`` or ``put``, and consume it.

        Args:
            peer_rank: The rank of the group that sends it.
            async_op: Return a Work immediately. Its ``wait`` waits for the signal and consumes it.
            timeout: Limit of the wait, a timedelta or seconds. None: the timeout of the group.

        Raises:
            TimeoutError: No signal has arrived in time.
            PeerLostError: The rank is lost.
            UsageError: The window is not registered.
        """
        rank = self._peer("wait_signal", peer_rank)
        self.check_registered("wait_signal")
        work = _SignalWork(self._window, rank, self._group.timeout_s if timeout is None else seconds_of(timeout))
        if async_op:
            return work
        work.wait()
        return None

    def check_registered(self, call: str) -> None:
        """Raise a UsageError if no memory is registered. ``call``: the call of the program, in the error."""
        if self._mine is None:
            raise UsageError(
                f"{call} on group '{self._group.name}': the window is not registered.\n  Call tensor_register on every"
                " rank first."
            )

    def _peer(self, call: str, rank: int) -> int:
        number = integer_of(rank)
        if number is None:
            raise TypeError(f"{call}: expected a rank, not {type(rank).__name__}")
        if not 0 <= number < self._group.size():
            raise UsageError(
                f"{call}: {number} is not a rank of group '{self._group.name}': expected 0 to {self._group.size() - 1}"
            )
        return number

    def _elements(self, call: str, tensor: Tensor, rank: int, offset: int) -> Tensor:
        """Check that elements are within the memory of a rank. Return the tensor without gradient and lazy bits."""
        self.check_registered(call)
        dtype, shape = self._shapes[rank]
        start = integer_of(offset)
        if start is None:
            raise TypeError(f"{call}: the offset must be an integer, not {type(offset).__name__}")
        if start < 0:
            raise UsageError(f"{call}: the offset must be nonnegative, not {start}")
        if tensor.dtype != dtype:
            raise UsageError(f"{call}: {tensor.dtype} does not match the registered tensor of rank {rank}, {dtype}")
        if not tensor.is_cpu:
            raise UsageError(f"{call}: a tensor on {tensor.device} is not supported.\n  Pass tensor.cpu().")
        if start + tensor.numel() > shape.numel():
            raise UsageError(
                f"{call}: {tensor.numel()} elements from element {start} on: this exceeds the window size of rank"
                f" {rank}, {shape.numel()} elements"
            )
        plain = tensor.detach()
        return plain.resolve_conj().resolve_neg() if call == "put" else plain


class _SignalWork(Work):
    """The wait for a signal."""

    def __init__(self, window: EngineWindow, rank: int, timeout_s: float) -> None:
        self._window, self._rank, self._timeout_s = window, rank, timeout_s
        self._arrived = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._arrived:
            try:
                self._window.wait_signal(self._rank, seconds_of(timeout) if timeout else self._timeout_s)
            except AllranksError as error:
                self._error = error
                raise
            self._arrived, self._error = True, None
        return True

    def is_completed(self) -> bool:
        return self._arrived or self._error is not None or self._window.has_signal(self._rank)

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        return self._rank


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


publish(globals())
