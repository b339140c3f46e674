"""Functions of torch.distributed: messages, objects, batches, groups, Join."""

from datetime import timedelta

import torch
import torch.distributed as td
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import init_device_mesh

from support.worlds import refusal


def _mine(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(td.get_rank()))


def objects():
    rank, size = td.get_rank(), td.get_world_size()
    everyone = [None] * size
    td.all_gather_object(everyone, {"rank": rank, "long": "x" * (1000 * rank)})
    at_1 = [None] * size if rank == 1 else None
    td.gather_object(("from", rank), at_1, dst=1)
    mine = [None]
    td.scatter_object_list(mine, [{"for": r} for r in range(size)] if rank == 0 else None, src=0)
    said = ["a", {"b": torch.ones(2)}] if rank == 0 else [None, None]
    td.broadcast_object_list(said, src=0)
    if rank == 0:
        td.send_object_list([1, "two"], dst=1)
    got = [None, None]
    if rank == 1:
        td.recv_object_list(got, src=0)
    return everyone, at_1, mine, said, got


def messages():
    rank = td.get_rank()
    other = 1 - rank
    got = [torch.zeros(3) for _ in range(4)]
    batch = [td.P2POp(td.irecv, got[0], other), td.P2POp(td.isend, _mine(3), other)]
    for work in td.batch_isend_irecv(batch):
        work.wait()
    sent = [td.isend(_mine(3) + tag, other, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        td.irecv(got[tag], other, tag=tag).wait()
    for work in sent:
        work.wait()
    source = None
    if rank == 0:
        td.send(_mine(3), 1)
    else:
        source = td.recv(got[3])
    return got, source


def collectives():
    rank, size = td.get_rank(), td.get_world_size()
    results = []
    for op in (td.ReduceOp.SUM, td.ReduceOp.AVG, td.ReduceOp.MIN, td.ReduceOp.MAX, td.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            tensor = _mine(5, 2).to(dtype)
            td.all_reduce(tensor, op)
            results.append(tensor)
    for op in (td.ReduceOp.BAND, td.ReduceOp.BOR, td.ReduceOp.BXOR):
        tensor = torch.tensor([5 + rank, 12])
        td.all_reduce(tensor, op)
        results.append(tensor)
    rows = [torch.empty(3) for _ in range(size)]
    td.all_gather(rows, _mine(3))
    flat = torch.empty(3 * size)
    td.all_gather_into_tensor(flat, _mine(3))
    part = torch.empty(2)
    td.reduce_scatter(part, list(_mine(2 * size).chunk(size)))
    td.reduce_scatter_tensor(half := torch.empty(2), _mine(2 * size))
    sizes = list(range(size))  # rank 0 receives nothing
    for op in (td.ReduceOp.SUM, td.ReduceOp.AVG, td.ReduceOp.MAX):
        for async_op in (False, True):
            own_size = torch.empty(sizes[rank])
            work = td.reduce_scatter(own_size, list(_mine(sum(sizes)).split(sizes)), op, async_op=async_op)
            if async_op:
                work.wait()
            results.append(own_size)
    gathered = [torch.empty(3) for _ in range(size)] if rank == 0 else None
    td.gather(_mine(3), gathered, dst=0)
    td.scatter(mine := torch.empty(2), list(torch.arange(2.0 * size).chunk(size)) if rank == 1 else None, src=1)
    td.all_to_all_single(swapped := torch.empty(3 * size), _mine(3 * size))
    uneven = torch.empty(3 + rank)
    td.all_to_all_single(
        uneven, torch.arange(3.0 if rank == 0 else 4.0), [1 + rank, 2], [1, 2] if rank == 0 else [2, 2]
    )
    td.reduce(total := _mine(4), dst=1)
    td.broadcast(told := _mine(4), src=1)
    work = td.all_reduce(late := _mine(100), async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    doubled = future.wait()
    kept = total if rank == 1 else None  # undefined on the other ranks
    return results, rows, flat, part, half, gathered, mine, swapped, uneven, kept, told, late, doubled


def coalesced():
    tensors = [_mine(3), _mine(2, 2)]
    with td._coalescing_manager():
        for tensor in tensors:
            td.all_reduce(tensor)
    size = td.get_world_size()
    outputs = [torch.empty(3 * size), torch.empty(4 * size)]
    with td._coalescing_manager(async_ops=True) as together:
        for output, tensor in zip(outputs, (_mine(3), _mine(4)), strict=True):
            td.all_gather_into_tensor(output, tensor)
    together.wait()
    halves = [torch.empty(2), torch.empty(3)]
    with td._coalescing_manager():
        for half in halves:
            td.reduce_scatter_tensor(half, _mine(half.numel() * size))
    td.all_reduce_coalesced(more := [_mine(3), _mine(2)])
    return tensors, outputs, halves, more


def groups():
    rank = td.get_rank()
    seen = []
    for group in (
        td.new_group([1, 0]),
        td.new_group(timeout=timedelta(seconds=20), group_desc="mine"),
        td.new_group([rank], use_local_synchronization=True),
        init_device_mesh("cpu", (2,), mesh_dim_names=("x",)).get_group("x"),
    ):
        tensor = torch.tensor([2.0**rank])
        td.all_reduce(tensor, group=group)
        td.broadcast(root := torch.tensor([rank]), group_src=0, group=group)
        td.barrier(group)
        seen.append((tensor, root, td.get_rank(group), td.get_process_group_ranks(group), group.group_desc))
        seen.append((group.size(), group.rank(), td.get_backend(group) == td.get_backend(), str(group.group_name)))
    td.destroy_process_group(group)
    return seen


def barriers():
    td.barrier()
    td.barrier(async_op=True).wait(timedelta(seconds=10))
    td.monitored_barrier(timeout=timedelta(seconds=10))
    td.monitored_barrier(wait_all_ranks=True)
    return td.is_torchelastic_launched()


def refusals():
    """Return the errors that torch's Python code raises before it calls the group of allranks."""
    rank = td.get_rank()
    return [
        refusal(lambda: td.send(torch.ones(1), dst=rank)),
        refusal(lambda: td.new_group([0, 7])),
        refusal(lambda: td.all_reduce("no tensor")),
        refusal(lambda: td.init_process_group("gloo")),
    ]


class _Counter(Joinable):
    """Joinable that counts the ranks that still have inputs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def step(self):
        Join.notify_join_context(self)
        tensor = torch.ones(1)
        td.all_reduce(tensor)
        self.seen.append(tensor.item())

    def join_hook(self, **_):
        class Hook(JoinHook):
            def main_hook(self):
                td.all_reduce(torch.zeros(1))

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return td.group.WORLD


def join():
    counter = _Counter()
    with Join([counter]):
        for _ in range(3 + 2 * td.get_rank()):
            counter.step()
    return counter.seen


def profiled():
    with torch.profiler.profile() as profile:
        td.all_reduce(torch.ones(3))
        td.barrier()
    names = [event.key.partition(":")[2] for event in profile.key_averages()]
    return "all_reduce" in names
