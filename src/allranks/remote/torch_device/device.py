"""The device ``worker``: registers the hooks that make ``torch.randn(3, device="worker:1")`` use this package.

PyTorch has one device type for external backends, PrivateUse1. A process can rename it once. This is done when the
first master of the process starts, not at import.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from functools import partial
from typing import Any

import torch
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from allranks._base.errors import AllranksError, ConfigError, UsageError
from allranks.remote.protocol import flags, wire
from allranks.remote.torch_device import compilers, generators, saving, torch_worker
from allranks.remote.torch_device.call_site import called
from allranks.remote.torch_device.composites import COMPOSITES, choose_by_kind
from allranks.remote.torch_device.devices import CURRENT, place_of
from allranks.remote.torch_device.dispatch import dispatch
from allranks.remote.torch_device.handle import DeviceTarget
from allranks.remote.torch_device.modules import apply, swap_tensors
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["prove", "register"]

TESTED = "2.13"

_registered: list[torch.library.Library] = []
aten = torch.ops.aten


def register() -> None:
    """Register the device with torch.

    Raises:
        UsageError: Another package has already named PrivateUse1.
    """
    if _registered:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UsageError(
            f"the device 'worker' cannot be registered: {name!r} already uses torch's only device for extensions.\n"
            "  Start the master in a process that does not import this extension."
        )
    _setup_privateuseone_for_python_backend("worker", backend_module=torch_worker)
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    # Factories with device="worker" arrive with the key PrivateUse1. Handles have the key Lazy (`handle`).
    for key in ("PrivateUse1", "Lazy"):
        library.fallback(_fallback, key)  # type: ignore[no-untyped-call]
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1", "NestedTensorPrivateUse1"):
        library.fallback(_refuse, key)  # type: ignore[no-untyped-call]
    _registered.append(library)
    # Handles always have this key (`signature.AUTOCAST`), also outside of `torch.autocast`.
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    explicit = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "Lazy"):
        explicit.impl("_copy_from", _copy_from, key)  # type: ignore[no-untyped-call]
    for name, kernel in COMPOSITES.items():
        # At the level of autograd, because torch decomposes these operators above `dispatch`.
        explicit.impl(name, kernel, "AutogradLazy")  # type: ignore[no-untyped-call]
    # torch.tensor([x.sum(), y.sum()]) requests values in a context where operations bypass `dispatch`.
    for op in (*_both(), aten._local_scalar_dense.default):
        explicit.impl(op, partial(_fallback, op), "Lazy")  # type: ignore[no-untyped-call]
    # In this context it also creates memory, and within a TorchDispatchMode torch does not find the fallback.
    for op in (aten.empty.memory_format, aten.empty_strided.default):
        for key in ("PrivateUse1", "Lazy"):
            explicit.impl(op, partial(_make_memory, op), key)  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        explicit.impl("_pin_memory", _pin, "CPU")  # type: ignore[no-untyped-call]
    compilers.register()
    choose_by_kind()
    saving.register(RemoteTensor)
    generators.register()
    torch_worker.register()
    _point_to_ours()
    _refuse_index_0()
    _refuse_memory()
    flags.watch(_follow_flags)
    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    torch.utils.swap_tensors = swap_tensors
    _foreach_utils._get_foreach_kernels_supported_devices = _with_foreach
    _registered.append(explicit)  # torch removes the kernels of a library that is deleted


_of_torch = _foreach_utils._get_foreach_kernels_supported_devices


def _with_foreach() -> list[str]:
    """Return the device types with ``torch._foreach`` operators. Handles have the type ``lazy`` in torch's C++."""
    return [*_of_torch(), "lazy"]


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


_CONVERSIONS = {"tensor", "as_tensor", "asarray"}


def _make_memory(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a tensor on the current worker if torch added index 0 itself.

    torch adds index 0 to a device without an index when it converts a CPU tensor. Index 0 is the master and not a
    worker.
    """
    device = kwargs.get("device")
    if device is not None and device.index == 0:
        name, texts = called()
        if (name in _CONVERSIONS or not callable(getattr(torch, name, None))) and "worker:0" not in texts:
            kwargs["device"] = torch.device("worker", CURRENT[0])
    return dispatch(op, args, kwargs)


def _refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"{op._schema.name}: {wire.ONLY_STRIDED}")


def _copy_from(*args: Any, **kwargs: Any) -> Any:
    return dispatch(aten._copy_from.default, args, kwargs)


def _pin(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return ordinary memory. Pinned memory is useless for workers, but loaders request it on every accelerator."""
    return x.clone()


def _point_to_ours() -> None:
    """Make torch's DataParallel refuse workers. It takes indices for those of CUDA devices, from 0 on."""
    made = torch.nn.DataParallel.__init__
    torchs: Any = sys.modules[torch.nn.DataParallel.__module__]

    @functools.wraps(made)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        held = itertools.chain(module.parameters(), module.buffers())
        if torchs._get_available_device_type() == "worker" or any(isinstance(each, RemoteTensor) for each in held):
            raise UsageError(
                "torch.nn.DataParallel does not support workers, which are the accelerator of this process.\n"
                "  Use allranks.DataParallel(module, device_ids=['worker:1', 'worker:2'])."
            )
        made(self, module, *args, **kwargs)

    torch.nn.DataParallel.__init__ = init  # type: ignore[method-assign]


def _refuse_index_0() -> None:
    """Refuse ``x.worker(0)``. Later code could not distinguish it from ``x.worker()``."""
    made = torch.Tensor.worker  # type: ignore[attr-defined]

    @functools.wraps(made)
    def worker(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(device, "index", device) == 0:
            place_of(torch.device("worker", 0))
        return made(self, device, *args, **kwargs)  # type: ignore[no-any-return]

    torch.Tensor.worker = worker  # type: ignore[attr-defined]


def _refuse_memory() -> None:
    """Refuse ``torch.UntypedStorage(4, device="worker:1")``. It has no memory here, and torch would write to it."""
    made = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return made(cls, *args, **kwargs)
        if torch.device(device).type == "worker":
            raise UsageError(
                f"a storage cannot be created on {device}: its memory is in another process.\n"
                f"  Create a tensor instead: torch.empty(n, dtype=torch.uint8, device={str(device)!r})."
            )
        return made(cls, *args, device=device, **kwargs)  # type: ignore[call-arg]

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


def _both() -> list[Any]:
    """Return operators that torch decomposes for unknown devices, although the workers have a kernel for them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::") and has(full, "CompositeImplicitAutograd") and has(full, "CPU"):
            name, _, overload = full.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(aten, name), overload or "default"))
    return found


def prove(place: DeviceTarget) -> None:
    """Test undocumented behavior of torch: a backward on a worker, in this thread, with gradients that stay there.

    Raises:
        ConfigError: This version of torch behaves differently.
    """
    threads: list[int] = []
    try:
        with torch.inference_mode(False), torch.enable_grad():  # independent of the caller's modes
            x = torch.ones(2, device=place.device, requires_grad=True)
            x.register_hook(lambda grad: threads.append(threading.get_ident()))  # type: ignore[no-untyped-call]
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
            f"master-worker mode does not work with torch {torch.__version__}: the gradient on a worker is {found}"
            f" instead of {expected}.\n  Install torch {TESTED}, the tested version."
        )


def _follow_flags() -> None:
    for master in torch_worker.masters():
        master.follow_flags()
