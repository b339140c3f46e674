"""The C++ core (core/bind.cc). Addresses, counts and codes; see core/comm.h for what the calls mean."""

from collections.abc import Callable
from typing import TypeAlias

# verb, dtype, reduce op, root, count
Call: TypeAlias = tuple[str, str, str, int, int]

DTYPES: dict[str, int]
REDUCE_OPS: dict[str, int]
ISA: str

class Failure(Exception):
    # kind, peer, reporter, call number, the reporter's call, seconds, every rank's call, ranks waited for, call sites,
    # text
    args: tuple[str, int, int, int, Call, float, list[Call], list[int], list[str], str]

class Sizes:
    piece: int
    ring: int
    pipe: int
    ranks: int

class SharedBlock:
    address: int

class Request:
    def done(self) -> bool: ...
    def source(self) -> int: ...

class Comm:
    def __init__(
        self,
        rank: int,
        sizes: Sizes,
        segments: list[int],
        liveness: list[int],
        timeout_s: float,
        spin_us: float,
        spin_progress_us: float,
    ) -> None: ...
    @staticmethod
    def across_hosts(
        rank: int,
        host_of: list[int],  # ranks of one host have the same number
        sizes: Sizes,
        segments: list[int],
        liveness: list[int],
        pulses: list[int],  # by rank, -1 where there is none; of ranks that are no leaders empty
        asking_pipe: int,
        number: int,
        timeout_s: float,
        spin_us: float,
        spin_progress_us: float,
    ) -> Comm: ...
    def adopt(self, rank: int, kind: int, fd: int, greeting: str) -> None: ...
    def give_up(self, rank: int) -> None: ...
    # mark: the shape and, above 32 bits, the call site. started: of an asynchronous call, which returns a Request,
    # where in the program it stands; None: the call blocks and returns None.
    def all_reduce(
        self, data: int, count: int, dtype: int, mark: int, op: int, started: str | None, /
    ) -> Request | None: ...
    def reduce(
        self, data: int, count: int, dtype: int, mark: int, op: int, root: int, started: str | None, /
    ) -> Request | None: ...
    def broadcast(
        self, data: int, count: int, dtype: int, mark: int, root: int, started: str | None, /
    ) -> Request | None: ...
    def all_gather(
        self, data: int, count: int, dtype: int, mark: int, outs: list[int], started: str | None, /
    ) -> Request | None: ...
    def gather(
        self, data: int, count: int, dtype: int, mark: int, outs: list[int], root: int, started: str | None, /
    ) -> Request | None: ...
    def scatter(
        self, data: int, count: int, dtype: int, mark: int, ins: list[int], root: int, started: str | None, /
    ) -> Request | None: ...
    def reduce_scatter(
        self, data: int, count: int, dtype: int, mark: int, ins: list[int], op: int, started: str | None, /
    ) -> Request | None: ...
    def all_to_all(
        self,
        dtype: int,
        mark: int,
        ins: list[int],
        in_bytes: list[int],
        outs: list[int],
        out_bytes: list[int],
        started: str | None,
        /,
    ) -> Request | None: ...
    def barrier(self, mark: int, started: str | None, /) -> Request | None: ...
    def share(self, number: int, bytes: int, parts: list[int], /) -> SharedBlock: ...
    def send(self, data: int, count: int, dtype: int, to: int, tag: int, async_op: bool, /) -> Request | None: ...
    def send_now(self, tensor: object, to: int, tag: int, /) -> bool: ...
    def recv_now(self, tensor: object, source: int, tag: int, /) -> int: ...  # -1: nothing was done
    def recv(self, data: int, count: int, dtype: int, source: int, tag: int, /) -> int: ...
    def start_recv(self, data: int, count: int, dtype: int, source: int, tag: int, /) -> Request: ...
    def wait(self, request: Request, timeout_s: float, /) -> None: ...
    def last_calls(self) -> list[tuple[int, Call]]: ...
    def stats(self) -> tuple[int, int, float, int]: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

def set_where(function: Callable[[], str]) -> None: ...
def create_memory(bytes: int) -> int: ...
def create_segment(rank: int, size: int, sizes: Sizes) -> int: ...
def neighbours(rank: int, host_of: list[int]) -> list[int]: ...
def set_ordinary(classes: list[type], reduce_op: type) -> None: ...
def shape_hash(shape: list[int]) -> int: ...
def reduces(dtype: int, op: int) -> bool: ...

class Now:
    def __init__(self, comm: Comm, explain: Callable[[Failure, str], Exception]) -> None: ...
    # False: nothing was done, because a tensor is not ordinary or an argument is wrong.
    def __call__(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> bool: ...
