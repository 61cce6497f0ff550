"""Zoos of small transformers that read images row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import Interval, Several, check_several
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.builder import Built, SampledZooOptions, Split, split_of
from nfn_graph.tasks.zoo.classifiers import Metrics, TrainingData
from nfn_graph.tasks.zoo.optimisers import SGD_FACTOR, Optimiser, Parameters
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import ClassifierZooBuilder, StackedNetworks, TrainedCheckpoint
from nfn_graph.transforms import FillBiases

# The number of images that are evaluated at once.
_EVALUATED = 256


@dataclass(frozen=True)
class TransformerZooOptions(SampledZooOptions):
    """Train a zoo of small transformers that read images row by row, as sequences.

    The hyperparameters of every network, including its size, are sampled independently.

    Attributes:
        widths: Neurons of the residual stream; one width is sampled for every network.
        heads: Numbers of attention heads; one is sampled for every network. Every width must be a
            multiple of every number of heads, by a factor of two or more.
        depths: Numbers of blocks; one is sampled for every network.
        expansions: Neurons between the two dense layers of a block, as multiples of the width; one
            is sampled for every network.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import TransformerZooOptions
        >>> TransformerZooOptions(Path("zoo"), networks=100).heads
        (2, 4)
    """

    widths: Several = (8, 12, 16)
    heads: Several = (2, 4)
    depths: Several = (1, 2)
    expansions: Several = (1, 2)
    learning_rate: Interval = (5e-4, 2e-2)

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        for name in ("widths", "heads", "depths", "expansions"):
            check_several(name, getattr(self, name), 1)
        # Heads of one dimension would be neurons of another kind than those of several.
        odd = [(w, h) for w in self.widths for h in self.heads if w % h or w < 2 * h]
        if odd:
            raise UserError(
                f"Expected --heads that divide all --widths, into parts of two or more (got "
                f"{odd[0][1]} heads and a width of {odd[0][0]})"
            )


@dataclass(frozen=True)
class Shape:
    """The sizes of one network.

    Args:
        rows: Positions of the sequence.
        columns: Numbers at every position.
        classes: Outputs.
        width: Neurons of the residual stream.
        heads: Attention heads.
        depth: Blocks.
        expansion: Neurons between the dense layers of a block, as a multiple of the width.
    """

    rows: int
    columns: int
    classes: int
    width: int
    heads: int
    depth: int
    expansion: int


@dataclass(frozen=True)
class TransformerRun:
    """Everything that decides how one transformer is trained; see the options."""

    network: int
    seed: int
    shape: Shape
    init_scale: float
    optimiser: Optimiser
    learning_rate: float
    l2: float
    train_fraction: float
    epochs: int
    num_images: int
    num_steps: int
    split: Split

    # Transformers have no dropout, and are written down when their training ends.
    dropout: ClassVar[float] = 0.0

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The steps after which it is written down."""
        return (self.num_steps,)

    def stacked(self) -> Transformers:
        """The kind of network, many of which can be trained together."""
        return Transformers(self.shape)


