"""The state of a tensor on a worker: handles, their places, their calls, and the interface of the master.

These types refer to each other, so they are in one file.

A handle is a tensor subclass without data. To torch's C++ it is on ``lazy:R``: backward runs such tensors in the
caller's thread, and its inner factories keep R. To Python it is on ``worker:R``. `RemoteTensor` in `tensor` is the
class of all handles; `Handle` is the part of it that other modules of this package need.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from allranks import _core
from allranks._base.errors import UsageError
from allranks.remote.protocol.arguments import packed_as
from allranks.remote.protocol.signature import Signature, SignatureFacts, flatten, marked

__all__ = ["AnsweredHandle", "DeviceTarget", "Driver", "Handle", "KnownCall", "make", "operands", "single", "view"]

_is_inference_mode_enabled = torch.is_inference_mode_enabled
_STATE = {"_ref", "_sig", "_place", "_off", "_is_param"}
_requires_grad: Any = torch.Tensor.requires_grad


class HandleConnections(Protocol):
    """The connections of a master with its workers: commands and answers."""

    outbox: _core.Outbox
    recorder: Any
    seed: int
    state: int
    timeout_s: float
    closed: bool

    @property
    def ranks(self) -> list[int]: ...
    def next_number(self) -> int: ...
    def put(self, place: DeviceTarget, message: Any, data: Any = None) -> None: ...
    def command(self, place: DeviceTarget, name: str, /, **arguments: Any) -> None: ...
    def request(self, place: DeviceTarget, name: str, /, **arguments: Any) -> Any: ...
    def wait(self, number: int, rank: int, what: str, timeout_s: float | None = None) -> Any: ...
    def unanswered(self, rank: int, timeout_s: float, what: str) -> Exception: ...
    def loss_error(self, rank: int, why: str) -> Exception: ...
    def check(self, place: DeviceTarget) -> None: ...
    def check_process(self) -> None: ...
    def without_recovery(self) -> AbstractContextManager[None]: ...
    def refuse_recording(self, why: str, always: bool = True) -> None: ...


class Operators(Protocol):
    """The calls with templates on workers."""

    templates: dict[int, tuple[Any, Any, Any, KnownCall]]
    programs: list[int]

    def define(
        self, place: DeviceTarget, key: Any, op: Any, args: list[Any], kwargs: dict[str, Any], values: list[Any],
        results: list[Any], resized: list[tuple[int, Signature]], checked: bool,
    ) -> KnownCall: ...  # fmt: skip
    def prepare(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], key: Any, place: DeviceTarget, refs: list[Any],
        values: list[Any],
    ) -> KnownCall | AnsweredHandle: ...  # fmt: skip
    def invoke(
        self, place: DeviceTarget, name: str, link: int, tensors: Sequence[Handle], arguments: Sequence[Any],
        results: Sequence[Signature] = (),
    ) -> list[Handle]: ...  # fmt: skip


class HandleTransfers(Protocol):
    """Tensors that move between the master and workers, and among workers."""

    def upload(self, place: DeviceTarget, plain: torch.Tensor, non_blocking: bool = ...) -> Handle: ...
    def hold(self, place: DeviceTarget, ref: Any, sig: Signature, dense: torch.Tensor) -> None: ...
    def item(self, x: Handle) -> Any: ...
    def fetch(self, x: Handle) -> torch.Tensor: ...
    def copy(self, x: Handle, place: DeviceTarget) -> Handle: ...
    def copies(self, tensors: Sequence[Handle], place: DeviceTarget) -> list[Handle]: ...
    def link(self, place: DeviceTarget, *ranks: int) -> int: ...


class Devices(Protocol):
    """The workers and groups of one master."""

    def worker(self, rank: int) -> DeviceTarget: ...
    def target(self, ranks: Sequence[int]) -> int: ...


class Driver(Protocol):
    """The interface of the master that handles need. `master.Master` implements it; this module does not import it."""

    @property
    def connections(self) -> HandleConnections: ...
    @property
    def operators(self) -> Operators: ...
    @property
    def transfers(self) -> HandleTransfers: ...
    @property
    def devices(self) -> Devices: ...
    @property
    def watch(self) -> Callable[[Any], None]: ...
    def follow_flags(self) -> None: ...
    def synchronize(self, place: DeviceTarget | None = None) -> None: ...


class DeviceTarget:
    """One worker, or a group of workers: the target of a handle's device.

    Attributes:
        master: The driver of its workers.
        index: The index of its device. A worker's index is its rank.
        ranks: Its workers.
        target: The outbox's number for its workers.
        calls: The calls with templates on its workers, by key.
        calls_by_flags: `calls` for each state of torch's flags, by the state's number.
        call: Queues a call: the outbox's method, or the recorder's while a step is captured.
        links: Native groups that were created for it, by their ranks. They end with it.
        successor: The target of the group after a lost worker has been replaced; None before.
    """

    __slots__ = (
        "__weakref__",
        "_kind",
        "call",
        "calls",
        "calls_by_flags",
        "device",
        "index",
        "lazy",
        "links",
        "master",
        "ranks",
        "successor",
        "target",
    )  # fmt: skip

    def __init__(self, master: Driver, index: int, ranks: tuple[int, ...], target: int) -> None:
        self.master = master
        self.index = index
        self.ranks = ranks
        self.target = target
        self.lazy = torch.device("lazy", index)
        self.device = torch.device("worker", index)
        self.links: dict[tuple[int, ...], int] = {}
        self.calls_by_flags: dict[int, dict[Any, KnownCall]] = {}
        self.calls: dict[Any, KnownCall] = self.calls_by_flags.setdefault(master.connections.state, {})
        self.call = master.connections.outbox.call
        self.successor: DeviceTarget | None = None
        self._kind = ""

    @property
    def kind(self) -> str:
        """The kind of device that its workers compute on: "cpu" or "cuda"."""
        if not self._kind:
            self._kind = self.master.connections.request(self, "kind")
        return self._kind

    def __str__(self) -> str:
        return str(self.device) if self.index == self.ranks[0] else f"group {list(self.ranks)}"


def _set_requires_grad(self: Handle, requires_grad: bool) -> None:
    if requires_grad != self.requires_grad:
        self._end_watch()
    _requires_grad.__set__(self, requires_grad)


class Handle(torch.Tensor):
    """A tensor whose data is on a worker, or on each worker of a group.

    A change that alters how autograd treats the tensor invalidates the captured steps that use it.
    """

    # No slots: `torch.utils.swap_tensors` must be able to turn a parameter into a handle.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _ref: Any
    _sig: Signature
    _place: DeviceTarget
    _off: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._place.device

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, Handle):
            raise TypeError(
                f"data on {other.device} cannot replace data on {self._place}.\n  Send it first, with .to()."
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        # Before the new Ref is set, because this notifies the steps that use the old one.
        self._end_watch()
        self._ref, self._sig, self._place, self._off = other._ref, other._sig, other._place, other._off

    requires_grad = property(_requires_grad.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Handle:
        if requires_grad != self.requires_grad:
            self._end_watch()
        super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        self._end_watch()
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        self._end_watch()
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _end_watch(self) -> None:
        """Invalidate captured steps that use this handle, because it gets another Ref or another use in autograd."""
        for watch in weakref.getweakrefs(self._ref.whole):
            if watch.__callback__ is not None:  # those of `Replay`
                watch.__callback__(watch)

    def _notes(self) -> dict[str, Any]:
        """Return the attributes that the user has set."""
        return {name: each for name, each in self.__dict__.items() if name not in _STATE}


def view(base: Handle, sig: Signature, ref: Any, offset: int) -> Handle:
    """Return a handle that shares the base's memory, and is an inference tensor if the base is one."""
    if _is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):
            return make(base._place, sig, ref, offset)
    return make(base._place, sig, ref, offset)


