"""``allranks checkpoint``: list, show, verify, compare, export and merge checkpoints.

====================  ================================================================================================
``list FOLDER``       the checkpoints in a folder
``show PATH``         the writers of a checkpoint, and its contents
``verify PATH``       reads every byte; exit code 1 if something differs from what was written
``diff PATH PATH``    the differences between two checkpoints; exit code 1 if there are any
``export PATH FILE``  one safetensors file, or, with another extension, one for ``torch.load``
``merge PATH...``     one checkpoint from the shares of hosts that have no common folder
====================  ================================================================================================

A PATH is a checkpoint or a folder of checkpoints. Of a folder, the newest checkpoint or that of ``--step`` is used.
``list``, ``show`` and ``verify`` also accept a share of a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks._base.console import ArgumentParser, harmless, put
from allranks._base.errors import AllranksError, CheckpointError, UsageError, rank_list
from allranks._base.exit_codes import FOUND, USAGE
from allranks._base.files import plain_file
from allranks._call.bytes import view_of
from allranks.checkpoint import folders, parts, single_file
from allranks.checkpoint.layout import PartDescription, SaveJob, set_positions
from allranks.checkpoint.loading import BlockReader, load_as_rank
from allranks.checkpoint.manifest import Manifest, Saved, dtype_of, load_manifest
from allranks.checkpoint.merging import merge_shares
from allranks.checkpoint.selection import select_local_checkpoint
from allranks.checkpoint.verifying import check
from allranks.tools.progress import LoopBar

__all__ = ["main"]

_NAME = "allranks checkpoint"


def main(argv: Sequence[str]) -> int:
    """Run the command. Return the exit code."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.act(options)
    except (AllranksError, OSError) as error:
        print(harmless(f"{_NAME}: error: {_words(error)}"), file=sys.stderr)
        return USAGE
    except MemoryError:
        print(f"{_NAME}: error: not enough memory", file=sys.stderr)
        return USAGE
    return code


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, AllranksError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="allranks checkpoint",
        description="Inspect, compare, export and merge checkpoints that allranks.checkpoint.save has written.",
        epilog="A PATH is a checkpoint or a folder of checkpoints. For a folder, the command uses the newest"
        " checkpoint, or the one of --step. verify exits with code 1 if it finds damage, and diff if it finds a"
        " difference.",
    )
    folder = "checkpoints"
    examples = {
        "list": (
            (f"allranks checkpoint list {folder}", "list steps, times, sizes, ranks and hosts"),
            (f"allranks checkpoint list {folder} --verify", "read every byte, and mark damaged checkpoints"),
        ),
        "show": ((f"allranks checkpoint show {folder} --step 500", "show the ranks, tensors and values of step 500"),),
        "verify": (
            (
                f"allranks checkpoint verify {folder} --all",
                "verify all checkpoints; exit with code 1 if any byte is damaged",
            ),
        ),
        "diff": (("allranks checkpoint diff run1 run2", "compare the newest checkpoints of two folders"),),
        "export": (
            (
                f"allranks checkpoint export {folder} model.safetensors",
                "export the tensors of rank 0 from the newest checkpoint",
            ),
        ),
        "merge": (
            (
                f"allranks checkpoint merge node0 node1 --into {folder}",
                "merge the shares of hosts without a common folder",
            ),
        ),
    }
    parser.examples = (*examples["list"], *examples["verify"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, act, summary in (
        ("list", _list, "list the checkpoints in a folder"),
        ("show", _show, "show the writers and the contents of a checkpoint"),
        ("verify", _verify, "read every byte, and report damage"),
        ("diff", _diff, "show the differences between two checkpoints"),
        ("export", _export, "export one file: safetensors, or a file for torch.load"),
        ("merge", _merge, "merge the shares of several hosts into one checkpoint"),
    ):
        add = commands.add_parser(name, help=summary, description=_sentence(summary), examples=examples[name])
        add.set_defaults(act=act)
        if name == "merge":
            add.add_argument(
                "paths", type=Path, nargs="+", metavar="PATH", help="one folder of checkpoints per host, or one share"
            )
            add.add_argument(
                "--into",
                type=Path,
                required=True,
                metavar="FOLDER",
                help="folder of checkpoints that receives the result",
            )
        else:
            add.add_argument("path", type=Path, metavar="FOLDER" if name == "list" else "PATH")
        if name == "diff":
            add.add_argument("other", type=Path, metavar="PATH")
        if name == "export":
            add.add_argument(
                "file",
                type=Path,
                metavar="FILE",
                help="NAME.safetensors; with any other extension, a file for torch.load",
            )
            add.add_argument("--force", action="store_true", help="overwrite an existing file")
        if name == "list":
            add.add_argument("--verify", action="store_true", help="read every byte to find damage")
        if name == "verify":
            add.add_argument("--all", action="store_true", help="verify all checkpoints in the folder")
        if name not in ("list", "diff"):
            add.add_argument("--step", type=int, metavar="N", help="step to use in a folder (default: the newest)")
        if name in ("diff", "export", "show"):
            rank_help = (
                "show the tensors and values of this rank (default: all tensors, and the values of rank 0)"
                if name == "show"
                else "rank whose state is used (default: 0)"
            )
            add.add_argument("--rank", type=int, default=None if name == "show" else 0, metavar="R", help=rank_help)
        add.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


# list and show.


def _list(options: argparse.Namespace) -> int:
    found = [_entry(one.step, one.path, options.verify) for one in folders.find(options.path)]
    if options.json:
        put(json.dumps(found, indent=1) + "\n")
    elif not found:
        put(f"There is no checkpoint in {options.path}.\n")
    else:
        put(f"{'step':>12}  {'when':19}  {'size':>8}  {'ranks':>5}  hosts\n")
        for entry in found:
            put(_line(entry) + "\n")
    return 0


def _entry(step: int, path: Path, verified: bool) -> dict[str, Any]:
    try:
        info = folders.Info.of(path, load_manifest(path))
        problems = check(path) if verified else []
    except (CheckpointError, OSError) as error:
        problems = [_words(error)]
    if problems:
        return {"step": step, "path": str(path), "problem": problems[0]}
    found = {"step": step, "path": str(path), "nbytes": info.nbytes, "when": info.when, "ranks": info.ranks}
    share = {} if info.share is None else {"share": info.share[0], "shares": info.share[1]}
    return {**found, "hosts": list(info.hosts), "run": info.run, **share}


def _line(entry: dict[str, Any]) -> str:
    if "problem" in entry:
        return f"{entry['step']:>12}  damaged: {entry['problem']}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["when"]))
    hosts = ", ".join(entry["hosts"]) + (f"  ({_share(entry)})" if "share" in entry else "")
    return f"{entry['step']:>12}  {when:19}  {_size(entry['nbytes']):>8}  {entry['ranks']:>5}  {hosts}"


def _share(entry: dict[str, Any]) -> str:
    return f"share {entry['share']} of {entry['shares']}"


def _size(nbytes: int) -> str:
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def _show(options: argparse.Namespace) -> int:
    is_there = options.path.exists()
    folder = (
        _path_of(options.path, options.step) if is_there else select_local_checkpoint(options.path, options.step).folder
    )
    manifest = load_manifest(folder)
    rank = _rank(options.rank, manifest)
    shown_tensors = manifest.tensors if options.rank is None else manifest.tensors_of(rank).values()
    tensors = [_described(saved, manifest) for saved in shown_tensors]
    values = dict(_values(manifest.tree(rank), ""))
    entry = _entry(manifest.step, folder, verified=False)
    if options.json:
        writers = [{"host": writer.host, "pid": writer.pid} for writer in manifest.writers]
        files = [
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "rank": file.rank,
                **({"share": file.share} if file.share else {}),
            }
            for file in manifest.files
        ]
        shown = {**entry, "writers": writers, "files": files, "tensors": tensors, "values": values}
        put(json.dumps(shown, indent=1) + "\n")
        return 0
    put(f"{folder}\n")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.when))
    hosts = ", ".join(entry["hosts"])
    writers_text = f"{entry['ranks']} ranks on {hosts}, run {entry['run']}"
    share = f"{_share(entry)}: {_size(manifest.nbytes)} in this folder" if manifest.share else _size(manifest.nbytes)
    put(f"step {manifest.step}, {when}, {share}, {writers_text}\n\n")
    width = max((len(tensor["name"]) for tensor in tensors), default=0)
    for tensor in tensors:
        ranks_text = f"  of {rank_list(tensor['ranks'])}" if tensor["ranks"] else ""
        pieces = f"  in {tensor['parts']} parts" if tensor["parts"] > 1 else ""
        shape = str(tensor["shape"])
        nbytes = _size(tensor["nbytes"])
        put(f"{tensor['name']:{width}}  {tensor['dtype']:9}  {shape:16}  {nbytes:>8}{pieces}{ranks_text}\n")
    put("\n" if values and tensors else "")
    for name, value in values.items():
        put(f"{name} = {value}\n")
    return 0


