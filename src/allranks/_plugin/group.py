"""torch's ProcessGroup around a group of allranks.

Each verb is called in one of two ways. A plain call from torch's own Python and C++ goes directly to ``Calls``, unless
a profiler, mode or hook observes operators. Any other call goes to the method of torch's base class. That method
accepts all forms of the arguments and calls one of torch's operators; see ``operators``. The base method is virtual. It
calls the override in TorchGroup again, unless the calling Python function has the name that C++ expects.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from allranks._api.windows import new_window
from allranks._base.errors import AllranksError, PeerLostError, TimeoutError, UsageError
from allranks._base.verbs import VERBS
from allranks._call.callsite import NOWHERE, line_of
from allranks._core import Sites, TorchCall
from allranks._plugin import recorder
from allranks._plugin.calls import OPS, Calls, tensors_in
from allranks._plugin.names import NAME
from allranks._plugin.operators import BACKENDS_IN_PYTHON, Operator, install, make_backend
from allranks._plugin.window import TorchWindow, allocate
from allranks._plugin.work import DONE, TorchWork

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Derivation", "TorchGroup"]

_torch: Any = torch
_c10d: Any = torch.distributed
_C: Any = torch._C._distributed_c10d
_Base: Any = _c10d.ProcessGroup
_profiling: Callable[[], bool] = _torch.autograd._profiler_enabled  # in this thread
# In any thread, because a profiler can record all threads: that of torch's debug server does.
_profiling_anywhere: Callable[[], bool] = partial(vars(_torch.autograd.profiler).__getitem__, "_is_profiler_enabled")
_modes: Callable[[], int] = _torch._C._len_torch_dispatch_stack
_functorch: Callable[[], int | None] = _torch._C._functorch.maybe_current_level
_OBSERVERS = [_profiling, _profiling_anywhere, _modes, _functorch]
_PLAIN = {Tensor, torch.nn.Parameter}

_OLD = {  # names in torch before 2.12
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_single": "gather_into_tensor",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def _torch_hooks(environ: Mapping[str, str]) -> bool:
    """Return whether a feature is requested that torch 2.15 and later implements by C++ hooks of its operators.

    A call through the operators takes three times as long.
    """
    checks = hasattr(_C, "NanCheckHook") and environ.get("TORCH_DIST_NAN_CHECK") == "1"
    return checks or recorder.is_requested(environ)


class Derivation(NamedTuple):
    """Functions that create groups from a group.

    Attributes:
        shrink: The group of the remaining ranks. Receives the group, the ranks to exclude, and torch's flags.
        split: The part that contains this rank, or None. Receives the group, the members of the part, the timeout and a
            description.
        merge: A group with ranks of other groups. Receives the group, a store, the number of ranks, the timeout and a
            description.
    """

    shrink: Callable[[TorchGroup, Sequence[int], int], TorchGroup]
    split: Callable[[TorchGroup, Sequence[int], timedelta | None, str | None], TorchGroup | None]
    merge: Callable[[TorchGroup, Any, int, timedelta, str | None], TorchGroup]


class TorchGroup(_Base):  # type: ignore[misc]
    """A group of allranks in the form that torch's C++ and Python use.

    Attributes:
        allranks_group: The group of allranks.
        aborted: This rank has aborted the group's calls.
    """

    _name = _desc = ""
    _store: Any = None  # of a group that torch does not register together with a store

    def __init__(
        self,
        group: ProcessGroup,
        backend: str,
        leave: Callable[[ProcessGroup], None],
        derivation: Derivation,
        others: Mapping[str, tuple[Any, Any]],
    ) -> None:
        """Wrap a group.

        Args:
            group: The group of allranks.
            backend: torch's name for the backend.
            leave: Called when torch destroys the group.
            derivation: Creates groups from this one.
            others: torch's own backends for other devices, by device type, with their BackendType.
        """
        super().__init__(group.rank(), group.size())
        self.allranks_group = group
        self._backend = backend
        self._leave = leave
        self._derivation = derivation
        self.aborted = False
        self._calls = Calls(group)
        self._others = {device: made for device, (_, made) in others.items()}
        self._hooks: set[tuple[str, int]] = {("of torch", 0)} if _torch_hooks(os.environ) else set()
        # Then `_must_see` checks each call, and the core does not read any.
        self._watched = bool(others or self._hooks)
        if BACKENDS_IN_PYTHON:
            self._behind = make_backend(self._calls, backend, NAME, weakref.ref(self))
            for device in self._kinds():
                self._register_backend(device, self.BackendType.CUSTOM, self._behind)
            self._set_default_backend(self.BackendType.CUSTOM)
        install(TorchGroup)
        for other, (kind, made) in others.items():
            self._register_backend(torch.device(other), kind, made)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.allranks_group.monitored_barrier(timeout, wait_all_ranks)

    def _must_see(self, given: Sequence[Any]) -> bool:
        """Return whether the call must use torch's operators: for hooks, or because another backend executes it."""
        first = next(tensors_in(given), None)
        return bool(self._hooks) or first is None or first.device.type in self._others

    def _calls_for(self, args: Sequence[Any]) -> Calls | None:
        """Return the object that executes a call with these arguments, or None for another backend."""
        first = next(tensors_in(args), None)
        return None if first is not None and first.device.type in self._others else self._calls

    # --- properties that torch reads ---

    def getBackendName(self) -> str:
        return NAME  # for another name, C++ would search for the implementation of that backend

    def name(self) -> str:
        return self._backend

    _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def getGroupDesc(self) -> str:
        return self._desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """Device types of the group. Empty before it has members, because torch would record these for its recorder."""
        return self._kinds() if self.size() >= 0 else []

    def _kinds(self) -> list[torch.device]:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kinds = ["cpu", *self._others, *([here.type] if here and not self._others else [])]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device | str) -> Any:
        kind = torch.device(device).type
        return self._others.get(kind, self)  # the native engine transfers tensors of any device

    @property
    def options(self) -> SimpleNamespace:
        """The options that torch reads from a backend. Not torch's class, whose objects torch cannot copy."""
        return SimpleNamespace(
            _timeout=timedelta(seconds=self.allranks_group.timeout_s),
            backend=self._backend,
            global_ranks_in_group=list(self.allranks_group.ranks),
            group_name=self._name,
        )

    # --- members ---

    def rank(self) -> int:
        return self.allranks_group.rank()

    getRank = rank

    def size(self) -> int:
        return self.allranks_group.size()

    getSize = size

    @property
    def supports_reconfigure(self) -> bool:
        self._check_alone()
        return True

    def get_reconfigure_handle(self) -> str:
        self._check_alone()
        return self.allranks_group.reconfigure_handle()

    def reconfigure(self, opts: Any) -> TorchWork:
        """Reconfigure the group. The call is complete when it returns, as in gloo."""
        self._check_alone()
        ours = self.allranks_group
        ours.reconfigure(opts.uuid, opts.handles, opts.timeout)
        # torch attaches its recorder when it creates a group. A group without members gets it now.
        torchs = _c10d.distributed_c10d
        if self in torchs._world.pg_map and self not in getattr(torchs._world, "pg_flight_recorder_hooks", {self}):
            kinds = torchs.BackendConfig(_c10d.Backend(self._backend))
            torchs._maybe_attach_flight_recorder(self, kinds, list(ours.ranks))
        return DONE

    def restart(self) -> None:
        """Reset the record of calls, because the group has another engine, and possibly other members."""
        self._calls.restart()
        self.aborted = False
        known = _c10d.distributed_c10d._world
        if self in known.pg_map:
            known.pg_group_ranks[self] = {rank: i for i, rank in enumerate(self.allranks_group.ranks)}

    def _check_alone(self) -> None:
        if self._others:  # torch's error text
            raise UsageError("ProcessGroup reconfigure APIs do not support process groups with multiple backends")

    @property
    def supports_shrinking(self) -> bool:
        return not self._others

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> TorchGroup:
        """Return the new group to torch.distributed.shrink_group."""
        if opts_override is not None:
            raise UsageError(
                f"shrink_group: the {NAME} backend does not support pg_options {opts_override!r}.\n  Omit pg_options."
            )
        return self._derivation.shrink(self, ranks_to_exclude, shrink_flags)

    @property
    def supports_splitting(self) -> bool:
        return not self._others

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TorchGroup | None:
        """Return this rank's part to torch.distributed.split_group, None if there is none. All ranks call it."""
        self._check_derivable("split_group", opts)
        made = self._derivation.split(self, new_ranks, timeout, group_desc or group_name)
        return None if made is None else made._named(group_name, group_desc, self.get_group_store())

    def merge_remote_group(
        self, store: Any, size: int, timeout: timedelta, group_name: str | None = None, group_desc: str | None = None
    ) -> TorchGroup:
        """Return a group of this group's ranks and of others, numbered by their arrival at the store."""
        self._check_derivable("merge_remote_group", None)
        made = self._derivation.merge(self, store, size, timeout, group_desc or group_name)
        return made._named(group_name or "merge", group_desc, store)

    def _check_derivable(self, call: str, options: Any) -> None:
        if self._others:
            raise UsageError(
                f"{call}: the group has other backends than {NAME}, for {', '.join(self._others)}.\n  Call new_group."
            )
        if options is not None and not isinstance(options, SimpleNamespace):  # torch may pass those of this group
            raise UsageError(f"{call}: the {NAME} backend does not support pg_options {options!r}.\n  Omit pg_options.")

    def _named(self, name: str | None, description: str | None, store: Any) -> TorchGroup:
        self._set_group_name(name or "")
        self._set_group_desc(description or "")
        if store is not None:
            self._store = _c10d.PrefixStore(f"{self._name}/", store)
        return self

    def get_group_store(self) -> Any:
        """Return the store with which torch has created the group. Programs exchange values of its members there."""
        known = _c10d.distributed_c10d._world.pg_map.get(self)
        return self._store if known is None else known[1]

    supports_coalescing = True
    supports_time_estimate = _supports_time_estimate = False

    @property
    def supports_window(self) -> bool:
        return not self._others

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Return a window to torch.distributed. All ranks call this, in the same order."""
        self._check_derivable("new_window", None)
        return TorchWindow(new_window(tensor, self.allranks_group))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return memory for windows, in the same way as torch's backends."""
        return allocate(size, dtype, device)

    use_pg_for_symm_mem_rendezvous = False

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._calls.start_coalescing()

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        return self._calls.end_coalescing()

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.count

    def set_timeout(self, timeout: timedelta) -> None:
        self.allranks_group.set_timeout(timeout)
        for other in self._others.values():
            other._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, _C.AllreduceOptions() if opts is None else opts)  # type: ignore[no-any-return]

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the ranks are connected when the group is created."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing, as in gloo: no Work reports its duration."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: allranks compares its sequence numbers in every call."""

    # --- shutdown ---

    def shutdown(self) -> None:
        for other in () if self.allranks_group.inherited else self._others.values():
            other.shutdown()
        self._leave(self.allranks_group)

    def abort(self) -> None:
        """Abort all calls on every rank. The group remains usable for ``reconfigure``. torch may discard it."""
        # torch then forgets the group without a shutdown. `creation` finds it by this flag and closes it.
        self.aborted = True
        if self.allranks_group.inherited:
            return
        for other in self._others.values():
            other.abort()
        # A group without members has no engine that could abort calls.
        if self.rank() >= 0:
            self.allranks_group.abort()

    def get_error(self) -> Any:
        """Return torch's code for the failure of the group: caused by this rank, by another rank, or by a timeout."""
        failure = self._calls.failure
        if isinstance(failure, TimeoutError):
            return _C.ErrorType.TIMEOUT
        if isinstance(failure, PeerLostError):
            return _C.ErrorType.REMOTE_ERROR
        if failure is not None or self.aborted:
            return _C.ErrorType.COMM_ERROR
        return _C.ErrorType.REMOTE_ERROR if self.allranks_group.failed_ranks() else _C.ErrorType.SUCCESS


