"""Rank that is forked at random moments while it works. Its children execute random actions.

Arguments: ``own`` (allranks) or ``plugin`` (torch.distributed on allranks), the number of children, a seed. The program
checks the results of the parent in every step, and the exit status of each child. A child that hangs prints its stack
and is killed by SIGALRM.
"""

import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import allranks

MODE, CHILDREN, SEED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if MODE == "own":
    import allranks as dist
else:
    import torch.distributed as dist

LIMIT_S = 100
LARGE = 300_000
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork


TENSOR = torch.ones(2)


def warm_up() -> None:
    """Run the one-time initialization of torch in this thread. A fork could find its locks held."""
    assert (torch.ones(10) == 1).sum().item() == 10


def sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return {each for each in found if each.startswith("socket:")}


class Children:
    """The forked children and their exit statuses."""

    def __init__(self, things: dict[str, object], seed: int, before: set[str]) -> None:
        self.left = CHILDREN
        self.running: dict[int, str] = {}
        self.problems: list[str] = []
        self.things = things
        self.random = random.Random(seed)
        self.before = before
        self.lock = threading.Lock()

    def fork(self, in_main: bool) -> None:
        with self.lock:
            if self.left == 0:
                return
            self.left -= 1
            seed = self.random.random()
        chosen = random.Random(seed)
        actions = sorted(chosen.sample(ACTIONS, chosen.randrange(1, 4)), key=lambda action: action is make_a_world)
        end = chosen.choice(ENDS) if in_main and chosen.random() < 0.03 else leave
        told = f"{[each.__name__ for each in actions]}, {end.__name__}"
        if (pid := os.fork()) == 0:
            faulthandler.register(signal.SIGALRM, chain=True)
            faulthandler.enable()
            signal.alarm(LIMIT_S)
            try:
                for action in actions:
                    action(self)
            except BaseException:  # noqa: BLE001 - the exit status reports any error to the parent
                sys.excepthook(*sys.exc_info())
                os._exit(9)
            end()
        with self.lock:
            self.running[pid] = told

    def reap(self, everybody: bool = False) -> None:
        with self.lock:
            running = dict(self.running)
        for pid, told in running.items():
            ended, status = os.waitpid(pid, 0 if everybody else os.WNOHANG)
            if ended:
                with self.lock:
                    del self.running[pid]
                if status != (256 if "fail" in told else 0):
                    self.problems.append(f"a child ended with status {status}: {told}")
        assert not self.problems, self.problems

    def keep_forking(self) -> None:
        warm_up()
        pauses = random.Random(self.random.random())
        while self.left:
            time.sleep(pauses.random() * 0.01)
            if len(self.running) < 8:
                self.fork(in_main=False)


# Actions of children.


def call(children: Children) -> None:
    for name, group in [*children.things.items(), ("world", None)]:
        if name.startswith("group") or group is None:
            refused(lambda group=group: dist.all_reduce(TENSOR, group=group))
            refused(lambda group=group: dist.isend(TENSOR, 1 - dist.get_rank(), group=group))
    assert dist.is_initialized()
    assert dist.get_world_size() == 2


def wait(children: Children) -> None:
    for name, work in children.things.items():
        if name.startswith("pending"):
            refused(work.wait)


def refused(function) -> None:
    with pytest.raises(allranks.NotInitializedError, match="A forked child can neither"):
        function()


def collect(children: Children) -> None:
    children.things.clear()
    gc.collect()


