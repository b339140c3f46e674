"""Renderers of rank output: input bytes and the resulting bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launch.output.lines import Live, Names, Plain, Renderer
from support.terminal_model import Terminal

UP_AND_ERASE = b"\x1b[1A\x1b[2K"


def prefixes(n: int, hosts: list[str] | None = None, colour: bool = False) -> dict[int, bytes]:
    return Names(n, hosts, colour).each(range(n))


def feed(renderer: Renderer, *writes: tuple[int, bytes]) -> bytes:
    return b"".join(renderer.feed(rank, data) for rank, data in writes)


def plain(n: int = 2) -> Plain:
    return Plain(prefixes(n))


class Seen:
    """A live renderer and the terminal it writes to."""

    def __init__(self, n: int = 2, columns: int = 40) -> None:
        self.live = Live(prefixes(n), columns)
        self.terminal = Terminal(columns)

    def feed(self, *writes: tuple[int, bytes]) -> list[str]:
        self.terminal.feed(feed(self.live, *writes))
        return self.terminal.rows

    def end(self, *ranks: int) -> list[str]:
        for rank in ranks:
            self.terminal.feed(self.live.end(rank))
        return self.terminal.rows


def test_prefixes_have_the_same_width() -> None:
    assert prefixes(2) == {0: b"[0] ", 1: b"[1] "}
    assert prefixes(12)[1] == b"[ 1] "
    assert prefixes(12)[11] == b"[11] "


def test_colored_prefixes_end_with_a_reset() -> None:
    assert prefixes(1, colour=True) == {0: b"\x1b[36m[0] \x1b[0m"}


def test_prefixes_with_host_names_have_the_same_width() -> None:
    each = prefixes(11, ["node9"] * 8 + ["node10"] * 3)
    assert (each[7], each[10]) == (b"[  node9:7] ", b"[node10:10] ")


def test_some_ranks_of_a_job_keep_their_numbers() -> None:
    names = Names(12)
    renderer = Plain(names.each([8, 9]))
    assert feed(renderer, (9, b"a\n"), (8, b"b")) + renderer.end(8) == b"[ 9] a\n[ 8] b\n"
    assert names.of([8, 9, 11]) == b"[8-9,11] "


def test_timestamps_are_before_prefixes_and_bars_stay_in_place() -> None:
    seen = Seen()
    seen.live.stamp = b"10:00 "
    assert seen.feed((0, b"\r10%"), (1, b"x\n")) == ["10:00 [1] x", "10:00 [0] 10%"]
    seen.live.stamp = b"10:01 "
    assert seen.feed((0, b"\r20%")) == ["10:00 [1] x", "10:01 [0] 20%"]
    assert seen.feed((1, b"y\n"))[1:] == ["10:01 [1] y", "10:01 [0] 20%"]


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        ([b"a\nb\n"], b"[0] a\n[0] b\n"),
        ([b"a", b"b\n"], b"[0] ab\n"),
        ([b"\n"], b"[0] \n"),
        ([b"a\r\n"], b"[0] a\r\n"),
        ([b"a\r", b"\n"], b"[0] a\r\n"),
        ([b"10%\r20%\r", b"30%\n"], b"[0] 30%\n"),
        ([b"10%", b"\r20%", b"\n"], b"[0] 20%\n"),
        ([b"10%\r", b"20%\r\n"], b"[0] 20%\r\n"),
        ([b"\xff\xfe\x00\n"], b"[0] \xff\xfe\x00\n"),
    ],
)
def test_plain_shows_the_last_state_of_each_line(writes: list[bytes], shown: bytes) -> None:
    assert feed(plain(), *((0, data) for data in writes)) == shown


def test_plain_never_mixes_parts_of_lines() -> None:
    assert feed(plain(), (0, b"a"), (1, b"b"), (0, b"A\n"), (1, b"B\n")) == b"[0] aA\n[1] bB\n"


def test_plain_shows_an_unterminated_line_at_the_end() -> None:
    renderer = plain()
    assert renderer.feed(1, b"x\ny") == b"[1] x\n"
    assert renderer.end(1) == b"[1] y\n"
    assert renderer.end(1) == b""


def test_plain_does_not_show_a_bar_that_erased_itself() -> None:
    renderer = plain()
    assert renderer.feed(0, b"\r50%\r    \r") == b""
    assert renderer.end(0) == b""


def test_plain_does_not_keep_a_bar_that_never_ends() -> None:
    renderer = plain()
    for step in range(10000):
        assert renderer.feed(0, b"\rstep %d" % step) == b""
    assert renderer.end(0) == b"[0] step 9999\n"


def test_plain_splits_very_long_lines() -> None:
    renderer = plain()
    out = feed(renderer, *((0, b"x" * 65536) for _ in range(100))) + renderer.end(0)
    assert out.replace(b"[0] ", b"").replace(b"\n", b"") == b"x" * 6553600
    assert out.count(b"\n") < 10


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xc3", b"\xa9", b"bc"]), max_size=30), st.data())
def test_plain_does_not_depend_on_how_bytes_are_split(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    one, many = plain(), plain()
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert one.feed(0, whole) + one.end(0) == feed(many, *((0, piece) for piece in pieces)) + many.end(0)


def test_live_bar_moves_in_place() -> None:
    seen = Seen()
    assert seen.feed((0, b"\r10%")) == ["[0] 10%"]
    assert seen.feed((0, b"\r20%")) == ["[0] 20%"]
    assert seen.feed((0, b"\r100%\n")) == ["[0] 100%"]
    assert seen.feed((0, b"done\n")) == ["[0] 100%", "[0] done"]


def test_live_lines_of_other_ranks_are_above_the_bar() -> None:
    seen = Seen()
    assert seen.feed((0, b"\r10%"), (1, b"hello\n")) == ["[1] hello", "[0] 10%"]
    assert seen.feed((0, b"\r20%"), (1, b"wor"), (1, b"ld\nagain\n")) == [
        "[1] hello",
        "[1] world",
        "[1] again",
        "[0] 20%",
    ]


def test_live_notes_are_above_the_bar() -> None:
    seen = Seen()
    seen.feed((0, b"\r10%"))
    seen.terminal.feed(seen.live.note(b"stopping"))
    assert seen.feed((0, b"\r20%")) == ["stopping", "[0] 20%"]


def test_live_shows_the_lowest_rank_with_an_open_line() -> None:
    seen = Seen(3)
    assert seen.feed((2, b"\rtwo")) == ["[2] two"]
    assert seen.feed((1, b"\rone")) == ["[1] one"]
    assert seen.feed((2, b"\rTWO")) == ["[1] one"]
    assert seen.feed((0, b"zero\n")) == ["[0] zero", "[1] one"]
    assert seen.feed((1, b"\rone!\n")) == ["[0] zero", "[1] one!", "[2] TWO"]
    assert seen.end(0, 1, 2) == ["[0] zero", "[1] one!", "[2] TWO"]


def test_live_bar_of_rich_moves_in_place() -> None:
    seen = Seen()
    seen.feed((0, b"\x1b[?25l"))
    for step in (b"10%", b"20%"):
        seen.feed((0, b"\r\x1b[2K" + step))
    assert not seen.terminal.cursor_visible
    assert seen.feed((1, b"x\n")) == ["[1] x", "[0] 20%"]
    assert seen.feed((0, b"\r\x1b[2K30%\n\x1b[?25h")) == ["[1] x", "[0] 30%"]
    assert seen.terminal.cursor_visible


def test_live_bars_with_several_rows_move_in_place() -> None:
    seen = Seen()
    seen.feed((0, b"a1\nb1"))
    assert seen.feed((0, b"\r\x1b[2K" + UP_AND_ERASE + b"a2\nb2")) == ["[0] a2", "[0] b2"]


def test_live_cursor_never_goes_up_into_the_lines_of_others() -> None:
    seen = Seen()
    seen.feed((0, b"a1\nb1"), (1, b"keep\n"))
    rows = seen.feed((0, b"\r\x1b[2K" + UP_AND_ERASE + b"a2\nb2"))
    assert rows == ["[0] a1", "[1] keep", "[0] a2", "[0] b2"]
    rows = seen.feed((1, b"k\n\x1b[9A\x1b[2Ke\n"))
    assert rows == ["[0] a1", "[1] keep", "[0] a2", "[1] k", "[1] e", "[0] b2"]


def test_live_nested_bars_of_tqdm_move_in_place() -> None:
    seen = Seen()
    seen.feed((0, b"\router 1"), (0, b"\n\rinner 1\x1b[A"))
    assert seen.feed((0, b"\router 2"), (0, b"\n\rinner 2\x1b[A")) == ["[0] outer 2", "[0] inner 2"]
    seen.feed((1, b"keep\n"))
    assert "[1] keep" in seen.feed((0, b"\router 3"), (0, b"\n\rinner 3\x1b[A"))


def test_live_bar_that_erases_itself_leaves_no_line() -> None:
    seen = Seen()
    seen.feed((0, b"\r50%"), (0, b"\r   \r"))
    assert seen.feed((1, b"x\n")) == ["[1] x"]
    assert seen.end(0, 1) == ["[1] x"]


def test_live_redraw_overwrites_the_line_without_erasing_it() -> None:
    seen = Seen()
    seen.feed((0, b"50%"), (0, b"\r\x1b[?25l"), (1, b"x\n"))
    assert seen.feed((0, b"60")) == ["[1] x", "[0] 60%"]  # as a terminal shows it: overwritten, not erased


def test_live_redraws_all_rows_of_a_wrapped_line() -> None:
    seen = Seen(columns=20)
    seen.feed((0, b"x" * 50))
    assert seen.feed((1, b"y\n")) == ["[1] y", "[0] " + "x" * 16, "x" * 20, "x" * 14]


def test_live_keeps_indentation_that_is_written_separately() -> None:
    seen = Seen()
    assert seen.feed((0, b"  "), (0, b"a"), (0, b"\n"), (1, b"b\n")) == ["[0]   a", "[1] b"]


def test_live_shows_the_cursor_again_when_the_rank_has_exited() -> None:
    seen = Seen()
    seen.feed((0, b"\x1b[?25lx"))
    seen.end(0)
    assert seen.terminal.cursor_visible


def test_live_control_sequences_can_be_split_anywhere() -> None:
    whole = b"\x1b[?25l\r\x1b[2K\x1b[31m10%\x1b[0m\r\x1b[2K20%\r\nend\r\n"
    for cut in range(len(whole)):
        seen = Seen()
        assert seen.feed((0, whole[:cut]), (1, b"x\n"), (0, whole[cut:])).count("[0] end") == 1
        assert seen.terminal.rows[-1] in ("[0] end", "[1] x")


WRITES = [b"line\n", b"\rbar", b"part ", b"\r\n", b"\r\x1b[2K"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(0), st.sampled_from([*WRITES, UP_AND_ERASE])),
            st.tuples(st.sampled_from([1, 2]), st.sampled_from(WRITES)),
        ),
        max_size=40,
    )
)
def test_live_loses_no_line_whatever_rank_0_does(writes: list[tuple[int, bytes]]) -> None:
    seen = Seen(3, columns=200)
    said: list[str] = []
    for number, (rank, data) in enumerate(writes):
        if rank and data == b"line\n":
            data = b"\r\x1b[2Kline %d\n" % number
            said.append(f"[{rank}] line {number}")
        seen.feed((rank, data))
    rows = seen.end(0, 1, 2)
    assert [row for row in rows if row in said] == said
