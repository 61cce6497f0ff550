"""Zoos of small classifiers: `build_cnn_zoo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    Integers,
    Interval,
    Share,
    Shares,
    check_at_least,
    check_interval,
    check_networks,
    check_part,
    check_several,
    check_share,
    check_split,
    flag,
)
from nfn_graph.tasks.sources import Images, open_images
from nfn_graph.tasks.zoo.builder import (
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
from nfn_graph.tasks.zoo.optimisers import SGD_FACTOR, Optimiser
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import (
    KEPT_OF,
    ClassifierRun,
    TrainedCheckpoint,
    largest_activation,
    train_classifiers,
)

_NOT_IN_ROWS = ("architecture", "checkpoints")


@dataclass(frozen=True)
class CnnZooOptions(BuildOptions):
    """Train a zoo of small classifiers with random hyperparameters.

    The CNNs follow the recipe of the Small CNN Zoo: 3 x 3 convolutions with stride 2, the mean
    over all positions, and a dense layer. The hyperparameters of every network are sampled
    independently.

    Attributes:
        data: The images: digits (they come with scikit-learn), an .npz file, or a folder with the
            idx files of MNIST, with CIFAR batches, or with pictures in a subfolder per class.
        networks: The number of networks to train.
        arch: The architecture: CNNs or MLPs.
        widths: Channels or neurons of every hidden layer; one width is sampled for every network.
        depths: Numbers of hidden layers; one is sampled for every network.
        padding: The padding of the convolutions; auto is 0, or 1 if the images are too small for
            that.
        activations: Activation functions of the hidden layers; one is sampled for every network.
        inits: Initialisations of the weights; one is sampled for every network.
        init_scale: The range of a factor of the initial weights, sampled log-uniformly. For normal
            and truncated_normal, a tenth of it is the standard deviation.
        optimisers: Optimisers; one is sampled for every network.
        learning_rate: The range of learning rates, sampled log-uniformly; ten times as large for
            sgd.
        l2: The range of the penalty on the sum of squared weights, sampled log-uniformly.
        dropout: The range of the dropout probability, sampled uniformly, for networks with
            dropout.
        dropout_share: The share of networks with dropout.
        train_fractions: Shares of the training images that a network sees; one is sampled for
            every network.
        epochs: The range of the number of epochs, sampled uniformly.
        checkpoints: When to store a network, as shares of its training; each one adds a row.
        batch_size: The number of images per training step.
        test_share: The share of networks in the test split.
    """

    data: str = "digits"
    networks: int = 1000
    arch: Literal["cnn", "mlp"] = "cnn"
    widths: tuple[int, ...] = (16,)
    depths: tuple[int, ...] = (3,)
    padding: Literal["auto", 0, 1] = "auto"
    activations: tuple[Activation, ...] = ("relu", "tanh")
    inits: tuple[InitKind, ...] = (
        "glorot_normal",
        "he_normal",
        "orthogonal",
        "normal",
        "truncated_normal",
    )
    init_scale: Interval = (0.3, 3.0)
    optimisers: tuple[Optimiser, ...] = ("sgd", "adam", "rmsprop")
    learning_rate: Interval = (5e-4, 5e-2)
    l2: Interval = (1e-8, 1e-2)
    dropout: Interval = (0.0, 0.5)
    dropout_share: Share = 0.5
    train_fractions: Shares = (0.1, 0.25, 0.5, 1.0)
    epochs: Integers = (4, 40)
    checkpoints: Shares = (1.0,)
    batch_size: int = 64
    test_share: Share = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_networks("networks", self.networks)
        check_at_least("batch_size", self.batch_size, 1)
        for name in ("activations", "inits", "optimisers", "train_fractions", "checkpoints"):
            if not getattr(self, name):
                raise UserError(f"Expected at least one value of {flag(name)} (got none)")
        check_several("widths", self.widths, 1)
        check_several("depths", self.depths, 0 if self.arch == "mlp" else 1)
        if self.arch == "mlp" and self.padding != "auto":
            raise UserError(f"Expected no --padding with --arch mlp (got {self.padding})")
        for name in ("init_scale", "learning_rate", "l2", "epochs"):
            check_interval(name, getattr(self, name), above=0)
        check_interval("dropout", self.dropout)
        for value in self.dropout:
            check_part("dropout", value)
        check_share("dropout_share", self.dropout_share)
        check_split(self.validation_share, self.test_share)
        for name in ("train_fractions", "checkpoints"):
            for value in getattr(self, name):
                check_share(name, value)


def build_cnn_zoo(
    options: CnnZooOptions, *, images: Images | None = None, progress: bool = False
) -> Path:
    """Trains a zoo of classifiers, or what is missing of it.

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
    runs = [draw_run(options, images, network) for network in range(options.networks)]
    writer = ZooWriter(
        Path(options.out),
        "cnn",
        plain_options(options),
        TrainingData.facts(images),
    )
    data: list[TrainingData] = []

    def train(chosen: Sequence[ClassifierRun], on_steps: OnSteps) -> list[BuiltNetwork]:
        if not data:
            data.append(TrainingData.of(images, device, dtype))
        found: list[TrainedCheckpoint] = []
        for group in grouped(
            chosen,
            key=lambda run: (run.architecture, run.activation, run.dropout > 0),
            # Networks that are trained for about as long finish together.
            order=lambda run: run.num_steps,
            together=lambda run: networks_together(
                options, largest_activation(run, options.batch_size)
            ),
        ):
            group.sort(key=lambda run: run.optimiser)
            found += train_classifiers(group, data[0], options.batch_size, on_steps=on_steps)
        found.sort(key=lambda c: (c.run.network, c.step))
        return [(_row(c, options), c.run.architecture.name, c.parameters) for c in found]

    build = partial(build_cnn_zoo, images=images)
    return build_shards(
        options, writer, runs, lambda run: run.num_steps, train, build, progress=progress
    )


