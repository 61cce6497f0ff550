"""Zoos of small transformers that read images row by row: `build_transformer_zoo`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.converters import from_module, from_state_dict
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    Integers,
    Interval,
    Share,
    Shares,
    check_at_least,
    check_interval,
    check_networks,
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
    Split,
    ZooWriter,
    build_shards,
    device_of,
    dtype_of,
    grouped,
    networks_together,
    plain_options,
    split_of,
)
from nfn_graph.tasks.zoo.classifiers import Metrics, TrainingData
from nfn_graph.tasks.zoo.optimisers import (
    SGD_FACTOR,
    BatchedOptimiser,
    Optimiser,
    Parameters,
    stack,
)
from nfn_graph.tasks.zoo.seeds import Draws, seed_of
from nfn_graph.tasks.zoo.training import ImageOrder
from nfn_graph.transforms import FillBiases

# Images that are evaluated at once.
_EVALUATED = 256


@dataclass(frozen=True)
class TransformerZooOptions(BuildOptions):
    """Train a zoo of small transformers that read images row by row, as sequences.

    The hyperparameters of every network, including its size, are sampled independently.

    Attributes:
        data: The images: digits (they come with scikit-learn), an .npz file, or a folder with the
            idx files of MNIST, with CIFAR batches, or with pictures in a subfolder per class.
        networks: The number of networks to train.
        widths: Neurons of the residual stream; one width is sampled for every network.
        heads: Numbers of attention heads; one is sampled for every network. Every width must be a
            multiple of at least two of them.
        depths: Numbers of blocks; one is sampled for every network.
        expansions: Neurons between the two dense layers of a block, as multiples of the width; one
            is sampled for every network.
        init_scale: The range of a factor of the initial weights, sampled log-uniformly.
        optimisers: Optimisers; one is sampled for every network.
        learning_rate: The range of learning rates, sampled log-uniformly; ten times as large for
            sgd.
        l2: The range of the penalty on the sum of squared weights, sampled log-uniformly.
        train_fractions: Shares of the training images that a network sees; one is sampled for
            every network.
        epochs: The range of the number of epochs, sampled uniformly.
        batch_size: The number of images per training step.
        test_share: The share of networks in the test split.
    """

    data: str = "digits"
    networks: int = 500
    widths: tuple[int, ...] = (8, 12, 16)
    heads: tuple[int, ...] = (2, 4)
    depths: tuple[int, ...] = (1, 2)
    expansions: tuple[int, ...] = (1, 2)
    init_scale: Interval = (0.3, 3.0)
    optimisers: tuple[Optimiser, ...] = ("sgd", "adam", "rmsprop")
    learning_rate: Interval = (5e-4, 2e-2)
    l2: Interval = (1e-8, 1e-2)
    train_fractions: Shares = (0.1, 0.25, 0.5, 1.0)
    epochs: Integers = (4, 40)
    batch_size: int = 64
    test_share: Share = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_networks("networks", self.networks)
        check_at_least("batch_size", self.batch_size, 1)
        for name in ("optimisers", "train_fractions"):
            if not getattr(self, name):
                raise UserError(f"Expected at least one value of {flag(name)} (got none)")
        for name in ("widths", "heads", "depths", "expansions"):
            check_several(name, getattr(self, name), 1)
        # Heads of one dimension would be neurons of another kind than those of several.
        odd = [(w, h) for w in self.widths for h in self.heads if w % h or w < 2 * h]
        if odd:
            raise UserError(
                f"Expected --heads that divide all --widths, into parts of two or more (got "
                f"{odd[0][1]} heads and a width of {odd[0][0]})"
            )
        for name in ("init_scale", "learning_rate", "l2", "epochs"):
            check_interval(name, getattr(self, name), above=0)
        check_split(self.validation_share, self.test_share)
        for value in self.train_fractions:
            check_share("train_fractions", value)


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


def build_transformer_zoo(
    options: TransformerZooOptions, *, images: Images | None = None, progress: bool = False
) -> Path:
    """Trains a zoo of transformers, or what is missing of it.

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
    runs = [draw_transformer(options, images, network) for network in range(options.networks)]
    shapes = {_name(run.shape): run.shape for run in runs}
    # Networks of one shape share their layout.
    network_of = cache(lambda name: RowTransformer(shapes[name]).to("meta", dtype))
    example = torch.empty(1, *images.shape, device="meta", dtype=dtype)
    deepest = max(shapes, key=lambda name: shapes[name].depth)
    # Every block adds values to the neurons of the stream; zeros bring all depths together.
    fill = FillBiases.to_largest([from_module(network_of(deepest), example)])
    writer = ZooWriter(
        Path(options.out),
        "transformer",
        plain_options(options),
        TrainingData.facts(images),
        graph_of=lambda group, tensors: fill(
            from_state_dict(tensors, arch=network_of(group), example_input=example)
        ),
    )
    data: list[TrainingData] = []

    def train(chosen: Sequence[TransformerRun], on_steps: OnSteps) -> list[BuiltNetwork]:
        if not data:
            data.append(TrainingData.of(images, device, dtype))
        found: list[tuple[TransformerRun, Parameters, Metrics]] = []
        for group in grouped(
            chosen,
            key=lambda run: run.shape,
            order=lambda run: run.num_steps,
            together=lambda run: networks_together(
                options, options.batch_size * run.shape.rows * run.shape.width * 4
            ),
        ):
            group.sort(key=lambda run: run.optimiser)
            found += train_transformers(group, data[0], options.batch_size, on_steps)
        found.sort(key=lambda item: item[0].network)
        return [
            (_row(run, parameters, metrics, options), _name(run.shape), parameters)
            for run, parameters, metrics in found
        ]

    build = partial(build_transformer_zoo, images=images)
    return build_shards(
        options, writer, runs, lambda run: run.num_steps, train, build, progress=progress
    )


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


