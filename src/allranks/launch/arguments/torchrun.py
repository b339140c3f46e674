"""Command lines of torchrun and torch.distributed.launch, translated to those of ``allranks run``.

``allranks torchrun`` accepts each option of torchrun, in both spellings, with PET_* variables for missing ones. It
translates them to options of ``allranks run``. An option without an equivalent is an error that names the alternative.
Like torchrun, it starts ranks on this host only, under any scheduler. ``allranks launch`` is torch.distributed.launch:
the same, except that scripts receive ``--local-rank=I`` unless ``--use-env`` is given.

Source: torch.distributed.run and torch.distributed.launch of torch 2.13; the tests compare with their parsers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from allranks._base.errors import ConfigError
from allranks._cluster.host import visible_gpus
from allranks.launch.arguments.options import Parser, parse
from allranks.launch.arguments.rendezvous import C10D_PORT
from allranks.launch.ranks.environ import free_port
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import find, set_first_path

__all__ = ["parse_torchruns", "read"]

_PORT = 29500  # the default of --master-port
_GRACE_S = "30"  # seconds; the default of --shutdown-timeout
# The launcher handles these signals in any case, so they are not forwarded.
_STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_BINDINGS = {"node": "numa", "socket": "numa", "exclusive": "core", "core-complex": "core"}


class _Option(NamedTuple):
    name: str
    metavar: str
    help: str
    default: Any = None
    kind: Callable[[str], object] = str
    short: str = ""
    choices: Sequence[str] | None = None
    by_env: bool = True


def _list(text: str) -> list[str]:
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


_ignored = "accepted, without effect"
_OPTIONS = (
    _Option("nnodes", "N|MIN:MAX", "number of hosts on which this command is started", "1:1"),
    _Option("nproc-per-node", "N|auto|cpu|gpu", "ranks on this host", "1"),
    _Option(
        "rdzv-backend",
        "c10d|static",
        "c10d: hosts are numbered as they join; static: by --node-rank",
        "static",
    ),
    _Option("rdzv-endpoint", "HOST[:PORT]", "the host of the rendezvous", ""),
    _Option("rdzv-id", "NAME", "name of the job, the same on all hosts", "none"),
    _Option("rdzv-conf", "KEY=VALUE,...", "join_timeout, timeout, last_call_timeout, is_host", ""),
    _Option("max-restarts", "K", "restart the ranks if one fails, up to K times", 0, int),
    _Option("monitor-interval", "SECONDS", _ignored, 0.1, float),
    _Option("start-method", "METHOD", _ignored, "spawn", choices=("spawn", "fork", "forkserver")),
    _Option("event-log-handler", "NAME", "null only", "null"),
    _Option("role", "NAME", "ROLE_NAME of the ranks", "default"),
    _Option("log-dir", "DIR", "folder for -r and -t"),
    _Option("redirects", "STREAMS", "write to files only: 1 stdout, 2 stderr, 3 both, or 0:3,1:1", "0", short="-r"),
    _Option("tee", "STREAMS", "also write to files", "0", short="-t"),
    _Option("local-ranks-filter", "0,1,...", "show these local ranks only", ""),
    _Option("duplicate-stdout-filters", "WORDS", "not supported", [], _list),
    _Option("duplicate-stderr-filters", "WORDS", "not supported", [], _list),
    _Option("node-rank", "I", "number of this host (default: hosts are numbered as they join)", None, int),
    _Option("master-addr", "HOST", "host 0", "127.0.0.1"),
    _Option("master-port", "PORT", "port on host 0", None, int),
    _Option("local-addr", "HOST", "address of this host for the other hosts"),
    _Option("logs-specs", "NAME", "not supported", by_env=False),
    _Option("numa-binding", "MODE", "bind ranks to CPUs", choices=tuple(_BINDINGS), by_env=False),
    _Option("signals-to-handle", "NAMES", "signals to forward to the ranks", ",".join(_STOPPING)),
    _Option("shutdown-timeout", "SECONDS", "seconds between SIGTERM and SIGKILL (default 30)", None, int),
)
_FLAGS = {
    "standalone": "run the job on this host only",
    "module": "run a python module, as python -m does",
    "no-python": "run a command",
    "run-path": _ignored,
    "virtual-local-rank": "make one GPU visible to each rank, with local rank 0",
}


def _parser(environ: Mapping[str, str], for_launch: bool) -> argparse.ArgumentParser:
    name = "launch" if for_launch else "torchrun"
    parser = Parser(
        prog=f"allranks {name}",
        usage=f"allranks {name} [options] script.py [args ...]",
        description=f"Drop-in replacement for {'torch.distributed.launch' if for_launch else 'torchrun'}."
        " allranks run has more options and finds hosts by itself.",
        examples=(
            (f"allranks {name} --nproc-per-node 4 train.py", "four ranks on this host"),
            (
                f"allranks {name} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 t.py",
                "the same command on each of two hosts",
            ),
        ),
        epilog="The default of an option is the environment variable PET_<OPTION>, if it is set.",
    )
    for option in _OPTIONS:
        spellings = dict.fromkeys(("--" + option.name, "--" + option.name.replace("-", "_")))
        default = option.default
        if option.by_env:
            default = environ.get(f"PET_{option.name.replace('-', '_').upper()}", default)
        parser.add_argument(
            *([option.short] if option.short else []),
            *spellings,
            type=option.kind,
            default=default,
            choices=option.choices,
            metavar=option.metavar,
            help=option.help,
        )
    for flag, text in _FLAGS.items():
        spellings = dict.fromkeys(("--" + flag, "--" + flag.replace("-", "_")))
        set_by = f"PET_{flag.replace('-', '_').upper()}"
        try:
            default = bool(int(environ.get(set_by, "0")))
        except ValueError:
            raise ConfigError(f"{set_by}={environ[set_by]!r}: expected 0 or 1") from None
        short = ["-m"] if flag == "module" else []
        parser.add_argument(*short, *spellings, action="store_true", default=default, help=text)
    if for_launch:
        parser.add_argument(
            *("--use-env", "--use_env"),
            action="store_true",
            help="do not pass --local-rank=I; LOCAL_RANK is set",
        )
    parser.add_argument("training_script", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse_torchruns(argv: Sequence[str], environ: Mapping[str, str], *, for_launch: bool = False) -> argparse.Namespace:
    """Parse a command line into the same names and values as torchrun.

    Args:
        argv: the arguments.
        environ: the environment, with PET_* variables.
        for_launch: parse like torch.distributed.launch.

    Raises:
        ConfigError: the arguments are wrong.
        SystemExit: help was requested, and printed.
    """
    parser = _parser(environ, for_launch)
    script = _place_of_script(parser, argv)
    asked = parser.parse_args(argv[: script + 1])
    asked.training_script_args = list(argv[script + 1 :])
    if asked.training_script is None:
        raise ConfigError(f"nothing to run: expected a script (see {parser.prog} --help)")
    return asked


def _place_of_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Return the position of the program's name.

    argparse alone would also take arguments of the program for abbreviations of options.

    Returns:
        Its index; the number of arguments if there is no program, or if an earlier argument is wrong.
    """
    at = 0
    while at < len(argv):
        word, _, value = argv[at].partition("=")
        if not word.startswith("-") or word == "-":
            return at
        if word == "--":
            return at + 1
        known = parser._option_string_actions
        named = [known[word]] if word in known else [known[each] for each in known if each.startswith(word)]
        if not word.startswith("--") and word not in known:  # -t3
            named, value = [known[word[:2]]] if word[:2] in known else [], word[2:]
        if len(set(map(id, named))) != 1:
            return len(argv)
        at += 1 if value or named[0].nargs == 0 or "=" in argv[at] else 2
    return at


