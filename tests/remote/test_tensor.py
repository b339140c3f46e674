"""Comparison of tensors on a worker with tensors on the local CPU.

Each program runs on both. Both runs must give the same bits, or the same type of exception.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import io
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import allranks as dist
from allranks import RemoteError, UsageError
from allranks.remote.master.master import Master
from allranks.remote.torch_device.autocast import POLICIES

pytestmark = [
    pytest.mark.usefixtures("mw"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

W = "worker:1"
Program = Callable[[str], Any]
PROGRAMS: list[Program] = []


MISTAKES: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def mistake(function: Program) -> Program:
    MISTAKES.append(function)
    return function


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order on the worker and locally."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def here(found: Any) -> Any:
    """Return `found` with every tensor copied to the CPU, together with its properties."""
    if isinstance(found, Tensor):
        # The stride of a dimension of size 1 has no meaning, and torch's kernels differ in it.
        strides = [stride for stride, size in zip(found.stride(), found.shape, strict=True) if size > 1]
        return (found.detach().cpu(), found.dtype, strides, found.storage_offset(), found.requires_grad)
    if isinstance(found, dict):
        return {name: here(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [here(each) for each in found]
    return found


def same(found: Any, right: Any) -> None:
    """Assert that two results have equal values, types and dtypes."""
    assert type(found) is type(right), (found, right)
    if isinstance(right, Tensor):
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        assert torch.equal(found.isnan(), right.isnan())
        assert torch.equal(found.nan_to_num(), right.nan_to_num()), (found, right)
    elif isinstance(right, dict):
        assert list(found) == list(right)
        for name in right:
            same(found[name], right[name])
    elif isinstance(right, list | tuple):
        assert len(found) == len(right)
        for mine, its in zip(found, right, strict=True):
            same(mine, its)
    else:
        assert found == right


def outcome(function: Program, device: str) -> Any:
    torch.manual_seed(5)
    return here(function(device))


@program
def factories(d: str) -> Any:
    x = torch.ones(2, 3, device=d)
    return [
        torch.tensor([[1, 2], [3, 4]], device=d), torch.tensor(2.5, device=d), torch.as_tensor([1.0, 2], device=d),
        torch.zeros(2, 3, device=d), torch.full((2,), 7, device=d), torch.arange(5, device=d), torch.eye(3, device=d),
        torch.arange(1, 2, 0.25, device=d), torch.linspace(0, 1, 5, device=d), torch.logspace(0, 2, 3, device=d),
        torch.randn(2, 3, device=d), torch.rand(4, device=d), torch.randint(0, 9, (3,), device=d),
        torch.randperm(6, device=d), torch.zeros(0, 3, device=d), torch.tensor([], device=d),
        torch.zeros_like(x), torch.randn_like(x), torch.full_like(x, 3), x.new_tensor([1, 2]), x.new_zeros(2, 2),
        x.new_ones(3, dtype=torch.int64), x.new_full((2,), 4.0), torch.tril_indices(3, 3, device=d),
        torch.from_numpy(np.arange(4.0)).to(d), torch.asarray([1, 2], device=d), torch.complex(x, x),
        torch.empty(2, 3, device=d).fill_(2), torch.normal(0.0, 1.0, (3,), device=d),
        torch.bernoulli(torch.full((5,), 0.5, device=d)), torch.multinomial(torch.ones(5, device=d), 3),
        torch.tensor([True, False], device=d), torch.tensor(1 + 2j, device=d), torch.scalar_tensor(3, device=d),
        torch.hann_window(4, device=d), torch.vander(torch.arange(3, device=d)),
        torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"),
        torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
        torch.ones(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last),
    ]  # fmt: skip


@program
def factories_of_other_places(d: str) -> Any:
    x = torch.ones(2, 3, device=d)
    made = [
        torch.zeros_like(x, device="cpu"), x.new_zeros(2, device="cpu"), x.new_ones(2, device="cpu"),
        torch.rand_like(x, device="cpu"), x.new_tensor([1, 2], device="cpu"),
        torch.empty_like(x, device="cpu").zero_(), torch.full_like(x, 2., device="cpu"),
    ]  # fmt: skip
    assert [each.device.type for each in made] == ["cpu"] * len(made)
    assert [type(each) for each in made] == [torch.Tensor] * len(made)
    return made


@program
def under_a_default_device(d: str) -> Any:
    with torch.device(d):
        made = [torch.ones(2), torch.tensor([1, 2]), torch.arange(3), nn.Linear(2, 2).weight, torch.randn(3)]
    assert {str(each.device) for each in made} == {d}
    torch.set_default_device(d)
    try:
        made.append(torch.ones(3))
    finally:
        torch.set_default_device(None)
    assert str(made[-1].device) == d
    return made


@program
def conversions(d: str) -> Any:
    x = torch.randn(2, 3).to(d)
    other = torch.zeros(1, dtype=torch.float64, device=d)
    found = [
        x.to(torch.float64), x.double(), x.half(), x.bfloat16(), x.int(), x.bool(), x.to(other), x.type(torch.int32),
        x.type_as(other), x.to(d, torch.float16), x.to(d, copy=True), x.to(x.device, non_blocking=True),
        x.to(device=d, dtype=torch.int8), x.long(), x.to(torch.complex64), x.to("cpu"), x.cpu(),
        x.to("cpu", torch.float64), x.to(torch.zeros(1)), x.float(), x.contiguous(), x.t().contiguous(),
        x.to(memory_format=torch.contiguous_format), torch.ones(3, 2, dtype=torch.float64).to(x),
        torch.ones(3).to(d, torch.int32),
    ]  # fmt: skip
    assert x.to(d) is x
    assert x.to(torch.float32) is x
    assert x.to(x) is x
    assert x.float() is x
    assert x.to(d, copy=True) is not x
    assert x.contiguous() is x
    assert x.to(other).device == x.device
    y = x.to(d, copy=True)
    y.add_(1)
    return found, x, y


@program
def attributes(d: str) -> Any:
    x = torch.randn(2, 3, 4, device=d)
    return [
        x.shape, x.size(1), x.dim(), x.ndim, x.numel(), x.nelement(), x.stride(), x.dtype, x.layout,
        x.is_contiguous(), x.t().is_contiguous() if x.dim() == 2 else None, x.element_size(), x.itemsize, x.nbytes,
        x.is_floating_point(), x.is_complex(), x.is_leaf, x.requires_grad, x.grad, x.grad_fn, len(x),
        x.storage_offset(), x[1].storage_offset(), x.is_sparse, x.is_quantized, x.is_inference(), x._version,
        x.is_signed(), x.is_pinned(), x.get_device() in (-1, 1), x.mT.shape, x.is_meta, x.is_nested, x.is_conj(),
        x.is_neg(), x.output_nr,
    ]  # fmt: skip


@program
def scalars(d: str) -> Any:
    x = torch.tensor(2.75, device=d)
    n = torch.tensor(3, device=d)
    return [
        bool(x), int(x), float(x), complex(x), f"{x:.2f}", f"{n:>4d}", f"{x}"[:10], x.item(), n.item(),
        round(float(x), 1), list(range(5))[n], n.__index__(), [1, 2, 3, 4][n],
        bool(torch.tensor([True], device=d)), x.tolist(), torch.ones(2, 2, device=d).tolist(), math.floor(x),
        x.__float__(), 7 // n, abs(-x), -x, +x, ~n, x // 2, 7 % n, 2 ** n, n << 1, n & 1, 1 - x, 5 / x,
        x == 2.75, not x, x > 2 and n < 5, x.is_nonzero(),
    ]  # fmt: skip


@mistake
def bool_of_many(d: str) -> Any:
    return bool(torch.ones(2, device=d))


@program
def iteration(d: str) -> Any:
    x = torch.arange(6.0, device=d).reshape(3, 2)
    a, b, c = x
    return [
        list(x), a, b, c, len(x), list(reversed(x)), 3.0 in x, 9.0 in x, [float(each) for each in x[0]],
        dict(enumerate(x.unbind(1))), max(x[:, 0]), sum(x), sorted(x[:, 1], reverse=True),
        list(zip(x, x, strict=True)),
        torch.stack(list(x)),
    ]  # fmt: skip


@mistake
def iterating_a_number(d: str) -> Any:
    return list(torch.tensor(1.0, device=d))


@program
def indexing(d: str) -> Any:
    x = torch.arange(60.0, device=d).reshape(3, 4, 5)
    i = torch.tensor([0, 2], device=d)
    m = x > 30
    return [
        x[0], x[-1, 2], x[:, 1:3], x[..., -1], x[::2, :, ::3], x[None, 0], x[i], x[[0, 1]], x[:, i, i],
        x[i[:, None], i], x[m], x[m[:, 0, 0]], x[torch.tensor([1, 0])], x[1, 2, 3], x[i, 1:, 0],
        x[:, [True, False, True, False]], x[x[:, 0, 0].argmax()], x[True], x[False], x.index_select(1, i),
        x.gather(2, i.expand(3, 4, 2)), x.take(i), x.masked_select(m), torch.nonzero(m), m.nonzero(as_tuple=True),
        torch.where(m, x, -x), torch.where(m), x.argwhere().shape, torch.argwhere(m[0]), x[0:0], x[5:], x[:, 3:1],
        x.narrow(1, 1, 2), x.select(-1, 2), x.unfold(1, 2, 1), x.diagonal(0, 1, 2), x[np.array([0, 1])],
        x[np.int64(1)], x[i == 2] if False else x[:2][i == 2], x[-2:][-1], x[1:][1:],
        x.take_along_dim(i.expand(3, 4, 2), 2), x.unique(), torch.unique(x // 7, return_counts=True),
        x[torch.tensor(1, device=d)], x[torch.tensor(1)],
    ]  # fmt: skip


@mistake
def result_that_is_an_operand(d: str) -> Any:
    x = torch.zeros(0, device=d)
    return torch.cat([x, torch.ones(4, 6, device=d)], out=x)


@mistake
def index_beyond(d: str) -> Any:
    return torch.ones(3, device=d)[3]


@program
def assignment(d: str) -> Any:
    x = torch.zeros(3, 4, device=d)
    x[0] = 1
    x[1, 2] = 5.5
    x[:, -1] = torch.tensor([7.0, 8, 9], device=d)
    x[2, :2] = torch.arange(2, device=d)
    a = x.clone()
    x[x > 6] = -1
    x[[0, 1], [1, 1]] = 3
    b = x.clone()
    x[torch.tensor([0, 2], device=d)] += 10
    x[x < 0] = x[x < 0] * 2
    x[..., 0] *= 2
    x[1] = torch.ones(4)[0] * 4
    x[:, 1:2] = x[:, 0:1]
    c = x.clone()
    x[None, 2, None] = torch.tensor(6)
    at = (torch.tensor([0, 0], device=d), torch.tensor([1, 1], device=d))
    x.index_put_(at, torch.tensor([1.0, 1.0], device=d), accumulate=True)
    x.index_fill_(0, torch.tensor([1], device=d), 0.5)
    x.masked_fill_(x == 6, 66)
    x.scatter_(1, torch.zeros(3, 1, dtype=torch.long, device=d), 9.0)
    x.index_add_(0, torch.tensor([0], device=d), torch.ones(1, 4, device=d))
    x.masked_scatter_(x == 9, torch.arange(3.0, device=d))
    x.fill_diagonal_(2)
    y = x.t()
    y[0, 2] = -3
    e = torch.zeros(2, 2, device=d)
    e[...] = torch.ones(2, device=d)
    e[()] = e + 1
    del y
    return a, b, c, x, e


@program
def assignment_from_elsewhere(d: str) -> Any:
    x = torch.zeros(3, device=d)
    x[:] = torch.arange(3.0)  # as on a GPU, torch copies assigned values from the CPU
    x[0] = np.float64(4)
    x[1:] = torch.tensor([1, 2])
    y = torch.zeros(3)
    y[:] = x
    y[0:1] = x[1:2]
    y.copy_(x + 1)
    return x, y


@program
def views_alias(d: str) -> Any:
    x = torch.arange(24.0, device=d)
    v = x.view(2, 3, 4)
    vv = v[1].t()[1:]
    vv.mul_(10)
    after = [x.clone(), v.clone(), vv.clone()]
    x.add_(1)
    seen = [v.sum(), vv.clone(), x[20:].view(2, 2)]
    e = v.expand(2, 3, 4).permute(2, 0, 1)
    e[0].zero_()
    u = x.unsqueeze(0).squeeze().flatten().reshape(4, 6)
    u[3, 5] = 99
    c = x.chunk(3)
    c[0].fill_(7)
    s = x.split([20, 4])
    s[1].neg_()
    d1, d2 = x.view(4, 6).unbind(0)[:2]
    d2.copy_(d1)
    f = x.as_strided((2, 2), (5, 1), 3)
    f.fill_(-8)
    r = x.view(torch.int32)
    r[0] = 0
    d3 = x.view(4, 6).diagonal()
    d3 += 1
    w = x.unfold(0, 4, 4)
    w[:, 0] = 5
    n = x.detach()
    n[2] = 123
    x.data[3] = 321
    t = x.view(4, 6).movedim(0, 1).swapaxes(0, 1).transpose(0, 1).T
    t[0, 0] = 1e3
    return after, seen, e, u, c, s, r, x, v, vv, f, d3, w, n, t, x._is_view(), v._is_view(), v._base is x, vv._base is x


@program
def in_place(d: str) -> Any:
    x = torch.arange(1.0, 7, device=d).reshape(2, 3)
    y = x
    x += 1
    x *= 2
    x -= torch.ones(3, device=d)
    x /= 3
    x **= 2
    x //= 1
    x %= 5
    x.clamp_(1, 3).sqrt_().neg_().abs_()
    x.add_(x, alpha=2).addcmul_(x, x, value=0.5).addcdiv_(x, x + 1).lerp_(x * 2, 0.5)
    x.copy_(x.flip(0))
    x.t_()
    x.unsqueeze_(0)
    shape = x.shape
    x.squeeze_(0)
    x.resize_(2, 2)
    z = torch.zeros(3, device=d)
    torch.add(z, 1, out=z)
    o = torch.empty(0, device=d)
    torch.mul(z, 3, out=o)
    q = torch.arange(3, device=d)
    q += 1
    q <<= 1
    q |= 1
    b = torch.tensor([True, False], device=d)
    b &= True
    b ^= True
    r = torch.empty(3, device=d).uniform_(-1, 1).exponential_().clamp_(max=2)
    torch.sort(torch.tensor([3.0, 1, 2], device=d), out=(z, q))
    return x, y is x, shape, z, o, q, b, r, x._version


@mistake
def in_place_of_a_wrong_kind(d: str) -> Any:
    x = torch.ones(2, dtype=torch.int64, device=d)
    x += 1.5
    return x


@mistake
def in_place_on_a_leaf(d: str) -> Any:
    x = torch.ones(2, device=d, requires_grad=True)
    x += 1
    return x


@program
def autograd(d: str) -> Any:
    x = torch.randn(3, 4, device=d, requires_grad=True)
    w = torch.randn(4, 2, device=d).requires_grad_()
    h = (x @ w).tanh()
    h.retain_grad()
    loss = h.square().mean()
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), w.grad.clone(), h.grad]
    loss.backward()
    second = [x.grad.clone(), w.grad.clone()]
    x.grad.zero_()
    w.grad = None
    (x.sum() * 3).backward()
    third = [x.grad.clone(), w.grad]
    x.grad = torch.ones_like(x)
    x.sum().backward()
    return [
        first, second, third, x.grad, h.is_leaf, x.is_leaf, loss.requires_grad, loss.grad_fn.name(),
        [type(each[0]).__name__ for each in loss.grad_fn.next_functions],
    ]  # fmt: skip


@mistake
def autograd_twice_without_the_graph(d: str) -> Any:
    x = torch.ones(2, device=d, requires_grad=True)
    loss = (x * x).sum()
    loss.backward()
    loss.backward()


@program
def autograd_through_in_place_on_views(d: str) -> Any:
    x = torch.randn(4, 4, device=d, requires_grad=True)
    y = x * 1
    y[0].mul_(2)
    y[:, 1] = 0
    y.view(16)[3:5].sin_()
    v = y.t()[2]
    v += x[0]
    z = y.clone()
    z.diagonal().zero_()
    z[z > 1] = 0.5
    (y.sum() + z.square().sum()).backward()
    return y, z, x.grad, y.grad_fn.name()


@mistake
def autograd_sees_what_was_overwritten(d: str) -> Any:
    x = torch.ones(3, device=d, requires_grad=True)
    y = x.exp()
    z = y * y
    y.add_(1)
    z.sum().backward()


@mistake
def autograd_sees_what_was_overwritten_by_a_view(d: str) -> Any:
    x = torch.ones(3, device=d, requires_grad=True)
    y = x.exp()
    z = y * y
    y.detach()[0] = 1
    z.sum().backward()


@program
def autograd_grad(d: str) -> Any:
    x = torch.tensor([1.0, 2, 3], device=d, requires_grad=True)
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(h, x, torch.ones_like(h), allow_unused=True, retain_graph=True)
    h.sum().backward()
    other = torch.ones(2, device=d, requires_grad=True)
    unused = torch.autograd.grad(x.sum(), [x, other], allow_unused=True)
    batched = torch.autograd.grad(x * x, x, torch.eye(3, device=d), is_grads_batched=True)
    jac = torch.autograd.functional.jacobian(lambda t: t.sin() * t.sum(), x.detach())
    hes = torch.autograd.functional.hessian(lambda t: (t.sin() * t).sum(), x.detach())
    hvp = torch.autograd.functional.vhp(lambda t: (t**4).sum(), x.detach(), torch.ones(3, device=d))
    zero = torch.autograd.grad((x * 0).sum(), x, materialize_grads=True)
    return g, h, third, x.grad, unused, batched, jac, hes, hvp, zero


@program
def double_backward_of_layers(d: str) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8, 1)).to(d)
    x = torch.randn(2, 1, 4, 4).to(d).requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    ((g.flatten(1).norm(dim=1) - 1) ** 2).mean().backward()
    return g, [each.grad for each in net.parameters()]


@program
def gradcheck(d: str) -> Any:
    torch.manual_seed(1)
    x = torch.randn(3, 2, dtype=torch.float64).to(d).requires_grad_()
    w = torch.randn(4, 2, dtype=torch.float64).to(d).requires_grad_()
    return [
        torch.autograd.gradcheck(lambda a, b: F.linear(a, b).sigmoid(), (x, w)),
        torch.autograd.gradgradcheck(lambda a: (a**3).cumsum(0), (x,)),
    ]  # fmt: skip


@program
def hooks(d: str) -> Any:
    said: list[Any] = []
    x = torch.ones(3, device=d, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: g * 10)
    handle = x.register_hook(lambda g: said.append(g.clone()))
    x.register_post_accumulate_grad_hook(lambda p: said.append(p.grad.clone()))
    y.sum().backward()
    handle.remove()
    x.sum().backward()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).to(d)
    net.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    net.register_forward_hook(lambda m, a, r: r * 2)
    net[0].register_full_backward_hook(lambda m, gi, go: said.append([gi[0], go[0]]))
    net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    out = net(x.detach().requires_grad_())
    out.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(d)):
        z = (x * x).sum()
    z.backward()
    with torch.autograd.graph.save_on_cpu():
        z = (x.exp() * x).sum()
    z.backward()
    return said, out, x.grad, [each.grad for each in net.parameters()]


@program
def optimiser_in_backward(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(d)
    steps = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def step(p: Tensor) -> None:
        steps[p].step()
        steps[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        net(torch.ones(2, 3, device=d)).square().sum().backward()
    return list(net.parameters()), [p.grad for p in net.parameters()]


@program
def checkpointing(d: str) -> Any:
    found = []
    for reentrant in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).to(d)
        x = torch.randn(3, 4).to(d).requires_grad_()
        torch.manual_seed(3)
        y = checkpoint(net, x, use_reentrant=reentrant)
        noise = torch.rand(3, device=d)
        y.square().sum().backward()
        found.append([y, x.grad, [p.grad for p in net.parameters()], noise, torch.rand(2, device=d)])
    same(here(found[0]), here(found[1]))
    return found


@program
def random_numbers(d: str) -> Any:
    torch.manual_seed(11)
    a = torch.rand(3, device=d)
    module = torch.random if d == "cpu" else torch.get_device_module(d)
    state = module.get_rng_state() if d == "cpu" else module.get_rng_state(d)
    b = torch.randn(3, device=d)
    module.set_rng_state(state) if d == "cpu" else module.set_rng_state(state, d)
    c = torch.randn(3, device=d)
    devices = {"devices": []} if d == "cpu" else {"devices": [1], "device_type": "worker"}
    with torch.random.fork_rng(**devices):
        torch.manual_seed(4)
        e = torch.randn(3, device=d)
    f = torch.randn(3, device=d)
    assert torch.equal(b, c)
    return a, b, c, e, f, state


@program
def custom_function(d: str) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: float) -> Any:
            ctx.save_for_backward(x)
            ctx.by = by
            ctx.mark_non_differentiable(flag := (x > 0))
            return x * by, flag

        @staticmethod
        def backward(ctx: Any, g: Tensor, _: Any) -> Any:
            (x,) = ctx.saved_tensors
            return g * ctx.by + x, None

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    x = torch.arange(-1.0, 2, device=d, requires_grad=True)
    y, flag = Scale.apply(x, 3.0)
    z = Double.apply(y * 1)
    z.sum().backward()
    return y, flag, z, x.grad, flag.requires_grad


@program
def functional(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).to(d)
    x, t = torch.randn(4, 3).to(d), torch.randn(4, 1).to(d)
    parameters = {name: each.detach() for name, each in net.named_parameters()}

    def loss(p: Any, a: Tensor, b: Tensor) -> Tensor:
        return F.mse_loss(functional_call(net, p, (a,)), b)

    each = vmap(grad(loss), (None, 0, 0))(parameters, x, t)
    tangent = jvp(lambda a: net(a).sigmoid(), (x,), (torch.ones_like(x),))
    rows = jacrev(lambda a: a.sin() * a.sum())(x[0])
    columns = torch.func.jacfwd(lambda a: a.sin() * a.sum())(x[0])
    curve = hessian(lambda a: (a**3).sum())(x[0])
    value, pullback = torch.func.vjp(lambda a: a.exp(), x)
    torch.manual_seed(1)
    return [
        grad(loss)(parameters, x, t), each, tangent, rows, columns, curve, value, pullback(torch.ones_like(x)),
        vmap(torch.dot)(x, x), vmap(lambda a: a.masked_fill(a > 0, 0.0))(x),
        vmap(lambda a: a + torch.randn(3, device=d), randomness="different")(x),
        torch.func.grad_and_value(lambda a: (a * a).sum())(x),
    ]  # fmt: skip


@program
def forward_mode(d: str) -> Any:
    import torch.autograd.forward_ad as fwad

    x = torch.randn(3, 4).to(d)
    with fwad.dual_level():
        dual = fwad.make_dual(x, torch.ones_like(x))
        out = fwad.unpack_dual(F.dropout(dual, 0.0).tanh() @ dual.t())
    return out.primal, out.tangent


@program
def ensembles(d: str) -> Any:
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2).to(d) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(nets)
    base = copy.deepcopy(nets[0])
    each = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))
    return each(parameters, buffers, torch.ones(2, 3, device=d))


@program
def no_grad_and_inference(d: str) -> Any:
    x = torch.ones(2, device=d, requires_grad=True)
    with torch.no_grad():
        a = x * 2
        x.add_(1)
    with torch.inference_mode():
        b = x * 3
        b[0] = 7
        c = (b.reshape(1, 2), b.view(2, 1), b.to(torch.float64), b.contiguous(), torch.ones(2, device=d))
        e = F.softmax(F.linear(torch.ones(2, 2, device=d), torch.eye(2, device=d)), -1)
        lstm = nn.LSTM(2, 2).to(d)
        with torch.no_grad():
            [p.fill_(0.1) for p in lstm.parameters()]
        f = lstm(torch.ones(2, 1, 2, device=d))[0]
    with torch.no_grad(), torch.enable_grad():
        g = x * 2
    with torch.set_grad_enabled(False):
        h = x + 1
    return a, b, c, e, f, g, h, b.is_inference(), x.is_inference(), x._version


@mistake
def inference_tensor_in_autograd(d: str) -> Any:
    x = torch.ones(2, device=d, requires_grad=True)
    with torch.inference_mode():
        b = torch.ones(2, device=d)
    return x * b


@program
def data_attribute(d: str) -> Any:
    x = torch.ones(3, device=d, requires_grad=True)
    y = x.data
    y[0] = 5
    x.data.mul_(2)
    shared = x.clone()
    seen = shared.detach()
    x.data = torch.arange(4.0, device=d)
    y.zero_()
    p = nn.Parameter(torch.ones(2, device=d))
    p.data = p.data.double()
    p.data = torch.zeros(3, device=d, dtype=torch.float64)
    v = x.detach()
    v[0] = 9
    del shared  # the graph of `shared` refers to the old shape
    x.sum().backward()
    return seen, x, y, p, x.grad, x.data.requires_grad, v


@program
def requires_grad_rules(d: str) -> Any:
    x = torch.ones(2, device=d)
    x.requires_grad_()
    x.requires_grad = False
    y = torch.ones(2, device=d, requires_grad=True)
    z = (y * 2).detach().requires_grad_()
    z.sum().backward()
    return x, y, z, z.grad, y.grad


@mistake
def requires_grad_of_integers(d: str) -> Any:
    return torch.ones(2, dtype=torch.int64, device=d).requires_grad_()


@program
def copies(d: str) -> Any:
    x = torch.randn(2, 3, device=d, requires_grad=True)
    x.sum().backward()
    deep, shallow = copy.deepcopy(x), copy.copy(x)
    deep.data.add_(1)
    shared = copy.copy(p := nn.Parameter(torch.ones(2, device=d)))
    shared.data.add_(1)
    assert isinstance(shared, nn.Parameter)
    assert torch.equal(p, shared)
    twice = copy.deepcopy([x, x])
    assert twice[0] is twice[1]
    strided = copy.deepcopy(torch.ones(3, 2, device=d).t())
    p = copy.deepcopy(nn.Parameter(torch.ones(2, device=d), requires_grad=False))
    trained = nn.Parameter(torch.ones(2, device=d))
    trained.sum().backward()
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(d)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight.zero_()
    clone = x.clone()
    flat = torch.arange(6.0, device=d)
    views = copy.deepcopy([flat[4:], flat.view(2, 3).t(), nn.Parameter(flat[1:3]), flat[5:].expand(2), flat.detach()])
    views[0].fill_(9)
    views[2].data.zero_()
    conjugate = copy.deepcopy(torch.tensor([1 + 2j], device=d).conj())
    return [
        copy.deepcopy(trained).grad, flat, views, [each.storage_offset() for each in views], conjugate,
        x, deep, deep.grad, shallow, type(p) is type(nn.Parameter(torch.ones(1, device=d))),
        isinstance(p, nn.Parameter), net[0].weight.abs().sum() > 0, other[0].weight,
        isinstance(other[0].weight, nn.Parameter), clone.grad_fn.name(), strided, isinstance(shallow, nn.Parameter),
    ]  # fmt: skip


@mistake
def deepcopy_of_an_inner_tensor(d: str) -> Any:
    return copy.deepcopy(torch.ones(2, device=d, requires_grad=True) * 2)


@program
def saving(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(d)
    optimiser = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3).to(d)).sum().backward()
    optimiser.step()

    def through(what: Any, **kwargs: Any) -> Any:
        return torch.load(saved(what), **kwargs)

    state = through({"net": net.state_dict(), "optimiser": optimiser.state_dict()})
    assert {str(each.device) for each in state["net"].values()} == {d}
    there = through(net.state_dict(), map_location="cpu")
    assert {str(each.device) for each in there.values()} == {"cpu"}
    back = through(there, map_location=d)
    assert {str(each.device) for each in back.values()} == {d}
    named = through(there, map_location={"cpu": d})
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(d)
    missing = fresh.load_state_dict(state["net"])
    again = torch.optim.Adam(fresh.parameters())
    again.load_state_dict(state["optimiser"])
    fresh(torch.ones(4, 3, device=d)).sum().backward()
    again.step()
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plain.load_state_dict(net.state_dict())
    assigned = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assigned.load_state_dict(there, assign=True)
    whole = through(net, weights_only=False)
    parameter = through(nn.Parameter(torch.ones(2, device=d)))
    shared = torch.arange(4.0, device=d)
    views = [shared[2:], shared.view(2, 2).t(), nn.Parameter(shared[1:3]), shared[:0]]
    loaded = [through(views), through(views, map_location="cpu")]
    loaded.append(through(loaded[1], map_location=d))
    file = saved(views, _use_new_zipfile_serialization=False)
    loaded.append(torch.load(file, weights_only=True))
    for each in loaded:
        each[0].fill_(9)
    return [
        loaded, [each.storage_offset() for each in loaded[0]], through(torch.tensor([1 + 2j], device=d).conj()),
        through(torch.tensor([1, 2], dtype=torch.uint16).to(d)),
        state, there, back, named, list(missing), dict(fresh.state_dict()), again.state_dict(),
        dict(plain.state_dict()), dict(assigned.state_dict()), dict(whole.state_dict()),
        isinstance(whole[0].weight, nn.Parameter), parameter, isinstance(parameter, nn.Parameter),
        pickle.loads(pickle.dumps(shared)),
        through([torch.ones(3, 2, device=d).t(), torch.ones(3, dtype=torch.bfloat16, device=d)]),
    ]  # fmt: skip


@mistake
def saving_views_of_different_dtypes(d: str) -> Any:
    x = torch.ones(2, device=d)
    return torch.save([x, x.view(torch.int32)], io.BytesIO())


@mistake
def loading_a_wrong_state(d: str) -> Any:
    return nn.Linear(2, 2).to(d).load_state_dict(nn.Linear(3, 2).to(d).state_dict())


@program
def comparisons(d: str) -> Any:
    x = torch.ones(2, device=d)
    return [
        torch.equal(x, x.clone()), torch.equal(x, x + 1), torch.allclose(x, x + 1e-9), torch.isclose(x, x),
        x.eq(1).all(), (x == x).all().item(), (x < 2).any().item(), torch.equal(x, torch.ones(3, device=d)),
        bool((x == 1).all()), x == None, x != "a",  # noqa: E711
    ]  # fmt: skip


@program
def assertions(d: str) -> Any:
    torch.testing.assert_close(torch.ones(2, device=d), torch.ones(2, device=d))
    try:
        torch.testing.assert_close(torch.ones(2, device=d), torch.zeros(2, device=d))
    except AssertionError as error:
        return str(error).splitlines()[:3]


@program
def objects(d: str) -> Any:
    x = torch.ones(2, device=d)
    y = torch.ones(2, device=d)
    table = {x: 1, y: 2}
    found = [
        table[x], table[y], len({x, y, x}), isinstance(x, Tensor), torch.is_tensor(x),
        isinstance(nn.Parameter(x), nn.Parameter), isinstance(x, nn.Parameter), hash(x) == hash(x), id(x) == id(x),
        isinstance(nn.Parameter(x), Tensor), isinstance(nn.Buffer(x), nn.Buffer),
    ]  # fmt: skip
    weak = weakref.ref(y)
    del y, table
    gc.collect()
    x.note = 3
    return [
        found, weak() is None, x.note, torch.is_floating_point(x), torch.result_type(x, 1),
        torch.promote_types(x.dtype, torch.float64), torch.can_cast(x.dtype, torch.int32),
    ]  # fmt: skip


@program
def clipping(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(d)
    (net(torch.ones(2, 3, device=d)).square().sum() * 10).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    total = nn.utils.get_total_norm([p.grad for p in net.parameters()])
    clipped = [p.grad.clone() for p in net.parameters()]
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    inf = nn.utils.clip_grad_norm_(net.parameters(), 0.001, norm_type=float("inf"))
    flat = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(flat * 2, net.parameters())
    return norm, total, clipped, inf, flat, list(net.parameters()), [p.grad for p in net.parameters()]


@program
def parametrizations(d: str) -> Any:
    from torch.nn.utils import parametrizations as pz
    from torch.nn.utils import parametrize, prune

    torch.manual_seed(0)
    found: list[Any] = []
    for wrap in (pz.weight_norm, pz.spectral_norm, pz.orthogonal):
        torch.manual_seed(0)
        net = wrap(nn.Linear(3, 3)).to(d)
        net(torch.ones(2, 3, device=d)).sum().backward()
        found.append([net.weight, [p.grad for p in net.parameters()], list(net.state_dict().values())])
        torch.manual_seed(0)
        plain = nn.Linear(3, 3).to(d)
        torch.manual_seed(1)
        made = wrap(plain)
        found.append([made(torch.ones(2, 3, device=d))])

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    net = nn.Linear(3, 3).to(d)
    parametrize.register_parametrization(net, "weight", Symmetric())
    found.append([net.weight])
    parametrize.remove_parametrizations(net, "weight")
    found.append([net.weight, isinstance(net.weight, nn.Parameter)])
    pruned = prune.l1_unstructured(nn.Linear(3, 3).to(d), "weight", 0.5)
    found.append([pruned.weight, pruned.weight_mask])
    return found


@program
def swapping(d: str) -> Any:
    a, b = torch.ones(2, device=d), torch.zeros(3, device=d)
    torch.utils.swap_tensors(a, b)
    a.add_(1)
    return a, b


@program
def module_conversions(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2))
    net.to(d)
    first = net[0].weight
    found = [
        dict(each.state_dict())
        for each in (
            net.half(), net.bfloat16(), net.double(), net.float(), net.to(torch.float16), net.to(d, torch.float32),
            net.to(torch.zeros(1, device=d)), net.type(torch.float64),
        )
    ]  # fmt: skip
    assert net[0].weight is first
    net.requires_grad_(False)
    back = net.cpu()
    assert all(type(each) is nn.Parameter for each in back.parameters())
    empty = nn.Linear(2, 2, device="meta").to_empty(device=d)
    nn.init.ones_(empty.weight)
    return [
        found, dict(back.state_dict()), empty.weight, [p.requires_grad for p in net.parameters()],
        next(net.parameters()).device,
    ]  # fmt: skip


@program
def module_zero_grad_and_train(d: str) -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).to(d)
    with torch.no_grad():
        [nn.init.constant_(p, 0.5) for p in net.parameters()]
    torch.manual_seed(0)
    net.eval()(torch.ones(1, 2, device=d)).sum().backward()
    a = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=False)
    b = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return a, b, [p.grad for p in net.parameters()], net.train()(torch.ones(4, 2, device=d))


@program
def initialisers(d: str) -> Any:
    def fresh() -> Tensor:
        return torch.empty(4, 4, device=d)

    i = nn.init
    return [
        i.uniform_(fresh()), i.normal_(fresh()), i.constant_(fresh(), 2), i.ones_(fresh()), i.zeros_(fresh()),
        i.eye_(fresh()), i.dirac_(torch.empty(2, 2, 3, device=d)), i.xavier_uniform_(fresh()),
        i.xavier_normal_(fresh()), i.kaiming_uniform_(fresh()), i.kaiming_normal_(fresh()), i.trunc_normal_(fresh()),
        i.orthogonal_(fresh()),
    ]  # fmt: skip


@program
def batches(d: str) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    seen = [
        [x.to(d, non_blocking=True), y.to(d)] for x, y in torch.utils.data.DataLoader(data, batch_size=2, shuffle=False)
    ]
    there = torch.utils.data.TensorDataset(torch.arange(10.0, device=d).reshape(5, 2))
    rows = list(torch.utils.data.DataLoader(there, batch_size=2))
    return seen, rows


@program
def gradients_accumulate_over_batches(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).to(d)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
    average = torch.optim.swa_utils.AveragedModel(net)
    for step in range(4):
        net(torch.full((2, 3), float(step), device=d)).sum().backward()
        if step % 2:
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            average.update_parameters(net)
    return list(net.parameters()), optimiser.param_groups[0]["lr"], list(average.parameters())


@program
def numpy_from(d: str) -> Any:
    x = torch.arange(3.0, device=d)
    return [
        x.cpu().numpy().sum(), x.numpy(force=True).tolist(), x.detach().cpu().numpy().dtype.name,
        torch.from_numpy(np.ones(3)).to(d) * x, np.float64(2) * float(x[1]), x * np.float32(2),
        np.asarray(x.cpu()).tolist(),
    ]  # fmt: skip


@program
def shapes_that_depend_on_data(d: str) -> Any:
    x = torch.tensor([3, 1, 3, 2], device=d)
    return [
        x.unique(return_inverse=True), x.bincount(), x.repeat_interleave(x), torch.repeat_interleave(x, 2),
        x[x > 1].sum(), x.nonzero().flatten(), F.one_hot(x), torch.unique_consecutive(x), x.topk(2), x.sort(),
        x.histc(3) if False else x.float().histc(3), torch.combinations(x), torch.isin(x, x[:1]),
        torch.searchsorted(x.sort()[0], x), torch.bucketize(x, x.sort()[0]), x.float().quantile(0.5), x.mode(),
        x.median(), x.kthvalue(2),
    ]  # fmt: skip


def linear_algebra(d: str) -> Any:
    torch.manual_seed(0)
    x = torch.randn(3, 3).to(d)
    s = x @ x.T + torch.eye(3, device=d)
    return [
        torch.linalg.inv(s), torch.linalg.cholesky(s), torch.linalg.det(s), torch.linalg.solve(s, x),
        torch.linalg.eigvalsh(s), torch.linalg.norm(x), torch.linalg.qr(x), torch.linalg.svd(x)[1],
        torch.linalg.matrix_rank(s), torch.linalg.slogdet(s), x.matrix_exp(), torch.linalg.lstsq(s, x)[0],
        torch.linalg.pinv(s), torch.cdist(x, x), torch.kron(x, x), torch.einsum("ij,jk,kl->il", x, x, x),
        torch.tensordot(x, x, 1), torch.trace(x), torch.outer(x[0], x[1]), x.cross(x.flip(0), dim=1),
        torch.fft.fft(x).abs(), torch.fft.irfft(torch.fft.rfft(x)), torch.linalg.multi_dot([x, x, x]), torch.cov(x),
        torch.corrcoef(x),
        torch.stft(torch.ones(16, device=d), 4, window=torch.ones(4, device=d), return_complex=True),
    ]  # fmt: skip


def test_linear_algebra_is_close_to_the_cpu() -> None:
    # The results of LAPACK depend on the memory addresses of its operands.
    for found, right in zip(flat(linear_algebra(W)), flat(linear_algebra("cpu")), strict=True):
        torch.testing.assert_close(found.cpu(), right)


@program
def complex_numbers(d: str) -> Any:
    x = torch.tensor([1 + 2j, 3 - 1j], device=d)
    y = x.conj()
    r = torch.view_as_real(x)
    r[0, 0] = 9
    return [
        x, y * 2, y.resolve_conj(), x.real, x.imag, x.abs(), x.angle(), y.is_conj(), y.imag.is_neg(), y.imag + 1,
        torch.view_as_complex(torch.ones(2, 2, device=d)), (x @ y), x.item() if x.numel() == 1 else x[0].item(),
        y.cpu(), y.tolist(), torch.polar(torch.ones(2, device=d), torch.ones(2, device=d)),
        x.mH if x.dim() == 2 else None,
    ]  # fmt: skip


@program
def mixed_dtypes_and_numbers(d: str) -> Any:
    i, f, h = torch.arange(3, device=d), torch.ones(3, device=d), torch.ones(3, device=d, dtype=torch.float16)
    zero = torch.tensor(2.0, dtype=torch.float64)
    return [
        i + f, i / 2, i // 2, f * h, f + zero, zero * f, i * zero, f + 1j, i + True, torch.add(f, 2, alpha=3),
        f + np.float64(1), h + 1e5, i.sum(), i.float().mean(), torch.maximum(i, i), f.pow(2), 2**f, f.clamp(min=i),
        torch.where(f > 0, 1, 2.0), torch.where(f > 0, f, 0), f.add(1).mul(2.5), torch.cat([i, f]),
        torch.stack([f, f]), f.new_tensor(3) + i, torch.tensor(3, device=d) + torch.tensor([1.5], device=d),
        i.bool() & True, f.addcmul(f, f, value=3), torch.lerp(f, f * 2, 0.3),
    ]  # fmt: skip


@program
def many_operands(d: str) -> Any:
    xs = [torch.full((2,), float(i), device=d) for i in range(5)]
    a = torch._foreach_add(xs, 1.0)
    torch._foreach_mul_(xs, [1.0, 2, 3, 4, 5])
    return [
        a, xs, torch.cat(xs), torch.stack(xs).sum(0), torch.block_diag(*xs),
        torch.broadcast_tensors(xs[0], torch.ones(3, 1, device=d)), torch.cartesian_prod(*xs[:2]),
        torch._foreach_norm(xs), torch.hstack(xs), torch.atleast_2d(xs[0]), torch.chunk(torch.cat(xs), 4),
        torch.tensor_split(torch.cat(xs), 3),
    ]  # fmt: skip


@program
def layers_of_all_kinds(d: str) -> Any:
    torch.manual_seed(0)
    x, y, z = torch.randn(2, 3, 8).to(d), torch.randn(2, 3, 8, 8).to(d), torch.randn(2, 3, 4, 4, 4).to(d)
    made = [
        (nn.Conv1d(3, 2, 3, padding="same"), x), (nn.Conv2d(3, 6, 3, groups=3, padding_mode="reflect", padding=1), y),
        (nn.Conv3d(3, 2, 2), z), (nn.ConvTranspose2d(3, 2, 3, 2), y),
        (nn.MaxPool1d(2), x), (nn.MaxPool2d(2, return_indices=True), y), (nn.AvgPool2d(2), y),
        (nn.AdaptiveMaxPool2d(2), y), (nn.AdaptiveAvgPool1d(3), x), (nn.LPPool2d(2, 2), y),
        (nn.FractionalMaxPool2d(2, output_size=3), y),
        (nn.ReflectionPad2d(1), y), (nn.ConstantPad1d(1, 2.0), x), (nn.ReplicationPad2d(1), y), (nn.ZeroPad2d(1), y),
        (nn.CircularPad1d(2), x),
        (nn.BatchNorm2d(3), y), (nn.GroupNorm(3, 3), y), (nn.InstanceNorm2d(3, affine=True), y), (nn.LayerNorm(8), x),
        (nn.RMSNorm(8), x), (nn.LocalResponseNorm(2), y),
        (nn.ELU(), x), (nn.GELU("tanh"), x), (nn.GLU(), x), (nn.Hardtanh(), x), (nn.LogSigmoid(), x), (nn.Mish(), x),
        (nn.SELU(), x), (nn.Softmax(1), x), (nn.Softmin(1), x), (nn.Softsign(), x), (nn.Tanhshrink(), x),
        (nn.Threshold(0.1, 2), x), (nn.RReLU(), x), (nn.Hardswish(), x), (nn.CELU(), x), (nn.SiLU(), x),
        (nn.Softshrink(), x), (nn.Hardsigmoid(), x),
        (nn.Dropout(0.3), x), (nn.Dropout2d(0.3), y), (nn.AlphaDropout(0.3), x), (nn.FeatureAlphaDropout(0.3), y),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True)), x),
        (nn.PixelShuffle(1), y), (nn.Upsample(scale_factor=2, mode="bilinear"), y),
        (nn.Upsample(size=5, mode="linear"), x), (nn.Unfold(2), y), (nn.Flatten(), y), (nn.Unflatten(1, (3, 1)), y),
        (nn.ChannelShuffle(3), y), (nn.UpsamplingNearest2d(scale_factor=2), y), (nn.Identity(), x),
        (nn.RNN(8, 4), x), (nn.LSTM(8, 4, proj_size=2), x), (nn.GRU(8, 4, bias=False), x), (nn.LSTMCell(8, 4), x[0]),
        (nn.GRUCell(8, 4), x[0]), (nn.RNNCell(8, 4, nonlinearity="relu"), x[0]),
        (nn.PReLU(), x), (nn.Bilinear(8, 8, 2), (x, x)), (nn.CosineSimilarity(), (x, x)),
        (nn.PairwiseDistance(), (x, x)), (nn.MultiheadAttention(8, 2), (x, x, x)),
        (nn.TransformerDecoderLayer(8, 2, 16), (x, x)), (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (x, x)),
    ]  # fmt: skip
    found = []
    for layer, given in made:
        layer = layer.to(d)
        given = [each.detach().clone().requires_grad_() for each in (given if isinstance(given, tuple) else (given,))]
        torch.manual_seed(2)
        out = layer(*given)
        results = [each for each in flat(out) if each is not None]
        torch.stack([each.square().sum() for each in results if each.is_floating_point()]).sum().backward()
        with torch.no_grad():
            quiet = layer.eval()(*given)
        gradients = [each.grad for each in (*given, *layer.parameters())]
        found.append([type(layer).__name__, results, gradients, [each for each in flat(quiet) if each is not None]])
    return found


@program
def losses(d: str) -> Any:
    torch.manual_seed(0)
    x, t, k = torch.randn(4, 5).to(d).requires_grad_(), torch.rand(4, 5).to(d), torch.tensor([0, 1, 2, 4]).to(d)
    one, paths = torch.ones(4, device=d), torch.randn(6, 2, 5).to(d).log_softmax(2)
    made = [
        F.cross_entropy(x, k), F.cross_entropy(x, t),
        F.cross_entropy(x, k, weight=torch.ones(5, device=d), ignore_index=1, reduction="sum"), F.nll_loss(x, k),
        F.mse_loss(x, t), F.l1_loss(x, t), F.smooth_l1_loss(x, t), F.huber_loss(x, t),
        F.kl_div(x.log_softmax(1), t, reduction="batchmean"), F.binary_cross_entropy(x.sigmoid(), t),
        F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.ones(5, device=d)),
        F.hinge_embedding_loss(x, (t > 0.5) * 2.0 - 1), F.margin_ranking_loss(x[:, 0], x[:, 1], one),
        F.cosine_embedding_loss(x, t, one), F.triplet_margin_loss(x, t, t * 2), F.multi_margin_loss(x, k),
        F.multilabel_margin_loss(x, (t > 0.5).long()), F.multilabel_soft_margin_loss(x, t.round()),
        F.poisson_nll_loss(x, t), F.gaussian_nll_loss(x, t, t + 1), F.soft_margin_loss(x, (t > 0.5) * 2.0 - 1),
        F.ctc_loss(paths, torch.tensor([[1, 2], [3, 4]], device=d), torch.tensor([6, 6]), torch.tensor([2, 2])),
    ]  # fmt: skip
    torch.stack(made).sum().backward()
    return made, x.grad


@program
def packed_sequences(d: str) -> Any:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

    torch.manual_seed(0)
    x = pad_sequence([torch.randn(n, 3) for n in (5, 3, 2)], batch_first=True).to(d).requires_grad_()
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(3, 4, 2, batch_first=True, bidirectional=True).to(d)
        out, hidden = layer(pack_padded_sequence(x, [5, 3, 2], batch_first=True))
        padded, lengths = pad_packed_sequence(out, batch_first=True)
        padded.sum().backward()
        found.append([padded, lengths, hidden, x.grad.clone(), [p.grad for p in layer.parameters()]])
    return found


@program
def attention(d: str) -> Any:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8).to(d).requires_grad_() for _ in range(3))
    mask = (torch.rand(6, 6) > 0.3).to(d)
    bias = torch.randn(6, 6).to(d)
    torch.manual_seed(1)
    f = F.scaled_dot_product_attention
    made = [
        f(q, k, v), f(q, k, v, is_causal=True), f(q, k, v, mask | torch.eye(6, device=d).bool()), f(q, k, v, bias),
        f(q, k, v, scale=0.5), f(q, k[:, :2], v[:, :2], enable_gqa=True), f(q, k, v, dropout_p=0.2),
        f(q, k, v, bias.requires_grad_()),
    ]  # fmt: skip
    torch.stack(made).square().sum().backward()
    with torch.no_grad():
        quiet = f(q, k, v, is_causal=True)
    return made, q.grad, k.grad, v.grad, bias.grad, quiet


@program
def a_transformer_in_eval(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(d).eval()
    x = torch.randn(2, 5, 8).to(d)
    torch.tensor([[False] * 5, [False, False, False, True, True]]).to(d)
    with torch.no_grad():
        a = net(x)
        b = nn.MultiheadAttention(8, 2, batch_first=True).to(d).eval()(x, x, x, need_weights=False)[0].shape
    return a, b, net(x)


@program
def reductions(d: str) -> Any:
    x = torch.arange(6.0, device=d).view(2, 3)
    return [
        str(torch.Size(x.shape)), x.mean(dim=(0, 1)), x.sum(0, keepdim=True), x.std(), x.var(1, correction=0),
        x.max(1), x.min(), x.argmax(), x.cumsum(1), x.prod(), x.logsumexp(0), x.norm(p=1), x.flip(1), x.roll(1, 1),
        x.rot90(), x.tile(2), x.repeat(1, 2), x.softmax(1), x.amax(0), x.aminmax(), x.any(), x.all(),
        x.count_nonzero(), x.nansum(), x.diff(), x.std_mean if False else torch.std_mean(x), torch.var_mean(x, 1),
        x.triu(), x.renorm(2, 0, 1.0), x.cummax(1), torch.trapezoid(x), x.nan_to_num(), x.sgn(), x.frac(),
        torch.frexp(x),
    ]  # fmt: skip


@program
def another_default_dtype(d: str) -> Any:
    whole = torch.arange(3, device=d)

    def made() -> list[Tensor]:
        return [
            whole / 2, whole + 1.5, whole.sin(), torch.ones(2, device=d), torch.randn(2, device=d),
            torch.linspace(0, 1, 3, device=d), torch.full((2,), 1.5, device=d), torch.arange(0.0, 1, 0.25, device=d),
            torch.hann_window(4, device=d), torch.tensor([1.5], device=d), whole.float().to(torch.float32) / 2,
        ]  # fmt: skip

    found = made()
    torch.set_default_dtype(torch.float64)
    try:
        found += made()
    finally:
        torch.set_default_dtype(torch.float32)
    return found, made()


@program
def tensors_of_tensors(d: str) -> Any:
    x = torch.arange(4.0, device=d)
    return [
        torch.tensor([x.sum(), x.max()]), torch.tensor([[x.min(), 2], [x[1], 4]], device=d), torch.as_tensor(x),
        torch.stack([x.sum(), x.max()]),
    ]  # fmt: skip


@program
def graphs_between_here_and_there(d: str) -> Any:
    x = torch.arange(1.0, 4, requires_grad=True)
    w = torch.full((3,), 2.0, device=d, requires_grad=True)
    y = (x.to(d) * w).cpu() ** 2
    into = torch.zeros(3)
    into.copy_(w * 3)
    other = torch.zeros(3, device=d)
    other.copy_(x)
    number = (w * torch.tensor(3.0, requires_grad=True)).sum().to("cpu")
    (y.sum() + into.sum() + (other * w).sum().cpu() + number).backward()
    said = pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="nan values")
    with torch.autograd.set_detect_anomaly(True), said[0], said[1]:
        ((w * 0).sqrt() * 0).sum().backward()
    return x.grad, w.grad, y, into, other


@program
def in_low_precision(d: str) -> Any:
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 2))
        net.to(dtype).to(d)
        x = torch.randn(3, 4, dtype=dtype).to(d)
        optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
        torch.manual_seed(1)
        for _ in range(3):
            optimiser.zero_grad()
            net(x).float().square().mean().backward()
            optimiser.step()
        found.append(list(net.parameters()))
    return found


@program
def embeddings(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Embedding(5, 3, max_norm=1.0, scale_grad_by_freq=True).to(d)
    bag = nn.EmbeddingBag(5, 3, mode="max").to(d)
    k = torch.tensor([0, 1, 1, 4]).to(d)
    found = net(k), bag(k[None])
    torch.cat(found).sum().backward()
    one = F.one_hot(k, 5).float() @ net.weight
    return found, net.weight, net.weight.grad, bag.weight.grad, one, F.embedding(k, net.weight, padding_idx=1)


@program
def buffers_that_change(d: str) -> Any:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(2), persistent=False)
            self.scale = nn.ParameterList([torch.ones(2), torch.ones(2)])

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return x * self.scale[0] + self.mean

    net = Counter().to(d)
    x = torch.arange(6.0, device=d).view(3, 2)
    net(x), net(x)
    return net.seen, net.mean, dict(net.state_dict()), net.load_state_dict({}, strict=False).missing_keys


@program
def scaled_gradients(d: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(d)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler(torch.device(d).type, growth_interval=2)
    scales = []
    for step in range(5):
        optimiser.zero_grad()
        loss = net(torch.full((2, 3), float("inf") if step == 2 else 1.0, device=d)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimiser)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, list(net.parameters())


def automatically(d: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.autocast:
    return torch.autocast(torch.device(d).type, dtype=dtype, **options)


@program
def autocast(d: str) -> Any:
    found: list[Any] = []
    for dtype, cached in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 8), nn.LayerNorm(8),
            nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 4),
        ).to(d)  # fmt: skip
        optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
        x, y = torch.randn(5, 3, 5, 5).to(d), torch.randint(4, (5,)).to(d)
        torch.manual_seed(1)
        for _ in range(2):
            with automatically(d, dtype, cache_enabled=cached):
                one, two = net(x), net(x * 2)  # with the cache, weights are cast once; without it, twice
                with automatically(d, enabled=False):
                    exact = net[4].weight @ net[4].weight.t()
                most = torch.cat([one, two.float()]), torch.stack([one, one]), one.double() @ one.double().t()
                loss = F.cross_entropy(one, y) + F.mse_loss(two, torch.zeros_like(two)) + exact.mean()
            loss.backward()
            optimiser.step()
        found.append([one, two, exact, most, loss, [(p, p.grad) for p in net.parameters()]])
    return found


@functools.cache
def lstm_takes_halves() -> bool:
    """Return whether torch computes an LSTM under autocast. On CPUs without AVX-512, oneDNN does not."""
    try:
        with torch.autocast("cpu"):
            nn.LSTM(4, 6)(torch.zeros(1, 1, 4))
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        return False
    return True


@program
def autocast_of_what_goes_apart(d: str) -> Any:
    found: list[Any] = []
    for make in (nn.LSTM, nn.GRU, nn.RNN) if lstm_takes_halves() else (nn.GRU, nn.RNN):
        torch.manual_seed(0)
        net, x = make(4, 6, 2, batch_first=True).to(d), torch.randn(3, 5, 4).to(d)
        with automatically(d):
            y, again = net(x)[0], net(x * 2)[0]
            inside = (y.sum() * 2).float()
            inside.backward(retain_graph=True)  # backward inside autocast, which torch advises against
        again.float().sum().backward()
        with automatically(d), torch.inference_mode():
            found.append([net(x)[0], y, [p.grad for p in net.parameters()]])
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(d)
    x, hidden = torch.randn(2, 6, 16).to(d), torch.tensor([[False] * 6, [False] * 4 + [True] * 2]).to(d)
    torch.manual_seed(1)
    with automatically(d):
        y = net(x, src_key_padding_mask=hidden)
        found += [y, torch.einsum("bij,bkj->bik", x, x), torch.tensordot(x, x, dims=[[1], [1]])]
    y.float().square().sum().backward()
    net.eval()
    with automatically(d), torch.no_grad():
        found += [net(x), net(x, src_key_padding_mask=hidden), [p.grad for p in net.parameters()]]
    with automatically(d), torch.inference_mode():
        return found, torch.einsum("bij,bkj->bik", x, x), torch.tensordot(x, x, dims=[[1], [1]]), F.softmax(net(x), 1)


@program
def autocast_in_parts_of_programs(d: str) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=torch.device(d).type, cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type=torch.device(d).type)
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad @ ctx.saved_tensors[0].t()

    torch.manual_seed(0)
    net = nn.Linear(3, 3).to(d)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler(torch.device(d).type, init_scale=64.0)
    for _ in range(2):
        with automatically(d, torch.float16):
            y = Scale.apply(checkpoint(net, torch.randn(3, 3).to(d), use_reentrant=False))
            loss = vmap(net)(y).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
    return y, loss, list(net.parameters()), automatically(d)(net.forward)(y)


@program
def generators(d: str) -> Any:
    made, g = torch.Generator(device=d), torch.Generator(d).manual_seed(3)
    found = [
        torch.randn(3, device=d, generator=made), torch.rand(2, 2, device=d, generator=g),
        torch.randperm(5, device=d, generator=g), torch.randint(9, (3,), device=d, generator=g),
        torch.normal(0.0, 1.0, (3,), device=d, generator=g), torch.normal(torch.zeros(2, device=d), 2.0, generator=g),
        torch.bernoulli(torch.full((4,), 0.5, device=d), generator=g),
        torch.multinomial(torch.ones(5, device=d), 3, generator=g),
        nn.init.xavier_uniform_(torch.empty(3, 2, device=d), generator=g),
        nn.init.trunc_normal_(torch.empty(3, 2, device=d), generator=g),
        torch.randperm(5, generator=g, out=torch.empty(5, dtype=torch.long, device=d)),
        *(getattr(torch.empty(3, device=d), name)(generator=g) for name in ("normal_", "uniform_", "exponential_")),
    ]  # fmt: skip
    state = g.get_state()
    twins = [g.clone_state(), copy.deepcopy(g), pickle.loads(pickle.dumps(g)), torch.Generator(d).set_state(state), g]
    found += [torch.rand(2, device=d, generator=each) for each in twins]
    assert isinstance(g, torch.Generator)
    assert torch.device(d) == g.device
    assert torch.Generator(d).seed() != torch.Generator(d).seed()
    return found, state, made.initial_seed(), [each.initial_seed() for each in twins], torch.rand(2, device=d)


@program
def flags(d: str) -> Any:
    tiny, found = torch.tensor([1e-310], dtype=torch.float64).to(d), []
    torch.manual_seed(0)
    q, net, x = torch.randn(1, 2, 4, 8).to(d), nn.Conv2d(2, 3, 2).to(d), torch.randn(1, 2, 4, 8).to(d)
    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        torch.set_flush_denormal(on)
        torch.set_float32_matmul_precision("medium" if on else "highest")
        with torch.backends.__allow_nonbracketed_mutation():  # torch's test modules forbid such changes on import
            torch.backends.mkldnn.enabled = not on
        found.append([torch.empty(3, device=d) if on else None, tiny * 1, net(x), q @ q.mT])
        for kind in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with torch.no_grad(), sdpa_kernel(kind):
                y = F.scaled_dot_product_attention(q, q, q)
                found += [y, y.transpose(1, 2).flatten(2)]
    return found


@program
def views_in_inference_mode(d: str) -> Any:
    x = torch.arange(12.0, device=d).view(3, 4)
    with torch.inference_mode():
        views = [
            x.t(), x[0], x[1:], x.view(2, 6), x.unbind(0)[1], x.detach(), x.split(1)[0], x.as_strided((2,), (1,)),
            x.expand(2, 3, 4), x.to(d), x + 1, (x + 1)[0], (x + 1).t().detach(),
        ]  # fmt: skip
        views[0].add_(1)
    views[1].mul_(2)
    return views, [each.is_inference() for each in views], x._version


def flat(found: Any) -> list[Any]:
    return [one for each in found for one in flat(each)] if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda each: each.__name__)
def test_program(function: Program) -> None:
    same(outcome(function, W), outcome(function, "cpu"))


@pytest.mark.parametrize("function", MISTAKES, ids=lambda each: each.__name__)
def test_mistake_raises_the_exception_type_of_the_cpu(function: Program) -> None:
    with pytest.raises(Exception) as right:
        outcome(function, "cpu")
    with pytest.raises(right.type):
        outcome(function, W)


PRINTED: dict[str, Callable[[str], Any]] = {
    "a matrix": lambda d: torch.arange(6.0, device=d).view(2, 3),
    "integers": lambda d: torch.arange(3, device=d),
    "a number": lambda d: torch.tensor(3.5, device=d),
    "nothing": lambda d: torch.ones(0, 3, device=d),
    "much": lambda d: torch.zeros(2000, 3, device=d),
    "half": lambda d: torch.ones(2, dtype=torch.float16, device=d),
    "a leaf": lambda d: torch.ones(2, device=d, requires_grad=True),
    "a result": lambda d: torch.ones(2, device=d, requires_grad=True) * 2,
    "a parameter": lambda d: nn.Parameter(torch.ones(2, device=d)),
    "truth": lambda d: torch.ones(2, device=d) > 0,
}


@pytest.mark.parametrize("name", PRINTED)
def test_repr_differs_from_the_cpu_only_in_the_device(name: str) -> None:
    right, found = PRINTED[name]("cpu"), PRINTED[name](W)
    plain = repr(found).replace(f", device='{W}'", "")
    # The device name lengthens lines, so line breaks may differ.
    assert "".join(plain.split()) == "".join(repr(right).split())
    assert f"device='{W}'" in repr(found)
    assert str(found) == repr(found)


def test_repr_of_a_module_does_not_contain_the_device() -> None:
    assert repr(nn.Linear(2, 3).to(W)) == repr(nn.Linear(2, 3))
    assert str(list(nn.Linear(2, 1, device=W).state_dict())) == "['weight', 'bias']"


def refused() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    x, other, plain = torch.ones(2, 3, device=W), torch.ones(2, 3, device="worker:2"), torch.ones(2, 3)
    at = torch.tensor([1], device=W)
    apart = "Expected all tensors to be on the same device, but found at least two devices"

    def assigned(into: Tensor, value: Any) -> None:
        into[at] = value

    return {
        "another worker": (RuntimeError, f"{apart}, worker:1 and worker:2", lambda: x + other),
        "the CPU": (RuntimeError, f"{apart}, worker:1 and cpu", lambda: x + plain),
        "on the CPU": (RuntimeError, f"{apart}, cpu and worker:1", lambda: plain.add_(x)),
        "a number of another worker": (RuntimeError, apart, lambda: x + other.sum()),
        "a number on the CPU is written": (RuntimeError, apart, lambda: torch.tensor(1.0).add_(x.sum())),
        "out on the CPU": (RuntimeError, apart, lambda: torch.add(x.sum(), 1, out=torch.tensor(1.0))),
        "the CPU by a worker's indexes": (RuntimeError, apart, lambda: plain[at]),
        "into the CPU by a worker's indexes": (RuntimeError, apart, lambda: assigned(plain, 7)),
        "by another worker's indexes": (RuntimeError, apart, lambda: other[at]),
        "a layer": (RuntimeError, apart, lambda: nn.Linear(3, 2).to(W)(plain)),
        "a list": (RuntimeError, apart, lambda: torch.cat([x, plain])),
        "equal": (RuntimeError, apart, lambda: torch.equal(x, plain)),
        "allclose": (RuntimeError, apart, lambda: torch.allclose(x, plain)),
        "a gradient of elsewhere": (
            RuntimeError, "gradient",
            lambda: setattr(x.clone().requires_grad_(), "grad", plain),
        ),
        "no such worker": (
            UsageError, "worker:99 does not exist; expected worker:1 to worker:2",
            lambda: torch.ones(2, device="worker:99"),
        ),
        "no such worker to move to": (UsageError, "worker:3 does not exist;", lambda: plain.to("worker:3")),
        "too large a rank": (UsageError, "worker:200 does not exist;", lambda: x.to("worker:200")),
        "no such current worker": (UsageError, "worker:7 does not exist;", lambda: torch.worker.set_device(7)),
        "no such worker to load to": (
            UsageError, "worker:9 does not exist;",
            lambda: torch.load(saved(plain), map_location="worker:9"),
        ),
        "numpy": (
            TypeError, r"can't convert worker:1 device type tensor to numpy. Use Tensor.cpu()",
            lambda: x.numpy(),
        ),
        "an array": (TypeError, "can't convert worker:1", lambda: np.asarray(x)),
        "dlpack": (BufferError, "worker:1", lambda: np.from_dlpack(x)),
        "a pointer": (RuntimeError, "worker:1", lambda: x.data_ptr()),
        "shared memory": (RuntimeError, "worker:1", lambda: x.share_memory_()),
        "pinned memory": (RuntimeError, "worker:1", lambda: x.pin_memory()),
        "a generator of no worker": (UsageError, "worker:9 does not exist", lambda: torch.Generator(device="worker:9")),
        "a generator of the CPU": (
            UsageError, r"a generator of worker:1, not of cpu.\n  Create it with torch.Generator\(device='worker:1'\)",
            lambda: x.normal_(generator=torch.Generator()),
        ),
        "a generator of another worker": (
            UsageError, "expected a generator of worker:1, not of worker:2",
            lambda: torch.randn(2, device=W, generator=torch.Generator(device="worker:2")),
        ),
    }  # fmt: skip


def test_mixed_devices_and_unsupported_uses_are_refused(subtests: pytest.Subtests) -> None:
    for name, (kind, message, act) in refused().items():
        with subtests.test(name), pytest.raises(kind, match=message):
            act()


def test_refused_operation_changes_nothing() -> None:
    plain, at = torch.zeros(3), torch.tensor([1], device=W)
    with pytest.raises(RuntimeError):
        plain[at] = 7
    assert plain.tolist() == [0, 0, 0]
    assert torch.ones(2, device=W).sum().item() == 2


def test_autocast_policies_match_the_header_and_kernels_of_torch() -> None:
    """Compare the autocast policies with torch's header and with the kernels that torch has registered.

    The header lists only the operators for GPUs. The autocast programs of this file test the policy for CPUs.
    """
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def listed(macro: str) -> set[str]:
        lines = header.partition(f"#define {macro}(_)")[2].split("\n\n")[0]
        return {name.replace(", ", ".") for name in re.findall(r"_\((\w+(?:, \w+)?)\)", lines)}

    cuda = POLICIES["cuda"]
    assert cuda.lower - {"cudnn_convolution", "cudnn_convolution_transpose"} == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert cuda.promoted == listed("AT_FORALL_PROMOTE")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for policy in POLICIES.values():
        for name in policy.lower | policy.promoted | policy.refused:
            assert has(f"aten::{name}", policy.key), name


def test_unreferenced_generators_are_freed_on_the_worker(mw: Master) -> None:
    def count() -> int:
        return len(next(each.generators for each in gc.get_objects() if type(each).__name__ == "Interpreter"))

    before = mw.remote(count, on=1)().result()
    several = [torch.Generator(device=W) for _ in range(20)]
    assert mw.remote(count, on=1)().result() == before + 20
    del several
    assert mw.remote(count, on=1)().result() == before


def test_generator_of_a_group_draws_the_same_numbers_on_each_worker(mw: Master) -> None:
    group = mw.group([1, 2])
    drawn = torch.randn(3, device=group.device, generator=torch.Generator(device=group.device).manual_seed(1))
    right = torch.randn(3, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(drawn.shard(rank).cpu(), right) for rank in (1, 2))


def test_autocast_affects_only_its_own_device_type() -> None:
    net, x, plain = nn.LSTM(2, 2).to(W), torch.ones(2, 1, 2, device=W), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(x)[0].dtype is (x @ x.mT).dtype is torch.float32
    with torch.autocast("worker"):
        assert (plain @ plain).dtype is torch.float32
        assert (x @ x.mT).dtype is torch.float16  # as on GPUs


def test_device_without_index_is_the_current_worker() -> None:
    assert str(torch.ones(2, device="worker").device) == W
    assert torch.ones(2, device=W).type() == "torch.worker.FloatTensor"
    assert torch.worker.device_count() == 2
    with torch.worker.device(2):
        assert torch.worker.current_device() == 2
        made = [torch.ones(2, device="worker"), torch.ones(2).to("worker"), nn.Linear(2, 2).to("worker").weight]
        assert {str(each.device) for each in made} == {"worker:2"}
        assert str(torch.ones(2, device=W).to("worker").device) == "worker:2"
    assert torch.worker.current_device() == 1
    assert str(torch.ones(2).to("worker").device) == W


def test_worker_0_is_refused_as_a_device() -> None:
    plain, net, master = torch.ones(2), nn.Linear(2, 2), "worker:0"
    options = argparse.Namespace(device=torch.device(master))
    for call in (
        lambda: torch.ones(2, device="worker:0"),
        lambda: torch.randn(2, device="worker:0"),
        lambda: torch.empty(2, device="worker:0"),
        lambda: torch.arange(2, device="worker:0"),
        lambda: torch.tensor([1.0], device="worker:0"),
        lambda: torch.ones_like(plain, device="worker:0"),
        lambda: nn.Linear(2, 2, device="worker:0"),
        lambda: plain.to("worker:0"),
        lambda: plain.to(master),
        lambda: plain.to(device=torch.device(master), dtype=torch.float64),
        lambda: plain.to(options.device),
        lambda: torch.tensor([1.0], device=options.device),
        lambda: plain.worker(0),
        lambda: net.worker(0),
        lambda: net.to("worker:0"),
        lambda: torch.ones(2, device=W).to("worker:0"),
        lambda: torch.Generator(device="worker:0"),
        lambda: torch.worker.set_device(0),
        lambda: torch.worker.synchronize("worker:0"),
    ):
        with pytest.raises(UsageError, match="worker:0: rank 0 is the master, and the first worker is worker:1"):
            call()
    assert net.weight.device.type == "cpu"
    with torch.worker.device(2):
        for made in (
            torch.tensor([1.0], device="worker"),
            torch.as_tensor([1.0], device="worker"),
            plain.new_tensor([1.0], device="worker"),
            plain.to("worker"),
            net.to("worker").weight,
            plain.worker(),
        ):
            assert str(made.device) == "worker:2"
        torch.set_default_device("worker")
        try:
            assert {str(each.device) for each in (torch.ones(2), torch.tensor([1.0]))} == {"worker:2"}
        finally:
            torch.set_default_device(None)


def test_cached_calls_are_queued_without_python_code() -> None:
    x = torch.ones(4, device=W)
    mine = os.path.dirname(dist.remote.__file__)

    def functions_of(operation: Callable[[], Any]) -> set[str]:
        found = set()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(mine):
                found.add(frame.f_code.co_name)

        for _ in range(3):  # the worker infers the results of the first call; a later call is predicted, then cached
            operation()
        sys.setprofile(note)
        try:
            operation()
        finally:
            sys.setprofile(None)
        return found

    assert functions_of(lambda: x + 2.5) == {"here"}
    assert functions_of(lambda: x.add_(x, alpha=2)) == {"here"}
    assert functions_of(lambda: torch._foreach_mul_([x, x], 0.5)) == {"here"}
    assert functions_of(lambda: torch.sum(x, dim=[0], keepdim=True, dtype=torch.float64)) == {"here"}
    assert functions_of(lambda: x.view(2, 2)) == {"here"}
    half = x[2:]
    assert functions_of(lambda: half.view(2, 1)) == {"here"}
    x.copy_(torch.arange(4.0))
    assert half.view(2, 1).tolist() == [[2.0], [3.0]]
    assert {"here", "build"} <= functions_of(lambda: x.chunk(2))
    with torch.inference_mode():  # a view of an ordinary tensor is an ordinary tensor
        assert {"here", "build"} <= functions_of(lambda: x.view(2, 2))
        assert not x.view(2, 2).is_inference()
    assert "run" in functions_of(lambda: x.to(torch.float64) * 1j)


def test_master_can_create_a_process_group_beside_its_workers() -> None:
    for wrong in (99, "worker:99"):
        with pytest.raises(UsageError, match="worker:99 does not exist; expected worker:1 to worker:2"):
            dist.init_process_group(device_id=wrong)
    dist.init_process_group(device_id=torch.device("worker:2"))
    try:
        x = torch.arange(3.0, device="worker")
        assert str(x.device) == "worker:2"
        dist.all_reduce(x)  # the data pass through the master, which is the rank
        assert x.cpu().tolist() == [0.0, 1.0, 2.0]
    finally:
        dist.destroy_process_group()
        torch.worker.set_device(1)


def test_tensors_and_modules_move_between_workers() -> None:
    x = torch.randn(2, 3)
    there = x.to(W).t().to("worker:2")
    assert there.stride() == x.t().stride()
    assert torch.equal(there.cpu(), x.t())
    assert str(there.to(W, torch.float64).dtype) == "torch.float64"
    assert str(torch.zeros_like(there, device=W).device) == W
    into = torch.zeros(3, 2, device=W)
    into.copy_(there)
    assert torch.equal(into.cpu(), x.t())
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(W)
    kept, before = net[0].weight, net[0].weight.detach().cpu()
    net.to("worker:2")
    assert net[0].weight is kept
    assert {str(each.device) for each in net.state_dict().values()} == {"worker:2"}
    assert torch.equal(kept.detach().cpu(), before)


def test_autograd_across_workers_matches_the_cpu() -> None:
    def run(first: str, second: str) -> Any:
        torch.manual_seed(0)
        a, b = nn.Linear(4, 3), nn.Linear(3, 1)
        a, b = a.to(first), b.to(second)
        optimiser = torch.optim.Adam([*a.parameters(), *b.parameters()], 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            middle = a(torch.ones(2, 4, device=first)).tanh().to(second)
            (b(middle).square().sum() + middle.to(first).sum().to(second)).backward()
            optimiser.step()
        assert {str(each.device) for each in a.parameters()} == {first}
        assert {str(each.grad.device) for each in b.parameters()} == {second}
        return here([list(a.parameters()), list(b.parameters()), [p.grad for p in a.parameters()]])

    same(run(W, "worker:2"), run("cpu", "cpu"))


def test_seeds_reach_every_worker() -> None:
    for seed in (-1, 2**64 - 1):
        torch.manual_seed(seed)
        right = torch.randn(4)
        torch.manual_seed(seed)
        assert torch.equal(torch.randn(4, device=W).cpu(), right)
    torch.manual_seed(3)
    right = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=W).cpu(), right)
    assert torch.equal(torch.randn(4, device="worker:2").cpu(), right)
    with torch.worker.device(2):
        torch.worker.manual_seed(3)
        assert torch.equal(torch.randn(4, device="worker").cpu(), right)


def saved(what: Any, **kwargs: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file, **kwargs)
    file.seek(0)
    return file


def test_saved_state_is_loaded_by_a_process_without_allranks(tmp_path: Any) -> None:
    net = nn.Linear(2, 2).to(W)
    torch.save({"net": net.state_dict(), "x": torch.arange(3.0, device=W)}, tmp_path / "state.pt")
    program = (
        "import sys, torch\n"
        "state = torch.load(sys.argv[1], map_location='cpu')\n"
        "torch.nn.Linear(2, 2).load_state_dict(state['net'])\n"
        "print(state['x'], state['net']['bias'].device, 'allranks' in sys.modules)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "state.pt"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert said.stdout == "tensor([0., 1., 2.]) cpu False\n", said.stderr


def held(rank: int) -> int:
    return int(torch.worker.memory_stats(rank)["tensors"])


def test_deleted_tensors_are_freed_on_their_workers() -> None:
    gc.collect()
    before = held(1), held(2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 4)).to(W)
    optimiser = torch.optim.Adam(net.parameters())
    counts = []
    for _ in range(4):
        optimiser.zero_grad()
        net(torch.ones(3, 8, device=W))[0].to("worker:2").sum().backward()
        optimiser.step()
        counts.append((held(1), held(2)))
    assert counts[1] == counts[2] == counts[3]
    assert counts[0][0] > before[0]
    ring: list[Any] = [torch.ones(3, device=W)]
    ring.append(ring)
    x = torch.arange(6.0, device=W)
    views = [x[1:], x.view(2, 3), x.detach(), x.data, *x.split(2)]
    with pytest.raises(RuntimeError):
        x.view(7)
    torch.unique(x), x[x > 2], x.tolist(), repr(x), torch.load(saved(x))
    del net, optimiser, ring, x, views
    gc.collect()
    assert (held(1), held(2)) == before


def test_memory_allocated_counts_each_storage_once() -> None:
    gc.collect()
    before = torch.worker.memory_allocated(1)
    x = torch.zeros(1000, device=W)
    y = x[10:]
    assert torch.worker.memory_allocated(1) - before == 4000
    del x
    assert torch.worker.memory_allocated(1) - before == 4000
    del y
    assert torch.worker.memory_allocated(1) == before


def test_threads() -> None:
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        device = f"worker:{number % 2 + 1}"
        x = torch.full((4, 4), float(number), device=device, requires_grad=True)
        for _ in range(30):
            y = (x @ x).sum() / 4
            (gradient,) = torch.autograd.grad(y, x)
            y.item()
        found[number] = here(gradient), y.item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(100)
    for number in range(4):
        x = torch.full((4, 4), float(number), requires_grad=True)
        y = (x @ x).sum() / 4
        same(found[number], (here(torch.autograd.grad(y, x)[0]), y.item()))


def test_data_loaders_with_processes_and_pinned_memory_work() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    for kwargs in ({"pin_memory": True}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        loader = torch.utils.data.DataLoader(data, batch_size=4, **kwargs)
        assert [x.to(W, non_blocking=True).tolist() for (x,) in loader] == [[0, 1, 2, 3], [4, 5]]


def test_error_of_an_operation_is_raised_by_the_use_of_its_result() -> None:
    x = torch.ones(3, device=W)
    x[torch.tensor([0], device=W)].sum()  # the master waits for the first call of a new operation
    bad = x[torch.tensor([7], device=W)]
    worse = bad * 2
    with pytest.raises(RemoteError, match="index 7 is out of bounds") as caught:
        worse.sum().item()
    assert caught.value.line.startswith(f"{__file__}:")
    assert caught.value.operation == "aten::index.Tensor"
    assert (x + 1).tolist() == [2, 2, 2]
    torch.worker.synchronize()  # raises nothing, because the error has been raised already


def test_wrong_shapes_are_refused_immediately_by_the_master() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(2x3 and 2x3\)"):
            torch.ones(2, 3, device=W) @ torch.ones(2, 3, device=W)
        with pytest.raises(RuntimeError, match="size of tensor a"):
            torch.ones(2, device=W) + torch.ones(3, device=W)
