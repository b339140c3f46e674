"""The job files in examples/jobs are the output of `allranks submit`, and their commands are valid."""

import shlex
import subprocess
from pathlib import Path

import jobs
import pytest
import yaml

from allranks._base.errors import ConfigError
from allranks._net.secret import load_secret
from allranks.launch.arguments.options import parse


def test_each_job_file_has_a_command_in_the_readme() -> None:
    assert sorted(jobs.commands()) == sorted(jobs.FOLDER.iterdir())


@pytest.mark.parametrize("file", sorted(jobs.commands()), ids=lambda file: file.name)
def test_job_file_equals_the_output_of_its_command(file: Path) -> None:
    text = file.read_text()
    assert text == jobs.text_of(jobs.commands()[file]), "run: make format"
    if file.suffix == ".yaml":
        secret, _, job = yaml.safe_load_all(text)
        assert secret["stringData"] == {"ALLRANKS_SECRET": jobs.SECRET}
        words = job["spec"]["template"]["spec"]["containers"][0]["command"]
        words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words]
    else:
        subprocess.run(["bash", "-n", file], check=True)
        words = shlex.split(text.splitlines()[-1])
    run = words.index("run")
    target = parse(words[run + 1 :]).target
    assert (jobs.ROOT / target.name).is_file()


def test_placeholder_secret_of_the_manifests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The secret in ALLRANKS_SECRET has 13 bytes\. Expected 16 or more"):
        load_secret({"ALLRANKS_SECRET": jobs.SECRET})
