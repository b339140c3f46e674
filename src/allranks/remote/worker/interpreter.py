"""A worker: runs the commands that the master has queued, in order, and answers if requested.

Each template has a function (`generated`), so a queued operation costs little more than the operator itself. An
operation that fails stores a `Poison` in place of its results. It also poisons each tensor that shares memory with a
tensor that it should have changed. An operation on a poisoned tensor is poisoned by the same fault. The worker
continues.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allranks import _core
from allranks._base.errors import PeerLostError
from allranks._call.bytes import in_huge_pages
from allranks.remote.protocol import wire
from allranks.remote.protocol.arguments import (
    GENERATOR,
    Form,
    constant_of,
    count_tensors,
    number_codes,
    visit,
    written_by,
)
from allranks.remote.protocol.faults import Poison, Poisoned
from allranks.remote.protocol.wire import Answer, Ask, Command, Define, Fault, Hold, Meta, RemoteProgram
from allranks.remote.worker.commands import COMMANDS, OPERATIONS
from allranks.remote.worker.generated import call_function, call_source, flatten
from allranks.remote.worker.program import compile_program
from allranks.remote.worker.recording import CommandSlices, RecordedTemplates
from allranks.remote.worker.state import WorkerState, describe
from allranks.remote.worker.template import CallTemplate, Code, Slots

if TYPE_CHECKING:
    from allranks.remote.bootstrap.worker_context import WorkerContext

__all__ = ["Interpreter", "serve"]

_CHUNK = 1 << 18  # bytes of the receive buffer, which grows for larger messages
_COUNTED = 64  # commands after which the count that other processes read is updated
_NEEDS_AUTOGRAD = {"mkldnn_rnn_layer"}
_WRONG_META = (
    "If the operator is your own, correct its fake (meta) implementation. Otherwise report it with the output of"
    " `allranks doctor`."
)


def _encode_result(value: Any) -> Any:
    """Return the form in which a returned value of an operator is sent to the master."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"the result is a {type(value).__name__}, but workers can only return tensors and numbers.\n"
        "  Call the operator in a function that mw.remote() runs on the worker."
    )


