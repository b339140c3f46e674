"""Errors name the call site in the user's program, regardless of the library frames in between."""

import sysconfig
import threading
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch

import allranks
from allranks import _core
from allranks._call import callsite
from allranks.testing import run_ranks


def compiled(filename: str, source: str) -> dict[str, Any]:
    """Return the names that ``source`` defines, compiled as if ``source`` were the contents of ``filename``."""
    names: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), names)
    return names


def through(filename: str, ask: Callable[..., Any], *args: Any) -> Any:
    """Call ``ask`` from the second line of a function in ``filename`` and return its result."""
    return compiled(filename, "def pass_on(ask, args):\n    return ask(*args)\n")["pass_on"](ask, args)


def asked(outer: str, inner: str) -> str:
    """Return the call site reported for a call in file ``inner``, which file ``outer`` has called."""
    innermost = compiled(inner, "def pass_on(ask):\n    return ask()\n")["pass_on"]
    return through(outer, innermost, callsite.site)


def test_call_site_skips_frames_of_torch_and_the_standard_library() -> None:
    library = sysconfig.get_path("stdlib")
    for inner in (f"{torch.__path__[0]}/nn/modules/module.py", f"{library}/contextlib.py", "<frozen runpy>"):
        assert asked("/home/me/train.py", inner) == "/home/me/train.py:2"
    for ours in (f"{library}/site-packages/lightning/loop.py", "/home/me/torch/nn.py", "<string>", "train.py"):
        assert through(ours, callsite.site) == f"{ours}:2"


def test_call_site_without_user_frame_and_with_undecodable_file_name() -> None:
    said: list[str] = []
    # A thread that allranks has started: its stack has no frame of the user's program.
    body = compiled(callsite.__file__, "def body(said, ask):\n    said.extend(one() for one in ask)\n")["body"]
    thread = threading.Thread(target=body, args=(said, (callsite.site, callsite.where)))
    thread.start()
    thread.join()
    assert said == ["(no call site)"] * 2
    for ask in (callsite.site, callsite.where):
        assert through("/home/me/caf\udce9.py", ask) == "/home/me/caf?.py:2"
    assert through("/home/me/caf\udce9.py", callsite.stack_hash) != through("/home/me/cafe.py", callsite.stack_hash)


def test_call_sites_of_asynchronous_calls_are_cached_by_instruction() -> None:
    torchs = f"{torch.__path__[0]}/distributed/verbs.py"
    verb = compiled(torchs, "def verb(ask):\n    return ask()\n")["verb"]
    logged = compiled(torchs, "def logged(verb, ask):\n    return verb(ask)\n")["logged"]
    sites = _core.Sites(callsite.line_of, callsite.NOWHERE, [verb.__code__])
    for _ in range(2):
        kept, looked_up = sites.behind(0), callsite.site()
        assert kept == looked_up != callsite.NOWHERE
        # One line has two calls, and another file has the same instructions.
        for name in ("/home/me/a.py", "/home/me/b.py"):
            text = "def pass_on(ask, args):\n    x = 1\n    return (ask(*args),\n            ask(*args))\n"
            assert compiled(name, text)["pass_on"](sites.behind, (0,)) == (f"{name}:3", f"{name}:4")
        assert through("/home/me/a.py", logged, verb, lambda: sites.behind(1)) == "/home/me/a.py:2"
        # No stack is this deep.
        assert sites.behind(100_000) == callsite.NOWHERE
    # The frames of a passed function and of its wrapper are skipped.
    outer = compiled("/home/me/c.py", "def verb(ask):\n    return ask()\n")["verb"]
    wrapper = compiled("/home/me/d.py", "def wrapper(verb, ask):\n    return verb(ask)\n")["wrapper"]
    passing = _core.Sites(callsite.line_of, callsite.NOWHERE, [outer.__code__])
    assert through("/home/me/e.py", wrapper, outer, lambda: passing.behind(1)) == "/home/me/e.py:2"


class Summing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_mismatch_error_names_the_line_that_called_backward() -> None:
    def body() -> str:
        model = allranks.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        loss = model(torch.ones(1, 3)).sum()
        step = compiled("/home/me/train.py", "def step(loss):\n    loss.backward()\n")["step"]
        with pytest.raises(allranks.MismatchError) as caught:
            step(loss) if allranks.get_rank() == 0 else allranks.all_reduce(torch.ones(1))
        return str(caught.value)

    for said in run_ranks(2, body):
        assert "rank 0 at /home/me/train.py:2" in said
        assert f"rank 1 at {__file__}:" in said


def test_call_site_skips_torch_modules_and_backward() -> None:
    found: list[str] = []
    here = compiled(callsite.__file__, "def hook(found, ask):\n    return lambda *_: found.append(ask()) or None\n")
    hook = here["hook"](found, callsite.where)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    model = Summing()
    model.register_forward_pre_hook(hook)
    program = compiled("/home/me/train.py", "def step(model, x):\n    y = model(x)\n    y.sum().backward()\n")
    program["step"](model, x)
    assert found == ["/home/me/train.py:2", "/home/me/train.py:3"]


def test_call_site_lookup_takes_less_than_10_us() -> None:
    """Looking up the call site takes less than 10 us.

    Every asynchronous call does this lookup. The limit is 20 times the usual cost, for busy machines.
    """
    assert min(timeit.repeat(callsite.site, number=1000, repeat=20)) / 1000 < 10e-6
