"""torch's sharded training: fully_shard (FSDP2), FullyShardedDataParallel (FSDP1), and their state dicts."""

import copy
import functools
import itertools

import torch
import torch.distributed as td
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor


def _model():
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Linear(9, 9) if i % 2 == 0 else nn.Tanh() for i in range(5)], nn.LayerNorm(9))


def _batch(step):
    generator = torch.Generator().manual_seed(100 * step + td.get_rank())
    return torch.randn(5, 9, generator=generator)


def _here(tensors):
    return [t.to_local().clone() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]


def _trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = model(_batch(step)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, _here(model.parameters())


def _sharded(**options):
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def fully_sharded():
    return [_trained(_sharded(reshard_after_forward=after)) for after in (True, False)]


def mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _trained(_sharded(mp_policy=policy))


def cpu_offload():
    return _trained(_sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def accumulated_and_clipped():
    model = _sharded()
    norms = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(_batch(step)).pow(2).sum().backward()
        if step % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            norms += _here(p.grad for p in model.parameters())
            model.zero_grad()
    return norms


def saved_and_loaded():
    model = _sharded()
    _trained(model, 1)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_model_state_dict(model, options=full)
    other = _sharded()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    given = saved if td.get_rank() == 0 else {}
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, given, options=everywhere)
    return copy.deepcopy(saved), _here(other.parameters()), _here(get_model_state_dict(other).values())


def sharded_by_wrapping():
    """Train with every sharding strategy of FSDP1."""
    results = []
    wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for strategy, precision, original in itertools.product(
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
        (None, half),
        (True, False),
    ):
        model = FullyShardedDataParallel(
            _model(),
            sharding_strategy=strategy,
            auto_wrap_policy=wrap,
            mixed_precision=precision,
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        results.append(_trained(model, 2))
    return results


def wrapped_models_accumulate_clip_and_save():
    """Accumulate gradients, clip them and save a model with FSDP1."""
    torch.manual_seed(2)
    model = FullyShardedDataParallel(
        _model(),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=80),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with model.no_sync():
        model(_batch(0)).sum().backward()
    model(_batch(1)).sum().backward()
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        weights = _here(model.parameters())
    states = []
    for kind, config in (
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)),
        (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(_use_dtensor=False)),
    ):
        with FullyShardedDataParallel.state_dict_type(model, kind, config):
            state = model.state_dict()
            if kind is StateDictType.FULL_STATE_DICT:
                states.append({key: value.clone() for key, value in state.items()})
            else:
                states.append([shard.tensor.clone() for value in state.values() for shard in value.local_shards()])
            model.load_state_dict(state) if kind is StateDictType.SHARDED_STATE_DICT else None
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    return norm, weights, states, full.get("state")


def on_a_mesh_of_one_dimension():
    mesh = init_device_mesh("cpu", (td.get_world_size(),), mesh_dim_names=("shard",))
    return _trained(_sharded(mesh=mesh))
