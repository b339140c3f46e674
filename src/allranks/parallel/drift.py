"""Values that must be equal on all ranks: which of them differ, on which ranks, and in which elements.

Replicas of a model differ if the program updates them differently, or if memory is damaged. Training continues in both
cases, with a wrong result. `digests_of` reduces the values to hashes. The ranks compare these, and only if they differ
call `locate`, which exchanges hashes of smaller and smaller pieces of the first differing tensor.
"""

from __future__ import annotations

import math
import reprlib
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from allranks._api import objects
from allranks._base.errors import rank_list
from allranks._call.bytes import bytes_of, view_of
from allranks._call.digests import digest, is_plain, local_of, shard_of
from allranks._group.process_group import ProcessGroup

__all__ = ["Difference", "Gather", "combined", "digests_of", "find", "gather_in", "locate", "replicated_values"]

Gather = Callable[[Any], list[Any]]
"""Exchanges objects: takes the object of this rank, and returns those of all ranks in their order."""

_PIECES = 256  # pieces whose hashes are compared in one exchange: 4 exchanges locate an element among 4e9


@dataclass(frozen=True)
class Difference:
    """A value that differs between ranks.

    Attributes:
        name: Name of the value.
        others: Names of further values that differ.
        ranks: The ranks in groups with equal values, the largest group first.
        values: Per group: the first differing element of a tensor, or a description of the value.
        first: Index of the first differing element. None for other values, and if shapes or dtypes differ.
        last: Index of the last differing element.
        one_bit: Whether two groups differ in a single bit.
        one_element: Whether a single element of several differs.
        odd: The only rank that differs from a majority. None if there is no such rank.
        host: Host of this rank.
    """

    name: str
    others: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    values: tuple[str, ...]
    first: tuple[int, ...] | None
    last: tuple[int, ...] | None
    one_bit: bool
    one_element: bool
    odd: int | None
    host: str

    def __str__(self) -> str:
        text = self.name + (str(list(self.first)) if self.first else "")
        pairs = zip(self.values, self.ranks, strict=True)
        text += " is " + ", but ".join(f"{value} on {rank_list(list(ranks))}" for value, ranks in pairs)
        if self.one_bit:
            text += " (one bit differs)"
        if self.last is not None and self.last != self.first:
            text += f"; elements up to {list(self.last)} differ"
        if self.others:
            more = f" and {len(self.others) - 3} more" if len(self.others) > 3 else ""
            text += f"; {', '.join(self.others[:3])}{more} {'differs' if len(self.others) == 1 else 'differ'}, too"
        return text

    @property
    def memory_fault(self) -> str:
        """What to do if a single bit or element differs, which software hardly causes. "" in other cases."""
        if not self.one_element and not self.one_bit:
            return ""
        # After further steps, the element differs in more bits.
        what = "bit" if self.one_bit else "element"
        where = "the hosts" if self.odd is None else f"{self.host}, the host of rank {self.odd}"
        return f"A single {what} indicates a memory fault: test the memory of {where}."


def replicated_values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, buffers: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the values of a model and its optimizer that must be equal on all ranks, by name.

    Parameters and buffers that DistributedDataParallel ignores are left out. The name of a shard of a DTensor contains
    the position of the shard, so ranks only compare equal shards.

    Args:
        model: The model, without a wrapper such as DistributedDataParallel.
        optimizer: Its optimizer. Its state and the settings of its parameter groups are included.
        buffers: Names of the buffers that must be equal. None: all except the statistics of batch normalization, which
            each rank computes from its own inputs.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = {name: tensor for name, tensor in model.named_parameters() if name not in ignored}
    found: dict[str, Any] = {name + shard_of(tensor): tensor for name, tensor in parameters.items()}
    statistics = set(_statistics(model)) if buffers is None else set()
    for name, buffer in model.named_buffers():
        if name not in ignored and name not in statistics and (buffers is None or name in buffers):
            found[name + shard_of(buffer)] = buffer
    if optimizer is not None:
        names = {id(tensor): name for name, tensor in parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if isinstance(value, Tensor) or is_plain(value)}
            found |= {f"optimizer.param_groups[{number}][{key!r}]": value for key, value in settings.items()}
            for at, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"param_groups[{number}]['params'][{at}]")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) or is_plain(value):
                        shard = shard_of(value) if isinstance(value, Tensor) else ""
                        found[f"optimizer.{key}({name}){shard}"] = value
    return found