def _row(checkpoint: TrainedCheckpoint, options: CnnZooOptions) -> Row:
    run = checkpoint.run
    values: dict[str, Any] = {
        f.name: getattr(run, f.name) for f in fields(run) if f.name not in _NOT_IN_ROWS
    }
    hidden = run.architecture.convolutions or run.architecture.hidden
    return {
        **values,
        "arch": options.arch,
        "width": hidden[0] if hidden else 0,
        "depth": len(hidden),
        "padding": run.architecture.padding,
        "batch_size": options.batch_size,
        "step": checkpoint.step,
        "epoch": checkpoint.step * options.batch_size / run.num_images,
        "is_last": checkpoint.step == run.num_steps,
        "is_finite": all(bool(x.isfinite().all()) for x in checkpoint.parameters.values()),
        **checkpoint.metrics._asdict(),
    }


def draw_run(options: CnnZooOptions, images: Images, network: int) -> ClassifierRun:
    """The run of one network: it depends on the options, the data and its number only."""
    draws = Draws(options.seed, network, "hyperparameters")
    # Every value is drawn, needed or not, so that the draws of one do not shift the others.
    activation = draws.choice(options.activations)
    init = draws.choice(options.inits)
    init_scale = draws.log_uniform(*options.init_scale)
    optimiser = draws.choice(options.optimisers)
    learning_rate = draws.log_uniform(*options.learning_rate)
    l2 = draws.log_uniform(*options.l2)
    dropped, dropout = draws.uniform(0, 1), draws.uniform(*options.dropout)
    train_fraction = draws.choice(options.train_fractions)
    epochs = draws.integer(*options.epochs)
    width, depth = draws.choice(options.widths), draws.choice(options.depths)
    split = split_of(draws.uniform(0, 1), options.validation_share, options.test_share)
    num_images = max(1, round(train_fraction * len(images.train_index)))
    num_steps = max(1, math.ceil(epochs * num_images / options.batch_size))
    return ClassifierRun(
        network=network,
        seed=seed_of(options.seed, network),
        architecture=architecture_of(options, images, width, depth),
        activation=activation,
        init=init,
        init_scale=init_scale,
        optimiser=optimiser,
        learning_rate=learning_rate * (SGD_FACTOR if optimiser == "sgd" else 1),
        l2=l2,
        # Whatever is drawn, some activations stay.
        dropout=min(round(dropout * KEPT_OF), KEPT_OF - 1) / KEPT_OF
        if dropped < options.dropout_share
        else 0.0,
        train_fraction=train_fraction,
        epochs=epochs,
        num_images=num_images,
        num_steps=num_steps,
        checkpoints=tuple(sorted({round(c * num_steps) for c in options.checkpoints})),
        split=split,
    )


def architecture_of(options: CnnZooOptions, images: Images, width: int, depth: int) -> Architecture:
    """The network of `depth` hidden layers of `width`."""
    classes = len(images.classes)
    hidden = (width,) * depth
    if options.arch == "mlp":
        return Architecture(images.shape, (), hidden, classes)
    return Architecture(images.shape, hidden, (), classes, padding_of(options, images))


def padding_of(options: CnnZooOptions, images: Images) -> int:
    """No padding, as in the Small CNN Zoo, unless the deepest network would run out of pixels.

    Then all networks of the zoo get a padding of 1, with which a 3 x 3 convolution of stride 2
    works on any size: three of them lead from 8 x 8 to 4 x 4, 2 x 2, 1 x 1.
    """
    if options.padding != "auto":
        return options.padding
    smallest = min(images.shape[1:])
    for _ in range(max(options.depths)):
        smallest = (smallest - 3) // 2 + 1
        if smallest < 1:
            return 1
    return 0
