"""The wheel serves Python 3.10 and later and any torch version, and works with only its declared requirements."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_docs import ENVIRONMENT, page_program

import allranks

ROOT = Path(__file__).parents[2]
LEFT = {".so", ".pyc"}  # created by builds and runs in the package's folder
SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel.

    It reuses the build tools and compiled files of this environment, because building from scratch takes a minute.
    """
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), "."],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_package_and_its_wheel_have_one_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert allranks.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_modules_import_only_declared_requirements() -> None:
    """An optional package is imported in a function, and a package for types below TYPE_CHECKING."""
    requires = (Requirement(each) for each in distribution("allranks").requires or ())
    declared = {each.name.replace("-", "_") for each in requires if each.marker is None}
    undeclared = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            tops = {name.partition(".")[0] for name in names}
            undeclared += [f"{path}: {top}" for top in tops - declared - sys.stdlib_module_names - {"allranks"}]
    assert undeclared == []


@pytest.mark.timeout(600)
def test_wheel(wheel: Path, tmp_path: Path) -> None:
    assert "-cp310-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = archive.namelist()
    assert not [name for name in names if name.startswith(("tests", "core"))]
    assert {name for name in names if not name.startswith("allranks-")} == {
        "allranks/_core.abi3.so",
        *(str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.*") if path.suffix not in LEFT),
        *(f"allranks/_docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
    }
    (data,) = {name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".data")}
    pages = {f"{data}/data/share/man/man1/{page.name}" for page in (ROOT / "docs/man").iterdir()}
    assert {name for name in names if name.startswith(data)} == pages
    texts = (path for folder in (ROOT / "third_party").iterdir() for path in (folder / "COPYING", folder / "LICENSE"))
    licenses = ["LICENSE", *(str(path.relative_to(ROOT)) for path in texts if path.exists())]
    assert len(licenses) == 1 + len(list((ROOT / "third_party").iterdir()))
    (about,) = {name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert {name for name in names if name.startswith(f"{about}/licenses/")} == {
        f"{about}/licenses/{name}" for name in licenses
    }
    needed = subprocess.run(
        ["readelf", "-d", str(tmp_path / "installed/allranks/_core.abi3.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert libraries
    assert not [
        name for name in libraries if not name.startswith(("libstdc++", "libm.", "libgcc_s", "libc.", "ld-linux"))
    ]
    # The extension module works in the extracted folder, without importing torch.
    code = """
import sys
from allranks import _core

_core.create_segment(0, 1, _core.Sizes())
assert 'torch' not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "installed")}, cwd=tmp_path, check=True
    )


def test_sdist_contains_only_files_of_the_repository(tmp_path: Path) -> None:
    """Build it from a copy, because the environments in .venv and build have a hundred thousand files."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    present = {name for name in listed if (ROOT / name).exists()}
    for name in present:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("build/left.o", ".venv/left.py", "src/allranks/__pycache__/left.pyc", "src/allranks/_core.abi3.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    code = "from scikit_build_core.build import build_sdist; build_sdist('build/dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (built,) = (tmp_path / "build/dist").iterdir()
    with tarfile.open(built) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {"PKG-INFO"} <= present
    parts = ("LICENSE", "CMakeLists.txt", "core/", "src/", "third_party/", "docs/", "tests/", ".ci/try_wheel.py")
    assert {name for name in present if name.startswith(parts)} <= names


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment that contains only the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    here = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    (about,) = here.glob("allranks-*.dist-info")
    waiting = re.findall(r"^Requires-Dist: (.*)$", (about / "METADATA").read_text(), re.MULTILINE)
    taken = set()
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name in taken or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        taken.add(name)
        package = distribution(name)
        waiting += package.requires or []
        for top in {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (here / top).symlink_to(SITE / top)
    assert "numpy" not in taken
    return folder / "bin"


EVERYTHING = """
import torch
import allranks as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
try:
    torch.ones(1).numpy()
    raise SystemExit("numpy is here")
except RuntimeError:
    pass
everyone = dist.new_group()
pair = dist.new_group([0, 1], use_local_synchronization=True)
halves, _ = dist.new_subgroups(1)
split = dist.split_group(split_ranks=[[0], [1]])
shared = dist.empty_shared(4, group=everyone)
shared.fill_(rank)
dist.all_reduce(shared, group=everyone)
objects = [None] * size
dist.all_gather_object(objects, torch.arange(3) + rank, group=pair)
given = [{"a": torch.ones(2, dtype=torch.bfloat16)}]
dist.broadcast_object_list(given)
scattered = [None]
dist.scatter_object_list(scattered, [(1, "x")] * size if rank == 0 else None)
torchs = dist.torch_group()
torch.distributed.all_reduce(total := torch.ones(2), group=torchs)
if rank == 0:
    print(shared.tolist(), [o.tolist() for o in objects], given, scattered, total.tolist())
dist.destroy_process_group()
"""

WORKERS = """
import torch
import allranks as ar

mw = ar.init_master_worker(workers=2)
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t().to("worker:1")
print((x @ x).cpu().tolist(), x.sum().item(), mw.remote(lambda t: t.sum().item())(x).result())
torch.manual_seed(1)
state = torch.worker.get_rng_state("worker:1")
a = torch.rand(3, device="worker:1")
torch.worker.set_rng_state(state, "worker:1")
print(torch.equal(a.cpu(), torch.rand(3, device="worker:1").cpu()))
mw.shutdown()
"""


@pytest.mark.timeout(600)
def test_declared_requirements_are_sufficient(bare: Path, tmp_path: Path) -> None:
    """Run the documented programs and commands, and other code that reads tensor data, without NumPy."""
    for name in ("hello.py", "called.py", "spawned.py", "workers.py"):
        (tmp_path / name).write_text(page_program(name))
    (tmp_path / "everything.py").write_text(EVERYTHING)
    (tmp_path / "handles.py").write_text(WORKERS)

    def lines(*command: str, **environ: str) -> list[str]:
        done = subprocess.run(
            [str(bare / command[0]), *command[1:]],
            cwd=tmp_path, env={**ENVIRONMENT, "PYTHONWARNINGS": "ignore:Failed to initialize NumPy", **environ},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout.splitlines()

    assert sorted(lines("allranks", "run", "-n", "2", "hello.py"))[1] == "[1] rank 1 of 2: [3.0, 3.0, 3.0]"
    assert lines("python", "called.py") == ["[21, 21]"]
    assert lines("allranks", "help", "MismatchError")[0] == "## MismatchError"
    assert sorted("".join(lines("python", "spawned.py"))) == sorted("rank 0 of 2rank 1 of 2")
    assert "on worker:2" in lines("python", "workers.py")[0]
    expected = (
        "[0] [1.0, 1.0, 1.0, 1.0] [[0, 1, 2], [1, 2, 3]] [{'a': tensor([1., 1.], dtype=torch.bfloat16)}]"
        " [(1, 'x')] [2.0, 2.0]"
    )
    assert lines("allranks", "run", "-n", "2", "everything.py", ALLRANKS_PICKLE="0") == [expected]
    assert lines("python", "handles.py") == ["[[7.0, 15.0], [10.0, 22.0]] 10.0 10.0", "True"]
    assert lines("allranks", "doctor")[-1].partition(" failed")[0].endswith(" 0")
    assert "all_reduce" in "".join(lines("allranks", "bench", "all_reduce", "--sizes", "4", "--budget", "0.05"))
