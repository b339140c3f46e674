"""``allranks top``: the activity of the ranks of a running job, shown repeatedly."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import msgspec

from allranks._base.console import ArgumentParser, harmless, is_redrawable, put
from allranks._base.errors import AllranksError
from allranks._base.exit_codes import USAGE
from allranks._trace.jobs import JobAnswer, NoAnswer, Question, find
from allranks._trace.state import RankState
from allranks.tools.trace import choose

__all__ = ["main", "rows"]


def main(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    parser = ArgumentParser(
        prog="allranks top",
        description="Show calls and bytes per second, the share of the time in which a rank waits for other ranks, its"
        " CPU and memory, and its current call. For workers, commands are shown, too. Press Ctrl-C to stop.",
        examples=(
            ("allranks top", "the only job of this user here, every 2 s"),
            ("allranks top -d 10 -n 6 --json >usage.jsonl", "one minute, as JSON for programs"),
        ),
    )
    parser.add_argument(
        "job", nargs="?", type=int, metavar="JOB", help="pid of the launcher, required if several jobs run"
    )
    parser.add_argument(
        "-d", "--delay", type=float, default=2.0, metavar="S", help="seconds between updates (default 2)"
    )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="stop after N updates")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each update")
    args = parser.parse_args(argv)
    if args.delay <= 0:
        parser.error(f"--delay must be positive, not {args.delay:g}")
    try:
        return _watch(args.job, args.delay, args.count, args.json)
    except AllranksError as error:
        print(harmless(f"allranks top: error: {error}"), file=sys.stderr)
        return USAGE


def _watch(job: int | None, delay_s: float, count: int | None, as_json: bool) -> int:
    before = choose(job, Question(stacks=False))
    job, full_screen = before.launcher, is_redrawable(sys.stdout) and not as_json
    for number in itertools.count(1):
        time.sleep(delay_s)
        try:
            now = choose(job, Question(stacks=False))
        except NoAnswer:
            # If the job no longer exists, it has ended; otherwise the failure is reported.
            if any(each.pid == job for each in find()):
                raise
            print(f"allranks top: job {job} has ended", file=sys.stderr)
            return 0
        if as_json:
            put(msgspec.json.encode({"before": before, "now": now}).decode() + "\n")
        else:
            clear = "\x1b[H\x1b[2J" if full_screen else ""
            put(clear, styled=True)
            put("\n".join(rows(before, now)) + "\n" + ("" if full_screen else "\n"))
        sys.stdout.flush()
        before = now
        if number == count:
            break
    return 0


def rows(before: JobAnswer, now: JobAnswer) -> list[str]:
    """Return the table of the interval between two answers of the job."""
    old = {state.rank: state for state in before.states}
    lines = [f"job {now.launcher}: {now.command}; {now.size} ranks", ""]
    lines.append(
        f"{'rank':>4} {'pid':>8} {'calls/s':>10} {'MB/s':>9} {'waits':>6} {'CPU':>6} {'memory':>9}  process, in"
    )
    for state in now.states:
        then = old.get(state.rank)
        # The counters of a restarted rank begin at 0, so no rates can be computed.
        if then is None or then.pid != state.pid or state.at <= then.at:
            memory = _size(state.usage.resident)
            lines.append(f"{state.rank:>4} {state.pid:>8} {'':>10} {'':>9} {'':>6} {'':>6} {memory:>9}  started")
            continue
        seconds, a, b = state.at - then.at, then.usage, state.usage
        calls = b.calls + b.commands - a.calls - a.commands
        lines.append(
            f"{state.rank:>4} {state.pid:>8} {calls / seconds:>10,.0f} {(b.bytes - a.bytes) / seconds / 1e6:>9,.1f}"
            f" {_waited(then, state, seconds):>6.0%} {(b.cpu - a.cpu) / seconds:>6.0%} {_size(b.resident):>9}"
            f"  {_doing(state)}"
        )
    notes = [note for state in now.states for note in state.notes]
    return [*lines, "", *notes] if notes else lines


def _waited(then: RankState, now: RankState, seconds: float) -> float:
    """Return the share of the time in which a rank waited, including the call in progress."""
    waited = now.usage.waiting - then.usage.waiting
    if now.waiting is not None:
        # The total contains a call only when it has ended. Only the part within the interval counts.
        waited += min(now.waiting.seconds, seconds)
    return max(0.0, min(1.0, waited / seconds))


def _doing(state: RankState) -> str:
    call = state.waiting
    return state.process if call is None else f"{state.process}, {call.title}{f' ({call.site})' if call.site else ''}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
