"""Test of the verbs provider: runs in the virtual machine of run.py, which has the device rxe0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

FABRIC = "verbs"


def on_rank() -> None:
    import logging

    import torch

    import allranks as dist

    texts: list[str] = []
    log = logging.getLogger("allranks")
    log.setLevel(logging.INFO)
    log.addHandler(type("Log", (logging.Handler,), {"emit": lambda self, record: texts.append(record.getMessage())})())
    dist.init_process_group("tcp", timeout=120)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert any(f"fabric '{FABRIC}' connects the hosts" in text for text in texts), texts
    for count in (1, 1_000, 300_000):
        tensor = torch.arange(count, dtype=torch.float64) + rank
        dist.all_reduce(tensor)
        assert torch.equal(tensor, size * torch.arange(count, dtype=torch.float64) + sum(range(size)))
        sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
        received = torch.empty(count)
        dist.recv(received, (rank - 1) % size)
        sent.wait()
        assert (received == (rank - 1) % size).all()
    print(f"rank {rank}: sums and messages are right", flush=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(300_000))
    except dist.PeerLostError as error:
        if error.rank != 1:
            raise
        print(f"rank {rank}: the killed rank was reported after {time.monotonic() - began:.2f} s", flush=True)
        os._exit(0)
    raise AssertionError("the loss of rank 1 was not reported")


def main() -> None:
    environ = {
        **os.environ,
        "ALLRANKS_FABRIC": FABRIC,
        "ALLRANKS_SECRET": "a secret of the test in the guest",
        "FI_UNIVERSE_SIZE": "64",  # rdma_rxe has completion queues of at most 32,767 entries (docs/engines.md)
    }
    # The automatic choice finds the device, too.
    subprocess.run([sys.executable, "-m", "allranks", "doctor"], env=environ | {"ALLRANKS_FABRIC": "auto"}, check=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank"],
            env=environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.2.15", "MASTER_PORT": "29517"},
        )
        for rank in range(2)
    ]
    codes = [each.wait(600) for each in ranks]
    assert codes == [0, -signal.SIGKILL], codes


if __name__ == "__main__":
    on_rank() if "--rank" in sys.argv else main()