def _rank(rank: int | None, manifest: Manifest) -> int:
    """Check a rank number against the writers of the checkpoint. Return rank 0 if none is given."""
    if rank is not None and not 0 <= rank < len(manifest.writers):
        raise UsageError(f"--rank {rank}: step {manifest.step} has ranks 0 to {len(manifest.writers) - 1}")
    return rank or 0


def _described(saved: Saved, manifest: Manifest) -> dict[str, Any]:
    nbytes = torch.Size(saved.shape).numel() * dtype_of(saved.dtype).itemsize
    files = sorted({manifest.files[piece.file].name for piece in saved.pieces})
    found = {"name": saved.name, "dtype": saved.dtype, "shape": list(saved.shape), "nbytes": nbytes, "files": files}
    return {**found, "parts": len(saved.pieces), "ranks": list(saved.ranks)}


def _values(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the values that are not tensors: the path and a short text of each."""
    if isinstance(tree, list):
        if all(not isinstance(item, (list, dict)) for item in tree):
            yield path, _short(tree)
            return
        for number, item in enumerate(tree):
            yield from _values(item, f"{path}.{number}")
    elif isinstance(tree, dict) and len(tree) == 1:
        ((tag, value),) = tree.items()
        if tag == "dict" and isinstance(value, dict):
            for key, item in value.items():
                yield from _values(item, f"{path}.{key}" if path else key)
        elif tag == "items" and isinstance(value, list):
            for key, item in value:
                yield from _values(item, f"{path}.{key}" if path else str(key))
        elif tag == "tuple":
            yield from _values(value, path)
        elif tag not in ("tensor", "numpy"):
            yield path, _short(value)
    else:
        yield path, _short(tree)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# verify.


def _verify(options: argparse.Namespace) -> int:
    entries = folders.find(options.path) if options.all else []
    paths = [one.path for one in entries] if options.all else [_path_of(options.path, options.step)]
    sizes = {path: _nbytes(path) for path in paths}
    with LoopBar(_NAME) as bar:
        before = 0

        def verify_one(path: Path) -> list[str]:
            nonlocal before
            problems = check(path, lambda done, of: bar.at(f"reading {path.name}", before + done, sum(sizes.values())))
            before += sizes[path]
            return problems

        problems_by_path = {str(path): verify_one(path) for path in paths}
    if options.json:
        put(json.dumps(problems_by_path, indent=1) + "\n")
    else:
        for path, problems in problems_by_path.items():
            put(f"{path}: {_verdict(Path(path))}\n" if not problems else "")
            put("".join(f"{path}: {problem}\n" for problem in problems))
    return FOUND if any(problems_by_path.values()) else 0


def _nbytes(path: Path) -> int:
    """Return the bytes of the files; 0 if the manifest is damaged, which the later check reports."""
    try:
        return load_manifest(path, sizes=False).nbytes
    except (CheckpointError, FileNotFoundError):
        return 0


def _verdict(path: Path) -> str:
    """Return the result for a checkpoint or share without problems."""
    share = load_manifest(path).share
    return (
        "intact"
        if share is None
        else f"share {share.number} of {share.count}, intact; the other shares were not checked"
    )


def _path_of(path: Path, step: int | None) -> Path:
    """Return the path of a checkpoint or a share, even if it is damaged."""
    if not folders.is_folder_of_checkpoints(path):
        return path
    named = [one.path for one in folders.find(path) if step in (None, one.step)]
    return named[0] if named else select_local_checkpoint(path, step).folder


# diff.


def _diff(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(LoopBar(_NAME))
        chosen = [select_local_checkpoint(path) for path in (options.path, options.other)]
        count = _counted(bar, "reading both", sum(_tensor_bytes(each.manifest, options.rank) for each in chosen))
        one, other = (stack.enter_context(BlockReader(each, options.rank, progress=count)) for each in chosen)
        left_tensors, right_tensors = (reader.manifest.tensors_of(options.rank) for reader in (one, other))
        lines = []
        for name in sorted({*left_tensors, *right_tensors}):
            if name not in right_tensors:
                lines.append(f"{name}: only in {options.path}")
            elif name not in left_tensors:
                lines.append(f"{name}: only in {options.other}")
            elif difference := _difference(one, left_tensors[name], other, right_tensors[name]):
                lines.append(f"{name}: {difference}")
        left, right = (dict(_values(reader.manifest.tree(options.rank), "")) for reader in (one, other))
        for name in sorted({*left, *right}):
            if left.get(name) != right.get(name):
                lines.append(f"{name}: {left.get(name, 'no value')} and {right.get(name, 'no value')}")
    put(json.dumps(lines, indent=1) + "\n" if options.json else "".join(f"{line}\n" for line in lines))
    return FOUND if lines else 0


def _tensor_bytes(manifest: Manifest, rank: int) -> int:
    """Return the bytes of all tensors in the state of a rank."""
    saved = manifest.tensors_of(rank).values()
    return sum(torch.Size(each.shape).numel() * dtype_of(each.dtype).itemsize for each in saved)


def _counted(bar: LoopBar, words: str, total: int) -> Callable[[int], None]:
    """Return a callback that receives the number of bytes of each read, and shows the progress."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        bar.at(words, done, total)

    return count


def _difference(one: BlockReader, left_saved: Saved, other: BlockReader, right_saved: Saved) -> str:
    if (left_saved.dtype, left_saved.shape) != (right_saved.dtype, right_saved.shape):
        return f"{left_saved.dtype} {list(left_saved.shape)} and {right_saved.dtype} {list(right_saved.shape)}"
    left, right = _read(one, left_saved), _read(other, right_saved)
    # Tensors with equal bytes do not differ, even if they contain NaNs, which are not equal as numbers.
    if not left.numel() or bytes(view_of(left)) == bytes(view_of(right)):
        return ""
    if not (left.is_floating_point() or left.is_complex()):
        return f"{int((left != right).sum())} of {left.numel()} elements differ"
    # In the tensor's own dtype, the difference could overflow or be rounded (float16).
    wide = torch.complex128 if left.is_complex() else torch.float64
    distance = (left.to(wide) - right.to(wide)).abs()
    return f"{int((distance != 0).sum())} of {left.numel()} elements differ, by up to {float(distance.max()):.6g}"


def _read(reader: BlockReader, saved: Saved) -> Tensor:
    made = torch.empty(saved.shape, dtype=dtype_of(saved.dtype))
    reader.read(saved, made)
    return made


# export.


def _export(options: argparse.Namespace) -> int:
    chosen, file = select_local_checkpoint(options.path, options.step), options.file
    # lexists: a dangling link counts as an existing file, because writing would create its target.
    if os.path.lexists(file) and not options.force:
        raise CheckpointError(f"{file} already exists.\n  Pass --force to overwrite it.")
    try:
        file = plain_file(file)
    except OSError as error:
        raise CheckpointError(
            f"{options.file} cannot be overwritten: {error.strerror}.\n"
            "  Pass the path of a regular file or of a new file."
        ) from None
    if not file.absolute().parent.is_dir():
        raise CheckpointError(f"the folder {file.absolute().parent} does not exist")
    _rank(options.rank, chosen.manifest)
    total = _tensor_bytes(chosen.manifest, options.rank)
    with LoopBar(_NAME) as bar:
        count = _counted(bar, f"reading {chosen.folder.name}", total)
        if file.suffix == ".safetensors":
            with BlockReader(chosen, options.rank, progress=count) as reader:
                _write_safetensors(file, reader, list(reader.manifest.tensors_of(options.rank).values()))
        else:
            state = load_as_rank(chosen, None, options.rank, count)
            bar.at(f"writing {file.name}", total, None)
            single_file.save(state, file)
    tensors, nbytes = len(chosen.manifest.tensors_of(options.rank)), os.path.getsize(file)
    values = len(dict(_values(chosen.manifest.tree(options.rank), "")))
    left_out = values if file.suffix == ".safetensors" else 0
    if options.json:
        written = {"file": str(file), "nbytes": nbytes, "step": chosen.manifest.step, "rank": options.rank}
        put(json.dumps({**written, "tensors": tensors, "left_out": left_out}, indent=1) + "\n")
    elif file.suffix != ".safetensors":
        put(f"{file}: written for torch.load ({_size(nbytes)})\n")
    else:
        more = f"; {left_out} values that are not tensors are omitted" if left_out else ""
        put(f"{file}: {tensors} tensors ({_size(nbytes)}){more}\n")
    return 0


def _write_safetensors(file: Path, reader: BlockReader, tensors: Sequence[Saved]) -> None:
    """Write one tensor after the other into a temporary folder beside the file, then replace the file."""
    jobs = []
    for saved in tensors:
        nothing = (0,) * len(saved.shape)
        size = dtype_of(saved.dtype).itemsize
        jobs.append(
            SaveJob(PartDescription(saved.name, saved.dtype, size, saved.shape, nothing, saved.shape, 0), (), (0,))
        )
    set_positions(jobs)
    by_name = {saved.name: saved for saved in tensors}

    def views() -> Iterator[memoryview]:
        for job in jobs:
            tensor = _read(reader, by_name[job.description.name])
            yield view_of(tensor) if tensor.numel() else memoryview(b"")

    folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.absolute().parent))
    try:
        written, _ = parts.write_part(folder, jobs, reader.manifest.step, 0, views())
        os.replace(folder / written.name, file)
    finally:
        shutil.rmtree(folder)


# merge.


def _merge(options: argparse.Namespace) -> int:
    with LoopBar(_NAME) as bar:
        path = merge_shares(options.paths, options.into, options.step, bar.at)
    manifest = load_manifest(path)
    if options.json:
        put(json.dumps({"path": str(path), "step": manifest.step, "nbytes": manifest.nbytes}, indent=1) + "\n")
    else:
        put(f"{path}: complete ({_size(manifest.nbytes)})\n")
    return 0
