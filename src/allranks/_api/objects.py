"""Collectives of Python objects, with torch.distributed's names: pickled, sent as bytes, unpickled.

Unpickling runs code that the sender has chosen. This is safe between ranks of one job, which are connected only after
they have proved that they belong to it. Never unpickle data from other sources. With ALLRANKS_PICKLE=0, objects are
plain values and tensors in msgpack, and a received pickle is rejected.

Cost: each function takes one collective for the lengths, one for the bytes, and the pickling, which takes most of the
time.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from allranks._api.collectives import outside, root_of, source_of
from allranks._api.world import resolve_group
from allranks._base.errors import MismatchError, UsageError
from allranks._base.public import publish
from allranks._call.bytes import bytes_of
from allranks._call.purpose import part_of
from allranks._cluster.env import read_int

if TYPE_CHECKING:
    from torch import Tensor

    from allranks._group.process_group import ProcessGroup

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def all_gather_object(
    object_list: list[Any], obj: Any, group: ProcessGroup | None = None, weights_only: bool = False
) -> None:
    """Gather every rank's ``obj`` on every rank.

    Args:
        object_list: Receives one object per rank, in the order of the ranks.
        obj: Input of this rank.
        group: The process group. None: the world.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Raises:
        UsageError: The length of ``object_list`` differs from the size of the group.
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        two collectives, one for the lengths and one for the bytes (each padded to the longest), and the
        pickling, which takes most of the time.

    Example:
        >>> found = [None, None]  # on each of 2 ranks; rank 0 shows:
        >>> dist.all_gather_object(found, {"rank": dist.get_rank()})
        >>> found
        [{'rank': 0}, {'rank': 1}]
    """
    if outside(group, "all_gather_object"):
        return
    resolved = resolve_group(group)
    _check_length(object_list, resolved.size(), "object_list")
    mine = _pack(obj, resolved, weights_only)
    with part_of("all_gather_object"):
        lengths = _all_lengths(resolved, mine)
        # Padded to the longest, because the core needs one size for the single collective.
        rows = mine.new_empty(resolved.size(), max(lengths))
        resolved.all_gather(rows, _padded(mine, max(lengths)))
    object_list[:] = [_unpack(rows[r, : lengths[r]], resolved, r, weights_only) for r in range(resolved.size())]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gather every rank's ``obj`` on rank ``dst``.

    Args:
        obj: Input of this rank.
        object_gather_list: Only on ``dst``: receives one object per rank.
        dst: Rank of the world that receives them. 0 if neither it nor ``group_dst`` is given.
        group: The process group. None: the world.
        group_dst: Rank of the group that receives them, instead of ``dst``.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Raises:
        UsageError: The list is missing, is passed on another rank, or its length differs from the size of the group.
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        two collectives, one for the lengths and one for the bytes (each padded to the longest), and the
        pickling, which takes most of the time.

    Example:
        >>> rank = dist.get_rank()  # of 2; rank 0 shows:
        >>> found = [None, None] if rank == 0 else None
        >>> dist.gather_object("from " + str(rank), found)
        >>> found
        ['from 0', 'from 1']
    """
    if outside(group, "gather_object"):
        return
    resolved = resolve_group(group)
    root = root_of("gather_object", resolved, dst, group_dst, "dst", default=0)
    here = resolved.rank() == root
    if here != bool(object_gather_list):
        raise UsageError(
            f"gather_object: object_gather_list must be passed on the dst rank ({root}) and on no other rank (this is"
            f" rank {resolved.rank()} of group '{resolved.name}')"
        )
    if here and object_gather_list is not None:
        _check_length(object_gather_list, resolved.size(), "object_gather_list")
    mine = _pack(obj, resolved, weights_only)
    with part_of("gather_object"):
        lengths = _all_lengths(resolved, mine)
        rows = [mine.new_empty(max(lengths)) for _ in lengths] if here else None
        resolved.gather(_padded(mine, max(lengths)), rows, root)
    if rows is not None and object_gather_list is not None:
        object_gather_list[:] = [
            _unpack(row[:length], resolved, r, weights_only)
            for r, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Copy the objects of rank ``src``'s list into every rank's list.

    Args:
        object_list: The objects on ``src``; overwritten on other ranks. Its length must be the same on all ranks.
        src: Rank of the world that has the objects. 0 if neither it nor ``group_src`` is given.
        group: The process group. None: the world.
        device: Accepted for compatibility with torch. The bytes are sent from the CPU, or from the only device that
            the group supports.
        group_src: Rank of the group that has the objects, instead of ``src``.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Raises:
        UsageError: The list is empty, or its length differs from that of ``src``'s list.
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        two collectives, one for the lengths and one for the bytes, and the pickling, which takes most of the time.

    Example:
        >>> found = ["settings", 3] if dist.get_rank() == 1 else [None, None]  # of 2 ranks; rank 0 shows:
        >>> dist.broadcast_object_list(found, src=1)
        >>> found
        ['settings', 3]
    """
    if outside(group, "broadcast_object_list"):
        return
    _check_list(object_list, "object_list")
    resolved = resolve_group(group)
    root = root_of("broadcast_object_list", resolved, src, group_src, "src", default=0)
    here = resolved.rank() == root
    nothing = torch.empty(0, dtype=torch.uint8, device=resolved.device)
    packed = _pack(list(object_list), resolved, weights_only) if here else nothing
    # The number of objects travels along, so that a list of another length raises.
    length = torch.tensor([packed.numel(), len(object_list)], device="cpu").to(resolved.device)
    with part_of("broadcast_object_list"):
        resolved.broadcast(length, root)
        if not here:
            packed = packed.new_empty(int(length[0]))
        resolved.broadcast(packed, root)
    if not here:
        _fill(object_list, packed, int(length[1]), resolved, root, weights_only)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Send each rank one object of rank ``src``'s list.

    Args:
        scatter_object_output_list: Its first element is overwritten with this rank's object.
        scatter_object_input_list: Only on ``src``: one object per rank.
        src: Rank of the world that has the list. 0 if neither it nor ``group_src`` is given.
        group: The process group. None: the world.
        group_src: Rank of the group that has the list, instead of ``src``.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Raises:
        UsageError: A list is missing or empty, or its length differs from the size of the group.
        MismatchError, PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        two collectives, one for the lengths and one for the bytes (each padded to the longest), and the
        pickling, which takes most of the time.

    Example:
        >>> mine = [None]  # on each of 2 ranks; rank 0 shows:
        >>> dist.scatter_object_list(mine, ["a", "b"] if dist.get_rank() == 1 else None, src=1)
        >>> mine
        ['a']
    """
    if outside(group, "scatter_object_list"):
        return
    _check_list(scatter_object_output_list, "scatter_object_output_list")
    resolved = resolve_group(group)
    root = root_of("scatter_object_list", resolved, src, group_src, "src", default=0)
    pieces: list[Tensor] | None = None
    lengths = torch.zeros(resolved.size(), dtype=torch.int64, device=resolved.device)
    if resolved.rank() == root:
        _check_length(scatter_object_input_list, resolved.size(), "scatter_object_input_list")
        assert scatter_object_input_list is not None
        pieces = [_pack(obj, resolved, weights_only) for obj in scatter_object_input_list]
        lengths = torch.tensor([piece.numel() for piece in pieces], device="cpu").to(resolved.device)
    with part_of("scatter_object_list"):
        resolved.broadcast(lengths, root)
        # scatter needs pieces of one size, so all are padded to the longest.
        longest = int(lengths.max())
        mine = torch.empty(longest, dtype=torch.uint8, device=resolved.device)
        resolved.scatter(mine, None if pieces is None else [_padded(piece, longest) for piece in pieces], root)
    scatter_object_output_list[0] = _unpack(mine[: int(lengths[resolved.rank()])], resolved, root, weights_only)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send the objects of a list to rank ``dst``.

    Args:
        object_list: The objects.
        dst: Another rank of the world.
        group: The process group. None: the world.
        device: Accepted for compatibility with torch. The bytes are sent from the CPU, or from the only device that
            the group supports.
        group_dst: Another rank of the group, instead of ``dst``.
        use_batch: Accepted for compatibility with torch. No effect.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Raises:
        UsageError: The list is empty, or ``dst`` is not another rank.
        PeerLostError, TimeoutError: See ``all_reduce``.

    Cost:
        two messages, one for the lengths and one for the bytes, and the pickling, which takes most of the time.

    Example:
        >>> found = [None]  # on each of 2 ranks; rank 0 shows:
        >>> if dist.get_rank() == 1:
        ...     dist.send_object_list([{"step": 7}], dst=0)
        ... else:
        ...     source = dist.recv_object_list(found, src=1)
        ...     print(found)
        [{'step': 7}]
    """
    if outside(group, "send_object_list"):
        return
    _check_list(object_list, "object_list")
    resolved = resolve_group(group)
    to = root_of("send_object_list", resolved, dst, group_dst, "dst")
    packed = _pack(list(object_list), resolved, weights_only)
    resolved.send(torch.tensor([packed.numel(), len(object_list)], device="cpu").to(resolved.device), to)
    resolved.send(packed, to)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receive a list that another rank has sent with ``send_object_list``.

    Args:
        object_list: Output. Its length must be that of the sender's list.
        src: Sending rank in the world. None: the rank that sends first.
        group: The process group. None: the world.
        device: Accepted for compatibility with torch. The bytes are sent from the CPU, or from the only device that
            the group supports.
        group_src: Sending rank in the group, instead of ``src``.
        use_batch: Accepted for compatibility with torch. No effect.
        weights_only: Transfer only tensors and plain values, by ``torch.save`` and ``torch.load(weights_only=True)``,
            which run no code that the sender has chosen. The same on all ranks.

    Returns:
        The sending rank, as a rank of the world. -1 if this rank is not in the group.

    Raises:
        UsageError: The list is empty, or its length differs from that of the sender's list.
        MismatchError, PeerLostError, TimeoutError: See ``recv``.

    Cost:
        as ``send_object_list``.
    """
    if outside(group, "recv_object_list"):
        return -1
    _check_list(object_list, "object_list")
    resolved = resolve_group(group)
    length = torch.zeros(2, dtype=torch.int64, device=resolved.device)
    sender = resolved.recv(length, source_of("recv_object_list", resolved, src, group_src))
    packed = torch.empty(int(length[0]), dtype=torch.uint8, device=resolved.device)
    # From the same rank as the lengths, also if any rank may send.
    resolved.recv(packed, sender)
    _fill(object_list, packed, int(length[1]), resolved, sender, weights_only)
    return resolved.ranks[sender]


def _pack(obj: Any, group: ProcessGroup, weights_only: bool) -> Tensor:
    buffer = io.BytesIO()
    if _pickles() and weights_only:
        torch.save(obj, buffer)
    elif _pickles():
        pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    else:
        # The first byte distinguishes the two forms, so a receiver can reject pickles before it unpickles.
        buffer.write(_PLAIN + _encode(_as_plain(obj)))
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(group.device)


def _unpack(data: Tensor, group: ProcessGroup, sender: int, weights_only: bool) -> Any:
    packed = bytes_of(data)
    if packed[:1] == _PLAIN:
        try:
            return _decode(packed[1:])
        # The bytes may be anything, so every error of the decoder means invalid data.
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise MismatchError(
                f"the object of rank {sender} (group '{group.name}') is not valid msgpack: {error}.\n"
                "  Use the same versions of allranks and torch on all ranks."
            ) from None
    if not _pickles():
        raise MismatchError(
            f"rank {sender} sent a pickle (group '{group.name}'), but rank {group.rank()} rejects pickles"
            " (ALLRANKS_PICKLE=0).\n  Set ALLRANKS_PICKLE to the same value on all ranks."
        )
    if (packed[:2] == _ZIP) != weights_only:
        raise MismatchError(
            f"rank {sender} passed weights_only={not weights_only} (group '{group.name}'), but rank {group.rank()}"
            f" passed weights_only={weights_only}.\n  Pass the same value on all ranks."
        )
    if not weights_only:
        return pickle.loads(packed)
    try:
        return torch.load(io.BytesIO(packed), weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"the object of rank {sender} (group '{group.name}') has a class that weights_only=True does not accept."
            f" torch's message: {error}"
        ) from None


def _pickles() -> bool:
    return read_int(os.environ, "ALLRANKS_PICKLE", 0, 1) != 0


# --- objects without pickle: msgpack's own types are unchanged, all other types are msgpack extensions

_PLAIN = b"M"  # first byte of msgpack data; a pickle of protocol 2 or later begins with 0x80
_ZIP = b"PK"  # first bytes of a file of torch.save
_AS_THEY_ARE = (type(None), bool, float, str, bytes)
_TUPLE, _SET, _FROZENSET, _DICT, _INT, _TENSOR = range(6)
_encode = msgspec.msgpack.Encoder().encode


def _as_plain(obj: Any) -> Any:
    kind = type(obj)  # not isinstance: a subclass would be decoded as its base class
    if kind in _AS_THEY_ARE:
        return obj
    if kind is int:  # larger ones do not fit into msgpack's 64 bits
        return obj if -(1 << 63) <= obj < 1 << 63 else msgspec.msgpack.Ext(_INT, str(obj).encode())
    if kind is list:
        return [_as_plain(item) for item in obj]
    if kind is dict:
        return msgspec.msgpack.Ext(_DICT, _encode([[_as_plain(key), _as_plain(value)] for key, value in obj.items()]))
    for code, known in ((_TUPLE, tuple), (_SET, set), (_FROZENSET, frozenset)):
        if kind is known:
            return msgspec.msgpack.Ext(code, _encode([_as_plain(item) for item in obj]))
    if kind is torch.Tensor and obj.layout == torch.strided and not obj.is_quantized:
        # bytes_of copies the memory as it is, so lazy conjugation and negation are resolved first.
        row = [str(obj.dtype), list(obj.shape), obj.requires_grad, bytes_of(obj.resolve_conj().resolve_neg())]
        return msgspec.msgpack.Ext(_TENSOR, _encode(row))
    raise UsageError(
        f"msgpack cannot encode {kind.__name__}, and ALLRANKS_PICKLE=0 forbids pickles. Expected None, bool, int,"
        " float, str, bytes, list, tuple, dict, set or dense tensors.\n  To allow pickles, set"
        " ALLRANKS_PICKLE=1 on all ranks."
    )


def _from_extension(code: int, data: memoryview) -> Any:
    if code == _INT:
        return int(bytes(data))
    row = _decode(data)
    if code == _TENSOR:
        name, shape, grad, content = row
        dtype = getattr(torch, name.removeprefix("torch."))
        flat = (
            torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
        )
        return flat.reshape(shape).requires_grad_(grad)
    if code == _DICT:
        return dict(row)
    return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}[code](row)


