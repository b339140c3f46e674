"""Distributed checkpoints of torch: saves, asynchronous saves, loads into other layouts and on more ranks."""

import contextlib
import tempfile

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


@contextlib.contextmanager
def _folder():
    """Yield a temporary folder that all ranks share."""
    with tempfile.TemporaryDirectory(prefix="allranks-test-") as folder:
        said = [folder]
        td.broadcast_object_list(said, src=0)
        yield said[0]
        td.barrier()


def _trained(seed, mesh):
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 6) * seed).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _full(model, optimizer):
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    return [p.full_tensor().detach().clone() for p in model.parameters()], moments


def saved_and_loaded():
    mesh = init_device_mesh("cpu", (td.get_world_size(),))
    results = []
    with _folder() as folder:
        saved = _trained(1, mesh)
        model_state, optimizer_state = get_state_dict(*saved)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/now")
        future = dcp.async_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/later")
        future.result(60)
        for name in ("now", "later"):
            other = _trained(2, mesh)
            model_state, optimizer_state = get_state_dict(*other)
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
            set_state_dict(*other, model_state_dict=model_state, optim_state_dict=optimizer_state)
            results.append(_full(*other))
        assert all(torch.equal(a, b) for a, b in zip(results[0][0], _full(*saved)[0], strict=True))
    return results


def whole_states_from_rank_0():
    mesh = init_device_mesh("cpu", (td.get_world_size(),))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(*_trained(1, mesh), options=whole)
    other = _trained(2, mesh)
    from_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other[0], model_state, options=from_0)
    set_optimizer_state_dict(*other, optim_state_dict=optimizer_state, options=from_0)
    return _full(*other)


def loaded_in_another_layout_by_more_ranks():
    """Save on two ranks of the world; load on all ranks."""
    two = td.new_group([0, 1])
    all_of_them = init_device_mesh("cpu", (td.get_world_size(),))
    whole = torch.arange(91.0).reshape(13, 7)
    with _folder() as folder:
        if td.get_rank() < 2:
            mesh = DeviceMesh.from_group(two, "cpu")
            state = {"tensor": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}
            dcp.save(state, checkpoint_id=folder, process_group=two)
        td.barrier()
        state = {"tensor": distribute_tensor(torch.zeros(13, 7), all_of_them, [Shard(1)]), "step": 0}
        dcp.load(state, checkpoint_id=folder)
        assert torch.equal(state["tensor"].full_tensor(), whole)
    return state["tensor"].to_local(), state["step"]
