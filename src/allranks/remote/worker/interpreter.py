"""A worker: runs what the master has queued, in order, and answers where it is asked.

Of each template a function is compiled once that takes its tensors out of the slots, calls the operator and puts away
the results; so a queued operation costs the worker little beside the operator itself. An operation that fails leaves a
`Poison` where its results would be, and in every tensor that shares memory with one that it should have changed;
whatever uses a poisoned tensor is poisoned by the same fault. The worker goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allranks import _core
from allranks._base.errors import PeerLostError
from allranks.remote import wire
from allranks.remote.faults import Poison, Spoilt
from allranks.remote.wire import Answer, Ask, Define, Fault, Form, Hold, Meta, Order, Program
from allranks.remote.worker.orders import OPERATIONS, ORDERS
from allranks.remote.worker.program import compile_program
from allranks.remote.worker.state import WorkerState, describe
from allranks.remote.worker.template import Code, Slots, Template

if TYPE_CHECKING:
    from allranks.remote.meet import Post

__all__ = ["Interpreter", "serve", "written_by"]

_NUMBERS = {"f": "d", "i": "q", "g": "q"}
_CHUNK = 1 << 18
_WATCHED = {"mkldnn_rnn_layer"}


def _said(value: Any) -> Any:
    """What the master is told of a value that an operator has returned."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the result is a {type(value).__name__}: workers can return tensors and numbers")


def flatten(result: Any) -> list[Any]:
    """What an operator returned, in one list."""
    if isinstance(result, list | tuple):
        return [one for each in result for one in (each if isinstance(each, list | tuple) else (each,))]
    return [result]