_decode = msgspec.msgpack.Decoder(ext_hook=_from_extension).decode


def _padded(data: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, length - data.numel())) if data.numel() < length else data


def _all_lengths(group: ProcessGroup, data: Tensor) -> list[int]:
    lengths = torch.empty(group.size(), dtype=torch.int64, device=group.device)
    group.all_gather(lengths, torch.tensor([data.numel()], device="cpu").to(group.device))
    return [int(length) for length in lengths.tolist()]


def _fill(objects: list[Any], packed: Tensor, count: int, group: ProcessGroup, sender: int, weights_only: bool) -> None:
    if len(objects) != count:
        raise UsageError(
            f"object_list contains {len(objects)} objects on this rank, but {count} on the sending rank ({sender}).\n"
            f"  Pass a list of {count} elements."
        )
    objects[:] = _unpack(packed, group, sender, weights_only)


def _check_list(objects: Any, what: str) -> None:
    if not isinstance(objects, list) or not objects:
        raise UsageError(f"Expected argument {what} to be a list of size at least 1.")


def _check_length(objects: Any, size: int, what: str) -> None:
    if not isinstance(objects, list) or len(objects) != size:
        found = f"one of {len(objects)}" if isinstance(objects, list) else type(objects).__name__
        raise UsageError(f"{what} must be a list of {size} objects, one per rank, not {found}")


publish(globals())
