"""The dimensions of random training programs, and the frequency of each value.

Weights follow the usual content of training programs. About one program in ten has an object that State refuses: an
object that was not passed to it, or a counter that it cannot transfer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Choices", "choose"]


@dataclass
class Choices:
    """The dimensions of a program. Each field is a dimension, its value the choice.

    Attributes:
        seed: seed of the program.
        ranks: number of ranks.
        steps: steps per epoch.
        epochs: number of epochs.
        forgotten: State does not receive one of the objects that it needs.
    """

    seed: int
    ranks: int
    frontend: str
    style: str
    wrapper: str
    model: str
    dtype: str
    scheme: str
    optimizer: str
    scheduler: str
    scheduler_at: str
    averaging: str
    accumulation: str
    loss: str
    clip: bool
    scaler: bool
    loader: str
    workers: str
    augmentation: str
    generator_seed: str
    in_place: bool
    evaluation: str
    early_stopping: str
    logging: str
    global_step: str
    container: str
    caught: bool
    loop: str
    checkpoints: bool
    forgotten: bool
    steps: int
    epochs: int


def _pick(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def choose(seed: int) -> Choices:
    """Draw the dimensions of a program. Weights follow the usual content of training programs.

    Combinations that make no sense are replaced by the simpler choice, in one direction only.
    """
    rng = random.Random(f"choices {seed}")
    chance = rng.random
    c = Choices(
        seed=seed,
        ranks=3 if chance() < 0.25 else 2,
        frontend=_pick(rng, allranks=80, torch=20),
        style=_pick(rng, script=30, main=25, functions=25, trainer=20),
        wrapper=_pick(rng, allranks_ddp=44, torch_ddp=28, by_hand=24, fully_shard=4),
        model=_pick(
            rng, linear=14, mlp_dropout=20, batchnorm=20, attention=12, nonpersistent_buffer=10, counter_buffer=8,
            submodule_named_module=8, counter_attribute=2, sequential_batchnorm=6,
        ),
        dtype=_pick(rng, float32=85, float64=15),
        scheme=_pick(rng, plain=74, two_optimizers=8, gan=8, lbfgs=5, sam=5),
        optimizer=_pick(rng, SGD=25, momentum=20, Adam=20, AdamW=20, RMSprop=8, Adagrad=7),
        scheduler=_pick(
            rng, none=36, StepLR=15, ExponentialLR=10, OneCycleLR=9, CosineAnnealingLR=12, warmup_by_hand=10,
            ReduceLROnPlateau=8,
        ),
        scheduler_at=_pick(rng, step_after=58, step_before=10, epoch_end=25, epoch_begin=7),
        averaging=_pick(rng, none=60, averaged_model=12, ema_dict=10, ema_model=10, target=8),
        accumulation=_pick(rng, none=72, over_steps_zero_at_end=9, over_steps_zero_at_begin=5, no_sync=14),
        loss=_pick(rng, cross_entropy=60, mse=22, weight_tensor=7, weight_number=6, weight_array=5),
        clip=chance() < 0.35,
        scaler=chance() < 0.1,
        loader=_pick(
            rng, allranks_sampler=44, torch_sampler=14, shuffle_generator=11, random_sampler=5, iterable_dataset=8,
            number=8, list=10,
        ),
        workers=_pick(rng, none=91, two=5, two_persistent=4),
        augmentation=_pick(
            rng, none=50, getitem_torch=8, getitem_random=5, getitem_numpy=5, collate=6, step=14, torch_generator=6,
            numpy_generator=6,
        ),
        generator_seed=_pick(rng, same=50, per_rank=50),
        in_place=chance() < 0.1,
        evaluation=_pick(rng, none=42, section=40, metric_after_optimizer=18),
        early_stopping=_pick(rng, none=66, in_step=14, after_section=10, variables=10),
        logging=_pick(
            rng, none=13, running_loss=20, running_loss_local=8, list=12, list_local=15, meter=8, meter_local=6,
            progress_bar=8, progress_loop=7, enumerate=2,
        ),
        global_step=_pick(rng, none=70, variable=18, in_dict=12),
        container=_pick(
            rng, none=45, history=30, counter=5, defaultdict=4, namedtuple=4, deque=4, array=4, tensor=4,
        ),
        caught=chance() < 0.05,
        loop=_pick(rng, epochs=62, two_loops=11, steps_only=16, break_section=11),
        checkpoints=chance() < 0.08,
        forgotten=chance() < 0.05,
        steps=rng.randint(3, 6),
        epochs=rng.randint(2, 4),
    )  # fmt: skip
    _restrict(c)
    return c


def _restrict(c: Choices) -> None:
    """Replace combinations that no program would have."""
    if c.wrapper == "fully_shard":
        c.ranks, c.scheme, c.averaging, c.accumulation, c.scaler = 4, "plain", "none", "none", False
        if c.model in ("linear", "sequential_batchnorm", "batchnorm", "counter_buffer", "counter_attribute"):
            c.model = "mlp_dropout"  # FSDP2 does not synchronize buffers
    if c.frontend == "torch" and c.wrapper == "allranks_ddp":
        c.wrapper = "torch_ddp"
    if c.scheme in ("gan", "lbfgs", "sam"):
        c.accumulation, c.scaler, c.caught = "none", False, False
    if c.scheme == "gan":
        c.loss, c.model, c.averaging, c.in_place = "mse", "linear", "none", False
        c.early_stopping = "none"
        if c.evaluation == "section":
            c.evaluation = "none"
    if c.scheme == "lbfgs":
        c.optimizer, c.clip = "LBFGS", False
        if c.model in ("counter_buffer", "counter_attribute"):
            c.model = "mlp_dropout"
    if c.scheme == "two_optimizers" and c.model == "linear":
        c.model = "mlp_dropout"
    if c.accumulation != "none" and c.model == "attention" and c.scheme == "two_optimizers":
        c.accumulation = "none"
    if c.accumulation == "no_sync" and c.wrapper == "by_hand":
        c.accumulation = "none"
    if c.accumulation == "no_sync" and c.model in ("batchnorm", "sequential_batchnorm"):
        c.model = "mlp_dropout"  # half a batch is too small for this model
    if c.loop == "steps_only":
        c.epochs, c.steps = 1, c.steps * 3
        if c.scheduler_at.startswith("epoch"):
            c.scheduler_at = "step_after"
        c.early_stopping = "none"
    if c.accumulation.startswith("over_steps") and c.loop == "break_section":
        c.steps = max(c.steps, 4)  # an optimizer runs in every second or third step, and the last step is left out
    if c.scheduler == "OneCycleLR" and c.optimizer in ("Adagrad", "LBFGS"):  # these optimizers have no momentum
        c.scheduler = "StepLR"
    if c.scheduler in ("warmup_by_hand", "OneCycleLR"):
        c.scheduler_at = "step_before" if c.scheduler == "warmup_by_hand" else "step_after"
    if c.scheduler == "ReduceLROnPlateau":
        c.evaluation = c.evaluation if c.scheme == "gan" else "section"
        c.scheduler_at = "evaluation"
        if c.evaluation != "section":
            c.scheduler = "StepLR"
    if c.scheduler == "none" or c.scheduler_at == "evaluation" != c.scheduler:
        c.scheduler_at = c.scheduler_at if c.scheduler == "ReduceLROnPlateau" else "step_after"
    if c.scheduler == "none":
        c.scheduler_at = "none"
    if c.evaluation != "section":
        c.early_stopping = "none"
    if c.early_stopping != "none":
        c.loop = "epochs" if c.loop == "two_loops" else c.loop
        c.epochs += 1
    if c.loader in ("iterable_dataset", "number", "list") and c.augmentation.startswith("getitem"):
        c.augmentation = "step"
    if c.loader == "list" and c.loop != "steps_only":
        c.in_place = False  # each epoch would change the data again
    if c.style == "trainer" and (c.loader == "list" or c.logging.endswith("_local")):
        # State(trainer=self) would contain values that differ between ranks.
        c.global_step = "in_dict" if c.global_step == "variable" else c.global_step
        c.early_stopping = "in_step" if c.early_stopping == "variables" else c.early_stopping
    if c.loader in ("number", "list"):
        c.workers = "none"
        if c.augmentation == "collate":
            c.augmentation = "none"
    if c.loader == "iterable_dataset" and c.workers != "none":
        c.workers = "none"  # each worker would yield all samples
    if c.loader == "shuffle_generator" and c.augmentation in ("torch_generator", "numpy_generator"):
        c.augmentation = "none"
    if c.loader not in ("shuffle_generator", "random_sampler") and not c.augmentation.endswith("_generator"):
        c.generator_seed = "none"
    if c.loss.startswith("weight") and c.accumulation == "no_sync":
        c.loss = "cross_entropy"
    if c.checkpoints:  # a checkpoint cannot hold objects without state_dict()
        c.container = "history" if c.container in ("namedtuple", "deque", "defaultdict", "counter") else c.container
        c.logging = "meter_local" if c.logging == "meter" else c.logging
        if c.style == "trainer":
            c.global_step = "in_dict" if c.global_step == "variable" else c.global_step
            c.early_stopping = "in_step" if c.early_stopping == "variables" else c.early_stopping
    if c.caught and (c.accumulation != "none" or c.scaler):
        c.caught = False
