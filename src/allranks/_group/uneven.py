"""Collectives whose tensors have another size on each rank, without padding. MPI names these calls with v and w.

They consist of all_to_all, broadcast and reduce, so every engine has them. Ranks are numbered within the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allranks._base.errors import MismatchError, UsageError
from allranks._call.purpose import part_of
from allranks._call.work import Then, Together, Work
from allranks._engines.checks import (
    CODES,
    check_apart,
    check_own_piece,
    check_same_dtype,
    check_tensor,
    not_taken,
)
from allranks._group.base import BaseGroup

if TYPE_CHECKING:
    from allranks._call.types import PremulSum, ReduceOp

__all__ = ["UnevenCollectives"]

_BROADCAST_BYTES = 1 << 20
"""Results of at least this size are gathered by broadcasts.

An all_to_all takes one latency, but every rank writes its tensor once for each other rank. A broadcast writes it once.
(On 2 CPUs, all_to_all against broadcasts. 32 MiB: 5.7 and 4.0 ms with 4 ranks, 16 and 10 ms with 8. 256 KiB: 60 and 72
us with 4 ranks, 311 and 333 us with 8. Two ranks: the same writes.)
"""


class UnevenCollectives(BaseGroup):
    """The collectives of a group whose tensors may have another size on each rank."""

    def all_gather_v(self, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_gather_v`."""
        engine, verb = self._live(), "all_gather_v"
        self._check_pieces(verb, "tensor_list", outputs, tensor)
        with part_of(verb):
            # All ranks take the same decision, because they pass the same sizes. If they do not, they get a mismatch.
            if self._size < 3 or sum(output.nbytes for output in outputs) < _BROADCAST_BYTES:
                return _showing(engine.all_to_all(outputs, [tensor] * self._size, async_op), outputs)
            check_apart(verb, outputs)
            _copy(outputs[self._rank], tensor)
            works = [engine.broadcast(output, rank, async_op) for rank, output in enumerate(outputs)]
            return _showing(_together(works, async_op), outputs)

    def reduce_scatter_v(
        self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp | PremulSum, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.reduce_scatter_v`."""
        engine, verb = self._live(), "reduce_scatter_v"
        self._check_pieces(verb, "input_list", inputs, output)
        with part_of(verb):
            # A reduce overwrites the operand of its root.
            _copy(output, inputs[self._rank])
            operands = [output if rank == self._rank else given for rank, given in enumerate(inputs)]
            works = [engine.reduce(operand, rank, op, async_op) for rank, operand in enumerate(operands)]
            return _showing(_together(works, async_op), (output,))

    def gather_v(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.gather_v`."""
        engine, verb = self._live(), "gather_v"
        root = self._root(verb, "dst", dst, "gather_list", outputs)
        if outputs is not None:
            self._check_pieces(verb, "gather_list", outputs, tensor)
        nothing = check_tensor(verb, tensor).new_empty(0)
        inputs = [tensor if rank == root else nothing for rank in range(self._size)]
        with part_of(verb):
            return _showing(
                engine.all_to_all(outputs or self._nothing(nothing), inputs, async_op),
                () if outputs is None else outputs,
            )

    def scatter_v(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.scatter_v`."""
        engine, verb = self._live(), "scatter_v"
        root = self._root(verb, "src", src, "scatter_list", inputs)
        if inputs is not None:
            self._check_pieces(verb, "scatter_list", inputs, tensor)
        nothing = check_tensor(verb, tensor).new_empty(0)
        outputs = [tensor if rank == root else other for rank, other in enumerate(self._nothing(nothing))]
        with part_of(verb):
            return _showing(engine.all_to_all(outputs, inputs or self._nothing(nothing), async_op), (tensor,))

    def all_to_all_w(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_to_all_w`."""
        engine, verb = self._live(), "all_to_all_w"
        for what, tensors in (("output", outputs), ("input", inputs)):
            self._check_list(verb, f"{what}_tensor_list", tensors)
            for tensor in tensors:
                if tensor.dtype not in CODES or tensor.layout is not torch.strided:
                    raise not_taken(verb, tensor)
        check_apart(verb, outputs)
        # The engines compare sizes in bytes, so that the dtypes are compared here, in an all_gather before.
        mine = torch.tensor([CODES[tensor.dtype] for tensor in (*inputs, *outputs)], dtype=torch.uint8, device="cpu")
        mine = mine.to(inputs[0].device)
        everyones = mine.new_empty(self._size, 2, self._size)
        rooms = [output if _plain(output) else torch.empty_like(output).contiguous() for output in outputs]

        def fill() -> None:
            for output, room in zip(outputs, rooms, strict=True):
                _copy(output, room)

        with part_of(verb):
            compared = _after(engine.all_gather(everyones, mine, async_op), lambda: self._compare_dtypes(everyones))
            moved = engine.all_to_all([_bytes(each) for each in rooms], [_bytes(each) for each in inputs], async_op)
            return _showing(_together([compared, _after(moved, fill)], async_op), outputs)

    def _compare_dtypes(self, codes: Tensor) -> None:
        """Raise a mismatch if any rank expects another dtype than it is sent. ``codes``: by rank, in/out and peer."""
        sent, expected = codes[:, 0].cpu(), codes[:, 1].cpu().T
        for source, target in (sent != expected).nonzero().tolist()[:1]:
            dtypes = {code: dtype for dtype, code in CODES.items()}
            raise MismatchError(
                f"all_to_all_w on group '{self.name}' (rank {self._rank} of {self._size}): rank {source} sends"
                f" {dtypes[int(sent[source, target])]} to rank {target}, which expects"
                f" {dtypes[int(expected[source, target])]}.\n  Pass tensors of the same dtypes on both ranks."
            )

    def _check_pieces(self, verb: str, what: str, pieces: Sequence[Tensor], own: Tensor) -> None:
        self._check_list(verb, what, pieces)
        for piece in pieces:
            check_same_dtype(verb, check_tensor(verb, own), piece)
        gathers = verb in ("all_gather_v", "gather_v")
        output, given = (pieces[self._rank], own) if gathers else (own, pieces[self._rank])
        check_own_piece(verb, output, given, self._rank)

    def _check_list(self, verb: str, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise UsageError(f"{verb}: {what} must have {self._size} tensors, one per rank, not {len(tensors)}")
        for tensor in tensors:
            check_tensor(verb, tensor)

    def _root(self, verb: str, role: str, root: int, what: str, pieces: Sequence[Tensor] | None) -> int:
        """Return the checked root. Only the root passes pieces."""
        if not 0 <= root < self._size:
            raise UsageError(
                f"{verb}: {role}={root} is not a rank of group '{self.name}': expected 0 to {self._size - 1}"
            )
        if (pieces is not None) != (root == self._rank):
            asked = "must be passed" if root == self._rank else "must be None"
            raise UsageError(f"{verb}: {what} {asked} on rank {self._rank}, because {role} is rank {root}")
        return root

    def _nothing(self, nothing: Tensor) -> list[Tensor]:
        # Different objects: the results of a call must not share memory, which is compared by object as well.
        return [nothing.new_empty(0) for _ in range(self._size)]


def _after(work: Work | None, then: Callable[[], None]) -> Work | None:
    """Run ``then`` after a call: now if the call was blocking, and otherwise in the first wait."""
    if work is None:
        then()
        return None
    return Then(work, then, [])


def _together(works: Sequence[Work | None], async_op: bool) -> Work | None:
    return Together([work for work in works if work is not None]) if async_op else None


def _copy(to: Tensor, given: Tensor) -> None:
    if to is not given:
        with torch.no_grad():  # the output may be a parameter
            to.copy_(given.reshape(to.shape))


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _showing(work: Work | None, tensors: Sequence[Tensor]) -> Work | None:
    if work is not None:
        work.shown = tensors
    return work
