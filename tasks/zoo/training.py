"""Training many classifiers as one batched computation, each exactly as if it were alone.

Every network has its own initial weights, its own images in its own order, and its own
dropout, all sampled with its own seed, so that the result does not depend on the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.messages import UserError
from nfn_graph.tasks.sources import Images, open_images
from nfn_graph.tasks.zoo.builder import Built, ImageZooOptions, OnSteps, Split, ZooBuilder
from nfn_graph.tasks.zoo.classifiers import (
    Activation,
    Architecture,
    InitKind,
    Metrics,
    TrainingData,
    build_module,
    forward,
    initialise,
    measure,
)
from nfn_graph.tasks.zoo.optimisers import BatchedOptimiser, Optimiser, Parameters, stack
from nfn_graph.tasks.zoo.seeds import generator_of, random_bytes, seed_of

# Dropout is decided by random bytes: its probability is a multiple of 1/256.
KEPT_OF = 256

# The number of steps whose random numbers are sampled together. Another number would give another
# zoo, because it changes the order of the samples.
BLOCK = 8


@dataclass(frozen=True)
class ClassifierRun:
    """Everything that decides how one classifier is trained.

    Args:
        network: Its number in the zoo.
        seed: The seed of its initial weights, data order and dropout.
        architecture: Its shape.
        activation: The activation function of the hidden layers.
        init: The initialisation of the weights; see `initialise`.
        init_scale: See `init`.
        optimiser: See `BatchedOptimiser`.
        learning_rate: The learning rate.
        l2: The factor of the sum of squared weights (not biases) in the loss.
        dropout: The probability that a hidden activation is dropped.
        train_fraction: The share of the training images that it sees.
        epochs: The number of epochs.
        num_images: The number of training images that it sees.
        num_steps: The number of training steps.
        checkpoints: The steps after which a checkpoint is stored.
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

    def stacked(self) -> Classifiers:
        """The kind of network, many of which can be trained together."""
        return Classifiers(self.architecture, self.activation)

    def values(self) -> dict[str, Any]:
        """The values of the run in the table."""
        names = (f.name for f in fields(self))
        return {n: getattr(self, n) for n in names if n not in ("architecture", "checkpoints")}


