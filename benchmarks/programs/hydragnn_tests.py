"""HydraGNN's own tests of its optimizers, on every rank: each trains a graph network with DistributedDataParallel.

    allranks run -n 2 --instead-of-gloo benchmarks/programs/hydragnn_tests.py --folder NEW_FOLDER

It needs the package `HydraGNN`, which contains its tests, without their configuration and with dependencies that exist
only for old versions of torch. This program writes a configuration and replaces the two compiled functions that the
tests need. Both run before the training, without communication.
"""

import argparse
import hashlib
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch_geometric.nn
from scipy.spatial import cKDTree

CONFIGURATION = {
    "Verbosity": {"level": 0},
    "Dataset": {
        "name": "unit_test_singlehead",
        "format": "unit_test",
        "compositional_stratified_splitting": True,
        "rotational_invariance": False,
        "path": {part: f"dataset/{part}" for part in ("train", "test", "validate")},
        "node_features": {"name": ["x", "x2", "x3"], "dim": [1, 1, 1], "column_index": [0, 6, 7]},
        "graph_features": {"name": ["sum"], "dim": [1], "column_index": [0]},
    },
    "NeuralNetwork": {
        "Architecture": {
            "model_type": "PNA",
            "radius": 2.0,
            "max_neighbours": 100,
            "periodic_boundary_conditions": False,
            "hidden_dim": 8,
            "num_conv_layers": 2,
            "output_heads": {
                "graph": {
                    "num_sharedlayers": 2,
                    "dim_sharedlayers": 4,
                    "num_headlayers": 2,
                    "dim_headlayers": [10, 10],
                }
            },
            "task_weights": [1.0],
        },
        "Variables_of_interest": {
            "input_node_features": [0],
            "output_names": ["sum"],
            "output_index": [0],
            "type": ["graph"],
            "denormalize_output": False,
        },
        "Training": {
            "num_epoch": 2,
            "perc_train": 0.7,
            "loss_function_type": "mse",
            "batch_size": 32,
            "Optimizer": {"type": "AdamW", "learning_rate": 0.02},
        },
    },
    "Visualization": {"plot_init_solution": False, "plot_hist_solution": False, "create_plots": False},
}


def radius_graph(x, r, *_, **__):
    """Return the pairs of nodes with a distance of at most r, in both directions. pyg-lib has the compiled one."""
    pairs = torch.as_tensor(cKDTree(x.numpy()).query_pairs(r, output_type="ndarray")).T
    return torch.cat([pairs, pairs.flip(0)], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    inputs = folder / "tests" / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    mine = inputs / f"{os.environ['RANK']}.json"
    mine.write_text(json.dumps(CONFIGURATION))
    mine.replace(inputs / "ci.json")  # in one step, because the ranks share the folder
    os.chdir(folder)
    # HydraGNN reads its rank from the variables of Open MPI or SLURM.
    os.environ |= {"OMPI_COMM_WORLD_RANK": os.environ["RANK"], "OMPI_COMM_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    torch_geometric.nn.radius_graph = radius_graph
    sys.modules["torch_scatter"] = types.ModuleType("torch_scatter")
    sys.modules["torch_scatter"].scatter = torch_geometric.utils.scatter

    options = ["-q", "-s", "-p", "no:cacheprovider", "-W", "ignore", "-o", "python_functions=pytest_*"]
    failed = pytest.main([*options, "--pyargs", "tests.test_optimizer"])
    if os.environ["RANK"] == "0":
        for path in sorted(Path("logs").glob("*/*.pk")):
            weights = torch.load(path, weights_only=False)["model_state_dict"]
            content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
            print(f"result: weights of {path.name}: {hashlib.sha256(content).hexdigest()}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
