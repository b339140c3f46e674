"""On macOS and Windows, import and build fail with one sentence that names the container recipe."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SENTENCE = r"allranks requires Linux, and this is {}: run it in the container of\s+examples/recipes/Dockerfile"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_import_on_another_platform_names_the_container_recipe(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import allranks"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(SENTENCE.format(platform), done.stderr.splitlines()[-1])


def test_build_on_another_platform_names_the_container_recipe(tmp_path: Path) -> None:
    own = Path(sys.executable).with_name("cmake")  # `make` installs cmake there
    cmake = own if own.exists() else shutil.which("cmake")
    assert cmake, "CMake is missing, although it builds allranks"
    command = [cmake, "-S", ROOT, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Darwin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert re.search(SENTENCE.format("Darwin"), done.stderr)


def test_recipe_exists() -> None:
    assert (ROOT / "examples/recipes/Dockerfile").is_file()
    assert (ROOT / "docs/recipes.md").is_file()
