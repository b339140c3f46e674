"""The device ``worker``: what makes ``torch.randn(3, device="worker:1")`` come here.

PyTorch has one name for backends that it does not know, PrivateUse1, which a process can rename once. That is done when
the first master of the process starts, not at import.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from allranks._errors import AllranksError, ConfigError, UsageError
from allranks.remote import autocast, compilers, flags, generators, saving, wire
from allranks.remote import tensor as handles
from allranks.remote.composites import COMPOSITES, choose_by_kind
from allranks.remote.modules import apply
from allranks.remote.tensor import RemoteTensor, dispatch, place_of

if TYPE_CHECKING:
    from allranks.remote.master import Master

__all__ = ["Event", "prove", "register"]

TESTED = "2.13"

_registered: list[torch.library.Library] = []
aten = torch.ops.aten


def register() -> None:
    """Makes the device known to torch.

    Raises:
        UsageError: another package has given PrivateUse1 a name.
    """
    if _registered:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UsageError(
            f"torch's one place for devices of others is taken by {name!r} in this process; "
            "the device 'worker' cannot be beside it. Start the master in a process that does not import it"
        )
    _setup_privateuseone_for_python_backend("worker", backend_module=_module())
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "Lazy"):
        library.fallback(_fallback, key)  # type: ignore[no-untyped-call]
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1", "NestedTensorPrivateUse1"):
        library.fallback(_refuse, key)  # type: ignore[no-untyped-call]
    _registered.append(library)
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    explicit = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "Lazy"):
        explicit.impl("_copy_from", _copy_from, key)  # type: ignore[no-untyped-call]
    for name, kernel in COMPOSITES.items():
        explicit.impl(name, kernel, "AutogradLazy")  # type: ignore[no-untyped-call]
    # torch.tensor([x.sum(), y.sum()]) asks for values where operations do not pass by `dispatch`.
    for op in (*_both(), aten._local_scalar_dense.default):
        explicit.impl(op, partial(_fallback, op), "Lazy")  # type: ignore[no-untyped-call]
    # There it makes memory, too; and within a TorchDispatchMode torch does not find the fallback.
    for op in (aten.empty.memory_format, aten.empty_strided.default):
        for key in ("PrivateUse1", "Lazy"):
            explicit.impl(op, partial(_fallback, op), key)  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        explicit.impl("_pin_memory", _pin, "CPU")  # type: ignore[no-untyped-call]
    compilers.register()
    choose_by_kind()
    saving.register()
    generators.register()
    flags.watch(_follow_flags)
    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    _registered.append(explicit)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


def _refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"{op._schema.name}: {wire.ONLY_STRIDED}")


def _copy_from(*args: Any, **kwargs: Any) -> Any:
    return dispatch(aten._copy_from.default, args, kwargs)


def _pin(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Pinned memory is of no use to workers; loaders that ask for it on every accelerator get ordinary memory."""
    return x.clone()


