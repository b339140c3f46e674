"""``torch.worker``: the functions of ``torch.cuda`` that programs for accelerators use, for workers.

The names are those that ``torch.cuda`` and ``torch.xpu`` share. The worker measures all values. Values that cannot be
measured are refused. `register` makes ``torch.accelerator`` use the same functions.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from allranks._base.errors import UsageError
from allranks._call.bytes import bytes_of
from allranks.remote.torch_device import autocast, generators
from allranks.remote.torch_device.devices import CURRENT, place_of, places
from allranks.remote.torch_device.handle import DeviceTarget, Driver
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = [
    "Event", "Generator", "Stream", "StreamContext", "amp", "can_device_access_peer", "current_device",
    "current_stream", "default_stream", "device", "device_count", "device_memory_used", "device_of", "empty_cache",
    "get_amp_supported_dtype", "get_arch_list", "get_device_capability", "get_device_name", "get_device_properties",
    "get_rng_state", "get_rng_state_all", "init", "initial_seed", "ipc_collect", "is_available", "is_bf16_supported",
    "is_current_stream_capturing", "is_initialized", "is_tf32_supported", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved",
    "memory_stats", "memory_stats_as_nested_dict", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "seed",
    "seed_all", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "streams", "synchronize",
]  # fmt: skip

Generator = generators.Generator

_CAPTURE = "allranks.capture records and replays steps on workers"
_ALLOCATOR = "the tensors of a worker are in the memory of its process, and the master cannot replace its allocator"
_SENSORS = "workers do not read the sensors of their host"
_REFUSED = {
    **dict.fromkeys(("graph", "graph_pool_handle", "make_graphed_callables", "Graph", "CUDAGraph"), _CAPTURE),
    **dict.fromkeys(
        (
            "MemPool", "change_current_allocator", "get_per_process_memory_fraction", "memory_snapshot",
            "set_per_process_memory_fraction", "use_mem_pool",
        ),
        _ALLOCATOR,
    ),
    **dict.fromkeys(("clock_rate", "memory_usage", "power_draw", "temperature", "utilization"), _SENSORS),
    "default_generators": "torch.worker.get_rng_state() and manual_seed() use the worker's default generator;"
    " torch.Generator('worker:1') creates another one",
    "get_gencode_flags": "nothing is compiled for workers",
    "get_stream_from_external": "a worker has a single queue, torch.worker.current_stream()",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Raise AttributeError for a missing function, because programs test with ``hasattr`` which ones exist."""
    why = f": {_REFUSED[name]}" if name in _REFUSED else ""
    raise AttributeError(f"torch.worker has no {name!r}{why}", name=name)


def masters() -> list[Driver]:
    return list({id(each.master): each.master for each in _workers()}.values())


def _workers() -> list[DeviceTarget]:
    """Return all workers, in the order of their ranks. In a forked child there are none: they belong to the parent."""
    return [
        each
        for each in places()
        if len(each.ranks) == 1 and each.ranks[0] == each.index and not each.master.connections.closed
    ]


def _place(given: Any) -> DeviceTarget:
    """Return the workers of a device, an index, a tensor or None."""
    if isinstance(given, int):
        given = torch.device("worker", given)
    elif isinstance(given, RemoteTensor):
        given = given.device
    elif given is not None:
        given = torch.device(given)
    if given is not None and given.type != "worker":
        raise ValueError(f"Expected a worker, but got: {given}")
    return place_of(given)


def _worker(given: Any) -> DeviceTarget:
    """Return one worker.

    Raises:
        UsageError: The device is a group.
    """
    place = _place(given)
    if len(place.ranks) > 1:
        raise UsageError(f"{place} has no statistics of its own.\n  Request the statistics of each of its workers.")
    return place


def _ask(given: Any, name: str, **arguments: Any) -> Any:
    place = _worker(given)
    return place.master.connections.request(place, name, **arguments)


# Devices.


def device_count() -> int:
    """Return the number of workers. Their indices begin with 1."""
    return len(_workers())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return device_count() > 0


def init() -> None:
    """Do nothing if workers exist.

    Raises:
        UsageError: No workers exist.
    """
    place_of(None).master.connections.check_process()


_initialized = True  # otherwise checkpointing does not restore the workers' random state


def _lazy_init() -> None:
    """Do nothing. torch calls this before it creates a tensor."""


def _is_in_bad_fork() -> bool:
    """Return whether all workers belong to the process from which this one was forked."""
    return bool(places()) and not _workers()


def current_device() -> int:
    return CURRENT[0]


def set_device(device: Any) -> None:
    """Set the worker, or group, that ``device="worker"`` stands for. A negative index has no effect."""
    if not isinstance(device, int) or device >= 0:
        CURRENT[0] = _place(device).index


