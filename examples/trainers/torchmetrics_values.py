"""Metrics of torchmetrics over all ranks: each rank updates them with its own batches; ``compute`` covers all ranks.

    allranks run -n 2 examples/trainers/torchmetrics_values.py
    allranks run -n 2 examples/trainers/torchmetrics_values.py --backend gloo

torchmetrics gathers through torch.distributed. Some metrics add counts, others gather tensors whose lengths differ.
"""

import argparse

import torch
import torch.distributed as dist
from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="allranks")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    draw = torch.Generator().manual_seed(dist.get_rank())
    of_classes = MetricCollection([MulticlassAccuracy(5), MulticlassAUROC(5), MulticlassConfusionMatrix(5)])
    of_numbers = MetricCollection([MeanSquaredError(), PearsonCorrCoef()])
    for _ in range(4 + dist.get_rank()):
        scores = torch.randn(32, 5, generator=draw).softmax(-1)
        of_classes.update(scores, torch.randint(5, (32,), generator=draw))
        of_numbers.update(scores[:, 0], scores[:, 1])
    values = {**of_classes.compute(), **of_numbers.compute()}
    for name, value in values.items():
        print(name, value.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
