"""The handle of a tensor on a worker, and how operations on it are queued.

A handle is a tensor subclass without data. Autograd and nn see an ordinary tensor; what comes out below them arrives
here, at `dispatch`, is looked up among the calls that are known (`Call`) and goes out as a frame of a few bytes. To
torch's C++ it is on ``lazy:R``, which backward runs in the caller's thread and whose inner factories keep R; to
Python it is on ``worker:R``.
"""

from __future__ import annotations

import copy
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allranks import _core
from allranks._base.errors import UsageError, WorkerLost
from allranks.remote import wire
from allranks.remote.lines import here
from allranks.remote.signature import Facts, Signature, facts, flatten, indexes, marked, signature

if TYPE_CHECKING:
    from allranks.remote.master import Master

__all__ = [
    "GENERATORS",
    "Call", "Place", "RemoteTensor", "as_view", "dispatch", "form", "make", "operands", "place_of", "run",
]  # fmt: skip

_is_inference_mode_enabled = torch.is_inference_mode_enabled

GENERATORS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Those of workers, by the address of what is a generator to torch's C++: Python's object is not the one given."""

_TRUE, _FALSE, _FLOAT, _INT, _DEVICE, _GENERATOR = object(), object(), object(), object(), object(), object()
_OURS = {"_ref", "_sig", "_place", "_off", "_is_param"}
_LOOKS = (torch.Tensor, torch.dtype)
_BEYOND = 1 << 63  # a number of a call has 64 bits; others are part of its template
aten = torch.ops.aten


class Place:
    """Where handles are: one worker, or a group of them.

    Attributes:
        index: of its device; a worker's is its rank.
        ranks: its workers.
        target: how the outbox calls it.
        calls: the calls that these workers know, by key.
        learnt: these, by the number of the state of torch's flags in which they were learnt.
        call: queues one: the outbox's, or while a step is captured the recorder's.
        links: native groups that were made for it, by their ranks; they end with it.
    """

    __slots__ = (
        "__weakref__", "_kind",
        "call", "calls", "device", "index", "lazy", "learnt", "links", "master", "ranks", "target",
    )  # fmt: skip

    def __init__(self, master: Master, index: int, ranks: tuple[int, ...], target: int) -> None:
        self.master = master
        self.index = index
        self.ranks = ranks
        self.target = target
        self.lazy = torch.device("lazy", index)
        self.device = torch.device("worker", index)
        self.links: dict[tuple[int, ...], int] = {}
        self.learnt: dict[int, dict[Any, Call]] = {}
        self.calls: dict[Any, Call] = self.learnt.setdefault(master.state, {})
        self.call = master.outbox.call
        self._kind = ""

    @property
    def kind(self) -> str:
        """Of the device that its workers compute on: "cpu" or "cuda"."""
        if not self._kind:
            self._kind = self.master.request(self, "kind")
        return self._kind

    def __str__(self) -> str:
        return str(self.device) if self.index == self.ranks[0] else f"group {list(self.ranks)}"


class Call:
    """A call with operands of given looks, whose template the workers know.

    Attributes:
        number: of the template.
        outputs: how many new tensors it makes.
        only: what the one new tensor that it returns looks like; None where it returns something else.
        view: that shares its operand's memory, `shift` elements further.
        results: what it returns otherwise: ("new", looks, which output, view, shift), ("same", argument), None, lists.
        resized: operands that look different afterwards.
        pack: what turns the call's numbers into bytes.
        brief: for `_core.dispatch` the number, the outputs, what is returned (a tensor that looks so, the position of
            an argument, None, or True: what `build` builds) and the shift; None where only `run` can do it.
    """

    __slots__ = ("brief", "known", "number", "only", "outputs", "pack", "resized", "results", "shift", "view")

    def __init__(
        self, number: int, known: Facts, values: Sequence[Any], results: list[Any], outputs: int, resized: Any
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
        self.pack = struct.Struct("<" + "".join("d" if type(each) is float else "q" for each in values)).pack
        self.brief = None if resized else (number, outputs, self._returned(), self.shift)

    def _returned(self) -> Signature | int | bool | None:
        if self.only is not None and not self.only.bits and not self.view:
            return self.only
        if not self.results:
            return None
        if len(self.results) == 1 and type(self.results[0]) is tuple and self.results[0][0] == "same":
            return self.known.positions.get(self.results[0][1], True)
        return True

    def build(self, place: Place, made: Any, args: Any, kwargs: Any) -> Any:
        """The handles that the call returns."""
        made = [made] if self.outputs == 1 else made
        for index, sig in self.resized:
            operand: Any = marked(operands(args, kwargs)[index], sig.bits)
            operand.data = make(place, sig, operand._ref, operand._off)

        if not self.results:
            return None
        found = [self._built(each, place, made, args, kwargs) for each in self.results]
        return found[0] if len(found) == 1 else tuple(found)

    def _built(self, result: Any, place: Place, made: Any, args: Any, kwargs: Any) -> Any:
        # No function within `build`: one that calls itself is a cycle, which would keep the operands until it is found.
        if result is None:
            return None
        if type(result) is list:
            return [self._built(each, place, made, args, kwargs) for each in result]
        if result[0] == "same":
            return _argument(result[1], self.known, args, kwargs)
        _, sig, which, shares, shift = result
        return view(args[0], sig, made[which], args[0]._off + shift) if shares else make(place, sig, made[which], shift)


_requires_grad: Any = torch.Tensor.requires_grad


def _set_requires_grad(self: RemoteTensor, requires_grad: bool) -> None:
    if requires_grad != self.requires_grad:
        self._leave()
    _requires_grad.__set__(self, requires_grad)


class RemoteTensor(torch.Tensor):
    """A tensor whose data is on a worker, or on each worker of a group."""

    # No slots: `torch.utils.swap_tensors` has to make a handle of a parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _ref: Any
    _sig: Signature
    _place: Place
    _off: int

    # It queues what is known, and leaves all else to `dispatch` below.
    __torch_dispatch__ = staticmethod(_core.dispatch)  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._place.device

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `torch.Tensor.to`; to another worker directly, not through the master."""
        copy = kwargs.pop("copy", False)
        if len(args) > 1 and type(args[-1]) is bool and len(args) == (3 if isinstance(args[0], _LOOKS) else 4):
            *args, copy = args  # type: ignore[assignment]
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type in ("worker", "lazy"):
            device = torch.device("worker", self._place.master.index_of(device))
        if (
            not copy
            and device in (None, self._place.device)
            and dtype in (None, self.dtype)
            and memory_format in (None, torch.preserve_format)
        ):
            return self
        if device not in (None, self._place.device):
            self._place.master.single(self)
        return aten._to_copy.default(  # type: ignore[no-any-return]
            self, dtype=dtype, device=device or self._place.device, non_blocking=non_blocking,
            memory_format=memory_format,
        )  # fmt: skip

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The tensor's data, here. Waits for it."""
        return self.to("cpu", memory_format=memory_format)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy(force=True)
        raise TypeError(
            f"can't convert {self._place} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError(f"the data is on {self._place}: use Tensor.cpu() first")

    __dlpack_device__ = __dlpack__

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return super().type().replace("lazy", "worker")
        return super().type(dtype, non_blocking, **kwargs)

    def data_ptr(self) -> int:
        raise RuntimeError(f"the data is on {self._place}: there is no pointer to it here. Use Tensor.cpu() first")

    const_data_ptr = data_ptr

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is freed in the order of the one queue."""

    def share_memory_(self) -> RemoteTensor:
        raise RuntimeError(
            f"the data is on {self._place}: it cannot be in memory that processes of this host share. "
            "Use Tensor.cpu() first"
        )

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError(f"cannot pin a tensor on {self._place}: only dense CPU tensors can be pinned")

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RemoteTensor):
            raise TypeError(
                f"data on {other.device} cannot take the place of data on {self._place}: send it first, with .to()"
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._leave()
        self._ref, self._sig, self._place, self._off = other._ref, other._sig, other._place, other._off

    # What changes what autograd does with a tensor ends the captured steps that use it.

    requires_grad = property(_requires_grad.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> RemoteTensor:
        if requires_grad != self.requires_grad:
            self._leave()
        super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        self._leave()
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        self._leave()
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        """Tells captured steps, which know a tensor by its Ref, that this handle gets another, or another use."""
        for watch in weakref.getweakrefs(self._ref.whole):
            if watch.__callback__ is not None:
                watch.__callback__(watch)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def shard(self, rank: int) -> RemoteTensor:
        """One worker's tensor of a group's: the same memory, on device ``worker:rank``."""
        return self._place.master.shard(self, rank)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return self._place.master.show(self)
        except WorkerLost as lost:
            why = str(lost).partition("\n")[0]
            return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype}): {why}"

    def _notes(self) -> dict[str, Any]:
        """What its user has put on it."""
        return {name: each for name, each in self.__dict__.items() if name not in _OURS}

    def __reduce_ex__(self, protocol: Any) -> Any:
        from allranks.remote.saving import reduce

        return reduce(self)

    def __copy__(self) -> Any:
        made: Any = make(self._place, self._sig, self._ref, self._off)  # the same memory
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        made.__dict__.update(self._notes())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
                " at the moment."
            )
        from allranks.remote.saving import twin

        made: Any
        if isinstance(self, torch.nn.Parameter):  # to torch it is all of its memory, and its gradient is not copied
            made = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        else:
            made = twin(self, memo).requires_grad_(self.requires_grad)
            made.grad = copy.deepcopy(self.grad, memo)
            made.__dict__.update(copy.deepcopy(self._notes(), memo))  # which torch does not for parameters
        memo[id(self)] = made
        return made


def view(base: RemoteTensor, sig: Signature, ref: Any, offset: int) -> RemoteTensor:
    """A handle of a tensor that shares the base's memory, and like it is of inference mode or not."""
    if _is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):
            return make(base._place, sig, ref, offset)
    return make(base._place, sig, ref, offset)


