"""Parsers of option values: text in, value out. An invalid text raises ``argparse.ArgumentTypeError``."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path

from allranks._base.errors import ConfigError
from allranks._base.files import plain_file
from allranks._cluster.detection import CHOICES
from allranks._cluster.env import parse_seconds
from allranks._cluster.schedulers import scheduler_named
from allranks._engines import registry
from allranks.launch.spec.stdio import Streams

# Signals that stop the job, that cannot be caught, or that the launcher itself needs.
_NOT_PASSED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "SIGWINCH", "SIGPIPE")


def environment_kind(text: str) -> str:
    """Parse ``--env``: one of ``CHOICES``, or a scheduler that an installed package provides."""
    try:
        if text in CHOICES or scheduler_named(text) is not None:
            return text
    except ConfigError as error:  # a ValueError, whose message argparse would replace
        raise argparse.ArgumentTypeError(str(error)) from error
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(map(repr, CHOICES))})")


def rank_count(text: str) -> int | str:
    # torchrun's name for "CPUs if there are no GPUs" is cpu.
    known = {"auto": "auto", "cpu": "auto", "gpu": "gpu"}
    return known.get(text) or at_least_one(text, "a number of ranks (1 or more, auto or gpu)")


def stdin_rank(text: str) -> int | str:
    return text if text in ("auto", "none") else whole(text)


def whole(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (0 or more)")


def host_count(text: str) -> tuple[int, int]:
    least, greatest = _interval(text, "a number of hosts (N or MIN:MAX)")
    return least, least if greatest is None else greatest


def elastic_range(text: str) -> tuple[int, int | None]:
    return _interval(text, "a number of ranks (MIN or MIN:MAX)")


def _interval(text: str, what: str) -> tuple[int, int | None]:
    least, colon, greatest = text.partition(":")
    numbers = [at_least_one(part, what) for part in ([least, greatest] if colon else [least])]
    if numbers[0] > numbers[-1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is greater than MAX")
    return numbers[0], numbers[1] if colon else None


def replaced_file(text: str) -> Path:
    try:
        return plain_file(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be replaced: {error.strerror}.\n  Pass the path of a regular file or of a new file."
        ) from None


def backend_names(text: str) -> str:
    for part in text.lower().split(","):
        if not registry.is_known(name := part.rpartition(":")[2].strip()):
            known = ", ".join(registry.names())
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {known}; expected NAME, or cpu:NAME,cuda:NAME")
    return text


def thread_count(text: str) -> int | None:
    return None if text == "auto" else at_least_one(text, "a number of threads (1 or more, or auto)")


def at_least_one(text: str, what: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def some_seconds(text: str) -> float:
    if not (found := seconds(text)):
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text!r}")
    return found


def streams(text: str) -> Streams:
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        return Streams(of_some={int(rank): int(value) for rank, value in (x.split(":") for x in text.split(","))})
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither 0, 1, 2 or 3 nor a map of local ranks to these, such as 0:3,1:2"
    )


def folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder")
    return Path(text)


def local_ranks(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of local ranks, such as 0,1")
    return frozenset(map(int, text.split(",")))


def signal_names(text: str) -> tuple[int, ...]:
    numbers = []
    for word in text.split(",") if text != "none" else ():
        name = "SIG" + word.strip().upper().removeprefix("SIG")
        if name not in signal.Signals.__members__:
            raise argparse.ArgumentTypeError(f"unknown signal {word!r}; expected names such as USR1,USR2")
        if name in _NOT_PASSED:
            raise argparse.ArgumentTypeError(f"{name} controls the job itself and cannot be forwarded")
        numbers.append(signal.Signals[name])
    return tuple(numbers)
