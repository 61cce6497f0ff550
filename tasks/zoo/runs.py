"""What one classifier of a zoo is trained with, drawn from the distributions of the options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.architecture import Activation, Architecture, InitKind
from nfn_graph.tasks.zoo.optimisers import Optimiser
from nfn_graph.tasks.zoo.options import CnnZooOptions, Split
from nfn_graph.tasks.zoo.seeds import Draws, seed_of

# Plain gradient descent needs larger steps than the optimisers that normalise them.
SGD_FACTOR = 10.0
# Dropout is decided by random bytes: its probability is a multiple of 1/256.
KEPT_OF = 256


@dataclass(frozen=True)
class ClassifierRun:
    """Everything that decides how one classifier is trained.

    Args:
        network: Its number in the zoo.
        seed: What its initial weights, data order and dropout are drawn from.
        architecture: Its shape.
        activation: After every hidden layer.
        init: How weights are initialised; see `initialise`.
        init_scale: See `init`.
        optimiser: See `BatchedOptimiser`.
        learning_rate: The step size.
        l2: What the sum of all squared weights, not biases, is multiplied with in the loss.
        dropout: The probability that a hidden activation is dropped.
        train_fraction: The share of the training images that it sees.
        epochs: How often it sees them.
        num_images: How many images that is.
        num_steps: How many gradient steps that is.
        checkpoints: The steps after which it is written down.
        split: The part of the zoo that the network belongs to.
    """

    network: int
    seed: int
    architecture: Architecture
    activation: Activation
    init: InitKind
    init_scale: float
    optimiser: Optimiser
    learning_rate: float
    l2: float
    dropout: float
    train_fraction: float
    epochs: int
    num_images: int
    num_steps: int
    checkpoints: tuple[int, ...]
    split: Split


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


def largest_activation(run: ClassifierRun, batch_size: int) -> int:
    """How many numbers the largest activation of a training step holds."""
    sizes = [run.architecture.image, *run.architecture.units]
    return batch_size * max(math.prod(size) for size in sizes)


def split_of(draw: float, validation_share: float, test_share: float) -> Split:
    """The part that a number within [0, 1) falls into."""
    if draw < test_share:
        return "test"
    return "validation" if draw < test_share + validation_share else "train"