def make(place: Place, sig: Signature, ref: Any, offset: int = 0) -> RemoteTensor:
    """A handle."""
    made: RemoteTensor = _core.make_handle(place, sig, ref, offset)
    if sig.bits:
        marked(made, sig.bits)
    return made


def nowhere() -> None:
    """A reference to no place."""


_places: list[Callable[[], Place | None]] = [nowhere] * 128
"""By index of device: weak references, as a group ends when nothing uses it any more."""


def places() -> list[Place]:
    """Those that devices mean."""
    return [found for each in list(_places) if (found := each()) is not None]


def place_of(device: torch.device | None) -> Place:
    """The workers that a device means; the current one's where it has no index.

    Raises:
        UsageError: there are none of that index, as of 0.
    """
    index = device.index if device is not None else None
    if index == 0:
        raise UsageError(
            "worker:0: rank 0 is the master, and the first worker is worker:1. 'worker' alone is the current one,"
            " of torch.worker.set_device()"
        )
    if index is None:
        index = _current[0]
    if index < 0:  # torch keeps it in eight bits
        index += 256
    place = _places[index]() if index < len(_places) else None
    if place is None:
        there = [each.index for each in places() if each.index == each.ranks[0]]
        if not there:
            raise UsageError(f"worker:{index}: there are no workers. Call allranks.init_master_worker() first")
        was = index < len(_places) and _places[index] is not nowhere
        ended = "; a group's device ends with it: hold what group() returned" if was else ""
        raise UsageError(f"there is no worker:{index}; there are worker:{min(there)} to worker:{max(there)}{ended}")
    return place