class Interpreter(WorkerState):
    """Runs frames."""

    def __init__(
        self, rank: int, device: torch.device, send: Callable[[bytes], None], context: WorkerContext | None = None
    ) -> None:
        """Create an interpreter.

        Args:
            rank: The rank of this worker.
            device: The device of its tensors.
            send: Sends an encoded answer to the master.
            context: Its connection with the master, and its groups.
        """
        super().__init__(rank, device, context)
        self._send = send
        self._converted_count = 0
        self._table: dict[int, CallTemplate] = {}
        self._recorded: RecordedTemplates | None = None

    def execute(self, buffer: bytearray | bytes, start: int, end: int, slots: Slots) -> int:
        """Run the complete frames in a buffer. Return the position of the first incomplete one."""
        at, executed, head = start, 0, wire.HEAD.unpack_from
        table = self._table if self.slices is None else self._recorded_templates(self.slices)
        while end - at >= 2:
            (number,) = head(buffer, at)
            if number >= wire.CALL:
                template = table[number]
                after = at + 2 + template.nbytes
                if after > end:
                    break
                try:
                    template.run(slots, buffer, at + 2)
                except Exception as error:  # noqa: BLE001 - operations that use the result report it
                    self.fail(template, slots, buffer, at + 2, error)
                at = after
                executed += 1
                # `count_executed` reads the clock, so it is not called for each command.
                if executed == _COUNTED:
                    self.count_executed(executed)
                    executed = 0
            elif number == wire.FREE:
                if end - at < 4:
                    break
                count = wire.HEAD.unpack_from(buffer, at + 2)[0]
                after = at + 4 + 4 * count
                if after > end:
                    break
                for each in struct.unpack_from(f"<{count}I", buffer, at + 4):
                    slots.pop(each, None)
                at = after
            else:
                if end - at < 6:
                    break
                word = int.from_bytes(buffer[at + 2 : at + 6], "little")
                if number == wire.ECHO:
                    self._echo(word)
                    at += 6
                    continue
                if number == wire.LINE:
                    self.line, at = word, at + 6
                    continue
                if end - at < 6 + word:
                    break
                # Released after the message, because `serve` resizes the buffer, which Python refuses while a view of
                # it exists.
                with memoryview(buffer)[at + 6 : at + 6 + word] as payload:
                    self._handle_message(payload)
                at += 6 + word
                executed += 1
        self.count_executed(executed)
        return at

    def _recorded_templates(self, slices: CommandSlices) -> RecordedTemplates:
        """Return the templates in the form that records their calls."""
        if self._recorded is None or self._recorded.slices is not slices:
            self._recorded = RecordedTemplates(self._table, slices, self.site)
        return self._recorded

    def missing(self, buffer: bytearray, start: int, end: int) -> int:
        """Return the length of an incomplete frame, or 0 if its head does not contain the length."""
        if end - start >= 6 and wire.HEAD.unpack_from(buffer, start)[0] == wire.MESSAGE:
            return 6 + int.from_bytes(buffer[start + 2 : start + 6], "little")
        return 0

    def answer(self, number: int, result: Any = None, fault: Fault | None = None) -> None:
        """Send an answer to the master."""
        warned, self.warned = self.warned, []
        printed, self.printing = self.printing, []
        self._send(wire.frame(Answer(number, result, fault, warned, printed)))

    def _echo(self, number: int) -> None:
        """Answer a synchronization: send the number back, and the faults that have not been reported yet."""
        if self.device.type == "cuda":  # kernels run asynchronously, and the answer promises their end
            torch.cuda.synchronize(self.device)
        faults, self.unreported = self.unreported, []
        if faults or self.warned:
            self.answer(number, faults)
        else:
            self._send(wire.ECHOED.pack(0, number))

    def _handle_message(self, payload: memoryview) -> None:
        message, data = wire.unpack(payload)
        self.doing[0] = 0
        began = time.monotonic_ns()
        self._execute_message(message, data)
        if self.slices is not None:
            self.slices.add(self.site(self._name_of(message)), began, time.monotonic_ns())

    def _name_of(self, message: wire.Message) -> str:
        """Return the name under which a message is recorded."""
        match message:
            case Ask():
                return message.op
            case Command("start", _, {"function": number}):
                function = self.functions.get(number)
                return f"remote {getattr(function, '__qualname__', type(function).__name__)}"
            case Command():
                return message.name
            case Hold():
                return "upload"
            case _:
                return "a template"

    def _execute_message(self, message: wire.Message, data: memoryview) -> None:
        match message:
            case Define():
                if self._recorded is not None:
                    # Numbers are reused, and the recorded form has the name and the frame length of the old template.
                    self._recorded.pop(message.number, None)
                try:
                    self._table[message.number] = self._compile(message)
                except Exception as error:  # noqa: BLE001 - each call of the template raises it
                    self._table[message.number] = self._failing_template(message, error)
            case Ask():
                self._ask(message)
            case Hold(id, meta):
                try:
                    self.slots[id] = self._unpack(meta, data)
                except Exception as error:  # noqa: BLE001 - usually out of memory; operations on the tensor report it
                    self.slots[id] = Poison(self.fault("transfer of a tensor", error))
                    self.unreported.append(self.slots[id].fault)
            case RemoteProgram():
                if self._recorded is not None:
                    self._recorded.pop(message.number, None)
                self._table[message.number] = compile_program(self, message, self._table)
            case Command(name, number, arguments):
                self._execute_command(name, number, arguments, data)

    def _unpack(self, meta: Meta, data: memoryview) -> torch.Tensor:
        dtype, shape, strides = meta[:3]
        tensor = in_huge_pages(torch.empty_strided(shape, strides, dtype=wire.dtype_of(dtype), device="cpu"))
        if len(data):
            flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            # A copy, because `data` is a part of the receive buffer, which is reused.
            flat.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return tensor.to(self.device)

    def _execute_command(self, name: str, number: int, arguments: dict[str, Any], data: memoryview) -> None:
        # The previous line is restored below: the master sends a LINE frame only if the line of calls changes.
        line, self.line = self.line, arguments.pop("line", 0)
        try:
            if name == "keep":
                results, ids = self.kept.pop(arguments["of"], []), arguments["ids"]
                # None: another worker of the group has failed, so the master does not use the results
                if ids is not None:
                    self.slots.update((id, each) for id, each in zip(ids, results, strict=True) if id is not None)
                return
            self.answering = number
            result = COMMANDS[name](self, data, **arguments)
        except Poisoned as poisoned:
            if number:
                self.answer(number, None, poisoned.fault)
            for each in arguments.get("outputs", ()):
                # The master already has handles with these ids.
                self.slots[each] = Poison(poisoned.fault)
        except Exception as error:  # noqa: BLE001 - the master raises it
            fault = self.fault(name, error)
            if number:
                self.answer(number, None, fault)
            else:
                self.unreported.append(fault)
            for each in arguments.get("outputs", ()):
                self.slots[each] = Poison(fault)
        else:
            if number:
                self.answer(number, result)
            # Only after the answer, because the master starts its side of the transfer when it has received it.
            if (afterwards := self.afterwards) is not None:
                self.afterwards = None
                try:
                    afterwards()
                except PeerLostError:
                    pass  # the master has given up and dropped the link
                except Exception as error:  # noqa: BLE001 - for example no GPU memory: reported by the next wait
                    fault = self.fault(name, error)
                    self.unreported.append(fault)
                    for each in arguments.get("outputs", ()):
                        self.slots[each] = Poison(fault)
        finally:
            self.line = line

    def _ask(self, ask: Ask) -> None:
        """Run an operator immediately, and answer with the description of its results."""
        self.doing[0] = self.site(ask.op)
        inputs: list[Any] = [self.slots.get(each) for each in ask.inputs]
        poison = next((each for each in inputs if type(each) is Poison), None)
        answer: Any = None
        if poison is None:
            codes = number_codes([*ask.args, *ask.kwargs.values()])
            given = _Values(self, inputs, struct.unpack(f"<{codes}", ask.values))
            try:
                op = self._resolve(ask.op)
                args = [visit(form, given) for form in ask.args]
                kwargs = {name: visit(form, given) for name, form in ask.kwargs.items()}
                with torch.no_grad():
                    result = op(*args, **kwargs)
                returns = len(op._schema.returns)
                values = [] if returns == 0 else [result] if returns == 1 else result
                counts = [len(each) if isinstance(each, list | tuple) else -1 for each in values]
                results = flatten(result) if returns else []
                metas = [_encode_result(each) for each in results]
                answer = [
                    metas,
                    {each: describe(inputs[each]) for each in written_by(_named(op), ask.args, ask.kwargs)},
                    counts,
                ]
                self.kept[ask.number] = results
            except Exception as error:  # noqa: BLE001 - the master raises it immediately, at the call site
                # "now": this call has failed, and not a previous one that computed an operand.
                self.answer(ask.number, "now", self.fault(ask.op, error))
                return
        self.answer(ask.number, answer, poison.fault if poison else None)

    def _resolve(self, name: str) -> Any:
        space, _, rest = name.partition("::")
        if space == "allranks":
            return functools.partial(OPERATIONS[rest], self)
        base, _, overload = rest.partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        except AttributeError:
            raise NotImplementedError(
                f"worker {self.rank} has no operator {name}.\n  Run the code that defines it there with mw.remote(), or"
                " define it with torch.library.custom_op."
            ) from None
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"{name} is not an operator.\n  Report it with the output of `allranks doctor`.")
        return _WithAutograd(op) if base in _NEEDS_AUTOGRAD else op

    def _compile(self, define: Define) -> CallTemplate:
        """Return the function of a template. Its arguments are slots, a buffer and the position of the ids in it."""
        op = self._resolve(define.op)
        space = {"settle": self._convert_result, "generators": self.generators, "doing": self.doing}
        call = call_source(define.number, define.args, define.kwargs, define.results, op, self.device, space)
        inputs, outputs = call.inputs, call.outputs
        code = call.checked if define.checked else call.plain
        changes = tuple(written_by(_named(op), define.args, define.kwargs))
        site = self.site(define.op)
        run = call_function(call.checked, inputs, outputs, site)
        made = CallTemplate(define.op, inputs, outputs, code.layout.size, changes, run, code)
        if define.checked or not outputs:
            return made
        plain = made._replace(run=call_function(call.plain, inputs, outputs, site))

        def first(slots: Slots, buffer: Any, at: int) -> None:
            converted_before = self._converted_count
            made.run(slots, buffer, at)
            # The unchecked function replaces this one only if the strides of the result were already as the master
            # expects. Otherwise each result must be converted.
            if self._converted_count == converted_before and self._table.get(define.number) is wrapped:
                self._table[define.number] = plain

        wrapped = made._replace(run=first)
        return wrapped

    def _failing_template(self, define: Define, error: Exception) -> CallTemplate:
        """Return a template that raises an error, because this worker cannot create the requested one.

        A possible reason is another version of torch than the master's.
        """
        forms = [*define.args, *define.kwargs.values()]
        inputs, outputs = count_tensors(forms), sum(each is not None for each in define.results)
        layout = struct.Struct(f"<{inputs + outputs}I{number_codes(forms)}")

        def refuse(*_: Any) -> None:
            raise error

        code = Code(f"refuse_{define.number}()", layout, {f"refuse_{define.number}": refuse})
        return CallTemplate(define.op, inputs, outputs, layout.size, (), refuse, code)

    def _convert_result(self, result: Any, which: int, metas: list[Meta]) -> Any:
        """Return a result in the form that the master expects, or raise an error."""
        dtype, shape, strides, _, bits = metas[which]
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"result {which} is {result!r}, but the master expects a tensor.\n  {_WRONG_META}")
        same = list(result.shape) == shape and str(result.dtype) == f"torch.{dtype}"
        if same and list(result.stride()) == strides and wire.bits_of(result) == bits:
            return result
        # A converted result is a copy. A copy of a view would no longer share memory with its operand.
        if not same or bits or result._is_view():
            raise RuntimeError(
                f"result {which} is {describe(result)}, but the master expects {metas[which]}.\n  {_WRONG_META}"
            )
        self._converted_count += 1
        return result.new_empty_strided(shape, strides).copy_(result)


