"""torch's windows (torch 2.15 and later) around windows of allranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from allranks._api.windows import allocate_tensor
from allranks._base.errors import UsageError
from allranks._engines.native.window_memory import allocation_of
from allranks._plugin.work import DONE, TorchWork

if TYPE_CHECKING:
    from torch import Tensor

    from allranks._call.work import Work
    from allranks._group.window import Window

__all__ = ["TorchWindow", "allocate"]

_C: Any = torch._C._distributed_c10d
_NOW = timedelta(0)


class TorchWindow:
    """A window in the form of torch's Window. The options of a call may contain its timeout; hints have no effect."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Register the memory of this rank. See ``Window.tensor_register``."""
        self._window.tensor_register(tensor, owning)

    def tensor_deregister(self) -> None:
        """Withdraw the memory of all ranks. See ``Window.tensor_deregister``."""
        self._window.tensor_deregister()

    def put(
        self, tensor: Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool, opts: Any = None
    ) -> TorchWork | None:
        """Write a tensor into the memory of a rank, and send it a signal. See ``Window.put``.

        Raises:
            UsageError: Also if the tensor is not in memory of ``allocate_tensor``. torch's GPU windows have this
                restriction, so a program that runs here also runs there. ``allranks.new_window`` does not have it.
        """
        self._window.check_registered("put")
        if tensor.numel() and allocation_of(tensor) is None:
            raise UsageError(
                "put: the tensor is not in a registered segment, as torch's windows require.\n  Create it with the"
                " backend's allocate_tensor, or use allranks.new_window."
            )
        return self._done(self._window.put(tensor, dst_rank, target_offset_nelems), async_op)

    def get(self, tensor: Tensor, src_rank: int, source_offset_nelems: int, async_op: bool) -> TorchWork | None:
        """Read elements of the memory of a rank. torch's windows have no such call. See ``Window.get``."""
        return self._done(self._window.get(tensor, src_rank, source_offset_nelems), async_op)

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return the registered tensor of a rank of this host. See ``Window.map_remote_tensor``."""
        return self._window.map_remote_tensor(rank)

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> TorchWork | None:
        """Send a signal to a rank. See ``Window.signal``."""
        return self._done(self._window.signal(peer_rank), async_op)

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> TorchWork | None:
        """Wait for one signal of a rank. See ``Window.wait_signal``."""
        limit = None if opts is None or opts.timeout < _NOW else opts.timeout
        work = self._window.wait_signal(peer_rank, async_op, limit)
        return None if work is None else TorchWork.of(work)

    def get_attr(self, peer_rank: int) -> Any:
        """Return torch's WindowAttr: UNIFIED if this rank can map the memory of the other rank, else SEPARATE."""
        kinds, made = _C.WindowAccessType, _C.WindowAttr()
        made.access_type = kinds.UNIFIED if self._window.shares_memory(peer_rank) else kinds.SEPARATE
        return made

    def _done(self, _: Work | None, async_op: bool) -> TorchWork | None:
        return DONE if async_op else None


def allocate(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a CPU tensor that can be registered.

    Raises:
        UsageError: Another device.
    """
    if torch.device(device).type != "cpu":
        raise UsageError(f"allocate_tensor: windows of allranks have CPU memory, not {device}.\n  Pass device='cpu'.")
    return allocate_tensor(size, dtype)
