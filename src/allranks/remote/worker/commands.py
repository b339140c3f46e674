"""Commands of a worker other than torch's operators: transfers, groups, functions and status reports."""

from __future__ import annotations

import contextlib
import ctypes
import io
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils._pytree import tree_map

from allranks._base import pickling
from allranks._call.bytes import bytes_of, in_huge_pages
from allranks._call.types import ReduceOp
from allranks._cluster.host import processor
from allranks.remote.protocol import wire
from allranks.remote.protocol.faults import GIVEN, LEAVES, Given, Poison, Poisoned
from allranks.remote.protocol.flags import apply
from allranks.remote.worker.snapshots import SNAPSHOTS
from allranks.remote.worker.state import WorkerState, describe

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["OPERATIONS", "COMMANDS"]


def item(worker: WorkerState, data: memoryview, id: int) -> Any:
    value = worker.take(id).item()
    return [value.real, value.imag] if isinstance(value, complex) else value


def fetch(worker: WorkerState, data: memoryview, id: int, link: int) -> bytes | None:
    """Return a tensor's bytes, or send them over a link, if there is one, after this answer."""
    plain = _flat(worker.take(id))
    if not link:
        return bytes_of(plain)
    connected = worker.link(link)  # raises before the answer if the link could not be created
    worker.afterwards = lambda: connected.send(plain, 0)
    return None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in the order of its memory, on this host."""
    plain = tensor.resolve_conj().resolve_neg().cpu()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def upload(worker: WorkerState, data: memoryview, outputs: list[int], meta: wire.Meta, link: int) -> None:
    """Allocate memory for a large tensor of the master, and receive it after the answer. The master only sends then."""
    dtype, shape, strides = meta[:3]
    received = in_huge_pages(torch.empty_strided(shape, strides, dtype=wire.dtype_of(dtype), device="cpu"))
    on_device = received if worker.device.type == "cpu" else torch.empty_like(received, device=worker.device)

    def receive() -> None:
        worker.link(link).recv(_flat(received), 0)
        worker.slots[outputs[0]] = on_device if on_device is received else on_device.copy_(received)

    worker.link(link)  # raises if the link could not be created
    worker.afterwards = receive


def spread(
    worker: WorkerState,
    data: memoryview,
    link: int,
    root: int,
    id: int,
    meta: wire.Meta,
    sends: bool,
    outputs: list[int],
) -> None:
    """Broadcast a tensor of one worker to all workers of a group. The sender may be outside the group."""
    held = worker.slots[id] if sends else None
    dtype, shape, strides, *_ = meta
    made = in_huge_pages(torch.empty_strided(shape, strides, dtype=wire.dtype_of(dtype), device="cpu"))
    if isinstance(held, torch.Tensor):
        made = held.clone()
    if link:
        group = worker.link(link)
        _raise_common_fault(group, held)
        group.broadcast(_flat(made), root)
    elif type(held) is Poison:
        raise Poisoned(held.fault)
    for each in outputs:
        worker.slots[each] = made.to(worker.device)


def generator(worker: WorkerState, data: memoryview, name: int) -> None:
    """Create a generator."""
    worker.generators[name] = torch.Generator(worker.device)


def forget_generator(worker: WorkerState, data: memoryview, name: int) -> None:
    worker.generators.pop(name, None)


def seed(worker: WorkerState, data: memoryview, seed: int, generator: int = 0) -> None:
    if generator:
        worker.generators[generator].manual_seed(seed)
    else:
        torch.manual_seed(seed)  # seeds the generators of other devices, too, for user functions


def initial_seed(worker: WorkerState, data: memoryview, generator: int) -> int:
    return worker.generator(generator).initial_seed()


def state(worker: WorkerState, data: memoryview, generator: int = 0) -> bytes:
    """Return the state of a random generator."""
    return bytes_of(worker.generator(generator).get_state())


def set_state(worker: WorkerState, data: memoryview, state: bytes, generator: int = 0) -> None:
    given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    worker.generator(generator).set_state(given)


def group(
    worker: WorkerState, data: memoryview, number: int, name: str, ranks: Sequence[int], timeout_s: float
) -> None:
    """Create a native group, in which this worker connects to others."""
    assert worker.context is not None
    try:
        worker.groups[number] = worker.context.make_group(name, ranks, timeout_s)
    except Exception as error:  # noqa: BLE001 - operations on the link raise it; the master may have dropped it
        worker.groups[number] = worker.fault(wire.LINKING, error)


def ungroup(worker: WorkerState, data: memoryview, number: int) -> None:
    made = worker.groups.pop(number, None)
    if made is not None and not isinstance(made, wire.Fault):
        made.close()


def mark(worker: WorkerState, data: memoryview, event: int) -> None:
    """Record the time, for `Event`."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)  # kernels run asynchronously
    worker.marks[event] = time.perf_counter()


