"""Decoders of network data under random bytes: only the documented errors, and no more memory than the input."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks._base.errors import ConfigError
from allranks._net.frames import FrameDecoder, WireError, pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, NONCE
from allranks._rendezvous.join_protocol import Member, _pack_members, unpack_members
from allranks._store.wire import (
    FRAME_LIMIT,
    Add,
    CompareSet,
    Delete,
    FoundValues,
    Peek,
    RequestDone,
    RequestFailed,
    Set,
    WaitForKeys,
    WaitTimedOut,
    decode_reply,
    decode_request,
    encode,
)
from allranks.launch.spec.events import Event, Exited, FailureReport, Output
from allranks.launch.spec.events import RankFailed as RankFailed
from support.handshakes import first_frame, prove, server_side

SECRET = b"0123456789abcdef"
fuzz = settings(max_examples=400, database=None)
HELLO = first_frame(bytes(range(NONCE)))
ANSWER = server_side(SECRET, bytes(NONCE)).step(HELLO) or b""
PROOF, _ = prove(SECRET, bytes(range(NONCE)), ANSWER)
REQUESTS = [
    Set("key", b"value"),
    Add("n", -7),
    Peek(["a", "b"]),
    WaitForKeys(["a"], 3.5, True),
    Delete("a"),
    CompareSet("a", b"", b"x"),
]
REPLIES = [RequestDone(5), FoundValues([b"a", None, bytes(300)]), WaitTimedOut(["a"]), RequestFailed("why")]
EVENTS = [
    Output(1, 2, b"line\n"),
    RankFailed(0, 77, FailureReport(1, "ValueError: x", "text", "a.py:1")),
    Exited(3, 9, -11),
]
REAL = [*map(encode, REQUESTS), *map(encode, REPLIES), *map(encode, EVENTS), HELLO, ANSWER, PROOF]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Real traffic with some bytes changed, inserted, removed, repeated or truncated."""
    data = bytearray(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = at + draw(st.integers(0, 4))
        data[at:end] = draw(st.one_of(st.binary(max_size=5), st.just(bytes(data[at:end]) * 2)))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


anything = st.one_of(st.binary(max_size=600), mutated())


@fuzz
@given(st.lists(anything, max_size=6), st.sampled_from([HANDSHAKE_FRAME, FRAME_LIMIT]), st.data())
def test_frame_stream_decodes_equally_for_any_cuts(parts: list[bytes], limit: int, data: st.DataObject) -> None:
    """Decode the same frames for every split of a stream, and buffer at most the bytes of the stream."""
    stream = b"".join(pack_frame(part) if data.draw(st.booleans()) else part for part in parts)

    def frames(pieces: list[bytes]) -> list[bytes | str]:
        decoder, out = FrameDecoder(limit), list[bytes | str]()
        try:
            for piece in pieces:
                decoder.feed(piece)
                while (frame := decoder.next()) is not None:
                    assert len(frame) <= limit
                    out.append(frame)
                assert len(decoder._buffer) <= len(stream)
        except WireError:
            out.append("dropped")
        return out

    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert frames(pieces) == frames([stream])


@fuzz
@given(st.lists(anything, min_size=1, max_size=4))
def test_random_frames_never_complete_server_handshake(frames: list[bytes]) -> None:
    """Answer or refuse every frame: only the real proof completes the handshake."""
    handshake = server_side(SECRET, random.Random(len(frames)).randbytes(NONCE))
    with contextlib.suppress(WireError, ConfigError):
        for frame in frames:
            answer = handshake.step(frame)
            assert answer is not None
            assert len(answer) <= HANDSHAKE_FRAME


@fuzz
@given(anything)
def test_client_handshake_accepts_only_the_server_answer(frame: bytes) -> None:
    """Accept only the answer of the server to this nonce."""
    with contextlib.suppress(WireError, ConfigError):
        proof, right = prove(SECRET, bytes(range(NONCE)), frame)
        assert len(proof) == 32
        assert right == (frame == ANSWER)


def decode_event(frame: bytes) -> Event:
    """Decode an event, and convert every decoding error to ``WireError``.

    Agent and launcher are processes of one user on one host, so any of these errors may end the reader.
    """
    try:
        return msgspec.msgpack.decode(frame, type=Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from None


@fuzz
@given(anything)
def test_messages(frame: bytes) -> None:
    """Decode a message, encode it and decode it again: the result is the same message."""
    for decode in (decode_request, decode_reply, decode_event):
        with contextlib.suppress(msgspec.ValidationError, WireError):
            message = decode(frame)
            again = decode(encode(message))
            assert again == message or message != message  # a wait of NaN seconds is not equal to itself


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 9999]
)
def test_announced_length_allocates_no_memory(head: bytes) -> None:
    """Reject short frames that announce lists, bytes and texts of 2**32 - 1 elements, or deep nesting."""
    frames = [head, b"\x93\xa4Peek" + head, b"\x94\xa4Wait" + head]
    tracemalloc.start()
    try:
        for frame in frames:
            for decode in (decode_request, decode_reply, decode_event):
                with pytest.raises((msgspec.MsgspecError, WireError, RecursionError)):
                    decode(frame)
            decoder = FrameDecoder(FRAME_LIMIT)
            decoder.feed(FRAME_LIMIT.to_bytes(4, "big") + frame)
            assert decoder.next() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


names = st.text(max_size=8)


@fuzz
@given(st.lists(st.tuples(st.integers(0, 1 << 22), st.sampled_from("abc"), names, st.lists(names, max_size=2))))
def test_member_table_round_trips(rows: list[tuple[int, str, str, list[str]]]) -> None:
    """Pack and unpack members on any hosts in any order: the result equals the input."""
    members = tuple(
        Member(rank, pid, host, machine, len(rows), tuple(addresses))
        for rank, (pid, host, machine, addresses) in enumerate(rows)
    )
    assert unpack_members(_pack_members(members)) == members