def start_threads(children: Children) -> None:
    threads = [threading.Thread(target=call, args=(children,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fork_again(children: Children) -> None:
    if (pid := os.fork()) == 0:
        signal.alarm(LIMIT_S)
        collect(children)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def run_program(children: Children) -> None:
    subprocess.run(["true"], check=True)


def look_at_sockets(children: Children) -> None:
    if MODE == "own":  # the plugin uses the store of torch, which keeps its sockets
        left = sockets() - children.before
        assert not left, left
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "memfd:allranks" in line]
    ranges = [line.split()[0].split("-") for line in lines]
    sizes = {int(end, 16) - int(begin, 16) for begin, end in ranges}
    assert sizes <= {-(-4 * LARGE // 4096) * 4096}, sizes  # only shared blocks may remain mapped


def make_a_world(children: Children) -> None:
    if MODE == "own":
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.destroy_process_group()
        dist.init_process_group("allranks", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait()
    assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].tolist() == [1, 1, 1]
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


def read_block(children: Children) -> None:
    block = children.things.get("block")
    assert block is None or block[0].item() in (2.5, 5)


ACTIONS = [call, wait, collect, start_threads, fork_again, run_program, look_at_sockets, make_a_world, read_block]


def leave() -> None:
    os._exit(0)


def exit_in_order() -> None:
    sys.exit(0)


def fail() -> None:
    sys.excepthook = lambda *_: None
    raise ValueError("of a child's")


ENDS = [exit_in_order, fail]


# Steps of parents: the same on both ranks, in the same order.


def blocking(choice: random.Random, things: dict, fork) -> None:
    tensor = torch.full((choice.choice([1, 1000, LARGE]),), 1.0 + dist.get_rank())
    dist.all_reduce(tensor)
    assert (tensor == 3).all()


def asynchronous(choice: random.Random, things: dict, fork) -> None:
    other = 1 - dist.get_rank()
    sizes = [choice.choice([1, 1000, LARGE]) for _ in range(3)]
    tensors = [torch.full((size,), 1.0 + dist.get_rank()) for size in sizes]
    got = torch.zeros(sizes[0])
    pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    sent = torch.full((sizes[0],), 10.0 + dist.get_rank())
    pending += [dist.irecv(got, other), dist.isend(sent, other)]
    things |= {f"pending {i}": work for i, work in enumerate(pending)}
    fork()
    for i, work in enumerate(pending):
        things.pop(f"pending {i}")
        work.wait()
    assert (got == 10 + other).all()
    assert all((tensor == 3).all() for tensor in tensors)


def futures(choice: random.Random, things: dict, fork) -> None:
    tensors = [torch.full((1000,), 1.0 + dist.get_rank()) for _ in range(3)]
    made = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    fork()
    for future in made:
        assert (future.wait()[0] == 3).all()


def groups(choice: random.Random, things: dict, fork) -> None:
    group = things["group"] = dist.new_group([0, 1])
    tensor = torch.ones(1000)
    work = things["pending"] = dist.all_reduce(tensor, group=group, async_op=True)
    fork()
    del things["pending"]
    work.wait()
    assert (tensor == 2).all()
    if choice.random() < 0.9:
        dist.destroy_process_group(things.pop("group"))
    fork()
    things.pop("group", None)


def messages(choice: random.Random, things: dict, fork) -> None:
    tensor = torch.full((choice.choice([1, 4 * LARGE]),), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        assert (tensor == 0).all()


def shared_blocks(choice: random.Random, things: dict, fork) -> None:
    if MODE == "own":
        block = things["block"] = dist.empty_shared(LARGE).fill_(2.5)
        dist.all_reduce(block)
        fork()
        del things["block"]


STEPS = [blocking, asynchronous, futures, groups, messages, shared_blocks]


def main() -> None:
    before = sockets()
    dist.init_process_group("native" if MODE == "own" else "allranks")
    rank = dist.get_rank()
    warm_up()
    things: dict[str, object] = {}
    children = Children(things, 2 * SEED + rank, before)
    gc.collect()
    gc.freeze()  # children collect only objects that are created later
    forking = threading.Thread(target=children.keep_forking)
    forking.start()
    choice, mine = random.Random(SEED), random.Random(SEED + 10 * rank)
    left = torch.ones(1)
    steps = 0
    while left.item():
        choice.choice(STEPS)(choice, things, lambda: mine.random() < 0.3 and children.fork(in_main=True))
        children.reap()
        left.fill_(children.left + len(children.running))
        dist.all_reduce(left)
        steps += 1
    forking.join()
    children.reap(everybody=True)
    dist.barrier()
    dist.destroy_process_group()
    print(f"{CHILDREN} children, {steps} steps")


if __name__ == "__main__":
    main()