# Verbs whose plain calls the core parses, by method: the verb; the position of the tensor, and of its chunks (the
# argument number, and whether the argument is the only item of a list).
_READ: dict[str, tuple[str, tuple[int, bool] | None, tuple[int, bool] | None]] = {
    "allreduce": ("all_reduce", (0, True), None),
    "reduce": ("reduce", (0, True), None),
    "broadcast": ("broadcast", (0, True), None),
    "allgather": ("all_gather", (1, True), (0, True)),
    "all_gather_single": ("all_gather", (1, False), (0, False)),
    "reduce_scatter": ("reduce_scatter", (0, True), (1, True)),
    "reduce_scatter_single": ("reduce_scatter", (0, False), (1, False)),
    "all_to_all_single": ("all_to_all", (1, False), (0, False)),
    "barrier": ("barrier", None, None),
}


# Only the wrappers of torch's logger call these functions.
_LOGGED = [f for f in vars(_c10d.distributed_c10d).values() if type(f) is FunctionType and hasattr(f, "__wrapped__")]
_SITES = Sites(line_of, NOWHERE, [inspect.unwrap(f).__code__ for f in _LOGGED])


def _reader(verb: str, form: Sequence[type]) -> TorchCall | None:
    """Return the parser of plain calls of a verb, or None if the core does not parse them."""
    if verb not in _READ:
        return None
    short, tensor, pieces = _READ[verb]
    ops, rooted = OPS if VERBS[short].reduces else {}, bool(VERBS[short].root)
    return TorchCall(short, len(form), tensor, pieces, form[-1], ops, rooted, _OBSERVERS, _SITES)


