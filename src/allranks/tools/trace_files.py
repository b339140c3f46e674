"""Subcommands of ``allranks trace`` on trace files: ``timeline`` and ``flight`` read them, ``record`` creates them."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allranks._base.console import ArgumentParser, Program, put
from allranks._base.errors import ConfigError, rank_list
from allranks._trace import flight_recorder
from allranks._trace.chrome import other_data, read_profile
from allranks._trace.files import open_trace, trace_files
from allranks._trace.matching import read_process
from allranks._trace.timeline import Clock, Timeline, read
from allranks.tools.outputs import output_problem
from allranks.tools.progress import TerminalProgress

__all__ = ["flight", "record", "timeline"]

_PATHS = "trace files, or folders of them (allranks run --trace DIR)"
_FORMATS = "*.json or *.json.gz: for Perfetto; *.html: a page for a browser; *.png, *.svg, *.pdf: a picture"


def timeline(words: Sequence[str]) -> int:
    """Run ``allranks trace timeline``. Return its exit code.

    Raises:
        TraceError: A file is not a trace.
        ConfigError: The arguments are wrong.
    """
    parser = ArgumentParser(
        prog="allranks trace timeline",
        description="Put the calls of all ranks on one clock and draw them: which rank waited for which, and how long.",
        examples=(
            ("allranks trace timeline calls", "summary of the calls that allranks run --trace calls has recorded"),
            ("allranks trace timeline -o calls.html calls", "a page for a browser"),
        ),
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=_PATHS)
    _add_output(parser)
    parser.add_argument(
        "--profiler", nargs="+", action="extend", default=[], type=Path, metavar="FILE",
        help="traces of torch.profiler of the same ranks (export_chrome_trace), to add to the *.json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    args = parser.parse_args(words)
    _check_outputs(args.output)
    if args.profiler and not any(_is_json(file) for file in args.output):
        raise ConfigError("--profiler requires a timeline in *.json or *.json.gz (-o)")
    with TerminalProgress("allranks trace") as progress:
        progress.at("reading the trace files")
        found = read(args.paths, args.last)
        _write(found, args.output, args.profiler, progress)
    if args.json:
        put(json.dumps(other_data(found)) + "\n")
    else:
        put("".join(f"{line}\n" for line in summary(found, args.output)))
    return 0


def record(words: Sequence[str]) -> int | Program:
    """Run ``allranks trace record``: run a program, then write its timeline.

    Returns:
        The exit code of the job; in a forked rank, the rank.

    Raises:
        TraceError: The ranks have recorded nothing.
        ConfigError: The arguments are wrong.
    """
    parser = ArgumentParser(
        prog="allranks trace record",
        usage="allranks trace record -o FILE [--last TIME] --\n         [options of allranks run] script.py [args ...]",
        description="Run a program as allranks run does, and write the timeline of its calls when it has exited.",
        examples=(("allranks trace record -o calls.html -- -n 4 train.py", "four ranks, and a page for a browser"),),
    )
    _add_output(parser)
    own, job = _split(list(words))
    args = parser.parse_args(own)
    if not args.output:
        raise ConfigError("-o FILE is missing: the file for the timeline")
    if not job:
        raise ConfigError("a program is missing: allranks trace record -o timeline.html -- -n 4 train.py")
    _check_outputs(args.output)
    from allranks.launch import cli

    folder = Path(tempfile.mkdtemp(prefix=".allranks-trace-", dir=args.output[0].absolute().parent))
    try:
        code = cli.main(["--trace", str(folder), *job])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # This process is a forked rank. The launcher's process writes the timeline and removes the folder.
    if not isinstance(code, int):
        return code
    try:
        if any(folder.iterdir()):
            with TerminalProgress("allranks trace") as progress:
                progress.at("reading the trace files")
                found = read([folder], args.last, just_ended=True)
                _write(found, args.output, [], progress)
            for line in summary(found, args.output):
                print(f"allranks trace record: {line}", file=sys.stderr)
        elif code == 0:
            raise ConfigError(
                "no calls to draw: no rank of this host has created a group of allranks.\n  For an unchanged program of"
                " torch.distributed, add --instead-of-gloo."
            )
    finally:
        shutil.rmtree(folder)
    return code


def flight(words: Sequence[str]) -> int:
    """Run ``allranks trace flight``. Return its exit code.

    Raises:
        TraceError: A file is not a trace.
        ConfigError: The files cannot be written.
    """
    parser = ArgumentParser(
        prog="allranks trace flight",
        description="Write the calls of each rank in the format of torch's Flight Recorder. torchfrtrace FOLDER, a tool"
        " of torch, then reports the ranks that missed a call.",
        examples=(("allranks trace flight -o dumps calls && torchfrtrace dumps", "what torch's tool finds"),),
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=_PATHS)
    parser.add_argument(
        *("-o", "--output"), required=True, type=Path, metavar="FOLDER", help="output folder, without other files"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    args = parser.parse_args(words)
    with TerminalProgress("allranks trace") as progress:
        progress.at("reading the trace files")
        processes = [read_process(i, str(path), open_trace(path)) for i, path in enumerate(trace_files(args.paths))]
        found = flight_recorder.dumps(processes)
        progress.at(f"writing into {args.output}")
        try:
            files = [flight_recorder.write(args.output, dump, process) for dump, process in found.values()]
        except OSError as error:
            raise ConfigError(f"cannot write to {args.output}: {error.strerror}") from None
    left_out = sum(dump.left_out for dump, _ in found.values())
    if args.json:
        put(json.dumps({"files": [str(file) for file in files], "left_out": left_out}) + "\n")
        return 0
    lines = [f"{len(files)} ranks, {sum(len(dump.calls) for dump, _ in found.values())} calls, in {args.output}"]
    if left_out:
        lines.append(f"{left_out} messages are omitted, because the received message is not known (recv from any rank)")
    lines.append(f"next: torchfrtrace {args.output}")
    put("".join(f"{line}\n" for line in lines))
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those of the command and those of ``allranks run``."""
    for place, word in enumerate(words):
        if word == "--":
            return words[:place], words[place + 1 :]
    return words, []


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-o", "--output"), action="append", default=[], type=Path, metavar="FILE", help=f"what to write: {_FORMATS}"
    )
    parser.add_argument("--last", type=_seconds, metavar="TIME", help="only this much time at the end: 30, 5m")


