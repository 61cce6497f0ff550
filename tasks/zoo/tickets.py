"""Zoos of winning tickets: `build_ticket_zoo`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nfn_graph.messages import UserError
from nfn_graph.tasks.masks import Scope, check_sparsity, masks_from_scores
from nfn_graph.tasks.option_checks import (
    Share,
    check_above,
    check_at_least,
    check_networks,
    check_several,
    check_split,
)
from nfn_graph.tasks.sources import Images, open_images
from nfn_graph.tasks.zoo.builder import (
    MASK,
    BuildOptions,
    BuiltNetwork,
    OnSteps,
    Row,
    ZooWriter,
    build_shards,
    device_of,
    dtype_of,
    grouped,
    networks_together,
    plain_options,
    split_of,
)
from nfn_graph.tasks.zoo.classifiers import Activation, Architecture, InitKind, TrainingData
from nfn_graph.tasks.zoo.optimisers import Optimiser
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import (
    ClassifierRun,
    TrainedCheckpoint,
    largest_activation,
    train_classifiers,
)

MOST_POSITIONS = 16
_NOT_IN_ROWS = ("architecture", "checkpoints")


@dataclass(frozen=True)
class TicketZooOptions(BuildOptions):
    """Find winning tickets: initialisations, each with a mask under which it trains well.

    The masks come from one step of iterative magnitude pruning: a network is trained, and the mask
    keeps the weights that are largest after training. All networks are trained in the same way,
    each from a seed of its own.

    Attributes:
        data: The images: digits (they come with scikit-learn), an .npz file, or a folder with the
            idx files of MNIST, with CIFAR batches, or with pictures in a subfolder per class.
        networks: The number of networks to train.
        arch: The architecture: MLPs with two hidden layers, or CNNs with three 3 x 3 convolutions
            of stride 2, one hidden layer that reads all positions, and an output layer.
        widths: Neurons or channels of every hidden layer; one width is sampled for every network.
        sparsity: The share of the weights to prune. Biases are kept.
        scope: Whether weights compete within their network or within their layer.
        activation: The activation function of the hidden layers.
        init: The initialisation of the weights.
        optimiser: The optimiser of all networks.
        learning_rate: The learning rate of the optimiser.
        l2: The penalty on the sum of squared weights.
        epochs: The number of epochs.
        batch_size: The number of images per training step.
        test_share: The share of networks in the test split.
    """

    data: str = "digits"
    networks: int = 500
    arch: Literal["mlp", "cnn"] = "mlp"
    widths: tuple[int, ...] = (64,)
    sparsity: Share = 0.95
    scope: Scope = "global"
    activation: Activation = "relu"
    init: InitKind = "he_normal"
    optimiser: Optimiser = "adam"
    learning_rate: float = 3e-3
    l2: float = 0.0
    epochs: int = 40
    batch_size: int = 64
    validation_share: Share = 0.1
    test_share: Share = 0.1

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_networks("networks", self.networks)
        for name in ("epochs", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
        check_several("widths", self.widths, 1)
        check_above("learning_rate", self.learning_rate, 0)
        check_at_least("l2", self.l2, 0)
        check_split(self.validation_share, self.test_share)
        check_sparsity(self.sparsity)


def build_ticket_zoo(
    options: TicketZooOptions, *, images: Images | None = None, progress: bool = False
) -> Path:
    """Trains and prunes the networks of a zoo, or those that are missing of it.

    The checkpoints of the zoo are the initial weights; `zoo.state_dict(i, "mask")` are the masks.

    Args:
        options: What to build, and where.
        images: The data, if not to be read from `options.data`.
        progress: Whether to show a progress bar.

    Returns:
        The zoo's folder, for `open_zoo_folder`.
    """
    options.check()
    device, dtype = device_of(options), dtype_of(options)
    images = open_images(options.data) if images is None else images
    images.check_both_splits()
    runs = [ticket_run(options, images, network) for network in range(options.networks)]
    writer = ZooWriter(
        Path(options.out),
        "tickets",
        plain_options(options),
        {**TrainingData.facts(images), "flatten": "channels_first"},
    )
    data: list[TrainingData] = []

    def train(chosen: Sequence[ClassifierRun], on_steps: OnSteps) -> list[BuiltNetwork]:
        if not data:
            data.append(TrainingData.of(images, device, dtype))
        built: list[BuiltNetwork] = []
        for group in grouped(
            chosen,
            key=lambda run: run.architecture,
            order=lambda run: run.network,
            together=lambda run: networks_together(
                options, largest_activation(run, options.batch_size)
            ),
        ):
            found = list(train_classifiers(group, data[0], options.batch_size, on_steps=on_steps))
            first = {c.run.network: c for c in found if c.step == 0}
            last = [c for c in found if c.step == c.run.num_steps]
            built += [_pair(first[c.run.network], c, options) for c in last]
        built.sort(key=lambda network: network[0]["network"])
        return built

    build = partial(build_ticket_zoo, images=images)
    return build_shards(
        options, writer, runs, lambda run: run.num_steps, train, build, progress=progress
    )


def ticket_run(options: TicketZooOptions, images: Images, network: int) -> ClassifierRun:
    """How one network is trained: it depends on the options, the data and its number only."""
    draws = Draws(options.seed, network, "ticket")
    width = draws.choice(options.widths)
    split = split_of(draws.uniform(0, 1), options.validation_share, options.test_share)
    num_images = len(images.train_index)
    num_steps = max(1, math.ceil(options.epochs * num_images / options.batch_size))
    return ClassifierRun(
        network=network,
        seed=seed_of(options.seed, network),
        architecture=ticket_architecture(options, images, width),
        activation=options.activation,
        init=options.init,
        init_scale=1.0,
        optimiser=options.optimiser,
        learning_rate=options.learning_rate,
        l2=options.l2,
        dropout=0.0,
        train_fraction=1.0,
        epochs=options.epochs,
        num_images=num_images,
        num_steps=num_steps,
        checkpoints=(0, num_steps),
        split=split,
    )


def ticket_architecture(options: TicketZooOptions, images: Images, width: int) -> Architecture:
    """Two hidden layers; or three convolutions and two dense layers."""
    classes = len(images.classes)
    if options.arch == "mlp":
        return Architecture(images.shape, (), (width, width), classes)
    found = Architecture(images.shape, (width,) * 3, (width,), classes, 1, "flatten")
    positions = math.prod(found.maps[-1])
    if positions > MOST_POSITIONS:
        raise UserError(
            f"Expected images of at most 32 x 32 pixels for --arch cnn, whose dense layer reads "
            f"at most {MOST_POSITIONS} positions (got {positions} positions of "
            f"'{images.name}')"
        )
    return found


def weights_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights among the parameters of a network, without its biases."""
    return {key: x for key, x in parameters.items() if key.endswith("weight")}


def _pair(
    first: TrainedCheckpoint, last: TrainedCheckpoint, options: TicketZooOptions
) -> BuiltNetwork:
    """The row, the group and the tensors of an initialisation with its mask."""
    run = last.run
    is_finite = all(bool(x.isfinite().all()) for x in last.parameters.values())
    sizes = {k: x.abs().nan_to_num()[None] for k, x in weights_of(last.parameters).items()}
    masks = masks_from_scores(sizes, options.sparsity, options.scope)
    values: dict[str, Any] = {
        f.name: getattr(run, f.name) for f in fields(run) if f.name not in _NOT_IN_ROWS
    }
    row: Row = {
        **values,
        "arch": options.arch,
        "width": run.architecture.hidden[0],
        "sparsity": options.sparsity,
        "scope": options.scope,
        "num_weights": sum(m.numel() for m in masks.values()),
        "num_kept": sum(int(m.sum()) for m in masks.values()),
        "is_finite": is_finite,
        "dense_accuracy": last.metrics.test_accuracy,
    }
    tensors = {**first.parameters, **{f"{key}{MASK}": m[0] for key, m in masks.items()}}
    return row, run.architecture.name, tensors