def _verb(verb: str, name: str, *form: type) -> None:
    """Add the method ``name`` of a verb to TorchGroup. ``form`` contains the argument types that torch passes."""
    torchs, ours, types = getattr(_Base, name), getattr(Calls, name), list(form)
    lists = form[:2].count(list)
    reader = _reader(verb, form)

    def method(self: TorchGroup, *given: Any, **named: Any) -> Any:
        if named and named.keys() == {"opts"}:
            given, named = (*given, named["opts"]), {}
        # The core makes the checks below itself: it parses the arguments and looks for observers in C++
        # (docs/decisions/106).
        if reader is not None and not named and not self._watched:
            calls = self._calls
            try:
                call = reader(calls.group.now, given)
                if call is not None:
                    calls.count += 1
                    return DONE if call is True else calls.started(call)
            except AllranksError as error:
                calls.annotate(error, given)
                raise
        if (
            [*map(type, given)] == types
            and not named
            and not _profiling()
            and not _profiling_anywhere()
            and not _modes()
            and _functorch() is None
            and not (self._watched and self._must_see(given))
            and (not lists or (_plain(given[0]) and (lists == 1 or _plain(given[1]))))
        ):
            return ours(self._calls, *given)
        # The path through torch's operators costs 20 us and more in Python (docs/decisions/033).
        with Operator(*given, *named.values()) as operator:
            return operator.work(torchs(self, *given, **named))

    method.__code__ = method.__code__.replace(co_name=name)  # by this name, C++ detects that the method calls itself
    method.__name__ = method.__qualname__ = name
    setattr(TorchGroup, name, method)


