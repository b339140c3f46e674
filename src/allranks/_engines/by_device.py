"""One group on several engines: each call goes to the engine that transfers tensors of its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from allranks._base.errors import UsageError
from allranks._call.types import Stats
from allranks._engines.base import Engine, EngineWindow, never, not_begun
from allranks._engines.checks import check_tensor

if TYPE_CHECKING:
    from allranks import _core
    from allranks._call.types import PremulSum, ReduceOp
    from allranks._call.work import Work

__all__ = ["ByDevice"]


class ByDevice(Engine):
    """Engines by type of device, ``cpu`` and others. Calls without a tensor go to the engine of ``cpu``."""

    def __init__(self, name: str, engines: Mapping[str, Engine], group_name: str) -> None:
        self.name = name
        # A message can be sent on any of the engines, so the limit is the smallest of theirs.
        self.highest_tag = min(engine.highest_tag for engine in engines.values())
        self._engines = dict(engines)
        self._cpu = engines["cpu"]
        self._group_name = group_name
        # Only the engine for the CPU has a fast path. It returns False for tensors of other devices.
        self.now, self.begin = self._cpu.now, self._cpu.begin

    def prepare(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1
    ) -> Callable[[], bool] | None:
        return self._cpu.prepare(verb, tensor, pieces, op, root)

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        return self._of(tensor, "all_reduce").all_reduce(tensor, op, async_op)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        return self._of(tensor, "reduce").reduce(tensor, root, op, async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        return self._of(tensor, "broadcast").broadcast(tensor, root, async_op)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        return self._of(tensor, "all_gather").all_gather(outputs, tensor, async_op)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        return self._of(tensor, "gather").gather(tensor, outputs, root, async_op)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        return self._of(tensor, "scatter").scatter(tensor, inputs, root, async_op)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None:
        return self._of(tensor, "reduce_scatter").reduce_scatter(tensor, inputs, op, async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        return self._of(inputs[0], "all_to_all").all_to_all(outputs, inputs, async_op)

    def barrier(self, async_op: bool) -> Work | None:
        return self._cpu.barrier(async_op)

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        return self._of(tensor, "send").send(tensor, to, tag, async_op)

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        return self._of(tensor, "recv").recv(tensor, source, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        return self._of(tensor, "recv").irecv(tensor, source, tag)

    def empty_shared(self, nbytes: int) -> Tensor:
        return self._cpu.empty_shared(nbytes)

    def open_window(self) -> EngineWindow:
        return self._cpu.open_window()

    def parts(self) -> Mapping[str, Engine]:
        # Each engine once, under its first device: it counts its calls itself, whatever the device.
        first = {engine: device for device, engine in reversed(self._engines.items())}
        return {device: engine for engine, device in reversed(first.items())}

    def lost(self) -> Sequence[int]:
        # All engines have the same members, and a lost process is lost for all of them.
        return self._cpu.lost()

    def find_gone(self, ranks: Sequence[int]) -> Sequence[int]:
        return self._cpu.find_gone(ranks)

    def set_timeout(self, timeout_s: float) -> None:
        for engine in self._distinct():
            engine.set_timeout(timeout_s)

    def abort(self) -> None:
        for engine in self._engines.values():
            engine.abort()

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        return self._cpu.liveness(ranks)

    def stats(self) -> Stats:
        """Return the sums over all engines."""
        return Stats(*map(sum, zip(*(engine.stats() for engine in self._distinct()), strict=True)))

    def close(self) -> None:
        # First, so that no call reaches an engine that is being closed.
        self.now, self.begin = never, not_begun
        for engine in self._distinct():
            engine.close()

    def abandon(self) -> None:
        for engine in self._distinct():
            engine.abandon()

    def _distinct(self) -> list[Engine]:
        """Return each engine once. One engine may transfer tensors of several types of device."""
        return list(dict.fromkeys(self._engines.values()))

    def _of(self, tensor: Tensor, verb: str) -> Engine:
        engine = self._engines.get(check_tensor(verb, tensor).device.type)
        if engine is None:
            raise UsageError(
                f"{verb} on group '{self._group_name}': the tensor is on {tensor.device}, for which the group has no "
                f"engine (it has {self.name}).\n"
                "  Move the tensor to such a device, or create the group with an engine for "
                f"{tensor.device.type} tensors."
            )
        return engine
