"""Zoos of winning tickets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from nfn_graph.messages import UserError
from nfn_graph.tasks.masks import Scope, masks_from_scores
from nfn_graph.tasks.option_checks import (
    Several,
    Share,
    check_above,
    check_at_least,
    check_part,
    check_several,
)
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.builder import Built, ImageZooOptions, split_of
from nfn_graph.tasks.zoo.classifiers import Activation, Architecture, InitKind
from nfn_graph.tasks.zoo.optimisers import Optimiser, Parameters
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import ClassifierRun, ClassifierZooBuilder, TrainedCheckpoint

MOST_POSITIONS = 16


@dataclass(frozen=True)
class TicketZooOptions(ImageZooOptions):
    """Find winning tickets: initialisations, each with a mask under which it trains well.

    The masks come from one step of iterative magnitude pruning: a network is trained, and the mask
    keeps the weights that are largest after training. All networks are trained in the same way,
    each from a seed of its own.

    Attributes:
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

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import TicketZooOptions
        >>> TicketZooOptions(Path("zoo"), networks=100).sparsity
        0.95
    """

    arch: Literal["mlp", "cnn"] = "mlp"
    widths: Several = (64,)
    sparsity: Share = 0.95
    scope: Scope = "global"
    activation: Activation = "relu"
    init: InitKind = "he_normal"
    optimiser: Optimiser = "adam"
    learning_rate: float = 3e-3
    l2: float = 0.0
    epochs: int = 40
    validation_share: Share = 0.1
    test_share: Share = 0.1

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_at_least("epochs", self.epochs, 1)
        check_several("widths", self.widths, 1)
        check_above("learning_rate", self.learning_rate, 0)
        check_at_least("l2", self.l2, 0)
        check_part("sparsity", self.sparsity)


class TicketZooBuilder(ClassifierZooBuilder[TicketZooOptions]):
    """Builds a zoo of winning tickets.

    Its networks are the initial weights; `zoo.state_dict(i, "mask")` are the masks.
    """

    kind = "tickets"
    OPTIONS = TicketZooOptions

    def __init__(self, options: TicketZooOptions, source: Images | None = None) -> None:
        super().__init__(options, source)
        self._initial: dict[int, Parameters] = {}

    def facts(self) -> dict[str, Any]:
        """The images, and which entries run fastest where a convolution meets a dense layer."""
        return {**super().facts(), "flatten": "channels_first"}

    def draw(self, network: int) -> ClassifierRun:
        """The run of one network."""
        return ticket_run(self.options, self.source, network)

    def built(self, checkpoint: TrainedCheckpoint) -> list[Built[ClassifierRun]]:
        """At the end of its training, the initial weights of a network with the mask."""
        run: ClassifierRun = checkpoint.run
        if checkpoint.step == 0:
            self._initial[run.network] = checkpoint.parameters
            return []
        options, weights = self.options, weights_of(checkpoint.parameters)
        sizes = {key: x.abs().nan_to_num()[None] for key, x in weights.items()}
        found = masks_from_scores(sizes, options.sparsity, options.scope)
        masks = {key: mask[0] for key, mask in found.items()}
        row = {
            **run.values(),
            "arch": options.arch,
            "width": run.architecture.hidden[0],
            "sparsity": options.sparsity,
            "scope": options.scope,
            "num_weights": sum(m.numel() for m in masks.values()),
            "num_kept": sum(int(m.sum()) for m in masks.values()),
            "is_finite": checkpoint.is_finite,
            "dense_accuracy": checkpoint.metrics.test_accuracy,
        }
        return [Built(run, row, self._initial.pop(run.network), masks)]


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