class TrainedCheckpoint(NamedTuple):
    """A network at some step of its training."""

    run: Any
    step: int
    parameters: Parameters
    metrics: Metrics

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are numbers: training may diverge."""
        return all(bool(x.isfinite().all()) for x in self.parameters.values())


class ImageOrder:
    """The images of one network in the order in which it sees them.

    Its share of the images is shuffled for every epoch; the epochs are strung together, so
    that every batch is full.

    Args:
        seed: The seed of the network.
        count: The number of images that it sees.
        num_images: The number of all training images.
    """

    def __init__(self, seed: int, count: int, num_images: int) -> None:
        self._generator = generator_of(seed, "order")
        self.images = torch.randperm(num_images, generator=self._generator)[:count]
        self._left = self.images[:0]

    def take(self, count: int) -> Tensor:
        """The next images."""
        parts, missing = [self._left], count - len(self._left)
        while missing > 0:
            order = torch.randperm(len(self.images), generator=self._generator)
            parts.append(self.images[order])
            missing -= len(order)
        joined = torch.cat(parts)
        self._left = joined[count:]
        return joined[:count]


class StackedNetworks(ABC):
    """Networks of one shape, whose parameters are stacked along a first axis.

    Attributes:
        units: The shape of every hidden activation of one image; where dropout acts.
    """

    units: Sequence[tuple[int, ...]] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """A name of the shape, for the table of a zoo."""

    @property
    @abstractmethod
    def largest_activation(self) -> int:
        """The number of entries of the largest activation of one image."""

    @abstractmethod
    def module(self) -> nn.Module:
        """One of the networks as an ordinary module."""

    @abstractmethod
    def initialise(self, run: Any) -> Parameters:
        """Fresh parameters of one network."""

    @abstractmethod
    def loss(
        self, parameters: Parameters, images: Tensor, labels: Tensor, dropped: list[Tensor] | None
    ) -> Tensor:
        """The mean loss over a batch, summed over networks.

        Args:
            parameters: Stacked parameters.
            images: `[batch, N, channels, height, width]`.
            labels: `[N, batch]`.
            dropped: The dropout factors of every hidden layer, `[batch, N, *units]`.
        """

    @abstractmethod
    def measure(
        self, parameters: Parameters, data: TrainingData, trained_on: Sequence[Tensor]
    ) -> list[Metrics]:
        """The metrics of every network, given the training images that each of them saw."""


@dataclass(frozen=True)
class Classifiers(StackedNetworks):
    """Stacked classifiers of one architecture and activation."""

    architecture: Architecture
    activation: Activation

    @property
    def units(self) -> Sequence[tuple[int, ...]]:  # type: ignore[override]
        """The shape of every hidden activation of one image."""
        return self.architecture.units

    @property
    def name(self) -> str:
        """The name of the architecture."""
        return self.architecture.name

    @property
    def largest_activation(self) -> int:
        """The image itself, or one of the hidden layers."""
        return max(math.prod(size) for size in (self.architecture.image, *self.units))

    def module(self) -> nn.Module:
        """One of the networks as an ordinary module."""
        return build_module(self.architecture, self.activation)

    def initialise(self, run: ClassifierRun) -> Parameters:
        """Fresh parameters of one network."""
        generator = generator_of(run.seed, "initial")
        return initialise(self.architecture, run.init, run.init_scale, generator)

    def loss(
        self, parameters: Parameters, images: Tensor, labels: Tensor, dropped: list[Tensor] | None
    ) -> Tensor:
        """The cross-entropy."""
        outputs = forward(self.architecture, parameters, self.activation, images, dropped)
        return F.cross_entropy(outputs, labels, reduction="sum") / len(images)

    def measure(
        self, parameters: Parameters, data: TrainingData, trained_on: Sequence[Tensor]
    ) -> list[Metrics]:
        """The metrics of every network."""
        return measure(self.architecture, parameters, self.activation, data, trained_on)


def train_classifiers(
    runs: Sequence[Any],
    data: TrainingData,
    batch_size: int,
    *,
    initial: Parameters | None = None,
    masks: Mapping[str, Tensor] | None = None,
    on_steps: Callable[[int], None] = lambda steps: None,
) -> Iterator[TrainedCheckpoint]:
    """Trains networks of one shape together.

    Args:
        runs: The networks, with those of one optimiser next to each other. A run says what its
            network is with the method `stacked`, and how it is trained with `seed`, `optimiser`,
            `learning_rate`, `l2`, `dropout`, `num_images`, `num_steps` and `checkpoints`.
        data: The training and test images.
        batch_size: Images per step.
        initial: Stacked parameters to start from, instead of fresh ones.
        masks: Stacked masks of 0 and 1, by key: where weights are kept at zero.
        on_steps: Called with the number of steps made, summed over networks.

    Yields:
        Every checkpoint as soon as it is reached.
    """
    kinds = {run.stacked() for run in runs}
    if len(kinds) != 1:
        raise UserError(
            f"Expected networks of one architecture and activation (got {len(kinds)} kinds)"
        )
    state = _State(kinds.pop(), list(runs), data, initial, masks)
    longest = max(run.num_steps for run in runs)
    for start in range(0, longest + 1, BLOCK):
        state.keep_unfinished(start)
        if not state.runs:
            return
        batches = state.draw_batches(batch_size)
        drawn = state.draw_dropout(batch_size)
        for step in range(start, min(start + BLOCK, longest + 1)):
            yield from state.checkpoints(step)
            if step < longest:
                at = step - start
                state.step(batches[at], None if drawn is None else [d[at] for d in drawn])
        done = [min(max(run.num_steps - start, 0), BLOCK) for run in state.runs]
        on_steps(sum(done))


class _State:
    """The networks that are still in training, and what belongs to each."""

    def __init__(
        self,
        networks: StackedNetworks,
        runs: list[Any],
        data: TrainingData,
        initial: Parameters | None,
        masks: Mapping[str, Tensor] | None,
    ) -> None:
        like = data.train_images
        self.networks, self.runs, self.data = networks, runs, data
        if initial is None:
            initial = stack([networks.initialise(run) for run in runs])
        stacked = {key: x.to(like.device, like.dtype) for key, x in initial.items()}
        self.optimiser = BatchedOptimiser(
            stacked,
            [r.optimiser for r in runs],
            like.new_tensor([r.learning_rate for r in runs]),
            like.new_tensor([r.l2 for r in runs]),
            masks,
        )
        self.orders = [ImageOrder(r.seed, r.num_images, len(like)) for r in runs]
        self.dropout = [np.random.SFC64(seed_of(r.seed, "dropout")) for r in runs]

    def keep_unfinished(self, start: int) -> None:
        """Drops the networks whose last checkpoint has been taken."""
        rows = [i for i, run in enumerate(self.runs) if run.num_steps >= start]
        if len(rows) == len(self.runs):
            return
        self.runs = [self.runs[i] for i in rows]
        self.orders = [self.orders[i] for i in rows]
        self.dropout = [self.dropout[i] for i in rows]
        index = torch.tensor(rows, device=self.data.train_images.device)
        self.optimiser.keep(index, [r.optimiser for r in self.runs])

    def draw_batches(self, batch_size: int) -> Tensor:
        """Images `[BLOCK, batch, N]` for the next steps."""
        taken = torch.stack([order.take(BLOCK * batch_size) for order in self.orders], -1)
        return taken.view(BLOCK, batch_size, -1).to(self.data.train_images.device)

    def draw_dropout(self, batch_size: int) -> list[Tensor] | None:
        """Random bytes `[BLOCK, batch, N, *units]` of every hidden layer; None without dropout."""
        if not any(run.dropout for run in self.runs):
            return None
        layers = []
        for units in self.networks.units:
            # The order in which a stream fills them is part of what a zoo is.
            each = [random_bytes(g, (BLOCK, *units, batch_size)) for g in self.dropout]
            drawn = torch.stack([x.movedim(-1, 1) for x in each], 2)
            layers.append(drawn.to(self.data.train_images.device))
        return layers

    def factors(self, drawn: Tensor) -> Tensor:
        """The factors of activations, given random bytes `[batch, N, *units]` of one step."""
        like = self.data.train_images
        kept = [KEPT_OF - round(run.dropout * KEPT_OF) for run in self.runs]
        each = (-1, *[1] * (drawn.ndim - 2))
        # The largest byte that stays, so that 256 of 256 fit into a byte.
        last = torch.tensor([k - 1 for k in kept], dtype=torch.uint8, device=like.device)
        scale = like.new_tensor([KEPT_OF / k for k in kept])
        return (drawn <= last.view(each)) * scale.view(each)

    def step(self, batch: Tensor, drawn: list[Tensor] | None) -> None:
        """One gradient step of every network."""
        dropped = None if drawn is None else [self.factors(x) for x in drawn]
        images = self.data.train_images.index_select(0, batch.flatten())
        labels = self.data.train_labels[batch.t()]
        images = images.view(*batch.shape, *images.shape[1:])
        parameters = self.optimiser.parameters
        loss = self.networks.loss(parameters, images, labels, dropped)
        self.optimiser.step(torch.autograd.grad(loss, list(parameters.values())))

    @torch.no_grad()
    def checkpoints(self, step: int) -> Iterator[TrainedCheckpoint]:
        """The networks of which a checkpoint is due after this many steps."""
        rows = [i for i, run in enumerate(self.runs) if step in run.checkpoints]
        if not rows:
            return
        index = torch.tensor(rows, device=self.data.train_images.device)
        chosen = {key: x.detach()[index] for key, x in self.optimiser.parameters.items()}
        runs = [self.runs[i] for i in rows]
        orders = [self.orders[i].images for i in rows]
        results = self.networks.measure(chosen, self.data, orders)
        for i, (run, metrics) in enumerate(zip(runs, results, strict=True)):
            yield TrainedCheckpoint(
                run, step, {key: x[i].cpu() for key, x in chosen.items()}, metrics
            )


ImageOptions = TypeVar("ImageOptions", bound=ImageZooOptions)


class ClassifierZooBuilder(ZooBuilder[ImageOptions, Images, Any]):
    """Builds a zoo of networks that classify images, whose items are runs."""

    def __init__(self, options: ImageOptions, source: Images | None = None) -> None:
        super().__init__(options, source)
        self.source.check_both_splits()

    @abstractmethod
    def draw(self, network: int) -> Any:
        """The run of one network: it depends on the options, the data and its number only."""

    @abstractmethod
    def built(self, checkpoint: TrainedCheckpoint) -> Iterable[Built[Any]]:
        """The networks to store for a checkpoint, if any."""

    def open_source(self) -> Images:
        """The images that the options name."""
        images = open_images(self.options.data)
        return images.in_grey() if self.options.grey else images

    def facts(self) -> dict[str, Any]:
        """What a reader must know about the images."""
        return TrainingData.facts(self.source)

    @cached_property
    def data(self) -> TrainingData:
        """The images, where networks are trained."""
        return TrainingData.of(self.source, self.device, self.dtype)

    def list_networks(self) -> list[Any]:
        """The runs of all networks."""
        return [self.draw(network) for network in range(self.options.networks)]

    def steps(self, item: Any) -> int:
        """The training steps of a network."""
        return int(item.num_steps)

    def alike(self, item: Any) -> Hashable:
        """Networks of one shape, with or without dropout."""
        return item.stacked(), item.dropout > 0

    def name(self, item: Any) -> str:
        """The name of the shape."""
        return str(item.stacked().name)

    def largest_activation(self, item: Any) -> int:
        """The size of the largest activation for a batch of images."""
        return int(self.options.batch_size * item.stacked().largest_activation)

    def module(self, item: Any) -> tuple[nn.Module, tuple[int, ...]]:
        """The network, which reads an image."""
        return item.stacked().module(), self.source.shape

    def train(self, group: list[Any], on_steps: OnSteps) -> Iterator[Built[Any]]:
        """All checkpoints of the networks."""
        group.sort(key=lambda run: run.optimiser)
        size = self.options.batch_size
        for c in train_classifiers(group, self.data, size, on_steps=on_steps):
            yield from self.built(c)