class _WithAutograd:
    """An operator that computes the data for its backward only if autograd is enabled."""

    def __init__(self, op: Any) -> None:
        self._schema = op._schema
        self._run = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():  # `serve` has disabled gradients in this process
            return self._run(*args, **kwargs)


class _Values:
    """The arguments of a call that is executed once, built from its forms."""

    def __init__(self, worker: Interpreter, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        self._worker = worker
        self._inputs = iter(inputs)
        self._values = iter(values)

    def tensor(self) -> Any:
        return next(self._inputs)

    def number(self, code: str) -> Any:
        number = next(self._values)
        return self._worker.generators[number] if code == GENERATOR else number

    def sequence(self, parts: list[Any]) -> Any:
        return parts

    def constant(self, form: Form) -> Any:
        return constant_of(form, self._worker.device)


def _named(op: Any) -> Any:
    """Return an operator of torch unchanged, and the name of an operation of allranks."""
    return f"allranks::{op.func.__name__}" if isinstance(op, functools.partial) else op


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from glibc's malloc.h
# Measured: with freed memory kept, a copy of 64 MB between two workers reaches 7.2 GB/s instead of 1.5 GB/s.
_KEPT_BYTES = 1 << 30


def _keep_memory() -> None:
    """Make malloc keep up to 1 GiB of freed memory, as torch does on GPUs.

    By default, the memory of each tensor of more than 32 MiB, and often of smaller ones, comes from the kernel. Its
    pages are faulted in one by one, which takes longer than writing them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # a function of glibc
        libc.mallopt(_M_MMAP_MAX, 0)  # memory from mmap would return to the kernel when it is freed
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def serve(context: WorkerContext) -> None:
    """Run the commands that the master sends, until it closes the connection."""
    _keep_memory()
    device = torch.device(context.device)
    connection = context.socket

    interpreter = Interpreter(context.rank, device, connection.sendall, context)
    # All warnings are sent, and the filters of the master's program select those that are shown.
    warnings.simplefilter("default")
    warnings.showwarning = interpreter.warn  # type: ignore[assignment]
    # Autograd runs on the master, and workers execute the operations below it.
    torch.set_grad_enabled(False)
    buffer, start, end = bytearray(_CHUNK), 0, 0
    while True:
        need = interpreter.missing(buffer, start, end)
        # The incomplete frame is moved to the front only if space runs out, not after each receive.
        if start and (end == start or len(buffer) - end < _CHUNK // 2 or need > len(buffer) - start):
            buffer[: end - start] = buffer[start:end]
            start, end = 0, end - start
        if need > len(buffer):
            buffer.extend(bytes(need - len(buffer)))
        elif len(buffer) > 4 * _CHUNK and end < _CHUNK:
            buffer = buffer[:_CHUNK]  # a large message has enlarged the buffer
        # The core may answer an ECHO itself only if all before it is done and no fault or warning must be reported.
        # Work on a GPU must be synchronized first.
        quiet = start == end and not (interpreter.unreported or interpreter.warned) and device.type == "cpu"
        count = _core.receive(connection.fileno(), buffer, end, quiet)
        if count == 0:
            if interpreter.slices is not None:
                interpreter.slices.flush()
            return
        end += count
        interpreter.since = time.monotonic_ns()  # excludes the wait for commands from the time in commands
        start = interpreter.execute(buffer, start, end, interpreter.slots)
        # The functions of templates set the number of their operator and do not reset it.
        interpreter.doing[0] = 0