def marked(worker: WorkerState, data: memoryview, event: int) -> float:
    return worker.marks[event]


def unmark(worker: WorkerState, data: memoryview, event: int) -> None:
    worker.marks.pop(event, None)


def memory(worker: WorkerState, data: memoryview) -> dict[str, int]:
    """Return the bytes of the tensors here and of the whole process. On a GPU also the statistics of its allocator."""
    storages = {
        held.untyped_storage()._cdata: held.untyped_storage().nbytes()
        for held in worker.slots.values()
        if isinstance(held, torch.Tensor)
    }
    process = _kernel_table("/proc/self/status")
    allocated, resident = sum(storages.values()), process["VmRSS"]
    found = {"tensors": len(worker.slots), "allocated": allocated, "resident": resident}
    if worker.device.type == "cuda":
        return found | torch.cuda.memory_stats(worker.device)
    return found | {
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": resident,
        "reserved_bytes.all.peak": process["VmHWM"],
    }


def _kernel_table(path: str) -> dict[str, int]:
    """Return the values of a kernel file that are in kB, in bytes, by name."""
    rows = [line.partition(":") for line in Path(path).read_text(errors="surrogateescape").splitlines()]
    return {name: int(value.split()[0]) << 10 for name, _, value in rows if value.endswith(" kB")}


def memory_info(worker: WorkerState, data: memoryview) -> tuple[int, int]:
    """Return the free and the total bytes of the GPU or the host."""
    if worker.device.type == "cuda":
        return torch.cuda.mem_get_info(worker.device)
    host = _kernel_table("/proc/meminfo")
    return host["MemAvailable"], host["MemTotal"]


