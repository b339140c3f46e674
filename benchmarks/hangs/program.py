"""A program on torch.distributed that hangs in one of 25 ways: ``program.py KIND BACKEND``.

The kinds come from public reports of users. The line that a report must name has the comment ``culprit: RANK``, and the
kind is the function that contains it. Three ranks; rank 1 is the culprit unless the comment names another one.
"""

from __future__ import annotations

import fcntl
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOREVER_S = 60
rank = int(os.environ["RANK"])
x = torch.ones(8)


def mark() -> None:
    """Report when the hang begins."""
    print(f"hangs from {time.time()}", flush=True)


def step() -> None:
    """What all ranks do in every step."""
    dist.all_reduce(x)


def evaluation_on_one_rank() -> None:
    if rank == 1:
        time.sleep(FOREVER_S)  # culprit: 1
    step()


def python_loop() -> None:
    until = time.monotonic() + FOREVER_S
    while rank == 1 and time.monotonic() < until:  # culprit: 1
        pass
    step()


def lock() -> None:
    if rank == 1:
        mutex = threading.Lock()
        mutex.acquire()
        mutex.acquire(timeout=FOREVER_S)  # culprit: 1
    step()


def empty_queue() -> None:
    if rank == 1:
        queue.Queue().get(timeout=FOREVER_S)  # culprit: 1
    step()


def thread_join() -> None:
    if rank == 1:
        thread = threading.Thread(target=time.sleep, args=(FOREVER_S,), daemon=True)
        thread.start()
        thread.join()  # culprit: 1
    step()


def pipe_read() -> None:
    if rank == 1:
        read, _write = os.pipe()
        os.read(read, 1)  # culprit: 1
    step()


def file_lock() -> None:
    if rank == 1:
        path = tempfile.mkstemp()[1]
        with open(path) as held, open(path) as wanted:
            fcntl.flock(held, fcntl.LOCK_EX)
            fcntl.flock(wanted, fcntl.LOCK_EX)  # culprit: 1
    step()


def child_process() -> None:
    if rank == 1:
        subprocess.run(["sleep", str(FOREVER_S)])  # culprit: 1
    step()


def network() -> None:
    if rank == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        client.recv(1)  # culprit: 1
    step()


class _Slow(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if rank == 1 and index >= 4:
            time.sleep(FOREVER_S)
        return torch.ones(8)


def data_loader_worker() -> None:
    for _ in DataLoader(_Slow(), batch_size=2, num_workers=1):  # culprit: 1
        step()


def stopped() -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # culprit: 1
    step()


def swallowed_exception() -> None:
    for number in range(6):
        try:
            if rank == 1 and number == 3:
                raise MemoryError
            step()
        except MemoryError:
            continue
    dist.barrier()  # culprit: 1


def holds_the_gil() -> None:
    if rank == 1:
        re.match("(a+)+$", "a" * 64 + "b")  # culprit: 1
    step()


def fewer_batches() -> None:
    for _ in range(5 if rank == 1 else 6):
        step()
    dist.barrier()  # culprit: 1


def extra_collective() -> None:
    if rank == 1:
        dist.broadcast(torch.ones(4), 1)  # culprit: 1
    step()


def object_on_one_rank() -> None:
    if rank == 1:
        dist.all_gather_object([None] * 3, "metrics")  # culprit: 1
    step()
    dist.barrier()


def other_order() -> None:
    if rank == 1:
        dist.barrier()  # culprit: 1
        step()
    else:
        step()
        dist.barrier()


def other_tag() -> None:
    if rank == 1:
        dist.send(x, 0, tag=1)
    if rank == 0:
        dist.recv(x, 1, tag=2)  # culprit: 0
    step()


def missing_send() -> None:
    if rank == 0:
        dist.recv(x, 1)
    if rank == 1:
        time.sleep(FOREVER_S)  # culprit: 1
    step()


def missing_isend() -> None:
    if rank == 0:
        request = dist.irecv(x, 1)
        request.wait()
    if rank == 1:
        time.sleep(FOREVER_S)  # culprit: 1
    step()


def circle_of_recvs() -> None:
    dist.recv(x, (rank + 1) % 3)  # culprit: 1


def chain() -> None:
    if rank == 0:
        dist.recv(x, 2)
    if rank == 2:
        dist.recv(x, 1)
    if rank == 1:
        time.sleep(FOREVER_S)  # culprit: 1
    step()


def group_on_some_ranks() -> None:
    if rank != 1:
        dist.new_group([0, 1, 2])
    else:
        time.sleep(FOREVER_S)  # culprit: 1


def groups_in_other_order() -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    if rank == 1:
        dist.all_reduce(x, group=second)  # culprit: 1
        dist.all_reduce(x, group=first)
    else:
        dist.all_reduce(x, group=first)
        dist.all_reduce(x, group=second)


def skipped_backward() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for number in range(4):
        loss = model(x).sum()
        if number == 3:
            mark()
        if rank == 1 and number == 3:
            time.sleep(FOREVER_S)  # culprit: 1
        loss.backward()


def not_started() -> None:
    """Handled before `init_process_group`."""


KINDS = [
    evaluation_on_one_rank, python_loop, lock, empty_queue, thread_join, pipe_read, file_lock, child_process, network,
    data_loader_worker, stopped, swallowed_exception, holds_the_gil, fewer_batches, extra_collective,
    object_on_one_rank, other_order, other_tag, missing_send, missing_isend, circle_of_recvs, chain,
    group_on_some_ranks, groups_in_other_order, skipped_backward, not_started,
]  # fmt: skip


def main() -> None:
    kind, backend = sys.argv[1:3]
    if kind == "not_started":
        mark()
        if rank == 1:
            time.sleep(FOREVER_S)  # culprit of not_started: 1
    dist.init_process_group(backend)
    for _ in range(3):
        step()
    mark()
    next(each for each in KINDS if each.__name__ == kind)()
    time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
