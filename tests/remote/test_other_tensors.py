"""Unusual tensors, and programs that torch traces or compiles: correct on a worker, or refused with a clear error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from allranks import UsageError

pytestmark = [
    pytest.mark.usefixtures("mw", "as_many_threads"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

W = "worker:1"
OTHERS = torch.library.Library("others", "FRAGMENT")
Program = Callable[[str], Any]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


@program
def random_in_place(d: str) -> Any:
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    x = torch.full((2, 3, 4, 4), 0.5, device=d)
    return [
        [torch.zeros(5, dtype=t, device=d).random_() for t in (*integers, *floats, torch.bool)],
        [torch.zeros(5, dtype=t, device=d).random_(3, 90) for t in (*integers, *floats)],
        [torch.zeros(5, dtype=t, device=d).bernoulli_(0.4) for t in (*integers, *floats, torch.bool)],
        [torch.zeros(5, dtype=t, device=d).geometric_(0.3) for t in (*integers, *floats)],
        [
            each
            for t in floats
            for each in (
                torch.zeros(5, dtype=t, device=d).exponential_(2.0),
                torch.zeros(5, dtype=t, device=d).cauchy_(1, 2),
                torch.zeros(5, dtype=t, device=d).log_normal_(0.5, 1.5),
                torch.zeros(5, dtype=t, device=d).normal_(1, 2),
                torch.zeros(5, dtype=t, device=d).uniform_(2, 3),
            )
        ],
        x.clone().bernoulli_(x), F.dropout(x.clone(), 0.4, inplace=True), F.dropout2d(x.clone(), 0.4, inplace=True),
        F.alpha_dropout(x.clone(), 0.4, True, True), F.feature_alpha_dropout(x.clone(), 0.4, True, True),
        F.rrelu(x - 1, training=True, inplace=True), torch.native_dropout(x, 0.3, True),
    ]  # fmt: skip


@program
def rare_dtypes(d: str) -> Any:
    kinds = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
    there = [torch.arange(4).to(t).to(d) for t in kinds]
    return [each.float() for each in there], [torch.arange(4, device=d).to(t).float() for t in kinds]


def jagged(d: str) -> Tensor:
    values, offsets = torch.arange(12.0).view(4, 3).to(d), torch.tensor([0, 3, 4]).to(d)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@program
def jagged_tensors(d: str) -> Any:
    x = jagged(d)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()).to(d)
    made = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    with torch.no_grad():
        found = [
            (x * 2 + x).sin(), net(x), x.softmax(-1), x.double(), x.cpu(), made.to(d), copy.deepcopy(x),
            pickle.loads(pickle.dumps(x)),
            torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged, device=d),
            torch.nested.as_nested_tensor([torch.ones(2, 3, device=d), x.values()], layout=torch.jagged),
        ]  # fmt: skip
    plain = [x.sum(1), x.mean(1), x.to_padded_tensor(7.0), list(x.unbind()), list(x.shape)[::2], x.offsets()]
    return [each.values() for each in found], plain, str(x.device) == d, repr(x)[:12]


@program
def within_a_mode(d: str) -> Any:
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.ones(2, 3, device=d)
    with Log():
        found = [torch.tensor([1.0, 2], device=d), x.new_tensor([3]), x[[0, 1]], torch.tensor([x.sum(), 2], device=d)]
    with FlopCounterMode(display=False) as flops:
        (x @ torch.tensor([[1.0], [2], [3]], device=d)).sum()
    return found, torch.ops.aten.sum.default in seen, flops.get_total_flops()


@program
def traced(d: str) -> Any:
    torch.manual_seed(0)
    net, by = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(d), torch.arange(3.0).to(d)
    x, y = torch.ones(2, 3, device=d), torch.full((2, 3), 2.0, device=d)

    def function(t: Tensor) -> Tensor:
        return net(t * by) + torch.ones(3, device=t.device)

    graph = make_fx(function)(x)
    out, tangent = torch.func.linearize(function, x)
    scripted = torch.jit.script(net)
    return [
        graph(y), [str(each.target) for each in graph.graph.nodes if each.op == "call_function"],
        out, tangent(y), torch.func.functionalize(lambda t: t.add_(1).view(6).mul_(by[2]))(x.clone()),
        torch.fx.symbolic_trace(net)(y), torch.jit.trace(net, x)(y), [scripted(y) for _ in range(4)],
        torch.export.export(net, (x,)).module()(y),
    ]  # fmt: skip


@program
def compiled(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.LSTM(3, 2)).to(d)
    optimiser = torch.optim.Adam(net.parameters())
    torch.manual_seed(1)

    @torch.compile(backend="eager")
    def step(here: Tensor) -> Any:
        there = (here * 2).to(d)
        out = net(there)[0] + torch.ones(2, device=d)
        out.sum().backward()
        return out, float(out.detach().sum()), (here * 3).sin()

    found = []
    for _ in range(2):
        optimiser.zero_grad()
        found.append(step(torch.ones(11, 3)))
        optimiser.step()
    return found, list(net.parameters()), [each.grad for each in net.parameters()]


@program
def notes(d: str) -> Any:
    x, p = torch.ones(2, device=d), nn.Parameter(torch.ones(2, device=d))
    x.note = p.note = [1]
    shallow, deep = copy.copy(x), copy.deepcopy([x, p])
    moved = nn.ParameterList([p]).to("cpu")
    return [
        shallow.note, shallow.note is x.note, deep[0].note, deep[0].note is x.note, vars(deep[1]).get("note"),
        pickle.loads(pickle.dumps(p)).note, [each.note for each in moved],
    ]  # fmt: skip


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda each: each.__name__)
def test_program_has_the_same_outcome_as_on_the_cpu(function: Program) -> None:
    def bits(x: Tensor) -> Any:
        return x.dtype, x.shape, x.requires_grad, x.detach().cpu().reshape(-1).view(torch.uint8).tolist()

    def outcome(device: str) -> Any:
        torch.manual_seed(5)
        return tree_map_only(Tensor, bits, function(device))

    assert outcome(W) == outcome("cpu")


def refused() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    x, plain = torch.eye(2, device=W), torch.eye(2)
    storage = "no storage in this process"
    strided = r"workers support only strided tensors\.\n  Create other tensors on the master"
    at = (torch.tensor([0, 1, 2]), torch.tensor([0, 1]))
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    file.seek(0)
    ones = [torch.ones(2, device=W), torch.ones(3, device=W)]
    OTHERS.define("double(Tensor x) -> Tensor")
    OTHERS.impl("double", lambda x: x * 2, "CPU")

    def rows(indices: Tensor) -> Tensor:
        table = nn.Embedding(4, 2, sparse=True, device=W)
        table(indices).sum().backward()
        return table.weight

    return {
        "COO": (TypeError, f"sparse_coo: {strided}", lambda: torch.sparse_coo_tensor(x.long(), x[0], (2, 2))),
        "to COO": (TypeError, strided, lambda: x.to_sparse()),
        "COO from here": (TypeError, strided, lambda: plain.to_sparse().to(W)),
        "COO of zeros": (TypeError, strided, lambda: torch.zeros(2, layout=torch.sparse_coo, device=W)),
        "COO beside": (RuntimeError, "two devices, worker:1 and cpu", lambda: torch.sparse.mm(plain.to_sparse(), x)),
        "COO gradients": (TypeError, strided, lambda: rows(torch.tensor([1], device=W))),
        "CSR": (TypeError, strided, lambda: torch.sparse_csr_tensor(*at, [1.0, 1.0], (2, 2), device=W)),
        "to CSR": (TypeError, strided, lambda: x.to_sparse_csr()),
        "CSR from here": (TypeError, strided, lambda: plain.to_sparse_csr().to(W)),
        "for oneDNN": (TypeError, strided, lambda: x.to_mkldnn()),
        "quantized": (TypeError, strided, lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)),
        "quantized from here": (
            TypeError, strided,
            lambda: torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8).to(W),
        ),
        "packed": (TypeError, "ScriptObject", lambda: torch.ops.quantized.linear_prepack_fp16(x)),
        "nested": (TypeError, strided, lambda: torch.nested.as_nested_tensor(ones)),
        "nested from here": (TypeError, strided, lambda: torch.nested.nested_tensor([torch.ones(2)]).to(W)),
        "a pointer that is only read": (RuntimeError, "worker:1(.|\n)*Tensor.cpu", lambda: x.const_data_ptr()),
        "torch's dlpack": (BufferError, r"worker:1\.\n  Use Tensor.cpu", lambda: torch.from_dlpack(x)),
        "a storage": (RuntimeError, storage + r"\.\n  Use Tensor.cpu", lambda: list(x.untyped_storage())),
        "a typed storage": (RuntimeError, storage + r"\.\n  Use Tensor.cpu", lambda: x.storage().tolist()),
        "into a storage": (RuntimeError, storage, lambda: x.untyped_storage().copy_(plain.untyped_storage())),
        "of a storage": (RuntimeError, storage, lambda: x.set_(plain.untyped_storage())),
        "a file of TorchScript": (UsageError, "mw.remote.*or load the module's state", lambda: torch.jit.load(file, W)),
        "into a file of TorchScript": (
            RuntimeError, storage,
            lambda: torch.jit.save(torch.jit.script(nn.Linear(2, 2).to(W)), io.BytesIO()),
        ),
        "another process": (UsageError, r"has no workers.\n  Send its .cpu\(\)", lambda: ForkingPickler.dumps([x])),
        "TorchScript": (RuntimeError, "first, then script it", lambda: torch.jit.script(nn.Linear(2, 2)).to(W)),
        "lengths of packed sequences": (
            RuntimeError, "should be a 1D CPU int64 tensor, but got 1D worker:1",
            lambda: nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 1, device=W), torch.tensor([3, 2]).to(W)),
        ),
        "a pointer": (NotImplementedError, r"no pointer to it\.\n  Use Tensor.cpu\(\)", lambda: x.data_ptr()),
        "an operator of the master's": (NotImplementedError, "mw.remote", lambda: torch.ops.others.double(x)),
        "one graph": (
            RuntimeError, "allranks.capture sends a whole step",
            lambda: torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)(x),
        ),
    }  # fmt: skip


def test_unsupported_tensors_and_programs_are_refused(subtests: pytest.Subtests) -> None:
    for name, (kind, message, act) in refused().items():
        with subtests.test(name), pytest.raises(kind, match=message):
            act()
    assert torch.ones(2, device=W).sum().item() == 2
