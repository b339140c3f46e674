"""Every public name of torch.distributed exists in allranks with the same arguments, or a table gives the reason."""

import inspect
import types
from typing import Any

import pytest
import torch
import torch.distributed as package
import torch.distributed.distributed_c10d as peer

import allranks

# Each is in torch's builds for some devices only.
BACKENDS_OF_A_BUILD = [f"ProcessGroup{name}" for name in ("MPI", "NCCL", "NCCL2", "NCCLLazy", "UCC", "XCCL")]
LATER = ["get_backend_impl"]  # since torch 2.15
# Names that allranks lacks, with the reason.
MISSING = {
    **dict.fromkeys(
        [name for name in peer.__all__ if name.endswith("Options")], "torch's own argument bundles for its C++ backends"
    ),
    "BackendConfig": "allranks names engines by strings",
    "GroupName": "a type alias of torch's",
    "rendezvous": "init_process_group performs the rendezvous",
    "BuiltinCommHookType": "names hooks in torch's C++; allranks.algorithms.ddp_comm_hooks provides functions",
    "Reducer": "internal to torch's DistributedDataParallel",
    "Logger": "internal to torch's DistributedDataParallel",
    "RankType": "a type alias of torch's",
    "breakpoint": "not implemented: run pdb on one rank; the other ranks' calls raise after the group's timeout",
    **dict.fromkeys(
        ["ProcessGroupGloo", *BACKENDS_OF_A_BUILD], 'engines are selected by name: init_process_group("gloo")'
    ),
    "get_backend_impl": "engines are not part of the interface",
    "get_pg_count": "counts torch's registry of groups",
    "record_comm": "part of torch's profiler",
}
# Parameters that only torch has, with the reason.
DIFFERENT = {
    "init_process_group": {
        "_ranks": "torch's own, for groups that torch creates itself",
        "enable_reconfigure": "every group can be reconfigured (ProcessGroup.reconfigure)",
    },
}
_IN_DOCSTRINGS = "torch's are in docstrings only: tests/store/test_stores_as_torchs.py compares them"
_BUILT_IN = "made by the library alone: no program calls it"
# Classes whose constructor is not compared, with the reason.
MADE_OTHERWISE = {
    "Backend": "a str in both: takes a name",
    "DebugLevel": "an enum in both",
    "DistBackendError": "an exception",
    "DistError": "an exception",
    "DistNetworkError": "an exception",
    "DistStoreError": "an exception",
    **dict.fromkeys(["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"], _IN_DOCSTRINGS),
    "GradBucket": _BUILT_IN,
    "GroupMember": "a namespace in both",
    "ProcessGroup": _BUILT_IN,
    "QueueEmptyError": "an exception",
    "ReduceOp": "an enum here",
    "Work": _BUILT_IN,
    "group": "a namespace in both",
    "reduce_op": "torch's is an object that warns; here it is ReduceOp",
}
_CXX = "part of torch's C++ groups and their backends"
_DEVICES = "moves inputs to devices"
_JOIN = "for torch's Join over several models"
_HOOKS = "Work.get_future().then runs code after a call; allranks.trace records calls"
# Public methods that allranks lacks, with the reason. Some exist in one version of torch only.
MISSING_METHODS = {
    "Backend": {
        "FAKE": "torch's own, for its tests",
        "backend_type_map": "allranks names engines by strings",
        "register_backend": "a package adds an engine by an entry point (docs/extending.md)",
    },
    "DistributedDataParallel": {
        **dict.fromkeys(["gather", "scatter", "to_kwargs"], _DEVICES),
        **dict.fromkeys(["join_device", "join_hook", "join_process_group"], _JOIN),
        **dict.fromkeys(
            ["finalize_backward", "require_manual_backward_finalization", "should_finalize_after_backward"],
            "for torch's pipelines, which call torch's DistributedDataParallel",
        ),
    },
    "ProcessGroup": dict.fromkeys(
        [
            "register_abort_hook",
            "register_post_hook",
            "register_pre_hook",
            "supports_abort_hooks",
            "supports_completion_hooks",
            "unregister_abort_hook",
            "unregister_post_hook",
            "unregister_pre_hook",
        ],
        _HOOKS,
    )
    | dict.fromkeys(
        [
            "BackendType",
            "CUSTOM",
            "GLOO",
            "MPI",
            "NCCL",
            "UCC",
            "UNDEFINED",
            "XCCL",
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_coalesced",
            "allgather_into_tensor_coalesced",
            "allreduce_coalesced",
            "alltoall_base",
            "bound_device_id",
            "boxed",
            "gather_into_tensor",
            "gather_single",
            "get_backend",
            "get_group_store",
            "get_reconfigure_handle",
            "group_desc",
            "group_name",
            "merge_remote_group",
            "name",
            "new_window",
            "recv_anysource",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
            "shutdown",
            "split_group",
            "supports_reconfigure",
            "supports_window",
            "unbox",
            "use_pg_for_symm_mem_rendezvous",
        ],
        _CXX,
    ),
    "ReduceOp": {
        **dict.fromkeys(["boxed", "unbox"], _CXX),
        "RedOpType": "torch's op is an object around this enum",
        "factor": "only the op of premul_sum has it",
        "op": "torch's op is an object around an enum",
    },
    "TCPStore": {"libuvBackend": "allranks has one kind of server"},
    "Work": {
        "block_current_stream": "for devices",
        "boxed": _CXX,
        "get_future_result": "get_future().wait() raises or returns",
        "timeout": "the group's timeout, or that of wait(timeout)",
        "unbox": _CXX,
    },
}
# Public names of the package that are not part of the interface: imports of its modules.
_IMPORTED = {"log", "timedelta"}

