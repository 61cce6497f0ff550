"""Zoos of small classifiers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from nfn_graph.converters.commands import unset
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    Interval,
    Several,
    Share,
    Shares,
    check_at_least,
    check_interval,
    check_part,
    check_several,
    check_share,
    choices,
    flag,
)
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.builder import Built, SampledZooOptions, split_of
from nfn_graph.tasks.zoo.classifiers import Activation, Architecture, InitKind
from nfn_graph.tasks.zoo.optimisers import SGD_FACTOR
from nfn_graph.tasks.zoo.recipes import check_recipe
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import (
    KEPT_OF,
    ClassifierRun,
    ClassifierZooBuilder,
    TrainedCheckpoint,
)


@dataclass(frozen=True)
class CnnZooOptions(SampledZooOptions):
    """Train a zoo of small classifiers with random hyperparameters.

    The CNNs follow the recipe of the Small CNN Zoo unless options say otherwise: 3 x 3
    convolutions with stride 2, the mean over all positions, and a dense layer. The hyperparameters
    of every network are sampled independently.

    Attributes:
        recipe: Make networks like those of a published zoo. Its options are those of the recipe
            unless they are given as well.
        arch: The architecture: CNNs or MLPs.
        widths: Channels or neurons of every hidden layer; one width is sampled for every network.
        depths: Numbers of hidden layers; one is sampled for every network.
        kernels: Kernel sizes of the convolutions; one is sampled for every network.
        stride: The stride of the convolutions.
        padding: The padding of the convolutions; auto is 0, or 1 if the images are too small for
            that, and same is half of the kernel.
        per_layer: Whether widths, kernels and activations are sampled for every convolution
            instead of every network.
        skips: Whether a convolution may add the activations of an earlier one to its outputs. The
            earlier one is sampled among none and all but the one right before.
        activations: Activation functions of the hidden layers; one is sampled for every network.
        inits: Initialisations of the weights; one is sampled for every network.
        init_scale: The range of a factor of the initial weights, sampled log-uniformly. For normal
            and truncated_normal, a tenth of it is the standard deviation.
        init_std: The range of the standard deviation of normal and truncated_normal instead,
            sampled log-uniformly.
        dropout: The range of the dropout probability, sampled uniformly, for networks with
            dropout.
        dropout_share: The share of networks with dropout.
        checkpoints: When to store a network, as shares of its training; each one adds a row.
        checkpoint_epochs: The number of epochs between additional checkpoints; 0 for none.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import CnnZooOptions
        >>> CnnZooOptions(Path("zoo"), networks=100, widths=(8, 16)).learning_rate
        (0.0005, 0.05)
    """

    networks: int = 1000
    recipe: Annotated[
        Literal["small-cnn-zoo", "wild-park"] | None, unset("{small-cnn-zoo,wild-park}")
    ] = None
    arch: Literal["cnn", "mlp"] = "cnn"
    widths: Several = (16,)
    depths: Several = (3,)
    kernels: Several = (3,)
    stride: Literal[1, 2] = 2
    padding: Literal["auto", "same", 0, 1] = "auto"
    per_layer: bool = False
    skips: bool = False
    activations: Annotated[tuple[Activation, ...], arg(metavar=choices(Activation))] = (
        "relu",
        "tanh",
    )
    inits: Annotated[tuple[InitKind, ...], arg(metavar=choices(InitKind))] = (
        "glorot_normal",
        "he_normal",
        "orthogonal",
        "normal",
        "truncated_normal",
    )
    init_std: Annotated[tuple[float, float] | None, unset("LOW HIGH")] = None
    dropout: Interval = (0.0, 0.5)
    dropout_share: Share = 0.5
    checkpoints: Shares = (1.0,)
    checkpoint_epochs: int = 0

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_recipe("cnn", self)
        self.check_choices("activations", "inits", "checkpoints")
        check_several("widths", self.widths, 1)
        check_several("depths", self.depths, 0 if self.arch == "mlp" else 1)
        check_several("kernels", self.kernels, 1)
        check_at_least("checkpoint_epochs", self.checkpoint_epochs, 0)
        self._check_convolutions()
        if self.init_std is not None:
            check_interval("init_std", self.init_std, above=0)
        check_interval("dropout", self.dropout)
        for value in self.dropout:
            check_part("dropout", value)
        check_share("dropout_share", self.dropout_share)
        for value in self.checkpoints:
            check_share("checkpoints", value)

    def _check_convolutions(self) -> None:
        if self.arch == "mlp":
            for name in ("kernels", "stride", "padding", "per_layer", "skips"):
                value = getattr(self, name)
                if value != getattr(CnnZooOptions, name):
                    got = " ".join(map(str, value)) if isinstance(value, tuple) else value
                    raise UserError(f"Expected no {flag(name)} with --arch mlp (got {got})")
        is_same = self.padding == "same"
        if is_same and any(size % 2 == 0 for size in self.kernels):
            got = " ".join(map(str, self.kernels))
            raise UserError(f"Expected odd --kernels with --padding same (got {got})")
        if self.skips and not (is_same and self.stride == 1):
            raise UserError(
                f"Expected --stride 1 and --padding same with --skips, so that all activations "
                f"have the same positions (got {self.stride} and {self.padding})"
            )


class CnnZooBuilder(ClassifierZooBuilder[CnnZooOptions]):
    """Builds a zoo of classifiers."""

    kind = "cnn"
    OPTIONS = CnnZooOptions

    def draw(self, network: int) -> ClassifierRun:
        """The run of one network."""
        return draw_run(self.options, self.source, network)

    def built(self, checkpoint: TrainedCheckpoint) -> list[Built[ClassifierRun]]:
        """The checkpoint, with its hyperparameters and metrics."""
        run = checkpoint.run
        hidden = run.architecture.convolutions or run.architecture.hidden
        row = {
            **run.values(),
            "arch": self.options.arch,
            "width": hidden[0] if hidden else 0,
            "depth": len(hidden),
            "padding": run.architecture.padding,
            **layer_columns(run.architecture),
            "batch_size": self.options.batch_size,
            "step": checkpoint.step,
            "epoch": checkpoint.step * self.options.batch_size / run.num_images,
            "is_last": checkpoint.step == run.num_steps,
            "is_finite": checkpoint.is_finite,
            **checkpoint.metrics._asdict(),
        }
        return [Built(run, row, checkpoint.parameters)]


def layer_columns(architecture: Architecture) -> dict[str, str]:
    """What may differ between the convolutions of a network, with one value for each of them."""
    values: dict[str, tuple[Any, ...]] = {
        "widths": architecture.convolutions if architecture.activations else (),
        "kernels": architecture.kernels,
        "skips": architecture.skips,
        "activation": architecture.activations,
    }
    return {name: " ".join(map(str, found)) for name, found in values.items() if found}


def draw_run(options: CnnZooOptions, images: Images, network: int) -> ClassifierRun:
    """The run of one network: it depends on the options, the data and its number only."""
    draws = Draws(options.seed, network, "hyperparameters")
    # Every value is sampled, needed or not, so that one option does not change the other samples.
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
    if options.init_std is not None and init in ("normal", "truncated_normal"):
        init_scale = 10 * draws.log_uniform(*options.init_std)
    architecture = architecture_of(options, images, network, width, depth)
    if architecture.activations:
        # That of the network is not needed, and must not keep networks apart.
        activation = architecture.activations[0]
    num_images = max(1, round(train_fraction * len(images.train_index)))
    num_steps = max(1, math.ceil(epochs * num_images / options.batch_size))
    stored = {round(c * num_steps) for c in options.checkpoints}
    if options.checkpoint_epochs:
        each = range(options.checkpoint_epochs, epochs + 1, options.checkpoint_epochs)
        stored |= {math.ceil(epoch * num_images / options.batch_size) for epoch in each}
    return ClassifierRun(
        network=network,
        seed=seed_of(options.seed, network),
        architecture=architecture,
        activation=activation,
        init=init,
        init_scale=init_scale,
        optimiser=optimiser,
        learning_rate=learning_rate * (SGD_FACTOR if optimiser == "sgd" else 1),
        l2=l2,
        # Some activations are kept whatever probability is sampled.
        dropout=min(round(dropout * KEPT_OF), KEPT_OF - 1) / KEPT_OF
        if dropped < options.dropout_share
        else 0.0,
        train_fraction=train_fraction,
        epochs=epochs,
        num_images=num_images,
        num_steps=num_steps,
        checkpoints=tuple(sorted(stored)),
        split=split,
    )


def architecture_of(
    options: CnnZooOptions, images: Images, network: int, width: int, depth: int
) -> Architecture:
    """The network of `depth` hidden layers of `width`, or of a width for each of them."""
    classes = len(images.classes)
    hidden = (width,) * depth
    if options.arch == "mlp":
        return Architecture(images.shape, (), hidden, classes)
    draws, layers = Draws(options.seed, network, "layers"), range(depth)
    kernels = (draws.choice(options.kernels),) * depth
    activations: tuple[Activation, ...] = ()
    if options.per_layer:
        hidden = tuple(draws.choice(options.widths) for _ in layers)
        kernels = tuple(draws.choice(options.kernels) for _ in layers)
        activations = tuple(draws.choice(options.activations) for _ in layers)
    return Architecture(
        images.shape,
        hidden,
        (),
        classes,
        padding_of(options, images),
        stride=options.stride,
        kernels=() if set(options.kernels) == {3} else kernels,
        skips=tuple(draws.choice([-1, *range(i - 1)]) for i in layers) if options.skips else (),
        activations=activations,
    )


def padding_of(options: CnnZooOptions, images: Images) -> int | Literal["same"]:
    """No padding, as in the Small CNN Zoo, unless the deepest network would run out of pixels.

    Then all networks of the zoo get a padding of 1, with which a 3 x 3 convolution of stride 2
    works on any size: three of them lead from 8 x 8 to 4 x 4, 2 x 2, 1 x 1.
    """
    if options.padding != "auto":
        return options.padding
    smallest = min(images.shape[1:])
    for _ in range(max(options.depths)):
        smallest = (smallest - max(options.kernels)) // options.stride + 1
        if smallest < 1:
            return 1
    return 0