_current = [1]
"""The worker that ``device="worker"`` means."""


def dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Queues an operation, or does what stands for it here."""
    known = _known.get(id(op))
    if known is None:
        known = _known[id(op)] = (SPECIAL.get(op), facts(op), op)
        if known[0] is None:
            _core.know_operator(op, known[1], known[1].numbers, known[1].floats_matter)
    if known[0] is not None:
        return known[0](op, args, kwargs or {})
    return run(op, args, kwargs, known[1])


_known: dict[int, tuple[Any, Facts, Any]] = {}
"""By id of an operator, whose own hash is Python: what stands for it here, its facts, and it, so that it stays."""


class _Plain(Exception):
    """An operand is on no worker."""


def _is_foreign(value: Any) -> bool:
    """Whether it is a tensor of a class that has its own way with operators, as nested ones of layout jagged."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, RemoteTensor)
        and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


class _Elsewhere(Exception):
    """The result is wanted on another device than that of the operands."""


def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, known: Facts | None = None) -> Any:
    """Queues an operation: as `_core.dispatch`, which does only what is known and ordinary."""
    known = known or facts(op)
    key: list[Any] = [known]
    refs: list[Any] = []
    values: list[Any] = []
    place: Place | None = None
    try:
        for position, value in enumerate(args):
            place = _scan(value, type(value), key, refs, values, place, position in known.numbers, known.floats_matter)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                place = _scan(value, type(value), key, refs, values, place, name in known.numbers, known.floats_matter)
    except (_Plain, _Elsewhere) as way:
        if any(map(_is_foreign, flatten([*args, *(kwargs or {}).values()]))):
            return NotImplemented
        if known.composite:
            return op.decompose(*args, **(kwargs or {}))
        if type(way) is _Elsewhere:
            return _make_elsewhere(op, args, kwargs or {})
        return run(op, *_lift(op, args, kwargs or {}))
    if place is None:
        raise NotImplementedError(f"{known.name} without an operand on a worker")
    call = place.calls.get(tuple(key))
    if call is None:
        prepared = place.master.prepare(op, args, kwargs or {}, tuple(key), place, refs, values)
        if not isinstance(prepared, Call):
            return prepared.result  # it had to be asked for
        call = prepared
    if call.resized:
        _unshare(call, args, kwargs or {}, refs)
    try:
        made = place.call(place.target, here(), call.number, refs, call.outputs, call.pack(*values) if values else None)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise _apart(known.name, args, kwargs or {}) from None
    return call.build(place, made, args, kwargs)


