"""The state of a worker: tensors, groups, functions, clocks, and the faults of failed operations."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allranks._trace import memory
from allranks._trace.inspection import OF_WORKER
from allranks.launch.ranks.function import pack_error
from allranks.remote.protocol import wire
from allranks.remote.protocol.faults import Poison, Poisoned
from allranks.remote.protocol.wire import Fault, Meta, Warned
from allranks.remote.worker.recording import CommandSlices
from allranks.remote.worker.template import CallTemplate, Slots

if TYPE_CHECKING:
    from allranks import _core
    from allranks._group.process_group import ProcessGroup
    from allranks._trace.files import FileRecording
    from allranks.remote.bootstrap.worker_context import WorkerContext

__all__ = ["WorkerState", "describe"]

_WARNINGS = 100  # maximum number of warnings in one answer


def _recorder(rank: int) -> _core.Recorder | None:
    """Return the recorder of a worker's process."""
    if os.environ.get("RANK") != str(rank):  # the shared record belongs to the process that has started this one
        os.environ.pop(memory.MEMORY, None)
    return memory.recorder(rank, int(os.environ.get("WORLD_SIZE", rank + 1)), socket.gethostname())


class WorkerState:
    """The state that operations and commands read and change.

    Attributes:
        rank: The rank of this worker.
        device: The device of its tensors.
        context: Its connection with the master, and its groups; None for a worker without any.
        slots: Tensors, and poison, by id.
        unreported: Faults that no answer has reported.
        warned: Python warnings that no answer has reported.
        printed: The output of functions that the master prints, by call: stdout and stderr.
        printing: The part of this output that the next answer contains.
        line: The call site on the master of the next calls.
        answering: The number of the request that is being answered; 0 for none.
        kept: The results of a request, by its number, until the master assigns ids to them.
        groups: Groups by number; a fault if a group could not be created.
        functions: The user's functions, by number.
        held: The tensors that functions hold, and whose gradients the master holds.
        outcomes: The results of calls of functions, by number.
        afterwards: A function that a command runs after its answer has been sent.
        marks: Times, by the number of an event.
        copies: Copied storages by address, for each deep copy in progress.
        generators: Random number generators, by number.
        snapshots: Snapshots of kept tensors (`snapshots.Snapshots`); None if no tensors are kept.
        doing: Its only element is the number of the running operation, for other processes to read; 0 is none.
        since: The time, in ns, from which the time in commands has not been counted yet.
        slices: Records commands with their times; None if no file is recorded.
    """

    def __init__(self, rank: int, device: torch.device, context: WorkerContext | None = None) -> None:
        self.rank = rank
        self.device = device
        self.context = context
        self.slots: Slots = {}
        self.unreported: list[Fault] = []
        self.warned: list[Warned] = []
        self.printed: dict[int, list[str]] = {}
        self.printing: list[str] = []
        self.line = 0
        self.answering = 0
        self.kept: dict[int, list[Any]] = {}
        self.groups: dict[int, ProcessGroup | Fault] = {}
        self.functions: dict[int, Any] = {}
        self.held: dict[int, dict[int, torch.Tensor]] = {}
        self.outcomes: dict[int, Any] = {}
        self.afterwards: Callable[[], Any] | None = None
        self.marks: dict[int, float] = {}
        self.copies: dict[int, dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.snapshots: Any = None
        self._faults = 0
        self._sites: dict[str, int] = {}
        self._recorder = None if context is None else _recorder(rank)
        address = 0 if self._recorder is None else self._recorder.doing()
        word = ctypes.c_uint32.from_address(address) if address else ctypes.c_uint32()
        # The view of a ctypes object has the format "<I", whose elements Python cannot access, so it is cast twice.
        self.doing = memoryview(word).cast("B").cast("I")
        self.since = time.monotonic_ns()
        self.slices: CommandSlices | None = None
        self._commands = 0 if self._recorder is None else self._recorder.add_group("commands", OF_WORKER, 0, [rank])
        self._recording: FileRecording | None = None
        self._follow_file()

    def record(self, folder: Path | None) -> None:
        """Start to record commands in a file in a folder. None stops the recording.

        Raises:
            UsageError: The file cannot be created, or commands are already being recorded.
        """
        if folder is not None:
            self._recording = memory.record_in(folder)
        elif self._recording is not None and self.slices is not None:
            self.slices.flush()
            self._recording.stop()
            self._recording = None
        self._follow_file()

    def _follow_file(self) -> None:
        if self._recorder is None or not memory.records_in_file():
            self.slices = None
        elif self.slices is None:
            self.slices = CommandSlices(partial(self._recorder.add_commands, self._commands))

    def count_executed(self, commands: int) -> None:
        """Add a number of executed commands, and the time since the previous update, to the recorder's counters."""
        if self._recorder is not None:
            before, self.since = self.since, time.monotonic_ns()
            self._recorder.count_commands(self._commands, commands, self.since - before)

    def site(self, name: str) -> int:
        """Return the number under which an operation is recorded."""
        number = self._sites.get(name)
        if number is None:
            number = self._sites[name] = 0 if self._recorder is None else self._recorder.site(name)
        return number

    def generator(self, number: int) -> torch.Generator:
        """Return a generator by its number. 0 is the default generator."""
        if number:
            return self.generators[number]
        if self.device.type == "cpu":
            return torch.default_generator
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = self.device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

    def link(self, number: int) -> ProcessGroup:
        """Return a group by its number.

        Raises:
            Poisoned: It could not be created.
        """
        found = self.groups[number]
        if isinstance(found, Fault):
            raise Poisoned(found)
        return found

    def fault(self, name: str, error: BaseException) -> Fault:
        """Return the fault for an exception."""
        frames = traceback.format_exception(error)
        self._faults += 1
        kind, pickled = type(error).__name__, pack_error(error) if name == "remote function" else b""
        try:
            text = str(error)
        except Exception as another:  # noqa: BLE001 - the program defines the class of the error
            text = f"(no error text: str() raised {type(another).__name__})"
        return Fault(self.rank, self._faults, name, self.line, kind, text, "".join(frames), pickled)

    def warn(self, message: Warning | str, category: type[Warning], *where: Any) -> None:
        """Store a warning, which the next answer passes to the master. This replaces ``warnings.showwarning``.

        The reported line is the call site on the master. The line in torch, or in a function's file, is not helpful
        there.
        """
        builtin = next(each for each in category.__mro__ if each.__module__ == "builtins")
        if len(self.warned) < _WARNINGS:  # a loop that warns must not fill the answer
            kind = f"{category.__module__}.{category.__qualname__}"
            self.warned.append(Warned(self.line, kind, builtin.__name__, str(message)))

    def take(self, id: int) -> torch.Tensor:
        """Return a tensor by its id.

        Raises:
            Poisoned: It is poisoned.
        """
        held = self.slots[id]
        if type(held) is Poison:
            raise Poisoned(held.fault)
        assert isinstance(held, torch.Tensor)
        return held

    def keep(self, results: list[Any]) -> None:
        """Store the results of the current request until the master assigns ids to them."""
        self.kept[self.answering] = results

    def poison_memory(self, tensors: Sequence[Any], slots: Slots, poison: Poison) -> None:
        """Poison every tensor that shares memory with one of the given tensors."""
        storages = {each.untyped_storage()._cdata for each in tensors if isinstance(each, torch.Tensor)}
        # A captured step has slots of its own, and tensors in both can share memory.
        for where in {id(slots): slots, id(self.slots): self.slots}.values():
            for number, held in where.items():
                if isinstance(held, torch.Tensor) and held.untyped_storage()._cdata in storages:
                    where[number] = poison

    def fail(self, template: CallTemplate, slots: Slots, buffer: Any, at: int, error: Exception) -> None:
        ids = struct.unpack_from(f"<{template.inputs + template.outputs}I", buffer, at)
        inputs = [slots.get(each) for each in ids[: template.inputs]]
        poison = next((each for each in inputs if type(each) is Poison), None)
        if isinstance(error, Poisoned):
            poison = Poison(error.fault)
        if poison is None:
            poison = Poison(self.fault(template.name, error))
            self.unreported.append(poison.fault)
        for each in ids[template.inputs :]:
            slots[each] = poison
        if template.changes:
            self.poison_memory([inputs[each] for each in template.changes], slots, poison)
            # Also operands that were poisoned before: they have no memory to compare.
            for each in template.changes:
                slots[ids[each]] = poison


def describe(tensor: torch.Tensor) -> Meta:
    """Return the meta of a tensor."""
    wire.refuse_odd(tensor, "the result")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (dtype, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()), wire.bits_of(tensor))
