"""Results and futures of asynchronous calls equal those of torch's gloo, for functions of torch and of allranks."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks


def verbs(package: Any, rank: int, size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    def mine(*shape: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * rank

    def room(*shape: int) -> list[torch.Tensor]:
        return [torch.zeros(shape) for _ in range(size)]

    options = {"async_op": True}
    given, pieces = mine(2), [mine(2) + i for i in range(size)]
    uneven = list(range(1, size + 1))
    yield "all_reduce", lambda: package.all_reduce(mine(2), **options)
    yield "broadcast", lambda: package.broadcast(mine(2), 1, **options)
    yield "reduce", lambda: package.reduce(mine(2), 1, **options)
    yield "all_gather", lambda: package.all_gather(room(2), given, **options)
    yield "all_gather_single", lambda: package.all_gather_single(torch.zeros(2 * size), given, **options)
    yield "gather", lambda: package.gather(given, room(2) if rank == 1 else None, 1, **options)
    yield "scatter", lambda: package.scatter(torch.zeros(2), pieces if rank == 1 else None, 1, **options)
    yield "all_to_all", lambda: package.all_to_all(room(2), pieces, **options)
    yield "all_to_all_single", lambda: package.all_to_all_single(torch.zeros(size), mine(size), **options)
    yield (
        "all_to_all_single, uneven",
        lambda: package.all_to_all_single(
            torch.zeros(size * (rank + 1)), mine(sum(uneven)), [rank + 1] * size, uneven, **options
        ),
    )
    yield "barrier", lambda: package.barrier(**options)


def plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    assert isinstance(result, list), type(result)
    return [plain(each) for each in result]


def results(package: Any) -> dict[str, Any]:
    found = {}
    for name, call in verbs(package, package.get_rank(), package.get_world_size()):
        asked, waited, late = call(), call(), call()
        future = asked.get_future()
        waited.wait()
        found[name, "result"] = plain(waited.result())
        found[name, "future"] = plain(future.wait())
        late.wait()
        found[name, "future of a complete call"] = plain(late.get_future().wait())
    return found


def test_results_and_futures_equal_those_of_gloo(tmp_path: Path) -> None:
    def body() -> None:
        warnings.simplefilter("ignore")  # torch warns about Work.result
        on = {}
        for backend in ("gloo", "allranks"):
            meet = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
            td.init_process_group(backend, init_method=f"file://{tmp_path}/{backend}", **meet)
            on[backend] = results(td)
            td.destroy_process_group()
        for engine in ("native", "gloo"):
            dist.init_process_group(engine, timeout=30)
            on[f"ours, {engine}"] = results(dist)
            tensors = [torch.ones(2), torch.ones(3)]
            assert dist.all_reduce_coalesced(tensors, async_op=True).get_future().wait() == tensors
            out = torch.zeros(2)
            work = dist.reduce_scatter_single(out, torch.ones(2 * dist.get_world_size()), async_op=True)
            assert work.get_future().wait()[0] is out
            dist.destroy_process_group()
        for name, found in on.items():
            for (verb, how), result in found.items():
                expected = on["gloo"][verb, how]
                if verb == "reduce" and meet["rank"] != 1:
                    assert len(expected) == 1  # gloo leaves intermediate sums in it
                    expected = on["allranks"]["reduce", "result"]
                    assert expected == [[10.0 * meet["rank"], 10.0 * meet["rank"] + 1]]
                assert result == expected or name == "gloo", (name, verb, how)

    run_ranks(3, body, init=False)
