"""Under a real SLURM."""

from slurm import Slurm


def test_it_runs(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "-n3", "hostname")
    assert sorted(done.stdout.split()) == ["node0", "node0", "node1"], done.stderr
