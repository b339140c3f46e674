"""Collapsed output: equal lines of several ranks are shown once, without loss, delay or reordering."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from allranks.launch.output.collapse import WINDOW_S, Collapse
from allranks.launch.output.lines import Live, Names, Plain
from support.terminal_model import Terminal


class Seen:
    """A collapsed screen of four ranks, on a pipe or on a terminal."""

    def __init__(self, live: bool = False, hosts: list[str] | None = None) -> None:
        names = Names(4, hosts)
        each = names.each(range(4))
        self.terminal = Terminal(200)
        self.collapse = Collapse(Live(each, 200) if live else Plain(each), names.of, range(4))

    def feed(self, *writes: tuple[int, bytes], at: float = 0.0) -> list[str]:
        for rank, data in writes:
            self.show(self.collapse.feed(rank, data, at))
        return self.terminal.rows

    def show(self, data: bytes) -> list[str]:
        self.terminal.feed(data)
        return self.terminal.rows


def test_line_of_all_ranks_is_shown_once_and_immediately() -> None:
    assert Seen().feed(*((rank, b"loading\n") for rank in range(4))) == ["[0-3] loading"]


def test_line_of_some_ranks_is_shown_after_the_window() -> None:
    seen = Seen()
    assert seen.feed((2, b"a\n"), (0, b"b\n"), (1, b"a\n")) == [""]
    assert seen.collapse.due() == WINDOW_S
    assert seen.show(seen.collapse.tick(WINDOW_S)) == ["[1-2] a", "[0] b"]
    assert seen.collapse.due() is None


def test_line_written_in_parts_is_collapsed() -> None:
    seen = Seen()
    parts = [(rank, part) for part in (b"load", b"ing", b"\n") for rank in range(4)]
    assert seen.feed(*parts) == ["[0-3] loading"]


def test_prefix_names_the_host_if_all_ranks_of_a_line_are_on_it() -> None:
    seen = Seen(hosts=["a", "a", "b", "b"])
    seen.feed((0, b"x\n"), (1, b"x\n"), (1, b"y\n"), (2, b"y\n"))
    assert seen.show(seen.collapse.flush()) == ["[a:0-1] x", "[1-2] y"]


def test_unterminated_line_on_a_terminal_is_shown_after_the_window() -> None:
    seen = Seen(live=True)
    assert seen.feed((0, b"continue? ")) == [""]
    assert seen.show(seen.collapse.tick(WINDOW_S)) == ["[0] continue?"]
    assert seen.feed((1, b"x\n"), (0, b"yes\n"), at=1.0) == ["[0] continue? yes"]
    assert seen.show(seen.collapse.flush()) == ["[0] continue? yes", "[1] x"]


def test_progress_bar_moves_immediately_below_the_lines() -> None:
    seen = Seen(live=True)
    seen.feed(*((rank, b"begin\n") for rank in range(4)))
    assert seen.feed((0, b"\r10%")) == ["[0-3] begin", "[0] 10%"]
    seen.feed((1, b"x\n"), (2, b"x\n"))
    assert seen.show(seen.collapse.tick(WINDOW_S)) == ["[0-3] begin", "[1-2] x", "[0] 10%"]
    assert seen.feed((0, b"\r\x1b[2K20%")) == ["[0-3] begin", "[1-2] x", "[0] 20%"]


def test_progress_bars_with_several_rows_move_immediately() -> None:
    seen = Seen(live=True)
    seen.feed((0, b"\x1b[?25la1\nb1"))
    for step in range(2, 5):
        rows = seen.feed((0, b"\r\x1b[2K\x1b[1A\x1b[2Ka%d\nb%d" % (step, step)))
        assert rows == [f"[0] a{step}", f"[0] b{step}"]


def test_line_before_a_progress_bar_is_shown_before_it() -> None:
    seen = Seen(live=True)
    assert seen.feed((1, b"a\n"), (0, b"a\n"), (0, b"\r10%")) == ["[0-1] a", "[0] 10%"]


def test_unterminated_last_line_is_shown() -> None:
    seen = Seen()
    seen.feed((1, b"a\n"), (2, b"b"))
    seen.show(seen.collapse.end(2, 0.0))
    assert seen.show(seen.collapse.flush()) == ["[1] a", "[2] b"]


def test_complete_lines_are_not_mixed_with_an_unterminated_line() -> None:
    seen = Seen(live=True)
    seen.feed((0, b"\r10%"))
    seen.show(seen.collapse.line(0, b"warning", 0.0))
    seen.show(seen.collapse.line(1, b"warning", 0.0))
    assert seen.show(seen.collapse.flush()) == ["[0-1] warning", "[0] 10%"]


def test_collapsed_line_has_the_time_of_its_first_occurrence() -> None:
    names = Names(4)
    renderer = Plain(names.each(range(4)))
    collapse = Collapse(renderer, names.of, range(4))
    renderer.stamp = b"10:00 "
    collapse.feed(0, b"a\n", 0.0)
    renderer.stamp = b"10:01 "
    collapse.feed(1, b"a\n", 0.05)
    assert collapse.feed(1, b"b\n", 1.0) == b"10:00 [0-1] a\n"
    assert collapse.flush() == b"10:01 [1] b\n"


def test_very_long_line_is_shown_without_waiting_for_its_end() -> None:
    collapse = Seen().collapse
    out = b"".join(collapse.feed(0, b"x" * 65536, 0.0) for _ in range(40)) + collapse.end(0, 0.0)
    assert len(out) > 40 * 65536
    assert collapse.due() is None


def expand(shown: bytes) -> dict[int, list[bytes]]:
    """Return the lines of each rank, reconstructed from collapsed lines."""
    said: dict[int, list[bytes]] = {rank: [] for rank in range(4)}
    for line in shown.split(b"\n"):
        if line:
            match = re.fullmatch(rb"\[ *([0-9,-]+)\] ?(.*)", line, re.DOTALL)
            assert match is not None, line
            for span in match[1].decode().split(","):
                low, _, high = span.partition("-")
                for rank in range(int(low), int(high or low) + 1):
                    said[rank].append(match[2])
    return said


WRITES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([b"a\n", b"b\n", b"a", b"\n", b"a\nb\na\n"]), st.sampled_from([0, 3])),
    max_size=60,
)


@given(WRITES, st.booleans())
def test_expanded_lines_equal_the_output_of_each_rank(writes: list[tuple[int, bytes, int]], live: bool) -> None:
    seen, wrote, now, shown = Seen(live), dict.fromkeys(range(4), b""), 0, b""
    for rank, data, wait in writes:
        wrote[rank] += data
        now += wait
        shown += seen.collapse.feed(rank, data, now / 100)
        due = seen.collapse.due()
        assert due is None or due > now / 100  # no line waits longer than the window
    for rank in range(4):
        shown += seen.collapse.end(rank, now / 100)
    shown += seen.collapse.flush()
    assert seen.collapse.due() is None
    if live:
        shown = "\n".join(seen.show(shown)).encode()
    wanted = {rank: data.split(b"\n") for rank, data in wrote.items()}
    assert expand(shown) == {rank: lines if lines[-1] else lines[:-1] for rank, lines in wanted.items()}


BARS = [b"line\n", b"x", b"\r5%", b"\r\n", b"\r\x1b[2K", b"one\ntwo"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BARS))))
def test_no_line_is_lost_among_progress_bars(writes: list[tuple[int, bytes]]) -> None:
    collapse, alone, shown, wanted = Seen().collapse, Plain(Names(4).each(range(4))), b"", b""
    for number, (rank, data) in enumerate(writes):
        shown += collapse.feed(rank, data, number / 25)
        wanted += alone.feed(rank, data)
    for rank in range(4):
        shown += collapse.end(rank, 100.0)
        wanted += alone.end(rank)
    assert expand(shown + collapse.flush()) == expand(wanted)
