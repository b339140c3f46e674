"""A user program without a launcher: it joins the other ranks twice and prints the placement of the ranks.

With the argument "torch" it reduces a tensor. Without it, the program only joins, which needs no torch and starts
fast.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    timeout_s = float(os.environ.get("MEET_TIMEOUT", "30"))
    if "torch" in argv:
        import torch

        import allranks as dist

        dist.init_process_group(timeout=timeout_s)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sys.stdout.write(f"rank {dist.get_rank()} of {int(tensor)} local {dist.get_node_local_rank()}\n")
        dist.destroy_process_group()
        return
    from allranks._rendezvous.rendezvous import join

    for _ in range(2):
        meeting = join(None, timeout_s=timeout_s)
        hosts = ",".join(member.host for member in meeting.members)
        line = f"rank {meeting.rank} of {meeting.world_size} local {meeting.local_rank} on {hosts}\n"
        meeting.exchange(b"", timeout_s)
        meeting.close()
    sys.stdout.write(line)  # One write call, so that the line is not interleaved with other output.


if __name__ == "__main__":
    main(sys.argv[1:])
