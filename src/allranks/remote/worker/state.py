"""What a worker holds: tensors, groups, functions, clocks, and the faults of operations that have failed."""

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

_WARNINGS = 100  # that are passed on with one answer


def _recorder(rank: int) -> _core.Recorder | None:
    """The recorder of a worker's process."""
    if os.environ.get("RANK") != str(rank):  # the memory is for the calls of the process that has started this one
        os.environ.pop(memory.MEMORY, None)
    return memory.recorder(rank, int(os.environ.get("WORLD_SIZE", rank + 1)), socket.gethostname())


class WorkerState:
    """What operations and orders read and change.

    Attributes:
        rank: of this worker.
        device: where its tensors live.
        context: its connection with the master, and its groups; None for a worker without any.
        slots: tensors, and poison, by id.
        unreported: faults that no answer has reported.
        warned: Python's warnings that no answer has passed on.
        printed: what functions have printed that the master prints, by call; to stdout and stderr.
        printing: of that, what goes with the next answer.
        line: of the master's program that the next calls come from.
        answering: the number of the request that is being answered; 0 for none.
        kept: the results of a request, by its number, until the master says under which ids.
        groups: by number; a fault where the group could not be made.
        functions: the user's, by number.
        held: the tensors that they have, and whose gradient the master holds.
        outcomes: what calls of these have returned, by number.
        afterwards: what an order does when it has been answered.
        marks: times, by the number of an event.
        copies: copied storages by address, for each deep copy under way.
        generators: random number generators, by number.
        snapshots: of kept tensors (`snapshots.Snapshots`); None where nothing is kept.
        doing: its only element is the number of what is executed, for others to see; 0 is nothing.
        since: from when on the time in commands is not counted in the record yet, in ns.
        slices: where commands are recorded with their times; None where no file is recorded.
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
        self.doing = memoryview(word).cast("B").cast("I")
        self.since = time.monotonic_ns()
        self.slices: CommandSlices | None = None
        self._commands = 0 if self._recorder is None else self._recorder.add_group("commands", OF_WORKER, 0, [rank])
        self._recording: FileRecording | None = None
        self._follow_file()

    def record(self, folder: Path | None) -> None:
        """Begins to record commands in a file in a folder; None: ends it.

        Raises:
            UsageError: the file cannot be made, or commands are recorded already.
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
        """Counts commands in the record, and the time since the last were counted."""
        if self._recorder is not None:
            before, self.since = self.since, time.monotonic_ns()
            self._recorder.count_commands(self._commands, commands, self.since - before)

    def site(self, name: str) -> int:
        """The number under which an operation is recorded."""
        number = self._sites.get(name)
        if number is None:
            number = self._sites[name] = 0 if self._recorder is None else self._recorder.site(name)
        return number

    def generator(self, number: int) -> torch.Generator:
        """A generator by its number; 0 is that of all operations that are given none."""
        if number:
            return self.generators[number]
        if self.device.type == "cpu":
            return torch.default_generator
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = self.device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

    def link(self, number: int) -> ProcessGroup:
        """A group by its number.

        Raises:
            Poisoned: it could not be made.
        """
        found = self.groups[number]
        if isinstance(found, Fault):
            raise Poisoned(found)
        return found

    def fault(self, name: str, error: BaseException) -> Fault:
        """What went wrong, from an exception."""
        frames = traceback.format_exception(error)
        self._faults += 1
        kind, pickled = type(error).__name__, pack_error(error) if name == "remote function" else b""
        try:
            text = str(error)
        except Exception as another:  # noqa: BLE001 - of a class of the program's
            text = f"(its text cannot be had: {type(another).__name__})"
        return Fault(self.rank, self._faults, name, self.line, kind, text, "".join(frames), pickled)

    def warn(self, message: Warning | str, category: type[Warning], *where: Any) -> None:
        """Takes the place of ``warnings.showwarning``: the master gives its program the warning, with its next answer.

        The line is that of the master's program: the one in torch, or in a function's file, tells little there.
        """
        builtin = next(each for each in category.__mro__ if each.__module__ == "builtins")
        if len(self.warned) < _WARNINGS:
            kind = f"{category.__module__}.{category.__qualname__}"
            self.warned.append(Warned(self.line, kind, builtin.__name__, str(message)))

    def take(self, id: int) -> torch.Tensor:
        """A tensor by its id.

        Raises:
            Poisoned: it is poisoned.
        """
        held = self.slots[id]
        if type(held) is Poison:
            raise Poisoned(held.fault)
        assert isinstance(held, torch.Tensor)
        return held

    def keep(self, results: list[Any]) -> None:
        """Holds results, of what is being answered, until the master says under which ids."""
        self.kept[self.answering] = results

    def poison_memory(self, tensors: Sequence[Any], slots: Slots, poison: Poison) -> None:
        """Poisons whatever shares memory with tensors."""
        storages = {each.untyped_storage()._cdata for each in tensors if isinstance(each, torch.Tensor)}
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
            for each in template.changes:
                slots[ids[each]] = poison


def describe(tensor: torch.Tensor) -> Meta:
    """A tensor without its data."""
    wire.refuse_odd(tensor, "the result")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (dtype, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()), wire.bits_of(tensor))