def _both() -> list[Any]:
    """Operators that torch takes apart for devices of which it knows no kernel, though the workers' have one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::") and has(full, "CompositeImplicitAutograd") and has(full, "CPU"):
            name, _, overload = full.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(aten, name), overload or "default"))
    return found


def prove(place: handles.Place) -> None:
    """Tries what torch does not promise: a backward on a worker, in this thread, with gradients that stay there.

    Raises:
        ConfigError: this version of torch does something else.
    """
    threads: list[int] = []
    x = torch.ones(2, device=place.device, requires_grad=True)
    x.register_hook(lambda grad: threads.append(threading.get_ident()))  # type: ignore[no-untyped-call]
    try:
        (x * 3).sum().backward()  # type: ignore[no-untyped-call]
        grad = x.grad
        found: object = (type(grad), grad is not None and grad.device, threads, grad is not None and grad.tolist())
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        if isinstance(error, AllranksError):
            raise
        found = repr(error)
    expected = (RemoteTensor, place.device, [threading.get_ident()], [3.0, 3.0])
    if found != expected:
        raise ConfigError(
            f"master-worker mode does not work with torch {torch.__version__}: a gradient on a worker should be"
            f" {expected} and is {found}.\n  It is tested with torch {TESTED}"
        )


def _masters() -> list[Master]:
    return list({id(each.master): each.master for each in handles.places()}.values())


def _follow_flags() -> None:
    for master in _masters():
        master.follow_flags()


def _count() -> int:
    return sum(len(each.ranks) == 1 and each.ranks[0] == each.index for each in handles.places())


class Event:
    """A moment in a worker's work, as `torch.cuda.Event`.

    Example:
        start, end = torch.worker.Event(), torch.worker.Event()
        start.record(); y = x @ x; end.record()
        print(start.elapsed_time(end), "ms")
    """

    _made = 0

    def __init__(self, device: Any = None, enable_timing: bool = True, **_: Any) -> None:
        self._device = torch.device(device) if device is not None else None
        self._place: handles.Place | None = None
        Event._made += 1
        self._number = Event._made

    def record(self, stream: Any = None) -> None:
        """Notes the time when the worker comes here."""
        self._place = place_of(self._device)
        self._place.master.order(self._place, "mark", event=self._number)

    def synchronize(self) -> None:
        """Waits until the worker has come here."""
        self._when()

    def query(self) -> bool:
        """True once it has; waits, as all that is before it is done when the worker answers."""
        self._when()
        return True

    def wait(self, stream: Any = None) -> None:
        """Workers wait for each other where they exchange tensors: there is nothing to do."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another of the same worker."""
        if self._place is not end._place:
            raise UsageError("the clocks of different workers differ: both events must be of one worker")
        return (end._when() - self._when()) * 1e3

    def _when(self) -> float:
        if self._place is None:
            raise UsageError("the event has not been recorded")
        return float(self._place.master.request(self._place, "marked", event=self._number))


def _module() -> ModuleType:
    """``torch.worker``, with the names that torch and its users look for in ``torch.cuda``."""
    module: Any = ModuleType("torch.worker", __doc__)
    master = os.getpid()

    def synchronize(device: Any = None) -> None:
        if device is None:
            for master in _masters():
                master.synchronize()
        else:
            place = place_of(_device(device))
            place.master.synchronize(place)

    def manual_seed_all(seed: int) -> None:
        for master in _masters():
            master.seed = int(seed)
        for place in handles.places():
            if len(place.ranks) == 1:
                place.master.order(place, "seed", seed=int(seed))

    def manual_seed(seed: int) -> None:
        place = place_of(None)
        place.master.order(place, "seed", seed=int(seed))

    def get_rng_state(device: Any = "worker") -> torch.Tensor:
        place = place_of(_device(device))
        return torch.frombuffer(bytearray(place.master.request(place, "state")), dtype=torch.uint8)

    def set_rng_state(new_state: torch.Tensor, device: Any = "worker") -> None:
        place = place_of(_device(device))
        place.master.order(place, "set_state", state=new_state.numpy().tobytes())

    def set_device(device: Any) -> None:
        handles._current[0] = place_of(_device(device)).index

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = handles._current[0]
        set_device(device)
        try:
            yield
        finally:
            handles._current[0] = before

    def memory_stats(device: Any = None) -> dict[str, int]:
        place = place_of(_device(device))
        return place.master.request(place, "memory")  # type: ignore[no-any-return]

    def get_amp_supported_dtype() -> list[torch.dtype]:  # which torch.autocast asks first
        for master in _masters():
            for rank in master.ranks[:1]:
                autocast.register(master.places[(rank,)].kind)
        return [torch.bfloat16, torch.float16]

    for each in (
        synchronize, manual_seed, manual_seed_all, get_rng_state, set_rng_state, set_device, device, memory_stats,
        get_amp_supported_dtype,
    ):  # fmt: skip
        setattr(module, each.__name__, each)
    module.Event = Event
    module.Generator = generators.Generator
    module.device_count = _count
    module.is_available = lambda: _count() > 0
    module.is_initialized = lambda: _count() > 0
    module.current_device = lambda: handles._current[0]
    module.memory_allocated = lambda device=None: memory_stats(device)["allocated"]
    module._is_in_bad_fork = lambda: os.getpid() != master
    module._lazy_init = lambda: None
    module._initialized = True  # else checkpointing does not restore the workers' random state
    return module  # type: ignore[no-any-return]


def _device(given: Any) -> torch.device | None:
    if given is None or isinstance(given, torch.device):
        return given
    if isinstance(given, int):
        return torch.device("worker", given)
    if isinstance(given, RemoteTensor):
        return given.device
    return torch.device(given)