def _scan(
    value: Any, kind: type, key: list[Any], refs: list[Any], values: list[Any], place: Place | None,
    number: bool, floats_matter: bool,
) -> Place | None:  # fmt: skip
    """Adds an argument to a call's key, operands and numbers. Returns where the first operand is.

    `_core.dispatch` makes the same keys.
    """
    if kind is RemoteTensor or isinstance(value, RemoteTensor):
        key.append(value._sig)
        refs.append(value._ref)
        return place or value._place
    if kind is int:
        if number and -_BEYOND <= value < _BEYOND:
            key.append(_INT)
            values.append(value)
        else:
            key.append(value)
    elif kind is float:
        if floats_matter:
            key.append((_FLOAT, repr(value)))
        else:
            key.append(_FLOAT)
            values.append(value)
    elif value is True:
        key.append(_TRUE)
    elif value is False:
        key.append(_FALSE)
    elif kind is list or kind is tuple:
        key.append(len(value))
        for each in value:
            place = _scan(each, type(each), key, refs, values, place, number, floats_matter)
    elif isinstance(value, torch.Tensor):
        raise _Plain
    elif kind is torch.device:
        if value.type in ("worker", "lazy"):
            there = place_of(value)
            if place is not None and there.index != place.index:
                if _GENERATOR in key:
                    raise UsageError(
                        f"expected a generator of {there}, not of {place}: torch.Generator(device='{there}')"
                    )
                raise _Elsewhere
        elif place is None or value != place.lazy:
            raise _Elsewhere
        key.append(_DEVICE)
        return place or there
    elif kind is complex:
        key.append((complex, repr(value)))
    elif kind is torch.Generator:
        generator = GENERATORS.get(value._cdata)
        if generator is None or (place is not None and generator._place.index != place.index):
            of = generator.device if generator is not None else value.device
            device = place.device if place is not None else "worker:R"
            raise UsageError(f"expected a generator of {device}, not of {of}: torch.Generator(device='{device}')")
        if place is not generator._place:
            generator._place.master.check(generator._place)  # one of that index may have been lost
        key.append(_GENERATOR)
        values.append(generator._number)
        return place or generator._place
    else:
        key.append(value)
    return place