def train_transformers(
    runs: Sequence[TransformerRun],
    data: TrainingData,
    batch_size: int,
    on_steps: OnSteps = lambda steps: None,
) -> list[tuple[TransformerRun, Parameters, Metrics]]:
    """Trains networks of one shape together, each as if it were alone.

    Args:
        runs: The networks, with those of one optimiser next to each other.
        data: What they are trained and tested on.
        batch_size: The number of images per training step.
        on_steps: Called with the number of steps made, summed over networks.
    """
    like = data.train_images
    module = RowTransformer(runs[0].shape).to("meta")

    def one(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(parameters), (x,))

    together = torch.vmap(one)
    fresh = stack([initialise_transformer(run) for run in runs])
    optimiser = BatchedOptimiser(
        {key: x.to(like.device, like.dtype) for key, x in fresh.items()},
        [run.optimiser for run in runs],
        like.new_tensor([run.learning_rate for run in runs]),
        like.new_tensor([run.l2 for run in runs]),
    )
    orders = [ImageOrder(run.seed, run.num_images, len(like)) for run in runs]
    left, step = list(range(len(runs))), 0
    found = []
    while left:
        ended = [i for i, n in enumerate(left) if runs[n].num_steps == step]
        if ended:
            chosen = {key: x.detach()[ended] for key, x in optimiser.parameters.items()}
            ids = [left[i] for i in ended]
            measured = _measure(together, chosen, data, [orders[n].images for n in ids])
            for i, (n, metrics) in enumerate(zip(ids, measured, strict=True)):
                own = {key: x[i].cpu().clone() for key, x in chosen.items()}
                found.append((runs[n], own, metrics))
            kept = [i for i in range(len(left)) if i not in ended]
            left = [left[i] for i in kept]
            if not left:
                break
            rows = torch.tensor(kept, device=like.device)
            optimiser.keep(rows, [runs[n].optimiser for n in left])
        batch = torch.stack([orders[n].take(batch_size) for n in left]).to(like.device)
        outputs = together(optimiser.parameters, like[batch])
        loss = F.cross_entropy(
            outputs.flatten(0, 1), data.train_labels[batch].flatten(), reduction="sum"
        )
        parameters = list(optimiser.parameters.values())
        optimiser.step(torch.autograd.grad(loss / batch_size, parameters))
        step += 1
        on_steps(len(left))
    return found


@torch.no_grad()
def _measure(
    together: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    parameters: Parameters,
    data: TrainingData,
    trained_on: Sequence[Tensor],
) -> list[Metrics]:
    found = []
    for i, own in enumerate(trained_on):
        one = {key: x[i : i + 1] for key, x in parameters.items()}
        columns = []
        for images, labels in (
            (data.train_images[own], data.train_labels[own]),
            (data.test_images, data.test_labels),
        ):
            outputs = torch.cat([together(one, x[None])[0] for x in images.split(_EVALUATED)])
            # Of a network that has diverged, no answer is right.
            hits = (outputs.argmax(1) == labels) & outputs.isfinite().all(1)
            columns += [float(F.cross_entropy(outputs, labels)), float(hits.double().mean())]
        found.append(Metrics(*columns))
    return found


def _name(shape: Shape) -> str:
    return f"{shape.depth}x{shape.width}x{shape.expansion}h{shape.heads}"


def _row(
    run: TransformerRun, parameters: Parameters, metrics: Metrics, options: TransformerZooOptions
) -> Row:
    values = {f.name: getattr(run, f.name) for f in fields(run) if f.name != "shape"}
    sizes = {f: getattr(run.shape, f) for f in ("width", "heads", "depth", "expansion")}
    return {
        **values,
        **sizes,
        "batch_size": options.batch_size,
        "is_finite": all(bool(x.isfinite().all()) for x in parameters.values()),
        **metrics._asdict(),
    }