class device:
    """A context in which a worker, or a group, is the current one. None, or a negative index, has no effect."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None or (isinstance(device, int) and device < 0) else _place(device).index
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        if self.idx >= 0:
            CURRENT[0] = self.prev_idx


class device_of(device):
    """A context in which a tensor's worker is the current one. A tensor that is not on a worker has no effect."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if isinstance(obj, RemoteTensor) else None)


def synchronize(device: Any = None) -> None:
    """Wait until a worker, or all workers, have executed all queued commands. Does nothing if no workers exist.

    Raises:
        RemoteError: An operation has failed that has not been reported yet.
        NotInitializedError: This is a forked child.
    """
    if device is not None:
        place = _place(device)
        place.master.synchronize(place)
        return
    for master in {id(each.master): each.master for each in places()}.values():
        master.synchronize()


@dataclass(frozen=True)
class Properties:
    """The properties that a worker reports.

    Attributes:
        name: The name of the processor that it computes on.
        type: "cpu" or "cuda".
        host: The name of its host.
        total_memory: The memory of its GPU, or of its host, in bytes.
        multi_processor_count: The number of multiprocessors of a GPU. On a CPU: the threads that the worker computes
            with.
        capability: The compute capability of a GPU, [major, minor]. On a CPU: the instruction set that torch uses, such
            as "AVX512".
        arch_list: The GPUs for which the worker's torch is compiled.
        has_bfloat16, has_tf32: Support of these types by the worker's kernels.
    """

    name: str
    type: str
    host: str
    total_memory: int
    multi_processor_count: int
    capability: Any
    arch_list: list[str]
    has_bfloat16: bool
    has_tf32: bool


