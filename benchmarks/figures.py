"""Writes the figures of the README from the files that the benchmarks wrote.

python benchmarks/figures.py            # what `make bench` runs last
python benchmarks/figures.py --check    # says whether README.md holds what the files say
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"
UNITS = ((1 << 20, "MB"), (1 << 10, "KB"), (1, "B"))


def size(nbytes):
    unit, name = next((u, n) for u, n in UNITS if nbytes >= u)
    return f"{nbytes // unit} {name}"


def load(name):
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def render():
    two, four = load("all_reduce_2"), load("all_reduce_4")
    four_rows = {row["nbytes"]: row for row in four["rows"]}
    lines = [
        f"In-place float32 SUM `all_reduce` on {two['cpus']} CPUs ({two['processor']}), microseconds per call:",
        "",
        "| bytes | 2 ranks | gloo | ratio | fastest | 4 ranks | gloo | ratio | fastest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in two["rows"]:
        cells = [size(row["nbytes"])]
        for each in (row, four_rows[row["nbytes"]]):
            timings = each["timings"]
            cells += [f"{timings[name]['median_s'] * 1e6:,.1f}" for name in ("native", "gloo")]
            cells.append(f"{each['ratios']['gloo']:,.1f}x")
            cells.append(f"{timings['gloo']['fastest_s'] / timings['native']['fastest_s']:,.1f}x")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "*ratio* is that of the medians over all blocks, *fastest* that of each library's fastest block: gloo's",
        "threads are sometimes woken quickly, and mostly not.",
    ]
    step, launch = load("ddp_step"), load("launch")
    contenders = step["contenders"]
    lines += [
        "",
        f"A training step of a {step['parameters'] / 1e6:.0f} M-parameter MLP on {step['ranks']} ranks: "
        f"{contenders['allranks']['median_s'] * 1e3:.0f} ms with our `DistributedDataParallel`, "
        f"{contenders['torch']['median_s'] * 1e3:.0f} ms with torch's on gloo "
        f"({step['torch_over_allranks']:.2f}x), {contenders['no sync']['median_s'] * 1e3:.0f} ms with no sync.",
        "",
        f"A job of {launch['ranks']} ranks that imports torch and does one `all_reduce`: "
        f"{launch['median_s']['allranks run']:.1f} s with `allranks run`, "
        f"{launch['median_s']['torchrun']:.1f} s with torchrun and gloo ({launch['torchrun_over_allranks']:.1f}x).",
        "",
        "![time per call over tensor size](docs/all_reduce_2.png)",
    ]
    return "\n".join(lines) + "\n"


def main():
    readme = ROOT / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    _, tail = rest.split(END)
    text = head + BEGIN + render() + END + tail
    if "--check" in sys.argv:
        if text != readme.read_text():
            raise SystemExit("README.md does not hold the figures of benchmarks/*.json: run benchmarks/figures.py")
    else:
        readme.write_text(text)


if __name__ == "__main__":
    main()