def _seconds(text: str) -> float:
    from allranks._cluster.env import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _is_json(file: Path) -> bool:
    return file.name.endswith((".json", ".json.gz"))


def _check_outputs(files: Sequence[Path]) -> None:
    for file in files:
        drawn = not _is_json(file) and file.suffix != ".html"
        if why := output_problem(None if drawn else file, file if drawn else None):
            raise ConfigError(why.replace("--plot", "-o"))


def _write(found: Timeline, files: Sequence[Path], profiler: Sequence[Path], progress: TerminalProgress) -> None:
    profiles = [read_profile(file, found) for file in profiler]
    for file in files:
        progress.at(f"drawing {found.calls} calls into {file.name}")
        try:
            if _is_json(file):
                from allranks._trace import chrome

                chrome.write(found, file, profiles)
            elif file.suffix == ".html":
                from allranks._trace import page

                page.write(found, file)
            else:
                from allranks._trace import picture

                picture.write(found, file)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def summary(found: Timeline, files: Sequence[Path]) -> list[str]:
    """Return the lines that describe a timeline."""
    ranks = sorted({process.rank for process in found.processes})
    hosts = len(found.clocks)
    size = max(process.world_size for process in found.processes)
    of = f" of {size}" if size > len(ranks) else ""
    where = f" on {hosts} hosts" if hosts > 1 else ""
    commands = f" and {found.commands} commands of workers" if found.commands else ""
    lines = [f"{len(ranks)}{of} ranks{where}, {found.calls} calls{commands} in {found.end / 1e9:.3g} s"]
    if of:
        lines.append(f"no files of {rank_list(sorted(set(range(size)) - set(ranks)))}")
    if found.late:
        late = found.late[0]
        lines.append(
            f"rank {late.rank} arrived last in {late.times} of {found.compared} collectives; other ranks waited"
            f" {late.waited / 1e9:.3g} s for it"
        )
    lines += [_clock(clock, found.clocks[0]) for clock in found.clocks[1:]]
    if found.missing:
        lines.append(
            f"{found.missing} calls are missing: files keep only the newest calls, and stop growing if the disk is full"
        )
    lines += [f"written to {file}" for file in files]
    return lines


def _clock(clock: Clock, first: Clock) -> str:
    if clock.error is None:
        return (
            f"clock of {clock.host}: taken from its wall clock, so the error is not known; no calls connect it with"
            f" {first.host}"
        )
    return (
        f"clock of {clock.host}: within {clock.error / 1e3:.1f} us of that of {first.host}, by {clock.calls} calls"
        f" (drift {clock.drift * 1e6:+.2f} ppm)"
    )
