"""set_timeout: calls that begin later have the new timeout."""

import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


@pytest.mark.parametrize("engine", ["native", "tcp", "gloo"])
def test_later_calls_have_the_new_timeout(engine: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([0, 1], backend=engine)
        group.set_timeout(0.2)
        group.set_timeout(60)
        if rank == 0:
            time.sleep(0.5)  # longer than the first value
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        group.set_timeout(0.2)
        if rank == 0:
            with pytest.raises(dist.TimeoutError, match=r"0\.2 s"):
                dist.all_reduce(tensor, group=group)
        dist.barrier()

    run_ranks(2, body)


def test_it_applies_to_messages_and_asynchronous_calls() -> None:
    def body() -> None:
        for call in (
            lambda group: dist.recv(torch.empty(1), 1, group),
            lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(),
        ):
            group = dist.new_group([0, 1])
            dist.set_timeout(0.2, group)
            if dist.get_rank() == 0:
                with pytest.raises(dist.TimeoutError):
                    call(group)
            dist.barrier()

    run_ranks(2, body)


def test_a_value_that_is_no_timeout_is_refused() -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match="timeout must be"):
            dist.set_timeout("long")  # type: ignore[arg-type]
        with pytest.raises(dist.UsageError, match="must be positive"):
            dist.set_timeout(0)

    run_ranks(1, body)
