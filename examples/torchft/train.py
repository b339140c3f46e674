"""torchft on a group of allranks: replicas that train together, each of which can be killed and restarted.

A lighthouse, and three replicas of one process each:

    pip install torchft-nightly
    torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for replica in 0 1 2; do python examples/torchft/train.py --replica $replica & done

torchft's Manager accepts the group (``replicated_group``) instead of its own ProcessGroupGloo. It reconfigures the
group for each quorum, and transfers the state to joining replicas.
"""

import argparse
import hashlib
import os
import signal
from datetime import timedelta

import torch
from torch import distributed as c10d
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import allranks as dist

TIMEOUT = timedelta(seconds=20)


def replicated_group():
    """Return a group of this process alone. The Manager reconfigures it with the replicas of each quorum."""
    dist.init_process_group(timeout=TIMEOUT)  # the world is this replica alone: one process here
    return dist.torch_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replica", type=int, required=True, help="number of this replica")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="exit after this number of steps with all replicas")
    parser.add_argument("--die-after", type=int, help="kill -9 this process after this number of steps")
    parser.add_argument("--gloo", action="store_true", help="use torchft's own ProcessGroupGloo, for comparison")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.replica)  # a joining replica receives the weights of the other replicas
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    whole = {"steps": 0}  # steps in which all replicas took part
    parts = {"net": net, "adam": adam}

    def load(state):
        whole.update(state["whole"])
        for name, part in parts.items():
            part.load_state_dict(state[name])

    store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT) if options.gloo else replicated_group(),
        state_dict=lambda: {"whole": dict(whole), **{name: part.state_dict() for name, part in parts.items()}},
        load_state_dict=load,
        min_replica_size=2,
        replica_id=f"replica_{options.replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adam)
    while whole["steps"] < options.steps:
        if whole["steps"] == options.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        before = manager.current_step()
        batch = torch.randn(16, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), (batch.sum(1) > 0).long()).backward()
        optimizer.step()
        if manager.current_step() > before:
            print(f"step {manager.current_step()} with {manager.num_participants()} replicas", flush=True)
            whole["steps"] += manager.num_participants() == options.replicas
    manager.shutdown()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