def get_device_properties(device: Any = None) -> Properties:
    """Return the properties of a worker's processor. Waits for its answer."""
    return Properties(**_ask(device, "properties"))


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability of a worker's GPU.

    Raises:
        UsageError: The worker computes on a CPU.
    """
    found = get_device_properties(device)
    if found.type != "cuda":
        raise UsageError(
            f"{_worker(device)} computes on a CPU, which has no compute capability.\n"
            f"  Use get_device_properties().capability, its instruction set: {found.capability!r}."
        )
    major, minor = found.capability
    return major, minor


def get_arch_list() -> list[str]:
    """Return the GPUs for which the current worker's torch is compiled; [] if it computes on a CPU."""
    return get_device_properties().arch_list


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current worker supports bfloat16. A CPU always does, with kernels that may be slow."""
    return get_device_properties().has_bfloat16


def is_tf32_supported() -> bool:
    return get_device_properties().has_tf32


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return whether two devices exchange tensors directly. Any two workers do."""
    return _worker(device) is not _worker(peer_device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    for master in masters():  # torch.autocast calls this first
        for rank in master.connections.ranks[:1]:
            autocast.register(master.devices.worker(rank).kind)
    return [torch.bfloat16, torch.float16]


class amp:
    """``torch.worker.amp``, the counterpart of ``torch.cuda.amp``."""

    class autocast(torch.amp.autocast):
        def __init__(self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> None:
            super().__init__("worker", dtype, enabled, cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("worker", *args, **kwargs)


# Memory.


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return memory statistics of a worker, in bytes. Waits for its answer.

    Returns:
        ``tensors``: the number of its tensors. ``allocated``: the bytes of their memory. ``resident``: the resident
        memory of the worker's process on its host. On a GPU also all of `torch.cuda.memory_stats`. On a CPU also
        ``allocated_bytes.all.current``, which is ``allocated``, ``reserved_bytes.all.current``, which is ``resident``,
        and ``reserved_bytes.all.peak``, the maximum of ``resident``.
    """
    return OrderedDict(sorted(_ask(device, "memory").items()))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        functools.reduce(lambda within, each: within.setdefault(each, {}), path, nested)[last] = value
    return nested


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of the worker's tensors."""
    return memory_stats(device)["allocated_bytes.all.current"]


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the worker holds: those of its allocator on a GPU, those of its process on a CPU."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the maximum bytes of tensors on a GPU, since the start or `reset_peak_memory_stats`.

    Raises:
        UsageError: The worker computes on a CPU, where this is not measured.
    """
    stats = memory_stats(device)
    if "allocated_bytes.all.peak" not in stats:
        raise UsageError(
            f"{_worker(device)} computes on a CPU, for which torch does not record the peak memory of tensors.\n"
            "  Use max_memory_reserved(), the peak memory of its process."
        )
    return stats["allocated_bytes.all.peak"]


def max_memory_reserved(device: Any = None) -> int:
    """Return the maximum of `memory_reserved` since the start or `reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _ask(device, "reset_peak")


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Reset accumulated statistics. On a CPU there are none."""
    _ask(device, "reset_accumulated")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of a worker's GPU, or of its host (Linux's available memory)."""
    free, total = _ask(device, "memory_info")
    return free, total


def device_memory_used(device: Any = None) -> int:
    """Return the bytes of the GPU, or of the host, that all processes use."""
    free, total = mem_get_info(device)
    return total - free


def empty_cache() -> None:
    """Make all workers return unused memory to their GPU, or host."""
    for place in _workers():
        place.master.connections.command(place, "empty_cache")


def ipc_collect() -> None:
    """Do nothing, because no other process holds a worker's tensors."""


# Random numbers.


def manual_seed_all(seed: int) -> None:
    for master in masters():
        master.connections.seed = int(seed)
    for place in _workers():
        place.master.connections.command(place, "seed", seed=int(seed))


def manual_seed(seed: int) -> None:
    place = place_of(None)
    place.master.connections.command(place, "seed", seed=int(seed))


def _random() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1


def seed() -> None:
    """Seed the current worker's generator with a number that differs each time."""
    manual_seed(_random())


def seed_all() -> None:
    manual_seed_all(_random())


def initial_seed() -> int:
    """Return the seed of the current worker's generator."""
    return int(_ask(None, "initial_seed", generator=0))


def get_rng_state(device: Any = "worker") -> torch.Tensor:
    place = _place(device)
    return torch.frombuffer(bytearray(place.master.connections.request(place, "state")), dtype=torch.uint8)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the random states of the workers, in the order of their ranks."""
    return [get_rng_state(each.device) for each in _workers()]


def set_rng_state(new_state: torch.Tensor, device: Any = "worker") -> None:
    place = _place(device)
    place.master.connections.command(place, "set_state", state=bytes_of(new_state))


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for place, state in zip(_workers(), new_states, strict=True):
        set_rng_state(state, place.device)


# Streams and events.

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)


class Stream(torch.Stream):
    """The queue of a worker, or of a group. There is only one, and every stream object represents it.

    Args:
        device: The worker or group. None: the current worker.
        priority: Has no effect.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, stream_id=0, device_index=_place(device).index, device_type=_TYPE)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self._place = _place(device)
        self._entered: list[int] = []

    def synchronize(self) -> None:
        """Wait until all queued commands are done."""
        self._place.master.synchronize(self._place)

    def query(self) -> bool:
        """Wait until all queued commands are done, and return True."""
        self.synchronize()
        return True

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Do nothing, see `Event.wait`."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing, see `Event.wait`."""

    def is_capturing(self) -> bool:
        return self._place.master.connections.recorder is not None

    def __enter__(self) -> Stream:
        self._entered.append(current_device())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT[0] = self._entered.pop()


class StreamContext:
    """A context in which a stream's worker is the current one. None has no effect."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    return Stream(device)


def set_stream(stream: Any) -> None:
    """Make a stream's worker the current one."""
    if stream is not None:
        set_device(stream.device)


def is_current_stream_capturing() -> bool:
    """Return whether `allranks.capture` is recording a step."""
    return any(each.connections.recorder is not None for each in masters())


class Event(torch.Event):
    """A point in a worker's queue, like `torch.cuda.Event`.

    Example:
        start, end = torch.worker.Event(), torch.worker.Event()
        start.record(); y = x @ x; end.record()
        print(start.elapsed_time(end), "ms")
    """

    _made = 0

    def __new__(cls, device: Any = None, enable_timing: bool = True, **_: Any) -> Event:
        return super().__new__(cls, "worker", enable_timing=enable_timing)

    def __init__(self, device: Any = None, enable_timing: bool = True, **_: Any) -> None:
        self._given = device
        self._timed = enable_timing
        self._place: DeviceTarget | None = None
        Event._made += 1
        self._number = Event._made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return (self._place or _place(self._given)).device

    def record(self, stream: Any = None) -> None:
        """Record the time at which the worker, or the stream's worker, reaches this point."""
        place = _place(self._given if stream is None else stream.device)
        if self._place is not place:  # otherwise the previous worker would keep the time
            self._forget()
        self._place = place
        place.master.connections.command(place, "mark", event=self._number)

    def synchronize(self) -> None:
        """Wait until the worker has reached this point. An event that was not recorded is complete."""
        if self._place is not None:
            self._when()

    def query(self) -> bool:
        """Wait until the worker has reached this point, and return True. Its answer implies that all before is done."""
        self.synchronize()
        return True

    def wait(self, stream: Any = None) -> None:
        """Do nothing, because workers wait for each other when they exchange tensors."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to another one of the same worker.

        Raises:
            UsageError: The events are of two workers, one was not recorded, or one was made with
                ``enable_timing=False``.
        """
        if not (self._timed and end._timed):
            raise UsageError("elapsed_time: both events must be created with enable_timing=True")
        if self._place is not end._place:
            raise UsageError(
                "elapsed_time: the clocks of different workers differ: both events must be recorded on the same worker"
            )
        return (end._when() - self._when()) * 1e3  # type: ignore[no-any-return]

    def ipc_handle(self) -> bytes:
        raise UsageError("an event of a worker cannot be sent to another process")

    def _when(self) -> float:
        if self._place is None:
            raise UsageError("elapsed_time: an event has not been recorded.\n  Call record() on both events first.")
        return float(self._place.master.connections.request(self._place, "marked", event=self._number))

    def _forget(self) -> None:
        if self._place is not None and not self._place.master.connections.closed:
            self._place.master.connections.command(self._place, "unmark", event=self._number)

    def __del__(self) -> None:
        if hasattr(self, "_place"):  # `__init__` may have raised
            self._forget()

    def __repr__(self) -> str:
        return f"torch.worker.Event({'not recorded' if self._place is None else f'of {self._place}'})"


streams = SimpleNamespace(Stream=Stream, Event=Event)


# torch.accelerator. Its functions call functions of torch._C, which only support devices with a C++ backend.


def _converts(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about dtypes that few operators support
            torch.zeros(1, device="cpu").to(dtype).to(torch.complex64)
    except RuntimeError:  # torch has no kernels for some dtypes
        return False
    return True


def _capability(index: int) -> dict[str, set[torch.dtype]]:
    """Return the dtypes that workers support, which are those of the CPU."""
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return {"supported_dtypes": {each for each in dtypes if _converts(each)}}


def _exchange(index: int) -> int:
    before = current_device()
    set_device(index)
    return before


def register() -> None:
    """Make ``torch.accelerator`` use these functions. Its accelerator is ``worker`` once that device is registered."""
    answers: dict[str, Callable[..., Any]] = {
        "getDeviceIndex": current_device,
        "setDeviceIndex": set_device,
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "getStream": current_stream,
        "setStream": set_stream,
        "synchronizeDevice": lambda index: synchronize(index) if places() else None,
        "isAllocatorInitialized": is_initialized,
        "emptyCache": empty_cache,
        "emptyHostCache": lambda: None,  # pinned memory is ordinary memory
        "getDeviceStats": memory_stats,
        "resetAccumulatedStats": reset_accumulated_memory_stats,
        "resetPeakStats": reset_peak_memory_stats,
        "getMemoryInfo": mem_get_info,
        "getDeviceCapability": _capability,
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_accelerator_{name}", answer)
    # torch's own function returns 0 if the value is not measured.
    if hasattr(torch.accelerator, "max_memory_allocated"):
        torch.accelerator.max_memory_allocated = torch.accelerator.memory.max_memory_allocated = _max_memory_allocated

    torch.random.fork_rng = _fork_rng(torch.random.fork_rng)
    torch.Stream = _accepting_worker(torch.Stream, Stream)  # type: ignore[misc]
    torch.Event = _accepting_worker(torch.Event, Event, enable_timing=False)  # type: ignore[misc]


def _max_memory_allocated(device_index: Any = None, /) -> int:
    return max_memory_allocated(device_index)


def _accepting_worker(torch_class: type, allranks_class: type, **defaults: Any) -> Any:
    """Return a class like torch's whose objects for workers are of another class. torch's own would do nothing."""

    class Also(type(torch_class)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is made and not kwargs.keys() & {"stream_id", "device_index", "device_type"}:
                device = args[0] if args else kwargs.get("device")
                target_device = torch.accelerator.current_accelerator() if device is None else torch.device(device)
                if target_device is not None and target_device.type == "worker":
                    return allranks_class(*args, **{**defaults, **kwargs})
            return super().__call__(*args, **kwargs)

        def __instancecheck__(cls, each: Any) -> bool:
            return isinstance(each, torch_class) if cls is made else super().__instancecheck__(each)

        def __subclasscheck__(cls, each: Any) -> bool:
            return issubclass(each, torch_class) if cls is made else super().__subclasscheck__(each)

    made = Also(torch_class.__name__, (torch_class,), {"__module__": "torch", "__doc__": torch_class.__doc__})
    return made


def _fork_rng(fork_rng: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `fork_rng`, which assumes that indices begin with 0."""

    @functools.wraps(fork_rng)
    def forked(devices: Any = None, *args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
        if devices is None and device_type in (None, "worker"):
            devices = [each.index for each in _workers()]
        return fork_rng(devices, *args, device_type=device_type, **kwargs)

    return forked
