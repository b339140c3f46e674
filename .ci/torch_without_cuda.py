"""Installs a torch of PyPI without its CUDA packages: 0.5 GB are downloaded in place of 3 GB.

PyPI has torch for Linux with CUDA only. The loader wants every library of CUDA that torch's libraries name, although
without a GPU none of their functions does anything. The runtime, which torch asks for devices, is loaded too: 2 MB. For
each other library a stand-in is linked, with the symbols that torch's libraries want of it. Every function in it
returns 100, which is cudaErrorNoDevice. Constraints of the machine do not hold.

    python .ci/torch_without_cuda.py build/torch-2.15.0/bin/python 2.15.0
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_SYSTEM = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|z|cuda)\.so")  # libcuda is the driver's
_CUDA = re.compile(r"cu[A-Zs]|nccl|nvshmem")  # libraries that give their symbols no version
_RETURN_100 = {"x86_64": "mov $100, %eax\nret", "aarch64": "mov w0, #100\nret"}
_FUNCTIONS = ".text\n{labels}\n{body}\n.section .note.GNU-stack\n"


def main() -> None:
    python, version = sys.argv[1:]
    site = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--no-deps")
    _output(*install, f"torch=={version}")
    _output(*install, _runtime((next(site.glob("torch-*.dist-info")) / "METADATA").read_text()))
    torch = site / "torch"
    libraries = sorted((torch / "lib").glob("lib*.so*"))
    missing = {name for library in libraries for name in _needed(library)}
    for found in site.glob("nvidia/*/lib/libcudart.so.*"):
        shutil.copy(found, torch / "lib")  # where torch looks for all of them
    missing = {name for name in missing if not (torch / "lib" / name).exists() and not _SYSTEM.match(name)}
    versions, symbols = _wanted(libraries)
    unversioned = next(name for name in sorted(missing) if not versions[name])
    for name in missing:
        wanted = {version: symbols[version] for version in versions[name]}
        if name == unversioned:
            wanted = {"": symbols[""]}
        _link(torch / "lib" / name, wanted)


def _runtime(metadata: str) -> str:
    """The package with the CUDA runtime that this torch requires."""
    if named := re.search(r"^Requires-Dist: (nvidia-cuda-runtime-cu\d+==[\d.]+)", metadata, re.MULTILINE):
        return named[1]
    toolkit = re.search(r"^Requires-Dist: cuda-toolkit\[.*\]==(\d+\.\d+)", metadata, re.MULTILINE)
    assert toolkit is not None, "this torch requires its CUDA runtime in another way"
    return f"nvidia-cuda-runtime=={toolkit[1]}.*"


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-W", "-d", str(library)))


def _wanted(libraries: list[Path]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The versions of symbols that are wanted of each library, and the symbols of each version; "" is without one."""
    versions, symbols, defined = defaultdict(set), defaultdict(set), set()
    for library in libraries:
        name = ""
        for file, version in re.findall(r"File: (\S+)|Name: (\S+)", _output("readelf", "-W", "-V", str(library))):
            name = file or name
            if version:
                versions[name].add(version)
        for line in _output("readelf", "-W", "--dyn-syms", str(library)).splitlines():
            columns = line.split()
            if len(columns) < 8 or columns[4] not in ("GLOBAL", "WEAK"):
                continue
            symbol, _, version = columns[7].partition("@")
            if columns[6] != "UND":
                defined.add(symbol)
            elif version or _CUDA.match(symbol):
                symbols[version].add(symbol)
    symbols[""] -= defined
    return versions, symbols


def _link(library: Path, wanted: dict[str, set[str]]) -> None:
    labels = "\n".join(f".globl {name}\n{name}:" for names in wanted.values() for name in names)
    nodes = "".join(f"{version} {{ global: *; }};\n" for version in wanted if version)
    script = library.with_suffix(".versions")
    script.write_text(nodes)
    command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", str(library), "-x", "assembler", "-"]
    if nodes:
        command.insert(1, f"-Wl,--version-script={script}")
    text = _FUNCTIONS.format(labels=labels, body=_RETURN_100[platform.machine()])
    subprocess.run(command, input=text, text=True, check=True)
    script.unlink()


def _output(*command: str) -> str:
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


if __name__ == "__main__":
    main()