for _name, *_form in (
    ("allreduce", list, _C.AllreduceOptions),
    ("allreduce_coalesced", list, _C.AllreduceCoalescedOptions),
    ("reduce", list, _C.ReduceOptions),
    ("broadcast", list, _C.BroadcastOptions),
    ("allgather", list, list, _C.AllgatherOptions),
    ("all_gather_single", Tensor, Tensor, _C.AllgatherOptions),
    ("allgather_coalesced", list, list, _C.AllgatherOptions),
    ("all_gather_single_coalesced", list, list, _C.AllgatherOptions),
    ("gather", list, list, _C.GatherOptions),
    ("gather_single", Tensor, Tensor, _C.GatherOptions),
    ("scatter", list, list, _C.ScatterOptions),
    ("reduce_scatter", list, list, _C.ReduceScatterOptions),
    ("reduce_scatter_single", Tensor, Tensor, _C.ReduceScatterOptions),
    ("reduce_scatter_single_coalesced", list, list, _C.ReduceScatterOptions),
    ("alltoall", list, list, _C.AllToAllOptions),
    ("all_to_all_single", Tensor, Tensor, list, list, _C.AllToAllOptions),
    ("barrier", _C.BarrierOptions),
    ("send", list, int, int),
    ("recv", list, int, int),
    ("recv_anysource", list, int),
):
    _known = _name if hasattr(_Base, _name) else _OLD.get(_name, _name)
    if hasattr(_Base, _known):
        _verb(_name, _known, *_form)


def _plain(tensors: Sequence[Any]) -> bool:
    """Return whether all tensors in nested lists are instances of no subclass."""
    for each in tensors:
        kind = type(each)
        if kind not in _PLAIN and (kind is not list or not _plain(each)):
            return False
    return True


def _old_name(old: str, new: str) -> None:
    """Add a method's old name to TorchGroup.

    If C++ finds no override under the new name, because that method is the caller, it searches under the old name.
    """
    torchs = getattr(_Base, old)
    setattr(TorchGroup, old, property(lambda self: torchs.__get__(self) if Operator.is_open() else getattr(self, new)))


for _new, _name in _OLD.items():
    if hasattr(_Base, _new):
        _old_name(_name, _new)


def _hook(kind: str) -> None:
    """Route calls through torch's operators while hooks of torch 2.15 and later are registered."""
    name = f"register_{kind}_hook"
    register, unregister = getattr(_Base, name), getattr(_Base, f"un{name}")

    def registered(self: TorchGroup, hook_id: int, hook: Callable[[Any], None]) -> None:
        # Registered with torch first: once `_watched` is set, calls go through the operators that run the hook.
        register(self, hook_id, hook)
        self._hooks.add((kind, hook_id))
        self._watched = True

    def unregistered(self: TorchGroup, hook_id: int) -> None:
        unregister(self, hook_id)
        self._hooks.discard((kind, hook_id))
        self._watched = bool(self._hooks or self._others)

    setattr(TorchGroup, name, registered)
    setattr(TorchGroup, f"un{name}", unregistered)


for _kind in ("pre", "post"):
    if hasattr(_Base, f"register_{_kind}_hook"):
        _hook(_kind)


# torch.compile inspects every function that runs or is called. It cannot make anything here faster.
_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(*[_eval_frame._FrameAction.SKIP] * 2)
for _class in (TorchGroup, TorchWork):
    for _method in filter(inspect.isfunction, vars(_class).values()):
        _eval_frame.set_code_exec_strategy(_method.__code__, _SKIP)
        if _class is TorchWork:  # queries of a group, such as its name, are traced
            setattr(_method, "_torchdynamo_disable", True)  # noqa: B010 - as torch.compiler.disable, which loads it all
