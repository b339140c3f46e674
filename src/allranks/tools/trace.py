"""``allranks trace``: the activity of the ranks of a running job, and past calls from trace files (``trace_files``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from allranks._base.console import ArgumentParser, Program, harmless, put
from allranks._base.errors import AllranksError, ConfigError, rank_list
from allranks._base.exit_codes import USAGE
from allranks._trace.diagnosis import diagnose
from allranks._trace.jobs import JobAnswer, JobEnded, NoAnswer, Question, ask, find
from allranks._trace.state import RankState

__all__ = ["choose", "main", "table"]


def main(argv: Sequence[str]) -> int | Program:
    """Run the command. Return its exit code; in a forked rank of ``record``, the rank."""
    words = list(argv)
    if words[:1] and words[0] in _COMMANDS:
        try:
            return _COMMANDS[words[0]][0](words[1:])
        except (AllranksError, ConfigError) as error:
            print(harmless(f"allranks trace {words[0]}: error: {error}"), file=sys.stderr)
            return USAGE
    parser = ArgumentParser(
        prog="allranks trace",
        description="Show the calls of a job's ranks, while it runs or afterwards.",
        epilog="allranks trace COMMAND --help describes a command.",
        examples=(
            ("allranks trace show", "what each rank of the job on this host waits for"),
            ("allranks trace record -o calls.html -- -n 4 train.py", "run a program, and draw its calls"),
        ),
    )
    parser.add_argument("command", choices=_COMMANDS, help="; ".join(f"{n}: {s}" for n, (_, s) in _COMMANDS.items()))
    parser.parse_args(words)
    return USAGE


def _show(words: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="allranks trace show",
        description="Show what each rank of a running job does, for how long, and for which ranks it waits. Finds the"
        " jobs of this user on this host, and shows all hosts of a job.",
        examples=(
            ("allranks trace show", "the only job of this user here"),
            ("allranks trace show --calls 5 4711", "one of several jobs, with the newest calls of each rank"),
        ),
    )
    parser.add_argument(
        "job", nargs="?", type=int, metavar="JOB", help="pid of the launcher, required if several jobs run"
    )
    parser.add_argument("--calls", type=int, default=0, metavar="N", help="also the N newest calls of each rank")
    parser.add_argument("--json", action="store_true", help="print all information as JSON")
    args = parser.parse_args(words)
    answer = choose(args.job, Question(recent=max(0, min(args.calls, 1000))))
    if args.json:
        put(msgspec.json.encode(answer).decode() + "\n")
        return 0
    put("\n".join(_overview(answer, args.calls)) + "\n")
    return 0


def choose(pid: int | None, question: Question) -> JobAnswer:
    """Query the job with this launcher pid, or the only job.

    Raises:
        NoAnswer: No job or several jobs match, or the job does not answer.
    """
    # by launcher, because the agent of a job on this host answers, too
    answers: dict[tuple[str, int, str], JobAnswer] = {}
    silent: list[NoAnswer] = []
    for job in find():
        try:
            answer = ask(job, question)
        # The job ended after `find` had listed it.
        except JobEnded:
            continue
        except NoAnswer as error:
            silent.append(error)
        else:
            answers.setdefault((answer.launcher_host, answer.launcher, answer.command), answer)
    found = [answer for answer in answers.values() if pid is None or answer.launcher == pid]
    listed = "".join(f"\n  {a.launcher}: {a.command}, {a.size} ranks" for a in answers.values())
    if len(found) == 1:
        return found[0]
    if found:
        raise NoAnswer(f"several jobs run here; pass the pid of a launcher:{listed}")
    if silent:
        raise silent[0]
    if listed:
        raise NoAnswer(f"no job here has the launcher {pid}; running jobs:{listed}")
    raise NoAnswer(
        "no launcher of allranks runs a job of this user on this host.\n"
        "  Run this command on a host of the job, as the user who started it."
    )


def _overview(answer: JobAnswer, calls: int) -> list[str]:
    hosts = len(set(answer.hosts))
    where = f" on {hosts} hosts" if hosts > 1 else ""
    lines = [f"job {answer.launcher}: {answer.command}; {answer.size} ranks{where}, for {_time(answer.seconds)}", ""]
    lines += table(answer)
    diagnosis_lines = diagnose(answer.states).lines(dict(enumerate(answer.hosts)), answer.places)
    lines += ["", *diagnosis_lines] if diagnosis_lines else []
    for state in answer.states if calls else ():
        lines += ["", f"rank {state.rank}:"]
        for call in state.recent:
            took = f"{call.seconds * 1e3:.3f} ms" if call.ended else f"for {_time(call.seconds)}"
            last = f", rank {call.last} arrived last" if call.last >= 0 else ""
            lines.append(f"  {call.title:24} {took:>14}{last}{f', {call.site}' if call.site else ''}")
    return lines


def table(answer: JobAnswer) -> list[str]:
    """Return a row for each rank: host, process, current call, its duration, and the ranks that it waits for."""
    found = diagnose(answer.states)
    rows: list[tuple[str, ...]] = [("rank", "pid", "host", "process", "in", "for", "waits for", "commands")]
    states = {state.rank: state for state in answer.states}
    for rank in range(answer.size):
        host = answer.hosts[rank] if answer.hosts else ""
        if (state := states.get(rank)) is None:
            rows.append((str(rank), "", host, "not known", "its agent has not answered", "", "", ""))
            continue
        wait = found.waits.get(rank)
        awaited = rank_list(list(wait.awaited)) if wait is not None and wait.awaited else ""
        commands = f"{state.usage.commands:,}" if state.usage.commands else ""
        rows.append((str(rank), str(state.pid), host, state.process, *_doing(state, answer), awaited, commands))
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    if not answer.hosts:
        rows = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _doing(state: RankState, answer: JobAnswer) -> tuple[str, str]:
    """Return the current activity of a rank, and its duration."""
    if (call := state.waiting) is not None:
        group = "" if call.group in ("", "world") else f" of group '{call.group}'"
        return f"{call.title}{group}{f' ({call.site})' if call.site else ''}", _time(call.seconds)
    if state.doing:
        return f"executes {state.doing}", ""
    since = ""
    if state.last is not None and state.last.ended:
        since = _time(state.at - state.last.began - state.last.seconds)
    if place := answer.places.get(state.rank):
        return place, since
    if state.last is not None:
        return f"after {state.last.title}{f' ({state.last.site})' if state.last.site else ''}", since
    return answer.reasons.get(state.rank, "no call yet" if state.recorded else "no group yet"), since


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{max(0.0, seconds) * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _timeline(words: Sequence[str]) -> int:
    from allranks.tools import trace_files

    return trace_files.timeline(words)


def _record(words: Sequence[str]) -> int | Program:
    from allranks.tools import trace_files

    return trace_files.record(words)


def _flight(words: Sequence[str]) -> int:
    from allranks.tools import trace_files

    return trace_files.flight(words)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int | Program], str]] = {
    "show": (_show, "show what the ranks of a running job do"),
    "timeline": (_timeline, "draw the calls of all ranks on one clock, from trace files"),
    "record": (_record, "run a program and write its timeline"),
    "flight": (_flight, "convert trace files to the format of torch's Flight Recorder, for torchfrtrace"),
}
