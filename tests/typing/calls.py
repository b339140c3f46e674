"""Types that calls return, for a type checker.

A comment names the errors of a line. Each checker must report one of them in that line.
"""

from typing import assert_type

import torch

import allranks as dist
import allranks.multiprocessing as mp
from allranks import ProcessGroup, Work


def collectives(asynchronous: bool) -> None:
    t = torch.ones(4)
    rows = [torch.ones(4), torch.ones(4)]
    assert_type(dist.all_reduce(t), None)
    assert_type(dist.all_reduce(t, dist.ReduceOp.MAX, None, False), None)
    assert_type(dist.all_reduce(t, async_op=True), Work)
    assert_type(dist.all_reduce(t, async_op=asynchronous), Work | None)
    assert_type(dist.all_reduce(t, dist.ReduceOp.MAX, None, True), Work)
    assert_type(dist.all_gather(rows, t, None, True), Work)
    dist.all_reduce(t, async_op=True).wait()
    dist.all_reduce(t).wait()  # expect: attr-defined reportAttributeAccessIssue
    dist.all_reduce(t, op=dist.premul_sum(0.5))
    dist.all_reduce(t, op=dist.reduce_op.SUM)
    dist.all_reduce(t, op="sum")  # expect: call-overload reportCallIssue reportArgumentType
    works = [
        dist.reduce(t, 0, async_op=True), dist.broadcast(t, src=0, async_op=True),
        dist.all_gather(rows, t, async_op=True), dist.all_gather_into_tensor(torch.ones(8), t, async_op=True),
        dist.gather(t, rows if dist.get_rank() == 0 else None, dst=0, async_op=True),
        dist.scatter(t, None, src=0, async_op=True), dist.reduce_scatter(t, rows, async_op=True),
        dist.reduce_scatter_tensor(t, torch.ones(8), async_op=True), dist.all_to_all(rows, rows, async_op=True),
        dist.all_to_all_single(t, t, async_op=True), dist.barrier(async_op=True),
        dist.all_reduce_coalesced(rows, async_op=True), dist.isend(t, 1), dist.irecv(t, 1),
    ]  # fmt: skip
    assert_type(works, list[Work])
    for work in works:
        work.wait()
    later = [
        dist.all_reduce_multigpu(rows, async_op=True), dist.reduce_multigpu(rows, 0, async_op=True),
        dist.broadcast_multigpu(rows, 0, None, True), dist.all_gather_multigpu([rows], [t], async_op=True),
        dist.reduce_scatter_multigpu([t], [rows], async_op=True),
    ]  # fmt: skip
    assert_type(later, list[Work])
    assert_type(dist.all_reduce_multigpu(rows), None)
    assert_type(dist.recv(t), int)
    assert_type(dist.barrier(), None)


def groups() -> None:
    pair = dist.new_group([0, 1])
    assert_type(pair, ProcessGroup)
    if pair != dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1), group=pair, async_op=True).wait()
    mine, every = dist.new_subgroups(2)
    assert_type(mine, ProcessGroup)
    assert_type(every, list[ProcessGroup])
    part = dist.split_group(split_ranks=[[0], [1]])
    assert_type(part, ProcessGroup | None)
    assert_type(dist.get_rank(pair), int)
    world = dist.group.WORLD
    assert_type(world, ProcessGroup | None)


def methods(pair: ProcessGroup, asynchronous: bool) -> None:
    t = torch.ones(4)
    rows = [torch.ones(4), torch.ones(4)]
    assert_type(pair.all_reduce(t), None)
    assert_type(pair.all_reduce(t, dist.ReduceOp.MAX, True), Work)
    assert_type(pair.all_reduce(t, async_op=asynchronous), Work | None)
    pair.barrier().wait()  # expect: attr-defined reportAttributeAccessIssue
    works = [
        pair.reduce(t, 0, async_op=True), pair.broadcast(t, 0, True), pair.all_gather(rows, t, async_op=True),
        pair.gather(t, rows, 0, async_op=True), pair.scatter(t, None, 0, async_op=True),
        pair.reduce_scatter(t, rows, async_op=True), pair.all_to_all(rows, rows, async_op=True),
        pair.all_to_all_single(t, t, async_op=True), pair.barrier(True), pair.isend(t, 1),
    ]  # fmt: skip
    assert_type(works, list[Work])


def typos() -> None:
    dist.all_reduze(torch.ones(1))  # expect: attr-defined reportAttributeAccessIssue
    dist.init_process_grup()  # expect: attr-defined reportAttributeAccessIssue
    mp.Process(target=typos).start()
    mp.set_start_method("spawn")
    mp.get_context("spawn").Queue()
    mp.spawn(typos, nprocs=2)
    mp.spwan(typos)  # expect: attr-defined reportAttributeAccessIssue


def catches() -> None:
    try:
        dist.init_process_group("gloo", timeout=30)
    except dist.PeerLostError as error:
        assert_type(error.rank, int)
    except (dist.TimeoutError, dist.ConfigError, ValueError):
        dist.destroy_process_group()
    assert_type(dist.run(sum, args=([1, 2],), n=2), list[int])