def read(argv: Sequence[str], environ: Mapping[str, str], *, for_launch: bool = False) -> Options:
    """Return the options that a command line of torchrun requests. Arguments as for ``parse_torchruns``.

    Raises:
        ConfigError: the command line is wrong, or requires an unsupported feature.
        SystemExit: help was requested, and printed.
    """
    asked = parse_torchruns(argv, environ, for_launch=for_launch)
    _refuse(asked)
    words = ["--env", "local", *_rendezvous_words(asked, for_launch), *_ranks(asked), *_output(asked)]
    grace = asked.shutdown_timeout
    words += ["--grace", environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_S) if grace is None else str(grace)]
    local_rank = [f"{_spelling(asked)}=${{local_rank}}"] if for_launch and not asked.use_env else []
    options = parse(
        [*words, *_target(asked, local_rank, environ)], "allranks launch" if for_launch else "allranks torchrun"
    )
    target = replace(options.target, macros=True)
    return replace(options, target=target, virtual_local_rank=asked.virtual_local_rank)


def _refuse(asked: argparse.Namespace) -> None:
    """Refuse options that request an unsupported feature.

    Raises:
        ConfigError: with the alternative.
    """
    if asked.no_python and asked.module and not asked.run_path:
        raise ConfigError("--no-python and --module are mutually exclusive")
    if asked.no_python and not getattr(asked, "use_env", True):
        raise ConfigError("--no-python requires --use-env: commands do not receive --local-rank.\n  Add --use-env.")
    if asked.event_log_handler != "null":
        raise ConfigError("--event-log-handler: allranks does not record events.\n  Remove the option.")
    if asked.logs_specs is not None:
        raise ConfigError("--logs-specs: log plugins are not supported.\n  Use --log-dir, -r and -t.")
    if asked.duplicate_stdout_filters or asked.duplicate_stderr_filters:
        raise ConfigError(
            "--duplicate-stdout-filters and --duplicate-stderr-filters are not supported.\n"
            "  Write log files with -t 3 --log-dir DIR, and filter them with grep."
        )


