"""States as trees: supported values are restored, and unsupported values are reported."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks import CheckpointError, UsageError
from allranks.checkpoint.values import flatten, unflatten

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.floats(allow_nan=False))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def again(state: Any) -> Any:
    import msgspec

    flat = flatten(state)
    tree = msgspec.json.decode(msgspec.json.encode(flat.tree))
    return unflatten(tree, lambda name: flat.tensors[name])


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return (isinstance(one, float) and math.isnan(one) and math.isnan(other)) or repr(one) == repr(other)


@settings(max_examples=300)
@given(STATES)
def test_flattened_state_is_restored(state: Any) -> None:
    assert same(again(state), state)


def test_values_of_torch_and_numpy_are_restored() -> None:
    state = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "number": np.float32(1.5),
        "ordered": OrderedDict(b=1, a=2),
    }
    found = again(state)
    assert found["size"] == torch.Size([2, 3])
    assert found["dtype"] is torch.bfloat16
    assert found["device"] == torch.device("cuda", 1)
    assert found["array"].dtype == np.int16
    assert (found["array"] == state["array"]).all()
    assert found["empty"].shape == (0, 2)
    assert found["number"] == np.float32(1.5)
    assert type(found["number"]) is np.float32
    assert list(found["ordered"].items()) == [("b", 1), ("a", 2)]


def test_shared_tensor_has_one_name() -> None:
    weight = torch.ones(3)
    state = {"a": weight, "b": [weight, weight[:2], weight.clone()]}
    found = again(state)
    assert list(flatten(state).tensors) == ["a", "b.1", "b.2"]
    assert found["a"] is found["b"][0]


def test_equal_names_get_a_suffix() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert list(flatten(state).tensors) == ["a.b", "a.b~2"]
    assert again(state)["a"]["b"] == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, {"b": object()}]}, "'a.1.b' is a object"),
        ({"a": {1, 2}}, "'a' is a set"),
        ({"a": {(1, 2): 3}}, "the key (1, 2) at 'a'"),
        ({"a": np.array(["x"])}, "'a' is a NumPy array of <U1"),
        (lambda: 0, "'the state' is a function"),
    ],
)
def test_unsupported_value_is_reported(state: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert words in str(caught.value)


def test_recursive_state_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(UsageError, match="nested more than 200 levels"):
        flatten(state)


@pytest.mark.parametrize(
    "tree",
    [
        {}, {"dict": 1}, {"dict": {}, "tuple": []}, {"tuple": 5}, {"nothing": 1}, {"int": "x"}, {"float": []},
        {"complex": [1]}, {"bytes": "!"}, {"dtype": "Tensor"}, {"dtype": "nothing"}, {"device": "x"}, {"size": "ab"},
        {"items": [1]}, {"items": [[[], 1]]}, {"numpy": [1, 2]}, {"numpy_scalar": ["<f4", "AA=="]},
    ],
)  # fmt: skip
def test_damaged_tree_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        unflatten(tree, lambda name: torch.zeros(1))
