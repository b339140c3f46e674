"""What a State covers: the tensors, arrays and plain values of its parts, by name, and how they are restored.

`Coverage` finds them. `Undo` has copies of them, as they were when a step began, and restores them if the step is
repeated. How much it copies depends on what the first steps have shown (`StepPlan`): everything, or only what a
step changes before it is committed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from allranks._call.bytes import view_of
from allranks.resilience import fully_sharded
from allranks.resilience.buddies import unpack
from allranks.resilience.handover import assign
from allranks.resilience.reachable import PLAIN, Boundary, Reached, is_plain, reach
from allranks.resilience.shards import Parts, is_dtensor, local_of, shard_of

if TYPE_CHECKING:
    from allranks.resilience.step_plan import StepPlan

__all__ = ["Coverage", "Undo", "digest", "plain_of"]

_version = operator.attrgetter("_version")  # 35 ns a tensor

_FLAGS = ("require_forward_param_sync", "require_backward_grad_sync")
"""What DistributedDataParallel, torch's and ours, remembers from one forward to the next."""


class Coverage:
    """The parts of a State, and what is in them.

    Args:
        parts: by name; of a wrapper the module in it.
        wrappers: the DistributedDataParallel objects around modules of the parts.
        own: tensors that have other values on each rank.
        local: objects that the program has declared to be no part of the training's state.
    """

    def __init__(self, parts: Parts, wrappers: Sequence[Any], own: Sequence[Tensor], local: Sequence[Any]) -> None:
        self.parts = parts
        self.own = own
        self.modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.set_wrappers(wrappers)
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
        # The modules and optimizers that other parts refer to are parts themselves, or are no matter of those.
        inner = [module for part in self.modules for module in part.modules()]
        self._apart = Boundary(skip=[*local, *inner, *self.optimizers], roots=parts.values())

    def reached(self) -> Reached:
        """Everything in the parts."""
        fully_sharded.reshard(self.modules)
        names = {id(p): f"{n}.{q}" for n, part in self.parts.items() for q, p in _named(part)}
        roots = {**self.parts, **{f"own[{n}]": tensor for n, tensor in enumerate(self.own)}}
        return reach(roots, self._boundary, name_of=lambda tensor: names.get(id(tensor)))

    def buffer(self, name: str) -> Tensor | None:
        """A buffer of a module; the module may have put another tensor into its place."""
        owner, key = self.buffers[name]
        found: Tensor | None = owner._buffers.get(key)
        return found

    def is_light(self, path: str) -> bool:
        """Whether the container is one of those that are copied in every step; see ``light``."""
        return _root(path) in self._others or ".param_groups[" in path

    def common(self) -> dict[str, int]:
        """Hashes of what ranks have in common, by name: of tensors and of values. A shard's name says which one it is.

        Of an object with a ``state_dict()`` that is what it gives; the rest of its attributes may be made when needed.
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
            f"{name}{{}}": digest(plain_of(container))
            for name, container in reached.containers.items()
            if self.is_light(name) and _root(name) not in described
        }
        return found

    def must_agree(self, name: str) -> bool:
        """Whether ranks must have the same value. Plain values of modules may differ: caches, counters of calls."""
        part = self._others.get(_root(name.removesuffix("{}")))
        if hasattr(part, "state_dict"):  # what it gives must agree; other attributes may be made when they are needed
            return False
        return not name.endswith("{}") or self.is_light(name.removesuffix("{}"))

    def described(self) -> dict[str, int]:
        """Hashes of what parts other than modules and optimizers give as their ``state_dict()``."""
        return {
            f"{n}: state_dict()": digest(p.state_dict()) for n, p in self._others.items() if hasattr(p, "state_dict")
        }

    def is_trained(self, name: str) -> bool:
        """Whether it is a parameter, or the optimizer's state of one."""
        return isinstance(self.parts.get(_root(name)), (nn.Module, torch.optim.Optimizer))

    def is_of_module(self, name: str) -> bool:
        """Whether it is in a module."""
        return isinstance(self.parts.get(_root(name)), nn.Module)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of modules, and those that optimizers update, by name."""
        found: dict[int, tuple[str, Any]] = {}
        for name, part in self.parts.items():
            for inner, parameter in _named(part):
                found.setdefault(id(parameter), (f"{name}.{inner}", parameter))
        return dict(found.values())

    def light(self) -> Reached:
        """What a step often changes: the values of all parts but modules, and the settings of optimizers."""
        found = reach(self._others, self._apart)
        for name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):
                found.containers |= {f"{name}.param_groups[{n}]": group for n, group in enumerate(part.param_groups)}
        return found

    def keep_light(self) -> Callable[[], None]:
        """Copy these values. Returns what restores them."""
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
        """The DistributedDataParallel objects around modules of the parts are these."""
        self._wrappers = [vars(wrapper) for wrapper in wrappers]

    def flags(self) -> list[tuple[Any, ...]]:
        """What the wrappers remember from one forward to the next; the same in a replacement process."""
        return [tuple(wrapper.get(name) for name in _FLAGS) for wrapper in self._wrappers]

    def set_flags(self, flags: Iterable[tuple[Any, ...]]) -> None:
        """Set what the wrappers remember."""
        for wrapper, values in zip(self._wrappers, flags, strict=False):
            wrapper.update((name, value) for name, value in zip(_FLAGS, values, strict=True) if name in wrapper)

    def extras(self, grads: bool) -> dict[str, Tensor]:
        """Tensors that ``state_dict()`` leaves out: buffers that are not persistent, and gradients.

        Args:
            grads: with the gradients.
        """
        found = {name: tensor for name in self.buffers if (tensor := self.buffer(name)) is not None}
        if grads:
            found |= {f"grad({n})": p.grad.detach() for n, p in self.parameters().items() if p.grad is not None}
        return found

    def set_extras(self, came: Mapping[str, Tensor]) -> None:
        """Put received buffers and gradients into their places."""
        for name in self.buffers.keys() & came.keys():
            owner, key = self.buffers[name]
            owner._buffers[key] = assign(owner._buffers.get(key), came[name])
        for name, parameter in self.parameters().items():
            grad = came.get(f"grad({name})")
            parameter.grad = None if grad is None else grad.to(parameter.device)

    def set_own(self, kept: Mapping[str, Tensor]) -> None:
        """Put what the backup of this rank has kept into its places."""
        for number, tensor in enumerate(self.own):
            assign(tensor, kept.get(f"own[{number}]", tensor))
        for name in self.buffers.keys() & kept.keys():
            owner, key = self.buffers[name]
            owner._buffers[key] = assign(owner._buffers.get(key), kept[name])
        if "grads" in kept:
            self.set_extras(
                {n: t for n, t in kept.items() if n.startswith("grad(") and n[5:-1] in unpack(kept["grads"])}
            )

    def attributes(self) -> dict[str, dict[str, Any]]:
        """The plain values in the modules' and optimizers' attributes, which ``state_dict()`` leaves out, by path."""
        found = self.reached()
        return {
            path: {name: value for name, value in vars(owner).items() if is_plain(value)}
            for path, owner in found.owners.items()
            if isinstance(owner, (nn.Module, torch.optim.Optimizer))
        }

    def set_attributes(self, came: Mapping[str, Mapping[str, Any]]) -> None:
        """Set these attributes."""
        owners = self.reached().owners
        for path, values in came.items():
            if path in owners:
                vars(owners[path]).update(values)


def _root(path: str) -> str:
    """The name of the part that a path begins with."""
    return path.split(".", 1)[0].split("[", 1)[0]


def plain_of(container: Any) -> Any:
    """The values in a container that are in no other object."""
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
    """A tensor with a copy of what was in it."""

    tensor: Tensor
    copy: Tensor


class Undo:
    """Copies of what a step may change, as it was when the step began."""

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

    def keep_all(self, reached: Reached) -> None:
        """A step begins that may change anything."""
        self._versions = []
        self._containers = [(each, each.copy()) for each in reached.containers.values()]
        self._arrays = [(each, each.copy()) for each in reached.arrays.values()]
        self._flags = self._coverage.flags()
        self._keep_tensors(reached.tensors.values())
        self._keep_grads()

    def keep(self, plan: StepPlan) -> None:
        """A step begins that is committed early: what it changes before that is copied.

        The version counters of all other tensors tell, after a loss, whether the step has changed more than it used to.
        """
        if plan.modules or self._plan is not plan:
            self._watch(plan)
        light = self._coverage.light()
        self._containers = [(each, each.copy()) for each in (*light.containers.values(), *self._modules)]
        self._flags = self._coverage.flags()
        self._versions = list(map(_version, self._watched))
        self._arrays = [(each, each.copy()) for each in light.arrays.values()]
        new = [tensor for tensor in light.tensors.values() if id(tensor) not in self._known]
        self._keep_tensors([*self._chosen, *new])
        self._grads = None
        if plan.grads:
            self._keep_grads()

    def _watch(self, plan: StepPlan) -> None:
        self._plan = plan
        reached = self._coverage.reached()
        names = {name: tensor for name, tensor in reached.tensors.items() if not tensor.is_inference()}
        saved = plan.saved | self._coverage.buffers.keys()
        self._chosen = [t for name, t in names.items() if name + shard_of(t) in saved]
        watched = {name: t for name, t in names.items() if name + shard_of(t) not in saved}
        self._watched_names, self._watched = list(watched), list(watched.values())
        self._known = {id(tensor) for tensor in (*self._chosen, *self._watched)}
        light = self._coverage.is_light
        self._modules = [each for p, each in reached.containers.items() if not light(p)] if plan.modules else []

    def forget_plan(self) -> None:
        """A plan has changed, or the objects in the parts have."""
        self._plan = None

    def _keep_tensors(self, tensors: Collection[Tensor]) -> None:
        self._saved = []
        if tensors:
            with torch.no_grad():
                self._saved = [_Saved(local := local_of(tensor), local.clone()) for tensor in tensors]
        self.nbytes = sum(saved.copy.nbytes for saved in self._saved)

    def _keep_grads(self) -> None:
        self._grads = []
        for parameter in self._coverage.parameters().values():
            grad = parameter.grad
            self._grads.append((parameter, grad, None if grad is None else local_of(grad).clone()))

    def clear(self) -> None:
        """A loss has interrupted calls: modules have no pending ones any more."""
        fully_sharded.reset(self._coverage.modules)

    def take_back(self) -> list[str]:
        """Restore what the step has changed.

        Returns:
            The names of tensors that it has changed and of which there is no copy.
        """
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
        if self._grads is None:
            for parameter in self._coverage.parameters().values():
                parameter.grad = None
            return
        for parameter, grad, copy in self._grads:
            parameter.grad = grad
            if grad is not None and copy is not None:
                local_of(grad).copy_(copy)


def restore_container(container: Any, values: Any) -> None:
    """Put the values back into a dict, list, set or deque: in the same object, which others refer to."""
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, values)  # that of a Counter would add
    elif isinstance(container, set):
        container.clear()
        container.update(values)
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(values)


def digest(value: Any) -> int:
    """A hash of the value of a tensor, an array, or a container; the same in every process that has the same value.

    Cost:
        10 GB/s for tensors and arrays.
    """
    hasher = xxhash.xxh3_64()
    _feed(hasher, value, 0, set())
    return hasher.intdigest()


def _feed(hasher: Any, value: Any, depth: int, above: set[int]) -> None:
    if isinstance(value, Tensor):
        tensor = local_of(value) if is_dtensor(value) else value.detach()
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout != torch.strided or tensor.is_meta:
            hasher.update(str(tensor).encode())
            return
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        if flat.nbytes:
            hasher.update(view_of(flat))
    elif is_plain(value):
        hasher.update(repr(value).encode())
    elif hasattr(value, "__array_interface__"):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(value.tobytes())
    elif id(value) in above or depth > 20:
        return
    elif isinstance(value, Mapping):
        # The order of keys is that of their first assignment, which load_state_dict() does not keep.
        for key, each in sorted(value.items(), key=lambda item: repr(item[0]) if type(item[0]) in PLAIN else ""):
            hasher.update((repr(key) if type(key) in PLAIN else str(type(key))).encode())
            _feed(hasher, each, depth + 1, above | {id(value)})
    elif isinstance(value, (set, frozenset)):
        hasher.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, (list, tuple, deque)):
        hasher.update(f"{type(value).__name__}{len(value)}".encode())
        for each in value:
            _feed(hasher, each, depth + 1, above | {id(value)})
    else:
        hasher.update(type(value).__qualname__.encode())
