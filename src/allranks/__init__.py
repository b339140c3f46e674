"""allranks: run PyTorch on many processes.

``import allranks as dist`` provides torch.distributed's names, with the same arguments and semantics, over allranks's
own channel. The map of the package:

    _api           the functions: all_reduce and related functions, init_process_group, new_group, objects, windows,
                   multigpu, legacy names
    _group         ProcessGroup: called by the functions above
    _elastic       membership after a loss: rank slots, vote, generations, replay
    _engines       the engines that transfer the bytes: native, gloo, nccl, mpi
    _call          the elements of a call: ReduceOp, Work, futures, its call site in the program
    _rendezvous    how ranks find each other
    _store         TCPStore, FileStore, HashStore, PrefixStore
    _net           connections: handshake, admission, frames, TLS
    _cluster       the environment of this process: launcher or scheduler, host, network, environment variables
    _base          errors, as a tree, and other modules that all layers use
    _trace         the record of calls, and reports from it
    _watch         reports of waits in torch.distributed's own backends
    _plugin        torch.distributed's plugin, torch_group
    data           DistributedSampler
    engines        the interface for packages that provide an engine; schedulers: for a scheduler
    logging        configure: a log for each rank
    parallel, nn   DistributedDataParallel, DataParallel, collectives that support autograd
    algorithms     communication hooks for DistributedDataParallel
    checkpoint     save, load
    multiprocessing  spawn
    launch         allranks run; run: the same from Python; progress: its bar
    resilience     State: a training loop that survives lost ranks
    remote         init_master_worker: one process controls all others; all_reduce_, broadcast_ on its groups; keep
    testing        run_ranks: real ranks for tests
    trace          the last calls of this process, stragglers, a file with all calls
    tools          bench, doctor, submit

Names are loaded on first use, so that the launcher starts without importing torch. Some are torch's own names, which
work on this world: ``init_device_mesh``, ``fsdp``, ``tensor``, ... (docs/torch.md).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"allranks requires Linux, and this is {sys.platform}: run it in the container of examples/recipes/Dockerfile"
        " (docs/recipes.md)"
    )

__version__ = "0.2.0"

# The public names, by the module that defines them. `make format` writes __init__.pyi from this table. Type checkers
# and editors read that file.
_HOME = {
    "_api.collectives": (
        "P2POp",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "gather",
        "gather_into_tensor",
        "gather_single",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    ),
    "_api.groups": (
        "SHRINK_ABORT",
        "SHRINK_DEFAULT",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_process_group_ranks",
        "merge_remote_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "set_timeout",
        "shrink_group",
        "split_group",
    ),
    "_api.legacy": (
        "Backend",
        "default_pg_timeout",
        "gather_recv",
        "gather_send",
        "get_backend_config",
        "get_default_backend_for_device",
        "get_num_processes",
        "is_backend_available",
        "is_gloo_available",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "scatter_recv",
        "scatter_send",
        "supports_complex",
    ),
    "_api.multigpu": (
        "all_gather_multigpu",
        "all_reduce_multigpu",
        "broadcast_multigpu",
        "reduce_multigpu",
        "reduce_scatter_multigpu",
    ),
    "_api.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "_api.shared": ("empty_shared",),
    "_api.uneven": (
        "all_gather_v",
        "all_to_all_w",
        "gather_v",
        "reduce_scatter_v",
        "scatter_v",
    ),
    "_api.windows": ("allocate_tensor", "new_window"),
    "_api.world": (
        "GroupMember",
        "destroy_process_group",
        "get_backend",
        "get_rank",
        "get_world_size",
        "group",
        "init_process_group",
        "is_available",
        "is_initialized",
        "stats",
    ),
    "_base.errors": (
        "AbortedError",
        "AllranksError",
        "CheckpointError",
        "ConfigError",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "ExcludedError",
        "JoinError",
        "MismatchError",
        "NotInitializedError",
        "PeerLostError",
        "QueueEmptyError",
        "RankError",
        "RemoteError",
        "SecretError",
        "StateLostError",
        "StoreLostError",
        "TimeoutError",
        "UsageError",
        "WorkerLost",
        "WorkerReplaced",
    ),
    "_call.debug": ("DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"),
    "_call.types": ("ReduceOp", "Stats", "premul_sum", "reduce_op"),
    "_call.work": ("Work",),
    "_group.plan": ("Plan",),
    "_group.process_group": ("ProcessGroup",),
    "_group.window": ("Window",),
    "_plugin.torch_group": ("torch_group",),
    "_rendezvous.finders": ("register_rendezvous_handler",),
    "_store": ("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    "data": ("DistributedSampler",),
    "launch.call": ("run",),
    "launch.progress": ("progress",),
    "parallel": ("DataParallel", "DistributedDataParallel", "GradBucket"),
    "remote.capture.capture": ("capture",),
    "remote.master.groups": ("all_reduce_", "broadcast_"),
    "remote.master.start": ("init_master_worker", "keep"),
}
_MODULES = (
    "algorithms",
    "checkpoint",
    "data",
    "engines",
    "launch",
    "multiprocessing",
    "nn",
    "parallel",
    "remote",
    "resilience",
    "schedulers",
    "testing",
    "tools",
    "trace",
)
_ONLY_TORCHS = (
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "BuiltinCommHookType",
    "GatherOptions",
    "GroupName",
    "Logger",
    "ProcessGroupGloo",
    "ProcessGroupMPI",
    "ProcessGroupNCCL",
    "ProcessGroupNCCL2",
    "ProcessGroupNCCLLazy",
    "ProcessGroupUCC",
    "ProcessGroupXCCL",
    "RankType",
    "ReduceOptions",
    "ReduceScatterOptions",
    "Reducer",
    "ScatterOptions",
    "breakpoint",
    "get_backend_impl",
    "get_pg_count",
    "record_comm",
    "rendezvous",
)
_TORCHS = {
    "DeviceMesh": "torch.distributed.device_mesh",
    "FSDPModule": "torch.distributed.fsdp",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
    "fully_shard": "torch.distributed.fsdp",
    "init_device_mesh": "torch.distributed.device_mesh",
}
_TORCHS_MODULES = ("device_mesh", "elastic", "fsdp", "optim", "pipelining", "rpc", "tensor")
_OTHERWISE = {
    "DDP": "DistributedDataParallel",
    "FSDP": "FullyShardedDataParallel",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_MODULES])


def _module(name: str) -> Any:
    from allranks._base.forks import guard

    with guard:  # a concurrently forked child would otherwise inherit a held import lock of the module
        return importlib.import_module(f"allranks.{name}")


def _load(name: str) -> Any:
    if name in _MODULES:
        return _module(name)
    if name in _MODULE_OF:
        value = getattr(_module(_MODULE_OF[name]), name)
        # Later accesses find the name directly, and do not call `__getattr__`.
        globals()[name] = value
        return value
    if name in _TORCHS_MODULES:
        return importlib.import_module(f"torch.distributed.{name}")
    if name in _TORCHS:
        return getattr(importlib.import_module(_TORCHS[name]), name)
    if name in _OTHERWISE:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}: use allranks.{_OTHERWISE[name]}")
    if name in _ONLY_TORCHS:
        raise AttributeError(
            f"module 'allranks' has no attribute {name!r}: torch.distributed has this name, but this version of"
            " allranks does not.\n  Read docs/differences.md for the reason."
        )
    raise AttributeError(f"module 'allranks' has no attribute {name!r}")


if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