def _rendezvous_words(asked: argparse.Namespace, for_launch: bool) -> list[str]:
    """Return the words for the hosts of the job, and for their rendezvous."""
    words = ["--nnodes", asked.nnodes]
    if asked.standalone:
        return [*words, "--standalone"]
    words += ["--rdzv-backend", asked.rdzv_backend]
    if asked.rdzv_id != "none":
        words += ["--rdzv-id", asked.rdzv_id]
    if asked.local_addr:
        words += ["--local-addr", asked.local_addr]
    by_c10d = asked.rdzv_backend == "c10d"
    several = asked.nnodes not in ("1", "1:1")
    # torchrun's defaults in seconds, which are longer than those of ``allranks run``.
    usual = f"timeout={600 if by_c10d else 900},last_call_timeout=30"
    words += ["--rdzv-conf", f"{usual},{asked.rdzv_conf}"]  # a later setting overrides an earlier one
    if by_c10d:
        return [*words, "--rdzv-endpoint", asked.rdzv_endpoint or f"localhost:{C10D_PORT}"] if several else words
    if asked.rdzv_endpoint:
        words += ["--rdzv-endpoint", asked.rdzv_endpoint]
    elif several or asked.master_port is not None:
        port = _PORT if asked.master_port is None else asked.master_port
        words += ["--master-addr", asked.master_addr, "--master-port", str(port)]
    elif for_launch:
        words += ["--master-port", str(free_port(_PORT))]
    return [*words, "--node-rank", str(asked.node_rank)] if several and asked.node_rank is not None else words


def _ranks(asked: argparse.Namespace) -> list[str]:
    """Return the words for the number of ranks of this host, and their options."""
    count = asked.nproc_per_node
    if count == "xpu":
        raise ConfigError("--nproc-per-node xpu: allranks cannot count these devices.\n  Specify their number.")
    if count == "auto":
        count = "gpu" if len(visible_gpus(os.environ)) else "cpu"
    words = ["--nproc-per-node", count, "--max-restarts", str(asked.max_restarts), "--role", asked.role]
    if asked.numa_binding is not None:
        words += ["--bind", _BINDINGS[asked.numa_binding]]
    if asked.virtual_local_rank:
        words += ["--one-gpu-per-rank"]
    passed = [name for name in (part.strip() for part in asked.signals_to_handle.split(",")) if name not in _STOPPING]
    return [*words, "--signals", ",".join(passed)] if passed else words


def _output(asked: argparse.Namespace) -> list[str]:
    """Return the words for the output that is shown and kept."""
    words: list[str] = []
    for name, idle in (("redirects", "0"), ("tee", "0"), ("log_dir", None), ("local_ranks_filter", "")):
        if (value := getattr(asked, name)) != idle:
            words += ["--" + name.replace("_", "-"), value]
    return words


def _target(asked: argparse.Namespace, local_rank: list[str], environ: Mapping[str, str]) -> list[str]:
    words = [asked.training_script, *local_rank, *asked.training_script_args]
    if asked.run_path:
        return words
    if asked.no_python:
        return ["--", *words]
    as_module = ["-m"] if asked.module else []
    # PYTHON_EXEC is torchrun's variable for another interpreter.
    if (python := environ.get("PYTHON_EXEC", sys.executable)) != sys.executable:
        return ["--", python, "-u", *as_module, *words]
    return [*as_module, *words]


def _spelling(asked: argparse.Namespace) -> str:
    """Return the spelling of the local-rank option: torch's, unless the script only has that of torch before 2."""
    path = Path(asked.training_script)
    if asked.module and not asked.run_path:
        set_first_path(os.getcwd())
        spec = find(asked.training_script)
        path = Path(spec.origin) if spec is not None and spec.origin is not None else path
    text = path.read_text(errors="replace") if path.is_file() else ""
    return "--local_rank" if "--local_rank" in text and "--local-rank" not in text else "--local-rank"
