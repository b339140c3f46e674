"""Options of torchrun and torch.distributed.launch, compared with the parsers of torch."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.launch as torchs_launch
from torch.distributed.run import config_from_args, get_args_parser

from allranks._base.errors import ConfigError
from allranks.launch.arguments import torchrun
from allranks.launch.arguments.torchrun import parse_torchruns, read
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import Target


def read_torchruns(words: list[str]) -> argparse.Namespace:
    return get_args_parser().parse_args(words)


def options_of(parser: argparse.ArgumentParser) -> dict[str, tuple[str, object, object]]:
    """Return the destination, the number of values and the choices of each spelling of an option."""
    return {
        spelling: (action.dest, action.nargs, action.choices and sorted(action.choices))
        for action in parser._actions
        for spelling in action.option_strings
    }


def test_options_are_exactly_those_of_torchrun() -> None:
    assert options_of(torchrun._parser({}, for_launch=False)) == options_of(get_args_parser())


LINES = """
x.py
x.py --nnodes 3 -m
--nproc-per-node 2 x.py a --b
--nproc_per_node=gpu --nnodes=1:4 --max-restarts 3 x.py
--nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 15432 x.py
--rdzv-backend c10d --rdzv_endpoint node0:29400 --rdzv-id 7 --rdzv_conf is_host=1,join_timeout=5 x.py
--standalone --nproc-per-node auto -m a.b --c
--no-python --role trainer --monitor_interval 5 --start-method fork ls -l
--run_path /x.py
-r 3 -t 0:1,1:2 --log-dir logs --local_ranks_filter 0,1 x.py
--redirects=1 --tee=2 --local-addr 10.0.0.2 --numa-binding exclusive x.py
--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 --virtual-local-rank x.py
--event_log_handler console --logs_specs mine x.py
--duplicate-stdout-filters a,b,,c --duplicate_stderr_filters d x.py
--nnodes 2 -- x.py --
--nno 2 --stand --max-r=1 x.py
""".strip().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_command_line_is_parsed_as_by_torchrun(line: str) -> None:
    theirs, ours = vars(read_torchruns(line.split())), vars(parse_torchruns(line.split(), {}))
    if "node_rank" not in line:
        theirs["node_rank"] = None  # torchrun has 0 on each host, allranks has None
    assert ours == theirs


@pytest.mark.parametrize("line", ["--use-env --nproc_per_node 2 x.py", "--use_env x.py --use_env", "x.py"])
def test_command_line_is_parsed_as_by_torch_distributed_launch(line: str) -> None:
    theirs = vars(torchs_launch.parse_args(line.split())) | {"node_rank": None}
    assert vars(parse_torchruns(line.split(), {}, for_launch=True)) == theirs


def test_environment_variables_set_options_as_in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"nproc_per_node": "3", "max_restarts": "2", "monitor_interval": "1.5", "module": "1", "standalone": "0"}
    values |= {"node_rank": "1", "duplicate_stdout_filters": "a,b", "logs_specs": "not read", "numa_binding": "node"}
    for action in get_args_parser()._actions:
        if action.option_strings and action.nargs is None and not action.choices and action.type is not int:
            values.setdefault(action.dest, f"1{action.dest}"[: 1 if action.type is float else None])
    for name, value in values.items():
        monkeypatch.setenv(f"PET_{name.upper()}", value)
    words = ["--max_restarts", "5", "a.b"]
    assert vars(parse_torchruns(words, os.environ)) == vars(read_torchruns(words))


def asked(line: str, **environ: str) -> Options:
    return read(line.split(), environ)


def words_of(options: Options) -> tuple[str, ...]:
    return (options.target.name, *options.target.args)


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node 3 x.py a",
        "--nnodes 2:5 --rdzv-backend c10d --rdzv-endpoint [::1]:7 --rdzv-id b --nproc-per-node 2 --role r x.py",
        "--nnodes 2 --node-rank 1 --master-addr a --master-port 7 --max-restarts 3 x.py",
        "--nnodes 2 --rdzv-endpoint a:8 --node_rank 0 x.py",
        "--nproc-per-node cpu -m a.b c",
        "--shutdown-timeout 7 --no-python ls -l",
        "--run-path x.py",
    ],
)
def test_options_match_the_agent_configuration_of_torchrun(line: str) -> None:
    """Compare the options with the configuration that torchrun passes to its agent."""
    args = read_torchruns(line.split())
    if args.master_port is None:
        args.master_port = 29500  # the default that torchrun's run() sets
    config, command, arguments = config_from_args(args)
    options = read(line.split(), {})
    assert options.nodes == (config.min_nodes, config.max_nodes)
    assert options.per_host in (config.nproc_per_node, "auto")
    assert (options.restarts, options.role) == (config.max_restarts, config.role)
    assert options.run == ("" if config.run_id == "none" else config.run_id)
    if config.max_nodes > 1:
        assert options.leader is not None
        host, port = options.leader
        assert config.rdzv_endpoint == f"{f'[{host}]' if ':' in host else host}:{port}"
        assert options.node == (config.rdzv_configs.get("rank") if "rank" in line else None)
        assert options.last_call_s == 30  # default of c10d
    if config.shutdown_timeout is not None:
        assert options.grace_s == config.shutdown_timeout
    kind = "command" if args.no_python else "module" if args.module else "script"
    assert options.target.kind == kind
    ours = (
        words_of(options) if kind == "command" or args.run_path else ("-u", *(["-m"] * args.module), *words_of(options))
    )
    assert ours == ((command, *arguments) if kind == "command" else tuple(arguments))


def test_options_of_torchrun_are_translated() -> None:
    options = asked("--signals-to-handle SIGTERM,SIGUSR1 --numa-binding exclusive --local-addr 10.9.8.7 x.py")
    assert (options.signals, options.bind, options.iface) == ((signal.SIGUSR1,), "core", "10.9.8.7")
    assert read(["x.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}).grace_s == 4
    assert read(["x.py"], {}).env == "local"
    waits = asked("--nnodes 2 --rdzv-conf timeout=9,join_timeout=8,last_call_timeout=7 x.py")
    assert (waits.join_timeout_s, waits.last_call_s) == (8, 7)


def test_c10d_assigns_host_numbers_and_one_host_has_no_leader() -> None:
    assert asked("--rdzv-backend c10d --nnodes 2 --node-rank 1 x.py").node is None
    assert asked("--rdzv-backend c10d --nnodes 2 x.py").leader == ("localhost", 29400)
    assert asked("--rdzv-backend c10d --rdzv-endpoint localhost:0 x.py").leader is None
    alone = asked("--standalone --rdzv-id a --rdzv-endpoint a:1 --rdzv-backend etcd --node-rank 3 x.py")
    assert (alone.leader, alone.run, alone.node) == (None, "", None)


def test_python_exec_selects_the_interpreter() -> None:
    options = read(["--nproc-per-node", "2", "-m", "a.b", "c"], {"PYTHON_EXEC": "/opt/python"})
    assert options.target == Target("command", "/opt/python", ("-u", "-m", "a.b", "c"), macros=True)


def test_macros_are_replaced_as_in_torchrun() -> None:
    target = read(["x.py", "${local_rank}", "$local_rank-$other", "100$$"], {}).target
    assert target.on(3).args == ("3", "3-$other", "100$")
    assert Target("script", "x.py", ("${local_rank}",)).on(3).args == ("${local_rank}",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parser.add_argument('--local_rank')", "--local_rank=1"),
        ("parser.add_argument('--local-rank', '--local_rank')", "--local-rank=1"),
        ("import arguments", "--local-rank=1"),
    ],
)
def test_local_rank_argument_has_the_spelling_that_the_script_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    (tmp_path / "a_script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for words in (["a_script.py"], ["-m", "a_script"]):
        assert read([*words, "a"], {}, for_launch=True).target.on(1).args == (told, "a")
        assert read(["--use-env", *words, "a"], {}, for_launch=True).target.on(1).args == ("a",)
        assert read([*words, "a"], {}).target.on(1).args == ("a",)
    wrapped = read(["a_script.py", "a"], {"PYTHON_EXEC": "py"}, for_launch=True).target
    assert wrapped.on(1).args == ("-u", "a_script.py", told, "a")


BAD: dict[str, tuple[str, dict[str, str], str]] = {
    "etcd": ("--rdzv-backend etcd x.py", {}, "the rendezvous runs on one of the hosts"),
    "nothing": ("--nnodes 1", {}, "nothing to run: expected a script (see allranks torchrun --help)"),
    "xpu": ("--nproc-per-node xpu x.py", {}, "Specify their number"),
    "ranks": ("--nproc-per-node 0 x.py", {}, "'0' is not a number of ranks"),
    "hosts": ("--nnodes 1:2:3 x.py", {}, "is not a number of hosts"),
    "events": ("--event-log-handler console x.py", {}, "Remove the option"),
    "plug-ins": ("--logs-specs mine x.py", {}, "--log-dir, -r and -t"),
    "filters": ("--duplicate-stdout-filters a x.py", {}, "filter them with grep"),
    "module and command": ("-m --no-python x", {}, "are mutually exclusive"),
    "flag": ("x.py", {"PET_STANDALONE": "yes"}, "PET_STANDALONE='yes': expected 0 or 1"),
    "number": ("x.py", {"PET_MAX_RESTARTS": "x"}, "invalid int value: 'x'"),
    "restarts": ("--max-restarts -1 x.py", {}, "'-1' is not a whole number"),
    "signals": ("--signals-to-handle SIGNONE x.py", {}, "unknown signal 'SIGNONE'"),
    "streams": ("-r 4 x.py", {}, "'4' is neither 0, 1, 2 or 3 nor a map"),
    "two hosts, alone": ("--standalone --nnodes 2 x.py", {}, "--standalone runs the job on one host"),
}


@pytest.mark.parametrize("case", BAD)
def test_unsupported_options_are_errors_with_advice(case: str) -> None:
    line, environ, said = BAD[case]
    with pytest.raises(ConfigError) as caught:
        read(line.split(), environ)
    assert said in str(caught.value)


def test_launch_requires_use_env_for_commands() -> None:
    with pytest.raises(ConfigError, match="--no-python requires --use-env"):
        read(["--no-python", "ls"], {}, for_launch=True)
    assert read(["--no-python", "--use-env", "ls"], {}, for_launch=True).target.on(0) == Target("command", "ls")


def test_launch_uses_port_29500_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    free: Callable[[int], int] = lambda wanted: wanted  # noqa: E731
    monkeypatch.setattr(torchrun, "free_port", free)
    assert read(["x.py"], {}, for_launch=True).leader == ("", 29500)
    assert read(["--nnodes", "2", "x.py"], {}, for_launch=True).leader == ("127.0.0.1", 29500)
    assert read(["x.py"], {}).leader is None


def test_arguments_of_the_program_are_not_parsed_as_abbreviated_options() -> None:
    found = parse_torchruns(["--nproc-per-node", "2", "--max-rest=1", "-t", "3", "x.py", "--r=16", "--ma", "4"], {})
    assert (found.nproc_per_node, found.max_restarts, found.training_script) == ("2", 1, "x.py")
    assert found.training_script_args == ["--r=16", "--ma", "4"]