class Interpreter(WorkerState):
    """Runs frames."""

    def __init__(self, rank: int, device: torch.device, say: Callable[[bytes], None], post: Post | None = None) -> None:
        """
        Args:
            rank: of this worker.
            device: where its tensors live.
            say: sends an encoded answer to the master.
            post: where it meets other workers.
        """
        super().__init__(rank, device, post)
        self._say = say
        self._last_ask = 0
        self._mended = 0
        self._table: dict[int, Template] = {}

    def execute(self, buffer: bytearray | bytes, start: int, end: int, slots: Slots) -> int:
        """Runs the complete frames in a buffer: where the first incomplete one begins."""
        at, table, head = start, self._table, wire.HEAD.unpack_from
        while end - at >= 2:
            (number,) = head(buffer, at)
            if number >= wire.CALL:
                template = table[number]
                after = at + 2 + template.nbytes
                if after > end:
                    return at
                try:
                    template.run(slots, buffer, at + 2)
                except Exception as error:  # noqa: BLE001 - it goes to whoever uses the result
                    self.fail(template, slots, buffer, at + 2, error)
                at = after
            elif number == wire.FREE:
                if end - at < 4:
                    return at
                count = wire.HEAD.unpack_from(buffer, at + 2)[0]
                after = at + 4 + 4 * count
                if after > end:
                    return at
                for each in struct.unpack_from(f"<{count}I", buffer, at + 4):
                    slots.pop(each, None)
                at = after
            else:
                if end - at < 6:
                    return at
                word = int.from_bytes(buffer[at + 2 : at + 6], "little")
                if number == wire.ECHO:
                    self._echo(word)
                    at += 6
                    continue
                if number == wire.LINE:
                    self.line, at = word, at + 6
                    continue
                if end - at < 6 + word:
                    return at
                with memoryview(buffer)[at + 6 : at + 6 + word] as payload:
                    self._hear(payload)
                at += 6 + word
        return at

    def missing(self, buffer: bytearray, start: int, end: int) -> int:
        """How long the incomplete frame is that begins there, as far as can be told."""
        if end - start >= 6 and wire.HEAD.unpack_from(buffer, start)[0] == wire.MESSAGE:
            return 6 + int.from_bytes(buffer[start + 2 : start + 6], "little")
        return 0

    def answer(self, number: int, said: Any = None, fault: Fault | None = None) -> None:
        """Answers the master."""
        self._say(wire.frame(Answer(number, said, fault)))

    def _echo(self, number: int) -> None:
        """All before is done: says the number back, and the faults that nobody has heard of."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        faults, self.unheard = self.unheard, []
        if faults:
            self.answer(number, faults)
        else:
            self._say(wire.ECHOED.pack(0, number))

    def _hear(self, payload: memoryview) -> None:
        message, data = wire.unpack(payload)
        match message:
            case Define():
                try:
                    self._table[message.number] = self._compile(message)
                except Exception as error:  # noqa: BLE001 - whoever calls it hears of it
                    self._table[message.number] = self._refuse(message, error)
            case Ask():
                self._ask(message)
            case Hold(id, meta):
                try:
                    self.slots[id] = self._unpack(meta, data)
                except Exception as error:  # noqa: BLE001 - out of memory, most likely: it goes to whoever uses it
                    self.slots[id] = Poison(self.fault("a tensor of the master's", error))
                    self.unheard.append(self.slots[id].fault)
            case Program():
                self._table[message.number] = compile_program(self, message, self._table)
            case Order(name, number, said):
                self._obey(name, number, said, data)

    def _unpack(self, meta: Meta, data: memoryview) -> torch.Tensor:
        dtype, shape, strides = meta[:3]
        tensor = torch.empty_strided(shape, strides, dtype=wire.dtype_of(dtype))
        if len(data):
            flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            flat.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return tensor.to(self.device)

    def _obey(self, name: str, number: int, said: dict[str, Any], data: memoryview) -> None:
        line, self.line = self.line, said.pop("line", 0)
        try:
            if name == "keep":
                kept = zip(said["ids"], self.kept.pop(said["of"]), strict=True)
                self.slots.update((id, each) for id, each in kept if id is not None)
                return
            self.answering = number
            result = ORDERS[name](self, data, **said)
        except Spoilt as spoilt:
            if number:
                self.answer(number, None, spoilt.fault)
            for each in said.get("outputs", ()):
                self.slots[each] = Poison(spoilt.fault)
        except Exception as error:  # noqa: BLE001 - the master raises it
            fault = self.fault(name, error)
            if number:
                self.answer(number, None, fault)
            else:
                self.unheard.append(fault)
            for each in said.get("outputs", ()):
                self.slots[each] = Poison(fault)
        else:
            if number:
                self.answer(number, result)
            if (afterwards := self.afterwards) is not None:
                self.afterwards = None
                with contextlib.suppress(PeerLostError):  # the master has given up, and dropped the link
                    afterwards()
        finally:
            self.line = line

    def _ask(self, ask: Ask) -> None:
        """Runs an operator whose results only the data can tell."""
        self.kept.pop(self._last_ask, None)  # the master has raised what another worker answered
        self._last_ask = ask.number
        inputs: list[Any] = [self.slots.get(each) for each in ask.inputs]
        poison = next((each for each in inputs if type(each) is Poison), None)
        said: Any = None
        if poison is None:
            tensors, numbers = iter(inputs), iter(_numbers(ask.args, ask.kwargs, ask.values))
            try:
                op = self._resolve(ask.op)
                args = [self._value(form, tensors, numbers) for form in ask.args]
                kwargs = {name: self._value(form, tensors, numbers) for name, form in ask.kwargs.items()}
                with torch.no_grad():
                    result = op(*args, **kwargs)
                returns = len(op._schema.returns)
                values = [] if returns == 0 else [result] if returns == 1 else result
                counts = [len(each) if isinstance(each, list | tuple) else -1 for each in values]
                results = flatten(result) if returns else []
                metas = [_said(each) for each in results]
                said = [metas, {each: describe(inputs[each]) for each in written_by(op, ask.args, ask.kwargs)}, counts]
                self.kept[ask.number] = results
            except Exception as error:  # noqa: BLE001 - the master raises it at once, where it was called
                self.answer(ask.number, "now", self.fault(ask.op, error))
                return
        self.answer(ask.number, said, poison.fault if poison else None)

    def _resolve(self, name: str) -> Any:
        space, _, rest = name.partition("::")
        if space == "allranks":
            return functools.partial(OPERATIONS[rest][0], self)
        base, _, overload = rest.partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        except AttributeError:
            raise NotImplementedError(
                f"worker {self.rank} has no operator {name}: run what defines it there, with mw.remote(), "
                "or define it with torch.library.custom_op"
            ) from None
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"{name} is no operator")
        return _Watched(op) if base in _WATCHED else op

    def _value(self, form: Form, tensors: Any, numbers: Any) -> Any:
        if form[0] == "t":
            return next(tensors)
        if form[0] in _NUMBERS:
            number = next(numbers)
            return self.generators[number] if form[0] == "g" else number
        if form[0] == "l":
            return [self._value(each, tensors, numbers) for each in form[1:]]
        return wire.decode(form, self.device)

    def _compile(self, define: Define) -> Template:
        """A function for a template, of slots, a buffer and where in it the ids begin."""
        op = self._resolve(define.op)
        if not all(each.isidentifier() for each in define.kwargs):
            raise ValueError(f"{define.op}: {list(define.kwargs)} are no names")
        own = f"_{define.number}"
        space: dict[str, Any] = {f"op{own}": getattr(op, "_op", op), "settle": self._settle, "flatten": flatten}
        space |= {f"R{own}": define.results, "generators": self.generators}
        inputs, codes = 0, ""

        def source(form: Form) -> str:
            nonlocal inputs, codes
            if form[0] == "t":
                inputs += 1
                return f"{{i[{inputs - 1}]}}"
            if form[0] in _NUMBERS:
                codes += _NUMBERS[form[0]]
                number = f"{{n[{len(codes) - 1}]}}"
                return f"generators[{number}]" if form[0] == "g" else number
            if form[0] == "l":
                return f"[{', '.join(map(source, form[1:]))}]"
            name = f"c{len(space)}{own}"
            space[name] = wire.decode(form, self.device)
            return name

        args = [source(form) for form in define.args]
        args += [f"{name}={source(form)}" for name, form in define.kwargs.items()]
        outputs = [each for each, meta in enumerate(define.results) if meta is not None]
        layout = struct.Struct(f"<{inputs + len(outputs)}I{codes}")
        call = f"op{own}({', '.join(args)})"
        schema = getattr(op, "_schema", None)
        single = (
            outputs and len(define.results) == 1 and not (schema and str(schema.returns[0].type).startswith("List"))
        )

        def text(checked: bool) -> str:
            def result(source: str, which: int) -> str:
                return f"settle({source}, {which}, R{own})" if checked else source

            if not outputs:
                return call
            if single:
                return f"{{o[0]}} = {result(call, 0)}"
            taken = [f"{{o[{at}]}} = {result(f'r[{each}]', each)}" for at, each in enumerate(outputs)]
            return "; ".join([f"r = flatten({call})", *taken, "del r"])

        ids = [f"i{each}" for each in range(inputs)], [f"o{each}" for each in range(len(outputs))]
        numbers = [f"n{each}" for each in range(len(codes))]
        names = [*ids[0], *ids[1], *numbers]
        taken = f"{', '.join(names)}, = unpack(B, at)" if names else "pass"

        def function(checked: bool) -> Callable[[Slots, Any, int], None]:
            slots = [[f"S[{each}]" for each in kind] for kind in ids]
            body = text(checked).format(i=slots[0], o=slots[1], n=numbers)
            within = {**space, "unpack": layout.unpack_from}
            exec(f"def run(S, B, at):\n  {taken}\n  {body}", within)
            return within["run"]  # type: ignore[no-any-return]

        changes = tuple(written_by(op, define.args, define.kwargs))
        code = Code(text(define.checked), layout, space)
        made = Template(define.op, inputs, len(outputs), layout.size, changes, function(True), code)
        if define.checked or not outputs:
            return made
        plain = made._replace(run=function(False))

        def first(slots: Slots, buffer: Any, at: int) -> None:
            mended = self._mended
            made.run(slots, buffer, at)
            # What had to be brought into the strides that the master believes in has to be each time.
            if self._mended == mended and self._table.get(define.number) is wrapped:
                self._table[define.number] = plain

        wrapped = made._replace(run=first)
        return wrapped

    def _refuse(self, define: Define, error: Exception) -> Template:
        """Stands for a template that this worker cannot make: it may have another torch than the master."""
        forms = [*define.args, *define.kwargs.values()]
        inputs, outputs = sum(map(_count, forms)), sum(each is not None for each in define.results)
        layout = struct.Struct(f"<{inputs + outputs}I{''.join(map(_codes, forms))}")

        def refuse(*_: Any) -> None:
            raise error

        code = Code(f"refuse_{define.number}()", layout, {f"refuse_{define.number}": refuse})
        return Template(define.op, inputs, outputs, layout.size, (), refuse, code)

    def _settle(self, result: Any, which: int, metas: list[Meta]) -> Any:
        """Sees to it that a result is what the master believes it to be."""
        dtype, shape, strides, _, bits = metas[which]
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"result {which} is {result!r}, where the master expects a tensor")
        same = list(result.shape) == shape and str(result.dtype) == f"torch.{dtype}"
        if same and list(result.stride()) == strides and wire.bits_of(result) == bits:
            return result
        if not same or bits or result._is_view():
            raise RuntimeError(
                f"result {which} is {describe(result)}, where the master expects {metas[which]}: "
                "please report this operator"
            )
        self._mended += 1
        return result.new_empty_strided(shape, strides).copy_(result)


class _Watched:
    """An operator that keeps what its backward needs only where autograd is on."""

    def __init__(self, op: Any) -> None:
        self._schema = op._schema
        self._run = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self._run(*args, **kwargs)


def written_by(op: Any, args: Sequence[Form], kwargs: dict[str, Form]) -> list[int]:
    """Which of the tensors that a template takes the operator writes to."""
    if isinstance(op, functools.partial):
        return list(range(_count(args[0]))) if OPERATIONS[op.func.__name__][1] else []
    schema = op._schema
    by_name = {each.name: each for each in schema.arguments}
    given = [*zip(schema.arguments, args, strict=False), *((by_name[name], form) for name, form in kwargs.items())]
    found: list[int] = []
    seen = 0
    for argument, form in given:
        count = _count(form)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += range(seen, seen + count)
        seen += count
    return found


def _count(form: Form) -> int:
    return sum(map(_count, form[1:])) if form[0] == "l" else int(form[0] == "t")


def _numbers(args: Sequence[Form], kwargs: dict[str, Form], values: bytes) -> tuple[Any, ...]:
    return struct.unpack("<" + "".join(map(_codes, [*args, *kwargs.values()])), values)


def _codes(form: Form) -> str:
    return "".join(map(_codes, form[1:])) if form[0] == "l" else _NUMBERS.get(form[0], "")


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_KEPT = 1 << 30


def _keep_memory() -> None:
    """Has malloc keep up to 1 GiB of what is freed, as torch does on GPUs.

    By default each tensor of more than 32 MiB, and often smaller ones, comes from the kernel as pages that are
    faulted in one by one: that takes longer than to fill them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def serve(post: Post) -> None:
    """Runs what the master sends until it ends the connection."""
    _keep_memory()
    device = torch.device(post.device)
    line = post.socket

    interpreter = Interpreter(post.rank, device, line.sendall, post)
    torch.set_grad_enabled(False)
    buffer, start, end = bytearray(_CHUNK), 0, 0
    while True:
        need = interpreter.missing(buffer, start, end)
        if start and (end == start or len(buffer) - end < _CHUNK // 2 or need > len(buffer) - start):
            buffer[: end - start] = buffer[start:end]
            start, end = 0, end - start
        if need > len(buffer):
            buffer.extend(bytes(need - len(buffer)))
        elif len(buffer) > 4 * _CHUNK and end < _CHUNK:
            buffer = buffer[:_CHUNK]
        quiet = start == end and not interpreter.unheard and device.type == "cpu"
        count = _core.receive(line.fileno(), buffer, end, quiet)
        if count == 0:
            return
        end += count
        start = interpreter.execute(buffer, start, end, interpreter.slots)