def _statistics(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that a forward computes from the inputs of one rank."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(module, nn.SyncBatchNorm):
            yield from (f"{prefix}.{name}".lstrip(".") for name in module._buffers)


def digests_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the hashes of values. Cost: 10 GB/s."""
    return {name: digest(value) for name, value in values.items()}


def combined(digests: Mapping[str, int]) -> int:
    """Return one hash of all hashes, which fits into a signed 64-bit integer."""
    return digest(sorted(digests.items())) >> 1


def differing(everyones: Sequence[Mapping[str, int]], required: Collection[str] = ()) -> list[str]:
    """Return the names whose hashes differ among the ranks that have them, in the order of the values.

    Ranks may lack a name: the state of an optimizer can be distributed, and each rank has other shards. Names in
    ``required`` also differ if a rank lacks them.
    """
    names = dict.fromkeys(name for each in everyones for name in each)
    found = {name: {each.get(name) for each in everyones} - (set() if name in required else {None}) for name in names}
    return [name for name in names if len(found[name]) > 1]


def find(
    values: Mapping[str, Any], ranks: Sequence[int], gather: Gather, required: Collection[str] = ()
) -> Difference | None:
    """Return the first value that differs between ranks, or None. Each rank calls this.

    Args:
        values: The values of this rank by name: tensors and plain values.
        ranks: The numbers of all ranks, in the order of ``gather``.
        gather: Exchanges objects with all ranks.
        required: Names that no rank may lack.

    Cost: hashes of the values, and an exchange of 8 bytes. If values differ: see ``locate``.
    """
    digests = digests_of(values)
    # The usual case ends here.
    if len(set(gather(combined(digests)))) == 1:
        return None
    return locate(values, digests, ranks, gather, required)


def gather_in(group: ProcessGroup) -> Gather:
    """Return the exchange of objects in a group."""

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * group.size()
        objects.all_gather_object(found, mine, group)
        return found

    return gather


class _Shown(NamedTuple):
    """What a rank reports of a differing value.

    Attributes:
        host: The host of the rank.
        text: Description of the value.
        shape: Shape of a dense tensor, the shard of a DTensor. None for other values.
    """

    host: str
    text: str
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any], digests: Mapping[str, int]) -> _Shown:
        host = socket.gethostname()
        if name not in digests:
            return cls(host, "missing", None)
        if name not in values:
            return cls(host, f"a value with hash {digests[name]:x}", None)
        value = values[name]
        if not isinstance(value, Tensor):
            return cls(host, reprlib.repr(value), None)
        local = local_of(value)
        dense = local.layout == torch.strided and not local.is_meta
        return cls(host, f"a {local.dtype} of shape {tuple(local.shape)}", tuple(local.shape) if dense else None)


def locate(
    values: Mapping[str, Any],
    digests: Mapping[str, int],
    ranks: Sequence[int],
    gather: Gather,
    required: Collection[str] = (),
) -> Difference | None:
    """Return the first value that differs between ranks, or None. Each rank calls this.

    Args:
        values: The values of this rank by name. Values of which only the hash is known can be left out.
        digests: Their hashes.
        ranks: The numbers of all ranks, in the order of ``gather``.
        gather: Exchanges objects with all ranks.
        required: Names of this rank that no rank may lack.

    Cost: at most 11 exchanges, and some hashes of the differing tensor.
    """
    reports = gather((dict(digests), set(required)))
    everyones = [each for each, _ in reports]
    needed = set().union(*(names for _, names in reports))
    names = differing(everyones, needed)
    if not names:
        return None
    name = names[0]
    groups: dict[int | None, list[int]] = {}
    for at, each in enumerate(everyones):
        if name in each or name in needed:
            groups.setdefault(each.get(name), []).append(at)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group))
    shown = gather(_Shown.of(name, values, digests))
    texts = [each.text for each in shown]
    first = last = None
    one_bit = False
    holders = [shown[at] for group in ordered for at in group]
    shape = holders[0].shape
    # Elements correspond to each other only if all ranks have a dense tensor of the same shape and dtype.
    if shape is not None and len({each[1:] for each in holders}) == 1:
        flat = local_of(values[name]).resolve_conj().resolve_neg().cpu().reshape(-1) if name in digests else None
        low, high = (_narrow(flat, math.prod(shape), gather, side) for side in (0, -1))
        elements = gather(None if flat is None else (bytes_of(flat[low]), _text(flat[low].item())))
        texts = ["" if each is None else each[1] for each in elements]
        distinct = list({each[0] for each in elements if each is not None})
        first, last = _unravel(low, shape), _unravel(high, shape)
        # Other values differ as well if a damaged one was used: the momentum of a parameter, for example.
        one_bit = low == high and len(distinct) == 2 and _differing_bits(*distinct) == 1
    odd = ordered[1][0] if len(ordered) == 2 and len(ordered[0]) > len(ordered[1]) == 1 else None
    return Difference(
        name=name,
        others=tuple(names[1:]),
        ranks=tuple(tuple(ranks[at] for at in group) for group in ordered),
        values=tuple(texts[group[0]] for group in ordered),
        first=first,
        last=last,
        one_bit=one_bit,
        one_element=first is not None and first == last and math.prod(shape or ()) > 1,
        odd=None if odd is None else ranks[odd],
        host="" if odd is None else shown[odd].host,
    )


def _narrow(flat: Tensor | None, count: int, gather: Gather, side: int) -> int:
    """Return the index of the first (side 0) or last (side -1) element that differs between ranks.

    Args:
        flat: The elements on this rank. None: it does not have the tensor, but takes part in the exchanges.
        count: Number of elements.
        gather: Exchanges objects with all ranks.
        side: 0 or -1.
    """
    low, high = 0, count
    while high - low > 1:
        size = math.ceil((high - low) / _PIECES)
        starts = range(low, high, size)
        mine = None
        if flat is not None:
            mine = [xxhash.xxh3_64_intdigest(view_of(flat[start : min(start + size, high)])) for start in starts]
        everyones = [each for each in gather(mine) if each is not None]
        pieces = [at for at in range(len(starts)) if len({each[at] for each in everyones}) > 1]
        low = starts[pieces[side]]
        high = min(low + size, high)
    return low


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for extent in reversed(shape):
        index, coordinate = divmod(index, extent)
        found.append(coordinate)
    return tuple(reversed(found))


def _text(element: Any) -> str:
    return f"{element:.9g}" if isinstance(element, float) else str(element)  # 9 digits distinguish all float32


def _differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
