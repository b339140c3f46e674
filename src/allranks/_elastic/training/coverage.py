"""The tensors, arrays and plain values of the parts of a State, by name, and how they are restored.

`Coverage` finds them. `Undo` copies them at the start of a step, and restores them if the step is repeated. The first
steps determine how much it copies (`StepPlan`): everything, or only the values that a step changes before it is
committed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from allranks._call.digests import digest, is_plain, local_of, shard_of
from allranks._elastic.training import fully_sharded
from allranks._elastic.training.backups import unpack
from allranks._elastic.training.handover import assign
from allranks._elastic.training.reachable import Boundary, Reached, reach
from allranks._elastic.training.shards import Parts

if TYPE_CHECKING:
    from allranks._elastic.training.step_plan import StepPlan

__all__ = ["Coverage", "Undo", "plain_values"]

_version = operator.attrgetter("_version")  # 35 ns per tensor

_FLAGS = ("require_forward_param_sync", "require_backward_grad_sync")
"""State that DistributedDataParallel, torch's and allranks's, keeps from one forward to the next."""


class Coverage:
    """The parts of a State, and their contents.

    Args:
        parts: The parts by name. For a wrapper, the wrapped module.
        wrappers: The DistributedDataParallel objects around modules of the parts.
        own: Tensors whose values differ between ranks.
        local: Objects that the program has declared not to belong to the training's state.
    """

    def __init__(self, parts: Parts, wrappers: Sequence[Any], own: Sequence[Tensor], local: Sequence[Any]) -> None:
        self.parts = parts
        self.own = own
        self.modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.set_wrappers(wrappers)
        self.unvisited: dict[str, Any] = {}
        """Objects which the last traversal did not enter, because they are too large."""
        self._boundary = Boundary(skip=local, roots=parts.values())
        self._others = {
            name: part
            for name, part in parts.items()
            if not isinstance(part, (nn.Module, torch.optim.Optimizer, Tensor))
        }
        self.buffers = {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": (owner, key)
            for name, part in parts.items()
            if isinstance(part, nn.Module)
            for path, owner in part.named_modules()
            for key in owner._buffers
        }
        # Modules and optimizers that other parts reference are parts themselves, or do not belong to those parts.
        inner = [module for part in self.modules for module in part.modules()]
        self._apart = Boundary(skip=[*local, *inner, *self.optimizers], roots=parts.values())

    def reached(self) -> Reached:
        """Return everything that can be reached from the parts."""
        # Otherwise the traversal could record gathered parameters, whose memory FSDP2 frees later.
        fully_sharded.reshard(self.modules)
        names = {id(p): f"{n}.{q}" for n, part in self.parts.items() for q, p in _named(part)}
        roots = {**self.parts, **{f"own[{n}]": tensor for n, tensor in enumerate(self.own)}}
        found = reach(roots, self._boundary, name_of=lambda tensor: names.get(id(tensor)))
        self.unvisited = found.unvisited
        return found

    def buffer(self, name: str) -> Tensor | None:
        """Return a buffer of a module. The module may have replaced the tensor since it was last read."""
        owner, key = self.buffers[name]
        found: Tensor | None = owner._buffers.get(key)
        return found

    def is_light(self, path: str) -> bool:
        """Return whether every step copies this container. See ``light``."""
        return _root(path) in self._others or ".param_groups[" in path

    def common(self) -> dict[str, int]:
        """Return hashes of the values that ranks have in common, by name. A shard's name identifies the shard.

        For an object with a ``state_dict()``, only that dict is hashed. Its other attributes may be created on demand,
        so ranks may differ in them.
        """
        reached = self.reached()
        described = {n for n, part in self._others.items() if hasattr(part, "state_dict")}
        found = {name: digest(self.parts[name].state_dict()) for name in described}
        found |= {
            name + shard_of(tensor): digest(tensor)
            for name, tensor in reached.tensors.items()
            if _root(name) not in described
        }
        found |= {name: digest(array) for name, array in reached.arrays.items() if _root(name) not in described}
        found |= {
            f"{name}{{}}": digest(plain_values(container))
            for name, container in reached.containers.items()
            if self.is_light(name) and _root(name) not in described
        }
        return found

    def must_agree(self, name: str) -> bool:
        """Return whether ranks must have equal values. Plain values of modules may differ: caches, call counters."""
        part = self._others.get(_root(name.removesuffix("{}")))
        if hasattr(part, "state_dict"):  # only state_dict() must agree; other attributes may be created on demand
            return False
        return not name.endswith("{}") or self.is_light(name.removesuffix("{}"))

    def described(self) -> dict[str, int]:
        """Return hashes of the ``state_dict()`` of parts other than modules and optimizers."""
        return {
            f"{n}: state_dict()": digest(p.state_dict()) for n, p in self._others.items() if hasattr(p, "state_dict")
        }

    def is_trained(self, name: str) -> bool:
        """Return whether a name is in a module or an optimizer: a parameter, a buffer, or optimizer state."""
        return isinstance(self.parts.get(_root(name)), (nn.Module, torch.optim.Optimizer))

    def is_of_module(self, name: str) -> bool:
        """Return whether a name is in a module."""
        return isinstance(self.parts.get(_root(name)), nn.Module)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of modules, and the parameters that optimizers update, by name."""
        found: dict[int, tuple[str, Any]] = {}
        for name, part in self.parts.items():
            for inner, parameter in _named(part):
                found.setdefault(id(parameter), (f"{name}.{inner}", parameter))
        return dict(found.values())

    def light(self) -> Reached:
        """Return values that steps often change: those of parts other than modules, and settings of optimizers."""
        found = reach(self._others, self._apart)
        for name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):
                found.containers |= {f"{name}.param_groups[{n}]": group for n, group in enumerate(part.param_groups)}
        return found

    def copy_light(self) -> Callable[[], None]:
        """Copy these values. Return a function that restores them."""
        found = self.light()
        containers = [(each, each.copy()) for each in found.containers.values()]
        arrays = [(each, each.copy()) for each in found.arrays.values()]

        def restore() -> None:
            for container, values in containers:
                restore_container(container, values)
            for array, values in arrays:
                array[...] = values

        return restore

    def set_wrappers(self, wrappers: Sequence[Any]) -> None:
        """Set the DistributedDataParallel objects around modules of the parts."""
        self._wrappers = [vars(wrapper) for wrapper in wrappers]

    def flags(self) -> list[tuple[Any, ...]]:
        """Return the wrappers' state between two forwards. A replacement process receives it."""
        return [tuple(wrapper.get(name) for name in _FLAGS) for wrapper in self._wrappers]

    def set_flags(self, flags: Iterable[tuple[Any, ...]]) -> None:
        """Set the wrappers' state between two forwards."""
        for wrapper, values in zip(self._wrappers, flags, strict=False):
            wrapper.update((name, value) for name, value in zip(_FLAGS, values, strict=True) if name in wrapper)

    def extras(self, grads: bool) -> dict[str, Tensor]:
        """Return tensors that ``state_dict()`` leaves out: buffers that are not persistent, and gradients.

        Args:
            grads: Include the gradients.
        """
        found = {name: tensor for name in self.buffers if (tensor := self.buffer(name)) is not None}
        if grads:
            found |= {f"grad({n})": p.grad.detach() for n, p in self.parameters().items() if p.grad is not None}
        return found

    def set_extras(self, received: Mapping[str, Tensor]) -> None:
        """Assign received buffers and gradients."""
        for name in self.buffers.keys() & received.keys():
            owner, key = self.buffers[name]
            owner._buffers[key] = assign(owner._buffers.get(key), received[name])
        for name, parameter in self.parameters().items():
            grad = received.get(f"grad({name})")
            # The sender has no gradient here. The next backward would add to a leftover one.
            parameter.grad = None if grad is None else grad.to(parameter.device)

    def set_own(self, kept: Mapping[str, Tensor]) -> None:
        """Assign the values that this rank's backup rank has stored."""
        for number, tensor in enumerate(self.own):
            assign(tensor, kept.get(f"own[{number}]", tensor))
        for name in self.buffers.keys() & kept.keys():
            owner, key = self.buffers[name]
            owner._buffers[key] = assign(owner._buffers.get(key), kept[name])
        # The list of names distinguishes current gradients from older ones that `kept.update` has left.
        if "grads" in kept:
            self.set_extras(
                {n: t for n, t in kept.items() if n.startswith("grad(") and n[5:-1] in unpack(kept["grads"])}
            )

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the plain attributes of modules and optimizers, which ``state_dict()`` leaves out, by path."""
        found = self.reached()
        return {
            path: {name: value for name, value in vars(owner).items() if is_plain(value)}
            for path, owner in found.owners.items()
            if isinstance(owner, (nn.Module, torch.optim.Optimizer))
        }

    def set_attributes(self, received: Mapping[str, Mapping[str, Any]]) -> None:
        """Set these attributes."""
        owners = self.reached().owners
        for path, values in received.items():
            if path in owners:
                vars(owners[path]).update(values)


def _root(path: str) -> str:
    """Return the name of the part at the start of a path."""
    return path.split(".", 1)[0].split("[", 1)[0]


def plain_values(container: Any) -> Any:
    """Return the plain values in a container."""
    if isinstance(container, dict):
        return {key: value for key, value in container.items() if is_plain(value)}
    return [value for value in container if is_plain(value)] if isinstance(container, (list, deque)) else container


def _named(part: Any) -> Iterable[tuple[str, nn.Parameter]]:
    if isinstance(part, nn.Module):
        yield from part.named_parameters()
    elif isinstance(part, torch.optim.Optimizer):
        for number, group in enumerate(part.param_groups):
            for at, parameter in enumerate(group["params"]):
                yield f"param_groups[{number}][{at}]", parameter


class _Saved(NamedTuple):
    """A tensor with a copy of its content."""

    tensor: Tensor
    copy: Tensor


class Undo:
    """Copies of the values that a step may change, as they were at the start of the step."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._saved: list[_Saved] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._grads: list[tuple[Any, Tensor | None, Tensor | None]] | None = None
        self._flags: list[tuple[Any, ...]] = []
        self._plan: StepPlan | None = None
        self._chosen: list[Tensor] = []
        self._modules: list[Any] = []
        self._watched: list[Tensor] = []
        self._known: set[int] = set()
        self._watched_names: list[str] = []
        self._versions: list[int] = []
        self.nbytes = 0

    def save_all(self, reached: Reached) -> None:
        """Copy everything, for a step that may change anything."""
        # Everything is copied, so no version has to be compared.
        self._versions = []
        self._containers = [(each, each.copy()) for each in reached.containers.values()]
        self._arrays = [(each, each.copy()) for each in reached.arrays.values()]
        self._flags = self._coverage.flags()
        self._save_tensors(reached.tensors.values())
        self._save_grads()

    def save(self, plan: StepPlan) -> None:
        """Copy the values that a step changes before its commit, for a step that is committed early.

        After a loss, the version counters of all other tensors reveal whether the step has changed more than planned.
        """
        # Traverse the parts again only if necessary: it costs about 1 us per object in each step.
        if plan.modules or self._plan is not plan:
            self._watch(plan)
        light = self._coverage.light()
        self._containers = [(each, each.copy()) for each in (*light.containers.values(), *self._modules)]
        self._flags = self._coverage.flags()
        self._versions = list(map(_version, self._watched))
        self._arrays = [(each, each.copy()) for each in light.arrays.values()]
        # Tensors that the program has added since the plan was applied have no watched version, so copy them.
        new = [tensor for tensor in light.tensors.values() if id(tensor) not in self._known]
        self._save_tensors([*self._chosen, *new])
        self._grads = None
        if plan.grads:
            self._save_grads()

    def _watch(self, plan: StepPlan) -> None:
        self._plan = plan
        reached = self._coverage.reached()
        # Inference tensors have no version counter to watch.
        names = {name: tensor for name, tensor in reached.tensors.items() if not tensor.is_inference()}
        saved = plan.saved | self._coverage.buffers.keys()
        self._chosen = [t for name, t in names.items() if name + shard_of(t) in saved]
        watched = {name: t for name, t in names.items() if name + shard_of(t) not in saved}
        self._watched_names, self._watched = list(watched), list(watched.values())
        self._known = {id(tensor) for tensor in (*self._chosen, *self._watched)}
        light = self._coverage.is_light
        self._modules = [each for p, each in reached.containers.items() if not light(p)] if plan.modules else []

    def discard_plan(self) -> None:
        """Choose the tensors again at the next step, because the plan or the objects in the parts have changed."""
        self._plan = None

    def _save_tensors(self, tensors: Collection[Tensor]) -> None:
        self._saved = []
        if tensors:
            with torch.no_grad():
                self._saved = [_Saved(local := local_of(tensor), local.clone()) for tensor in tensors]
        self.nbytes = sum(saved.copy.nbytes for saved in self._saved)

    def _save_grads(self) -> None:
        self._grads = []
        for parameter in self._coverage.parameters().values():
            grad = parameter.grad
            self._grads.append((parameter, grad, None if grad is None else local_of(grad).clone()))

    def clear(self) -> None:
        """Remove the pending calls of modules. A loss has interrupted them."""
        fully_sharded.reset(self._coverage.modules)

    def restore(self) -> list[str]:
        """Restore the values that the step has changed.

        Returns:
            The names of tensors that the step has changed and that have no copy.
        """
        # Compare before anything is restored: restoring also increments version counters.
        now = map(_version, self._watched)
        changed = [n for n, v, w in zip(self._watched_names, now, self._versions, strict=False) if v != w]
        self.clear()
        for container, values in self._containers:
            restore_container(container, values)
        with torch.no_grad():
            for saved in self._saved:
                saved.tensor.copy_(saved.copy)
            for array, copy in self._arrays:
                array[...] = copy
            self._restore_grads()
        self._coverage.set_flags(self._flags)
        return changed

    def _restore_grads(self) -> None:
        # Without accumulation, the step computes all gradients again, so None replaces a copy.
        if self._grads is None:
            for parameter in self._coverage.parameters().values():
                parameter.grad = None
            return
        for parameter, grad, copy in self._grads:
            # Restore the object as well: zero_grad(set_to_none=True) may have removed it.
            parameter.grad = grad
            if grad is not None and copy is not None:
                local_of(grad).copy_(copy)


def restore_container(container: Any, values: Any) -> None:
    """Restore the values of a dict, list, set or deque in the same object, because other objects may reference it."""
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, values)  # Counter.update would add the values
    elif isinstance(container, set):
        container.clear()
        container.update(values)
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(values)
