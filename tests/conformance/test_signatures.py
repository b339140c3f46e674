"""Every public name of torch.distributed is here, with its arguments, or stands in a table with the reason."""

import inspect

import pytest
import torch.distributed.distributed_c10d as peer

import allranks

# Not here, and why.
MISSING = {
    **dict.fromkeys(
        [name for name in peer.__all__ if name.endswith("Options")], "torch's own argument bundles for its C++ backends"
    ),
    "BackendConfig": "engines are named by strings",
    "GroupName": "a type alias of torch's",
    "PrefixStore": "stores are not public here",
    "Store": "stores are not public here",
    "ProcessGroupGloo": 'engines are chosen by name: init_process_group("gloo")',
    "get_pg_count": "counts torch's registry of groups",
    "record_comm": "of torch's profiler",
    "shrink_group": "of nccl's communicators",
}
# Parameters that are here and not in torch, or the other way round, and why.
DIFFERENT = {
    "init_process_group": {"_ranks": "torch's own, for groups that torch makes itself"},
}


@pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(peer.__all__))
def test_name(name: str) -> None:
    if name in MISSING:
        assert not hasattr(allranks, name), f"{name} is here now: take it from the table"
        return
    theirs, ours = getattr(peer, name), getattr(allranks, name)
    if not inspect.isfunction(theirs):
        return
    expected = [p for p in inspect.signature(theirs).parameters if p not in DIFFERENT.get(name, ())]
    actual = list(inspect.signature(ours).parameters)
    assert actual == expected
    for parameter in expected:
        default = inspect.signature(theirs).parameters[parameter].default
        own = inspect.signature(ours).parameters[parameter].default
        if isinstance(default, (type(None), bool, int, str)) or default is inspect.Parameter.empty:
            assert own == default, parameter
        else:
            assert getattr(own, "name", own) == getattr(default, "name", default), parameter


def test_the_tables_name_what_torch_has() -> None:
    assert set(MISSING) <= set(peer.__all__)