class Block(nn.Module):
    """Attention and two dense layers, each behind a norm and with an addition around it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.scale = shape.heads, math.sqrt(shape.heads / width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, width * shape.expansion)
        self.down = nn.Linear(width * shape.expansion, width)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences `[batch, rows, width]`."""
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class RowTransformer(nn.Module):
    """Classifies images `[batch, channels, rows, columns]` row by row.

    There is no norm after the last block, so that a network of one block is the beginning of a
    network of two, tap by tap.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Linear(shape.columns, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.rows, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embed(x.transpose(1, 2).flatten(2)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TransformerZooBuilder(ClassifierZooBuilder[TransformerZooOptions]):
    """Builds a zoo of transformers."""

    kind = "transformer"
    OPTIONS = TransformerZooOptions

    def draw(self, network: int) -> TransformerRun:
        """The run of one network."""
        return draw_transformer(self.options, self.source, network)

    @cached_property
    def _fill(self) -> FillBiases:
        """Every block adds values to the neurons of the stream; zeros bring all depths together."""
        deepest = max(self.list_networks(), key=lambda run: run.shape.depth)
        return FillBiases.to_largest([self.empty_graph(deepest)])

    def transform(self, graph: WeightGraph) -> WeightGraph:
        """A graph with as many values for every neuron as the deepest network has."""
        return self._fill(graph)

    def built(self, checkpoint: TrainedCheckpoint) -> list[Built[TransformerRun]]:
        """The network, with its hyperparameters, sizes and metrics."""
        run: TransformerRun = checkpoint.run
        values = {f.name: getattr(run, f.name) for f in fields(run) if f.name != "shape"}
        sizes = {f: getattr(run.shape, f) for f in ("width", "heads", "depth", "expansion")}
        row = {
            **values,
            **sizes,
            "batch_size": self.options.batch_size,
            "is_finite": checkpoint.is_finite,
            **checkpoint.metrics._asdict(),
        }
        return [Built(run, row, checkpoint.parameters)]


def draw_transformer(
    options: TransformerZooOptions, images: Images, network: int
) -> TransformerRun:
    """The run of one network: it depends on the options, the data and its number only."""
    draws = Draws(options.seed, network, "hyperparameters")
    channels, rows, columns = images.shape
    shape = Shape(
        rows,
        channels * columns,
        len(images.classes),
        draws.choice(options.widths),
        draws.choice(options.heads),
        draws.choice(options.depths),
        draws.choice(options.expansions),
    )
    optimiser = draws.choice(options.optimisers)
    learning_rate = draws.log_uniform(*options.learning_rate)
    fraction = draws.choice(options.train_fractions)
    epochs = draws.integer(*options.epochs)
    num_images = max(1, round(fraction * len(images.train_index)))
    return TransformerRun(
        network=network,
        seed=seed_of(options.seed, network),
        shape=shape,
        init_scale=draws.log_uniform(*options.init_scale),
        optimiser=optimiser,
        learning_rate=learning_rate * (SGD_FACTOR if optimiser == "sgd" else 1),
        l2=draws.log_uniform(*options.l2),
        train_fraction=fraction,
        epochs=epochs,
        num_images=num_images,
        num_steps=max(1, math.ceil(epochs * num_images / options.batch_size)),
        split=split_of(draws.uniform(0, 1), options.validation_share, options.test_share),
    )


def initialise_transformer(run: TransformerRun) -> Parameters:
    """Fresh parameters: matrices with a variance of one over their inputs, norms as usual."""
    module = RowTransformer(run.shape).to("meta")
    generator = torch.Generator().manual_seed(seed_of(run.seed, "initial"))
    found = {}
    for key, like in module.state_dict().items():
        if like.dim() > 1:
            scale = run.init_scale * (0.1 if key == "position" else like.shape[1] ** -0.5)
            found[key] = torch.randn(like.shape, generator=generator) * scale
        else:
            is_norm = "norm" in key and key.endswith("weight")
            found[key] = torch.full(like.shape, float(is_norm))
    return found


@dataclass(frozen=True)
class Transformers(StackedNetworks):
    """Stacked transformers of one shape."""

    shape: Shape

    @property
    def name(self) -> str:
        """Depth, width, expansion and heads."""
        shape = self.shape
        return f"{shape.depth}x{shape.width}x{shape.expansion}h{shape.heads}"

    @property
    def largest_activation(self) -> int:
        """About that of the dense layers of a block."""
        return self.shape.rows * self.shape.width * 4

    def module(self) -> nn.Module:
        """One of the networks as an ordinary module."""
        return RowTransformer(self.shape)

    @cached_property
    def _outputs(self) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
        """The outputs of all networks, each for images of its own."""
        module = self.module().to("meta")

        def one(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(module, dict(parameters), (x,))

        return torch.vmap(one)

    def initialise(self, run: TransformerRun) -> Parameters:
        """Fresh parameters of one network."""
        return initialise_transformer(run)

    def loss(
        self, parameters: Parameters, images: Tensor, labels: Tensor, dropped: object = None
    ) -> Tensor:
        """The cross-entropy, mean over a batch and summed over networks."""
        outputs = self._outputs(parameters, images.transpose(0, 1).contiguous())
        loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / len(images)

    @torch.no_grad()
    def measure(
        self, parameters: Parameters, data: TrainingData, trained_on: Sequence[Tensor]
    ) -> list[Metrics]:
        """The metrics of every network, one after the other."""
        found = []
        for i, own in enumerate(trained_on):
            one = {key: x[i : i + 1] for key, x in parameters.items()}
            columns = []
            for images, labels in (
                (data.train_images[own], data.train_labels[own]),
                (data.test_images, data.test_labels),
            ):
                parts = [self._outputs(one, x[None])[0] for x in images.split(_EVALUATED)]
                outputs = torch.cat(parts)
                # A network that has diverged gets no answer right.
                hits = (outputs.argmax(1) == labels) & outputs.isfinite().all(1)
                columns += [float(F.cross_entropy(outputs, labels)), float(hits.double().mean())]
            found.append(Metrics(*columns))
        return found