def make(place: DeviceTarget, sig: Signature, ref: Any, offset: int = 0) -> Handle:
    """Return a new handle."""
    made: Handle = _core.make_handle(place, sig, ref, offset)
    if sig.bits:
        marked(made, sig.bits)
    return made


def single(x: Handle) -> DeviceTarget:
    """Return the worker that has the tensor.

    Raises:
        UsageError: The tensor is on the workers of a group.
    """
    if len(x._place.ranks) > 1:
        raise UsageError(
            f"expected a tensor on one worker, not on {x._place}.\n"
            f"  Select the data of one worker, for example x.shard({x._place.ranks[0]})."
        )
    return x._place


def operands(args: Any, kwargs: Any) -> list[Handle]:
    """Return the handles in a call, in order."""
    return [each for each in flatten([*args, *(kwargs or {}).values()]) if isinstance(each, Handle)]


class KnownCall:
    """A call with operands of given signatures. The workers have its template.

    Attributes:
        number: The number of the template.
        outputs: The number of new tensors that it creates.
        only: The signature of the one new tensor that it returns; None if it returns anything else.
        view: This tensor shares its operand's memory, `shift` elements further.
        results: The returned values: ("new", signature, output index, view, shift), ("same", argument), None, or lists
            of these.
        resized: Operands whose shape, strides or bits differ after the call: their positions and signatures.
        pack: Converts the call's numbers to bytes.
        brief: The data for `_core.dispatch`: the number, the outputs, the result, the shift and `view`. The result is
            the signature of a tensor, the position of an argument, None, or True if `build` must build it. None if only
            `run` can execute the call.
    """

    __slots__ = ("brief", "known", "number", "only", "outputs", "pack", "resized", "results", "shift", "view")

    def __init__(
        self, number: int, known: SignatureFacts, values: Sequence[Any], results: list[Any], outputs: int, resized: Any
    ):
        self.number = number
        self.known = known
        self.outputs = outputs
        self.results = results
        self.resized: list[tuple[int, Signature]] = resized
        self.only: Signature | None = None
        self.view, self.shift = False, 0
        if len(results) == 1 and type(results[0]) is tuple and results[0][0] == "new" and not resized:
            _, self.only, _, self.view, self.shift = results[0]
        self.pack = struct.Struct(f"<{packed_as(values)}").pack
        self.brief = None if resized else (number, outputs, self._returned(), self.shift, self.view)

    def _returned(self) -> Signature | int | bool | None:
        if self.only is not None and not self.only.bits:
            return self.only
        if not self.results:
            return None
        if len(self.results) == 1 and type(self.results[0]) is tuple and self.results[0][0] == "same":
            return self.known.positions.get(self.results[0][1], True)
        return True

    def build(self, place: DeviceTarget, made: Any, args: Any, kwargs: Any) -> Any:
        """Return the handles that the call returns."""
        made = [made] if self.outputs == 1 else made
        for index, sig in self.resized:
            operand: Any = marked(operands(args, kwargs)[index], sig.bits)
            operand.data = make(place, sig, operand._ref, operand._off)

        if not self.results:
            return None
        found = [self._built(each, place, made, args, kwargs) for each in self.results]
        return found[0] if len(found) == 1 else tuple(found)

    def _built(self, result: Any, place: DeviceTarget, made: Any, args: Any, kwargs: Any) -> Any:
        # Not a nested function of `build`: if it calls itself, it is a reference cycle that keeps the operands alive.
        if result is None:
            return None
        if type(result) is list:
            return [self._built(each, place, made, args, kwargs) for each in result]
        if result[0] == "same":
            return _argument(result[1], self.known, args, kwargs)
        _, sig, which, shares, shift = result
        return view(args[0], sig, made[which], args[0]._off + shift) if shares else make(place, sig, made[which], shift)


def _argument(which: str, known: SignatureFacts, args: Any, kwargs: Any) -> Any:
    position = known.positions.get(which)
    return args[position] if position is not None and position < len(args) else kwargs[which]


class AnsweredHandle:
    """The result of an operator that could not be queued."""

    __slots__ = ("result",)

    def __init__(self, result: Any) -> None:
        self.result = result