def form(value: Any, number: bool, floats_matter: bool) -> wire.Form:
    """An argument as a template has it; `_scan` takes the same values in the same order."""
    if isinstance(value, RemoteTensor):
        return ["t"]
    if number and type(value) is int and -_BEYOND <= value < _BEYOND:
        return ["i"]
    if type(value) is float and not floats_matter:
        return ["f"]
    if type(value) is torch.Generator:
        return ["g"]
    if isinstance(value, list | tuple):
        return ["l", *(form(each, number, floats_matter) for each in value)]
    return wire.encode(value)


def _make_elsewhere(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs what takes only their looks from its operands: on others that look like them, on the wished device."""
    known = facts(op)
    device = kwargs.get("device")
    if not known.factory or device is None:
        raise NotImplementedError(f"{known.name} to another device than that of its operands")

    def there(value: Any) -> Any:
        if not isinstance(value, RemoteTensor):
            return value
        return torch.empty_strided(value._sig.shape, value._sig.strides, dtype=value.dtype, device=device)

    if device.type == "lazy":
        device = place_of(device).device
    return op(*map(there, args), **{**kwargs, "device": device})


def _lift(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Puts operands of the master's where the others are: numbers in a tensor and indexes, as CUDA has it."""
    place: Place | None = None
    for each in flatten([*args, *kwargs.values()]):
        if isinstance(each, RemoteTensor):
            place = each._place
            break
        if isinstance(each, torch.device) and each.type in ("worker", "lazy"):
            place = place_of(each)
    if place is None:
        raise NotImplementedError(f"{facts(op).name} without an operand on a worker")
    there: Place = place
    lenient = indexes(op)
    written = {each.name for each in op._schema.arguments if each.alias_info and each.alias_info.is_write}

    def lifted(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return [lift(each, lenient, name) for each in value]
        return lift(value, False, name)

    def lift(value: Any, lenient: bool, name: str) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, RemoteTensor):
            lenient |= value.device == there.lazy  # a composite operator has made it beside handles that are near
            if value.device.type == "cpu" and name not in written and (value.dim() == 0 or lenient):
                return there.master.upload(there, value)
            raise _apart(facts(op).name, args, kwargs)
        return value

    return (
        [lifted(each, argument.name) for each, argument in zip(args, op._schema.arguments, strict=False)],
        {name: lifted(each, name) for name, each in kwargs.items()},
    )


def _apart(name: str, args: Any, kwargs: Any) -> RuntimeError:
    found: list[str] = []
    for each in flatten([*args, *kwargs.values()]):
        where = str(each._place) if isinstance(each, RemoteTensor) else None
        if where is None and isinstance(each, torch.Tensor):
            where = str(each.device)
        if where is not None and where not in found:
            found.append(where)
    error = RuntimeError(
        "Expected all tensors to be on the same device, "
        f"but found at least two devices, {' and '.join(found)}! ({name})"
    )
    error._without_frames = True  # type: ignore[attr-defined] # for `_core.dispatch`
    return error


def _argument(which: str, known: Facts, args: Any, kwargs: Any) -> Any:
    position = known.positions.get(which)
    return args[position] if position is not None and position < len(args) else kwargs[which]


def _unshare(call: Call, args: Any, kwargs: Any, refs: list[Any]) -> None:
    """Gives operands that the call reshapes ids of their own: detached handles share one."""
    found = operands(args, kwargs)
    resized = [found[index] for index, _ in call.resized]
    own = dict(zip(map(id, resized), unshare(resized), strict=True))
    refs[:] = [own.get(id(operand), ref) for operand, ref in zip(found, refs, strict=True)]


def unshare(given: Sequence[RemoteTensor]) -> list[Any]:
    """Gives handles ids of their own, of the same memory; their Refs then.

    A handle that is given twice, as an input and the result, has one: the worker refuses that as torch does here.
    """
    own: dict[int, Any] = {}
    for operand in given:
        if id(operand) not in own:
            own[id(operand)] = run(aten.alias.default, (operand,), None)._ref
            operand._leave()
            operand._ref = own[id(operand)]
    return [own[id(operand)] for operand in given]


def operands(args: Any, kwargs: Any) -> list[RemoteTensor]:
    """The handles in a call, in order."""
    return [each for each in flatten([*args, *(kwargs or {}).values()]) if isinstance(each, RemoteTensor)]


def _only(call: Call) -> Signature:
    assert call.only is not None
    return call.only


# What is not simply queued.

Special = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
SPECIAL: dict[Any, Special] = {}


def special(*ops: Any) -> Callable[[Special], Special]:
    def add(function: Special) -> Special:
        SPECIAL.update(dict.fromkeys(ops, function))
        _known.clear()
        _core.forget_operators()
        return function

    return add


@special(aten.detach.default, aten.lift_fresh.default, aten.lift.default)
def _detach(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return view(x, x._sig, x._ref, x._off) if isinstance(x, RemoteTensor) else x


@special(aten._local_scalar_dense.default)
def _item(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]._place.master.item(args[0])


@special(aten._to_copy.default)
def _to_copy(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    device = kwargs.get("device")
    if not isinstance(x, RemoteTensor):
        # torch gives a device without an index that of 0 where a tensor comes from the CPU.
        place = place_of(None if device is not None and device.index == 0 else device)
        plain = op(x, **{**kwargs, "device": torch.device("cpu")})
        return place.master.upload(place, plain)
    master = x._place.master
    if device in (None, x._place.lazy) or (
        device.type in ("worker", "lazy") and place_of(device).index == x._place.index
    ):
        return run(op, args, kwargs)
    rest = {name: each for name, each in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    if len(x._place.ranks) > 1 and torch._C._current_graph_task_id() >= 0:
        # Backward brings a gradient to where a tensor is of which all workers had copies.
        x = master.total(run(op, args, {**rest, "device": x._place.lazy}))
        return x if device == x._place.lazy else x.to(device)
    if device.type in ("worker", "lazy"):
        if any(each is not None for name, each in rest.items() if name != "memory_format"):
            x = run(op, args, {**rest, "device": x._place.lazy})
        return master.copy(x, place_of(device))
    fetched = master.fetch(x)
    return op(fetched, **rest, device=device)


@special(aten.copy_.default)
def _copy(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    into, source = args[:2]
    if not isinstance(into, RemoteTensor):
        into.copy_(source._place.master.fetch(source))
        return into
    place = into._place
    if not isinstance(source, RemoteTensor):
        source = place.master.upload(place, source.detach().cpu())
    elif source._place.index != place.index:
        source = place.master.copy(source, place)
    run(op, (into, source), None)
    return into


@special(aten._copy_from.default, aten._copy_from_and_resize.default)
def _copy_from(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _copy(aten.copy_.default, (args[1], args[0]), {})


def as_view(base: RemoteTensor, view: RemoteTensor) -> RemoteTensor:
    """Has torch take a handle for a view of another: one that it has not made, as where the two are on other workers.

    Autograd then sees where a change of one changes the other, and refuses it where it would have to know how.
    """
    _awaited.view = view
    try:
        return aten.alias.default(base)  # type: ignore[no-any-return]
    finally:
        _awaited.view = None


_awaited = threading.local()


@special(aten.alias.default)
def _alias(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    view = getattr(_awaited, "view", None)
    return run(op, args, kwargs) if view is None else view


@special(aten._sparse_compressed_tensor_unsafe.default)
def _refuse(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise TypeError(f"the result is {kwargs['layout']}: {wire.ONLY_STRIDED}")  # torch would fail at its own assertion


@special(aten._efficientzerotensor.default)
def _zeros(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return run(aten.zeros.default, args, kwargs)  # zeros without memory are of autograd's own, not to be sent or shown


@special(aten.is_pinned.default)
def _is_pinned(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return False


@special(aten.select.int)
def _select(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, dim, index = args
    if type(x) is not RemoteTensor:
        return run(op, args, kwargs)
    sig = x._sig
    if not -len(sig.shape) <= dim < len(sig.shape) or not -sig.shape[dim] <= index < sig.shape[dim]:
        return op(sig.on_meta(), dim, index)  # which raises
    if index < 0:
        index += sig.shape[dim]
    place = x._place
    call = place.calls.get((op, sig, dim))
    if call is None:
        shape, strides = list(sig.shape), list(sig.strides)
        del shape[dim], strides[dim]
        looks = signature(sig.dtype, shape, strides, sig.bits)
        forms = [["t"], ["c", dim], ["i"]]
        call = place.master.define(
            place, (op, sig, dim), op, forms, {}, [index], [("new", looks, 0, True, 0)], [], False
        )
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(index))
    return view(x, _only(call), made, x._off + index * sig.strides[dim])


@special(aten.slice.Tensor)
def _slice(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    x, dim, start, end, step = (*args, *defaults[len(args) - 1 :])
    sig = x._sig
    if not -len(sig.shape) <= dim < len(sig.shape) or step <= 0:
        return op(sig.on_meta(), dim, start, end, step)  # which raises
    start, end, step = slice(start, end, step).indices(sig.shape[dim])
    end = max(start, end)
    length = (end - start + step - 1) // step
    place = x._place
    key = (op, sig, dim, length, step)
    call = place.calls.get(key)
    if call is None:
        shape, strides = list(sig.shape), list(sig.strides)
        shape[dim], strides[dim] = length, strides[dim] * step
        looks = signature(sig.dtype, shape, strides, sig.bits)
        forms = [["t"], ["c", dim], ["i"], ["i"], ["c", step]]
        call = place.master.define(place, key, op, forms, {}, [start, end], [("new", looks, 0, True, 0)], [], False)
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(start, end))
    return view(x, _only(call), made, x._off + start * sig.strides[dim])


@special(aten.as_strided.default)
def _as_strided(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, size, strides, offset = (*args, None)[:4]
    place = x._place
    offset = x._off if offset is None else offset
    key = (op, x._sig, tuple(size), tuple(strides))
    call = place.calls.get(key)
    if call is None:
        looks = signature(x.dtype, size, strides, x._sig.bits)
        forms = [["t"], wire.encode(size), wire.encode(strides), ["i"]]
        call = place.master.define(place, key, op, forms, {}, [offset], [("new", looks, 0, False, 0)], [], False)
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(offset))
    return view(x, _only(call), made, offset)


@special(aten.set_.source_Tensor)
def _set(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, source = args
    x.data = source
    return x


_core.set_handles(
    RemoteTensor, Place, torch.Tensor._make_wrapper_subclass, here, dispatch, (_TRUE, _FALSE, _INT, _FLOAT),
    [str, torch.dtype, torch.layout, torch.memory_format],
)  # fmt: skip