PUBLIC = {
    name: getattr(package, name)
    for name in sorted(set(dir(package)) | set(peer.__all__))
    if not name.startswith("_")
    and name not in {*_IMPORTED, "reduce_op"}
    and not isinstance(getattr(package, name), types.ModuleType)
}
CLASSES = {
    **{name: theirs for name, theirs in PUBLIC.items() if inspect.isclass(theirs) and name not in MISSING},
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
}


# Arguments that torch does not have. They come last, so that positional arguments mean the same.
ADDED = {"DistributedDataParallel": ["check_every"]}
ADDED_BY_TORCH_2_15 = {
    "DistributedDataParallel": ["lazy_bucket_allocation"],
    **{name: ["weights_only"] for name in peer.__all__ if "_object" in name},
}


def same_arguments(name: str, theirs: Any, ours: Any) -> None:
    expected = {k: p for k, p in inspect.signature(theirs).parameters.items() if k not in DIFFERENT.get(name, ())}
    actual = inspect.signature(ours).parameters
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert [k for k, p in actual.items() if p.kind not in positional] == [
        *(k for k, p in expected.items() if p.kind not in positional),
        *(k for k in ADDED_BY_TORCH_2_15.get(name, ()) if k not in expected),
        *ADDED.get(name, ()),
    ]
    for parameter, described in expected.items():
        default = described.default
        if described.kind in positional:
            continue
        own = actual[parameter].default
        if isinstance(default, (type(None), bool, int, str)) or default is inspect.Parameter.empty:
            assert own == default, parameter
        else:
            assert getattr(own, "name", own) == getattr(default, "name", default), parameter


@pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_exists_with_the_arguments_of_torch(name: str) -> None:
    if name in MISSING:
        assert not hasattr(allranks, name), f"{name} now exists: remove it from the table"
        return
    ours = getattr(allranks, name)
    if inspect.isfunction(PUBLIC[name]):
        same_arguments(name, PUBLIC[name], ours)


def public(cls: type) -> set[str]:
    """Return the public names that the class and its bases define, except those of torch.nn.Module."""
    bases = [base for base in cls.__mro__ if base not in (torch.nn.Module, object, str, int)]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_class_has_the_methods_and_arguments_of_torch(name: str) -> None:
    theirs, ours = CLASSES[name], getattr(allranks, name)
    if name not in MADE_OTHERWISE:
        same_arguments(name, theirs.__init__, ours.__init__)
    if issubclass(theirs, Exception):
        return
    inherited = {method for method in public(theirs) - public(ours) if hasattr(ours, method)}
    missing = set(MISSING_METHODS.get(name, ()))
    assert public(theirs) - public(ours) - inherited <= missing, "methods that the table does not explain"
    assert not missing & public(ours), "the table contains methods that exist"
    for method in public(theirs) & public(ours):
        if inspect.isfunction(getattr(theirs, method)) and inspect.isfunction(getattr(ours, method)):
            same_arguments(f"{name}.{method}", getattr(theirs, method), getattr(ours, method))


def test_tables_contain_only_names_of_torch() -> None:
    assert set(MISSING) - {*BACKENDS_OF_A_BUILD, *LATER} <= set(PUBLIC)
    assert set(MADE_OTHERWISE) | set(MISSING_METHODS) <= {*CLASSES, "reduce_op"}


def test_access_to_a_missing_name_raises_an_error_that_refers_to_torch() -> None:
    assert set(allranks._ONLY_TORCHS) == set(MISSING)
    with pytest.raises(AttributeError, match=r"torch\.distributed has this name"):
        _ = allranks.record_comm
    for name in ("DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"):
        same_arguments(name, getattr(torch.nn.parallel, name), getattr(allranks.nn.parallel, name))


def test_error_classes_have_the_hierarchy_of_torch() -> None:
    errors = ["DistError", "DistBackendError", "DistNetworkError", "DistStoreError"]
    for one in errors:
        for other in errors:
            related = issubclass(getattr(package, one), getattr(package, other))
            assert issubclass(getattr(allranks, one), getattr(allranks, other)) == related
        assert issubclass(getattr(allranks, one), RuntimeError)
