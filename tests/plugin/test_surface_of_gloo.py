"""What gloo's group, backend and Work offer in Python exists on allranks, too, in this version of torch."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

td: Any = torch_dist
_DEVICES = "describes the network devices of gloo"
_RECORDER = "serves torch's recorder of calls, in C++"
# Attributes that only gloo has, by object: the reason.
ONLY_GLOO = {
    "group": {},
    "backend": {
        "Device": _DEVICES,
        "Options": _DEVICES,
        "_Options": _DEVICES,
        "create_device": _DEVICES,
        "create_default_device": _DEVICES,
        "merge": "torch calls it in C++; a group has merge_remote_group",
        "split": "torch calls it in C++; a group has split_group",
        "setUsePgForSymmMemRendezvous": "symmetric memory is a feature of accelerators",
        "_set_group_uid": "torch calls it in C++",
    },
    "work": {"_get_sequence_number": _RECORDER, "timeout": _RECORDER},
}
CLOSING = ("abort", "shutdown", "_start_coalescing", "_end_coalescing")  # not called here
PLAIN = (bool, int, str, timedelta, type(None))


@pytest.fixture
def pairs() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Yield gloo's and allranks's object of each kind."""
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    try:
        groups = [td.new_group([0], backend=backend) for backend in ("gloo", "allranks")]
        works = [td.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        yield {"group": tuple(groups), "backend": tuple(backends), "work": tuple(works)}
    finally:
        td.destroy_process_group()


def read(thing: Any, name: str) -> Any:
    """Return an attribute, or the result of the method if it can be called without arguments.

    Raises:
        RuntimeError: gloo does not support it.
    """
    value = getattr(thing, name)
    if not callable(value) or isinstance(value, type) or name in CLOSING:
        return value
    try:
        return value()
    except TypeError:  # it needs arguments
        return value


@pytest.mark.parametrize("kind", ONLY_GLOO)
def test_whatever_gloo_offers_exists(kind: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    gloos, ours = pairs[kind]
    wrong = []
    for name in dir(gloos):
        if name.startswith(("__", "_pybind11")) or name in ONLY_GLOO[kind]:
            continue
        try:
            expected = read(gloos, name)
        except RuntimeError:
            continue
        try:
            found = read(ours, name)
        except (AttributeError, RuntimeError) as error:
            wrong.append(f"{name}: {error}")
            continue
        if isinstance(expected, PLAIN) and not isinstance(found, type(expected)):
            wrong.append(f"{name}: {found!r} instead of {expected!r}")
    assert not wrong, "\n".join(wrong)


def test_only_missing_attributes_have_a_reason(pairs: dict[str, tuple[Any, Any]]) -> None:
    for kind, (_, ours) in pairs.items():
        for name in ONLY_GLOO[kind]:
            with pytest.raises((AttributeError, RuntimeError)):
                read(ours, name)


def test_methods_of_the_backend_work_as_on_gloo(pairs: dict[str, tuple[Any, Any]]) -> None:
    group, backend = pairs["group"][1], pairs["backend"][1]
    assert backend.options.backend == "allranks"
    assert backend.options.global_ranks_in_group == [0]
    assert backend.options.group_name == group.group_name
    backend.eager_connect_single_device(torch.device("cpu"))
    sparse = torch.eye(2).to_sparse()
    backend.allreduce_sparse([sparse]).wait()
    assert torch.equal(sparse.to_dense(), torch.eye(2))
    store = group.get_group_store()
    store.set("key", "value")
    assert td.distributed_c10d._get_process_group_store(group).get("key") == b"value"


def test_timeout_can_be_changed(pairs: dict[str, tuple[Any, Any]]) -> None:
    for group, backend in zip(pairs["group"], pairs["backend"], strict=True):
        # Public in torch 2.15 and later.
        change = getattr(td, "set_timeout", td.distributed_c10d._set_pg_timeout)
        change(timedelta(seconds=20), group)
        assert backend.options._timeout == timedelta(seconds=20)
        group.set_timeout(timedelta(seconds=30))
        assert backend.options._timeout == timedelta(seconds=30)
