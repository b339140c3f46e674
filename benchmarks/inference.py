"""Tokens per second of transformers' tensor parallelism on CPUs: gloo, and allranks in its place.

    python benchmarks/inference.py --json benchmarks/inference.json      # root, for the hosts

A small Llama with random weights is split over two ranks by ``tp_plan="auto"``, and generates tokens greedily. The
program requests no backend: transformers initializes torch.distributed with gloo. ALLRANKS_INSTEAD_OF_GLOO=1 lets
allranks replace it. Runs on both alternate, and medians are compared. All runs must generate the same tokens.

The ranks are on one host, or each on a host of its own: network namespaces of this machine, with equal parts of its
CPUs. Threads per rank are CPUs / ranks, and OMP_NUM_THREADS sets them for both backends.

The time of a step consists of Python, kernels and two all_reduces per layer. With the default sizes, a layer computes
less than a millisecond, so communication has a large part in it. A larger model computes longer, and gains less. The
first part of the settings generates tokens one by one: its messages have ``batch * hidden`` numbers. In ``prompt``,
nearly all of the time is the first step, whose messages have ``batch * prompt * hidden`` numbers. ``compiled`` runs the
model by torch.compile, which removes most of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster import Host, cluster, trouble  # noqa: E402

RANKS = 2
SETTINGS = {
    "1 sequence": {"batch": 1, "prompt": 16, "tokens": 64},
    "32 sequences": {"batch": 32, "prompt": 16, "tokens": 32},
    "prompt": {"batch": 4, "prompt": 512, "tokens": 2},
    "1 sequence, compiled": {"batch": 1, "prompt": 16, "tokens": 64, "compiled": True},
}
BACKENDS = ("gloo", "allranks")


def rank_main(folder: str, names: list[str], tokens: int, repeat: int) -> None:
    """Generate tokens, the program of a rank. Rank 0 prints the tokens and seconds of each setting."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, CompileConfig
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    source = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name in names:
        setting = SETTINGS[name]
        prompts = torch.randint(3, model.config.vocab_size, (setting["batch"], setting["prompt"]), generator=source)
        count = min(tokens, setting["tokens"]) if tokens else setting["tokens"]
        options: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        if setting.get("compiled"):
            config = CompileConfig(mode="default")
            config._compile_all_devices = True  # otherwise transformers compiles only for accelerators
            options |= {"cache_implementation": "static", "compile_config": config}
        seconds = []
        for i in range(-1, repeat):
            dist.barrier()
            begin = time.perf_counter()
            made = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **options)
            if i >= 0:  # the first generation warms up
                seconds.append(time.perf_counter() - begin)
        found[name] = {
            "tokens": made[:, setting["prompt"] :].tolist(),
            "generated": setting["batch"] * count,
            "seconds": seconds,
        }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: found[name]["tokens"] for name in names})
    if any(each != everyone[0] for each in everyone):
        raise SystemExit("the ranks generated different tokens")
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def parts() -> list[str]:
    """Return the CPUs of each host, for taskset: an equal part, or all if there are fewer CPUs than hosts."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // RANKS
    return [",".join(map(str, cpus[i * each : (i + 1) * each] if each else cpus)) for i in range(RANKS)]


def run(hosts: list[Host], backend: str, words: list[str]) -> dict[str, Any]:
    """Run the program once, on these hosts, or on this one if there are none. Return what rank 0 has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ALLRANKS_")},
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": "1" if hosts else str(RANKS),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // RANKS)),
        "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "ALLRANKS_SECRET": secrets.token_hex(32),
        "ALLRANKS_INSTEAD_OF_GLOO": str(int(backend == "allranks")),
    }
    command, running = [sys.executable, "-W", "ignore", __file__, "--rank", *words], []
    for rank in range(RANKS):
        # On one host as well: otherwise the kernel sometimes runs both ranks on one CPU.
        own = ["taskset", "--cpu-list", parts()[rank], *command]
        running.append(
            subprocess.Popen(
                hosts[rank].inside(*own) if hosts else own,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": "0" if hosts else str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = [each.communicate(timeout=1800) for each in running]
    replaced = any("the program requested gloo" in err for _, err in printed)
    if any(each.returncode for each in running) or replaced != (backend == "allranks"):
        sys.exit(f"{backend} failed:\n" + "".join(out[-2000:] + err[-4000:] for out, err in printed))
    result: dict[str, Any] = json.loads(printed[0][0].splitlines()[-1])
    return result


def compare(hosts: list[Host], where: str, args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Alternate runs on both backends, and return the tokens per second of each setting."""
    rates: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, Any] = {}
    for number in range(args.runs):
        for backend in BACKENDS if number % 2 == 0 else BACKENDS[::-1]:
            found = run(hosts, backend, words)
            print(f"{where}: run {number + 1} of {args.runs} on {backend} has finished", file=sys.stderr, flush=True)
            for name in args.settings:
                if tokens.setdefault(name, found[name]["tokens"]) != found[name]["tokens"]:
                    sys.exit(f"{where}, {name}: {backend} generates other tokens than the first run")
                rate = found[name]["generated"] / statistics.median(found[name]["seconds"])
                rates.setdefault(name, {}).setdefault(backend, []).append(rate)
    rows = {}
    for name, by_backend in rates.items():
        medians = {backend: statistics.median(each) for backend, each in by_backend.items()}
        ratio = medians["allranks"] / medians["gloo"]
        rows[name] = {"tokens_per_s": medians, "allranks_over_gloo": ratio, "runs": by_backend}
        print(
            f"{where}, {name}: {medians['allranks']:.1f} tokens/s on allranks, {medians['gloo']:.1f} on gloo: "
            f"{ratio:.2f}x",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, default=256, help="size of a hidden state (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="default %(default)s")
    parser.add_argument("--settings", type=lambda text: text.split(";"), default=list(SETTINGS), metavar="A;B")
    parser.add_argument("--tokens", type=int, default=0, help="generate at most this number of tokens per sequence")
    parser.add_argument("--repeat", type=int, default=5, help="generations of a run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="runs on each backend (default %(default)s)")
    parser.add_argument("--hosts", default="1,2", help="numbers of hosts (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.model, args.settings, args.tokens, args.repeat)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, str(ROOT / "examples/serve/make_model.py"), folder]
        sizes = ["--hidden", str(args.hidden), "--layers", str(args.layers)]
        subprocess.run([*make, *sizes], check=True, stderr=subprocess.DEVNULL)
        words = ["--model", folder, "--settings", ";".join(args.settings)]
        words += ["--tokens", str(args.tokens), "--repeat", str(args.repeat)]
        for count in map(int, args.hosts.split(",")):
            if count == 1:
                results["1 host"] = compare([], "1 host", args, words)
            elif reason := trouble():
                sys.exit(f"this machine cannot create hosts: {reason}")
            else:
                with cluster(RANKS) as made:
                    results["2 hosts"] = compare(made.hosts, "2 hosts", args, words)
    if args.json:
        about = {"ranks": RANKS, "threads": max(1, len(os.sched_getaffinity(0)) // RANKS)}
        model = {"hidden": args.hidden, "layers": args.layers}
        args.json.write_text(json.dumps({**about, **model, "settings": SETTINGS, "places": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