def reset_peak(worker: WorkerState, data: memoryview) -> None:
    if worker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(worker.device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident set


def reset_accumulated(worker: WorkerState, data: memoryview) -> None:
    if worker.device.type == "cuda":
        torch.cuda.reset_accumulated_memory_stats(worker.device)


def empty_cache(worker: WorkerState, data: memoryview) -> None:
    """Return unused memory to the system."""
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
    # malloc keeps up to 1 GiB of freed memory (`interpreter._keep_memory`).
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # a function of glibc
    if trim is not None:
        trim(0)


def properties(worker: WorkerState, data: memoryview) -> dict[str, Any]:
    """Return the properties of the processor that computes here. See `torch_worker.Properties`."""
    found = {"type": worker.device.type, "host": socket.gethostname()}
    if worker.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(worker.device)
        return found | {
            "name": gpu.name,
            "total_memory": gpu.total_memory,
            "multi_processor_count": gpu.multi_processor_count,
            "capability": [gpu.major, gpu.minor],
            "arch_list": torch.cuda.get_arch_list(),
            "has_bfloat16": torch.cuda.is_bf16_supported(),
            "has_tf32": torch.cuda.is_tf32_supported(),
        }
    return found | {
        "name": processor(),
        "total_memory": _kernel_table("/proc/meminfo")["MemTotal"],
        "multi_processor_count": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "arch_list": [],
        "has_bfloat16": True,
        "has_tf32": False,
    }


def storage(worker: WorkerState, data: memoryview, id: int, outputs: list[int]) -> list[int]:
    """Make a tensor's whole memory available as bytes. Return its name and its size.

    The name is unique as long as a tensor uses the memory.
    """
    held = worker.take(id)
    memory = held.untyped_storage()
    worker.slots[outputs[0]] = torch.empty(0, dtype=torch.uint8, device=held.device).set_(memory)
    return [memory._cdata, memory.nbytes()]


def twin(worker: WorkerState, data: memoryview, copying: int, id: int, outputs: list[int]) -> None:
    """Copy a tensor. Tensors that are copied together and share memory share one copy of the memory."""
    held = worker.take(id)
    memory = held.untyped_storage()
    copies = worker.copies.setdefault(copying, {})
    if memory._cdata not in copies:
        own = memory.clone()  # type: ignore[no-untyped-call]
        copies[memory._cdata] = own, memory  # the original is held, so that no other memory gets its address
    into, _ = copies[memory._cdata]
    made = torch.empty(0, dtype=held.dtype, device=held.device)
    worker.slots[outputs[0]] = made.set_(into, held.storage_offset(), held.shape, held.stride())


def copied(worker: WorkerState, data: memoryview, copying: int) -> None:
    """Finish a set of copies. The copied memory is released."""
    worker.copies.pop(copying, None)


def record(worker: WorkerState, data: memoryview, folder: str) -> None:
    """Start to record commands in a file in a folder. "" stops the recording."""
    worker.record(Path(folder) if folder else None)


def kind(worker: WorkerState, data: memoryview) -> str:
    """Return the kind of device on which the tensors are stored."""
    return worker.device.type


def function(worker: WorkerState, data: memoryview, name: int, tensors: list[int]) -> None:
    """Store a user function, with the tensors that it holds."""
    try:
        worker.functions[name], worker.held[name] = _unpickle(worker, data, tensors)
    except Poisoned as poisoned:
        worker.functions[name] = poisoned.fault
    except Exception as error:  # noqa: BLE001 - a request for the result of a call raises it
        worker.functions[name] = worker.fault("remote function", error)


def _unpickle(worker: WorkerState, data: memoryview, tensors: list[int]) -> tuple[Any, dict[int, torch.Tensor]]:
    """Unpickle data of the master. Also return those of its tensors whose gradients the master holds, by number."""
    try:
        GIVEN[:] = [worker.take(each) for each in tensors]
        return cloudpickle.loads(data), dict(LEAVES)
    finally:
        GIVEN.clear()  # these references would keep the tensors alive
        LEAVES.clear()


def start(
    worker: WorkerState, data: memoryview, call: int, function: int, tensors: list[int], prints_there: bool
) -> None:
    """Run a user function.

    Its result, or its exception, is kept for `result`. Its output is kept, too, if the master prints it.
    """
    if not prints_there:
        _run(worker, data, call, function, tensors)
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        _run(worker, data, call, function, tensors)
    if out.tell() or err.tell():
        worker.printed[call] = [out.getvalue(), err.getvalue()]


def _run(worker: WorkerState, data: memoryview, call: int, function: int, tensors: list[int]) -> None:
    try:
        (args, kwargs), leaves = _unpickle(worker, data, tensors)
        made = worker.functions[function]
        if isinstance(made, wire.Fault):
            raise Poisoned(made)
        for number, leaf in worker.held.get(function, {}).items():
            # A held tensor is the same object in each call. The gradient of a previous call must not be returned again.
            leaf.grad, leaves[-1 - number] = None, leaf
        with torch.enable_grad():  # disabled in this process, but the function may call backward
            outcome = made(*args, **kwargs)
        gradients = {number: leaf.grad for number, leaf in leaves.items() if leaf.grad is not None}
        worker.outcomes[call] = (outcome, gradients)
    except Poisoned as poisoned:
        worker.outcomes[call] = poisoned.fault
    except Exception as error:  # noqa: BLE001 - a request for the result raises it
        worker.outcomes[call] = worker.fault("remote function", error)


def result(worker: WorkerState, data: memoryview, call: int) -> Any:
    """Return the result of a function: the metas of its tensors, which stay here, and the rest pickled.

    The last of these tensors are gradients. The returned numbers identify the tensors of the call that they belong to;
    numbers below 0 identify tensors that the function holds.
    """
    worker.printing = worker.printed.pop(call, [])
    outcome = worker.outcomes[call]
    if isinstance(outcome, wire.Fault):
        del worker.outcomes[call]
        raise Poisoned(outcome)
    tensors: list[torch.Tensor] = []

    def stay(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        tensors.append(each.detach().to(worker.device))
        return Given(len(tensors) - 1)

    pickled = pickling.dumps(tree_map(stay, outcome[0]))
    tensors += outcome[1].values()
    worker.keep(tensors)
    del worker.outcomes[call]
    return [[describe(each) for each in tensors], pickled, list(outcome[1])]


def forget(worker: WorkerState, data: memoryview, function: int) -> None:
    """Forget a function that the master can no longer call."""
    worker.functions.pop(function, None)
    worker.held.pop(function, None)


def drop(worker: WorkerState, data: memoryview, call: int) -> None:
    """Discard a result that is no longer needed. A fault is kept, so that the next synchronization reports it."""
    outcome = worker.outcomes.pop(call, None)
    for text, stream in zip(worker.printed.pop(call, []), (sys.stdout, sys.stderr), strict=False):
        stream.write(text)
    if isinstance(outcome, wire.Fault):
        worker.unreported.append(outcome)


# Operations between workers. A participant that only has poison first sends the fault to the others, which would
# otherwise wait forever.


def send(worker: WorkerState, tensors: Sequence[Any], link: int, peer: int) -> None:
    """Send tensors without gaps to the other end of a link."""
    group = worker.link(link)
    poison = next((each for each in tensors if type(each) is Poison), None)
    trouble = wire.pack_fault(poison.fault) if poison else b""
    # With an explicit device, because a user function may have set another default device.
    group.send(torch.tensor([len(trouble)], device="cpu"), peer)
    if poison:
        group.send(torch.frombuffer(bytearray(trouble), dtype=torch.uint8), peer)
        raise Poisoned(poison.fault)
    for tensor in tensors:
        if tensor.numel():
            group.send(_flat(tensor), peer)


def recv(worker: WorkerState, tensors: Sequence[Any], link: int, peer: int, metas: Sequence[Any]) -> Any:
    """Receive tensors. Return one tensor, or a list."""
    group = worker.link(link)
    trouble = torch.empty(1, dtype=torch.int64, device="cpu")
    group.recv(trouble, peer)
    if trouble:
        packed = torch.empty(int(trouble), dtype=torch.uint8, device="cpu")
        group.recv(packed, peer)
        raise Poisoned(wire.unpack_fault(bytes_of(packed)))
    made = []
    for dtype, shape, strides in metas:
        plain = in_huge_pages(torch.empty_strided(shape, strides, dtype=wire.dtype_of(dtype), device="cpu"))
        if plain.numel():
            group.recv(_flat(plain), peer)
        made.append(plain.to(worker.device))
    return made if len(made) > 1 else made[0]


def _raise_common_fault(group: ProcessGroup, *held: Any) -> None:
    """Exchange the faults of poisoned tensors, and raise the first one on all members.

    Raises:
        Poisoned: A member has a poisoned tensor.
    """
    poison = next((each for each in held if type(each) is Poison), None)
    trouble = wire.pack_fault(poison.fault) if poison else b""
    own_length = torch.tensor([len(trouble)], device="cpu")
    lengths = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    group.all_gather(lengths, own_length)
    for rank, length in enumerate(lengths.tolist()):
        if length:
            packed = torch.frombuffer(bytearray(trouble), dtype=torch.uint8) if rank == group.rank() else (
                torch.empty(length, dtype=torch.uint8, device="cpu")
            )  # fmt: skip
            group.broadcast(packed, rank)
            raise Poisoned(wire.unpack_fault(bytes_of(packed)))


def _apply_concatenated(tensors: Sequence[torch.Tensor], apply_in_place: Callable[[torch.Tensor], Any]) -> None:
    """Apply an in-place operation on one tensor to many tensors. Those of one dtype are concatenated."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for alike in kinds.values():
        if len(alike) == 1 and alike[0].is_contiguous():
            apply_in_place(alike[0])  # in place: saves two copies
            continue
        whole = torch.cat([each.reshape(-1) for each in alike])
        apply_in_place(whole)
        parts = torch.split_with_sizes(whole, [each.numel() for each in alike])
        for each, part in zip(alike, parts, strict=True):
            each.copy_(part.view(each.shape))


def all_reduce(worker: WorkerState, tensors: Sequence[Any], link: int, op: str) -> None:
    group = worker.link(link)
    _raise_common_fault(group, *tensors)
    _apply_concatenated(tensors, lambda tensor: group.all_reduce(tensor, getattr(ReduceOp, op)))


def broadcast(worker: WorkerState, tensors: Sequence[Any], link: int, root: int) -> None:
    group = worker.link(link)
    _raise_common_fault(group, *tensors)
    _apply_concatenated(tensors, lambda tensor: group.broadcast(tensor, root))


def all_gather(worker: WorkerState, tensors: Sequence[Any], link: int, dim: int) -> torch.Tensor:
    """Concatenate the members' tensors along a dimension."""
    group, (tensor,) = worker.link(link), tensors
    _raise_common_fault(group, tensor)
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(group.size())]
    group.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def reduce_scatter(worker: WorkerState, tensors: Sequence[Any], link: int, op: str, dim: int) -> torch.Tensor:
    """Return each member's part of the sum, along a dimension."""
    group, (tensor,) = worker.link(link), tensors
    _raise_common_fault(group, tensor)
    parts = [each.contiguous() for each in tensor.chunk(group.size(), dim)]
    made = torch.empty_like(parts[0])
    group.reduce_scatter(made, parts, getattr(ReduceOp, op))
    return made


def flags(worker: WorkerState, tensors: Sequence[Any], link: int, changed: Sequence[Any]) -> None:
    apply(changed)


OPERATIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (flags, send, recv, all_reduce, broadcast, all_gather, reduce_scatter)
}
"""Operations by name. `protocol.arguments.is_in_place` identifies those that change their tensors."""

COMMANDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        item,
        fetch,
        upload,
        spread,
        generator,
        forget_generator,
        seed,
        initial_seed,
        state,
        set_state,
        group,
        ungroup,
        mark,
        marked,
        unmark,
        memory,
        memory_info,
        reset_peak,
        reset_accumulated,
        empty_cache,
        properties,
        storage,
        twin,
        copied,
        record,
        kind,
        function,
        start,
        result,
        drop,
        forget,
        *SNAPSHOTS,
    )
}
