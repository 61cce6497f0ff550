"""The options of the zoo builders; the command line is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nfn_graph.converters.jobs.engines import Engine
from nfn_graph.converters.jobs.parts import Part
from nfn_graph.tasks.zoo.architecture import Activation, InitKind
from nfn_graph.tasks.zoo.optimisers import Optimiser

Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "float64"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class BuildOptions:
    """Options of every zoo.

    Attributes:
        out: The folder to write to; what is there already is kept, so a run that was stopped
            goes on where it was.
        seed: Decides every network; the same seed gives the same zoo.
        shard_size: Networks per file. It does not change the networks.
        shard: Build a part of the shards, such as 2/4 for the second of four machines.
        engine: Where to build the shards: in this process, in one process for each core, or as
            tasks of a Ray cluster whose machines see the folder; the data are sent to them.
        device: Where to train.
        dtype: The precision of training and of the files.
        together: Networks that are trained as one computation; 0 to choose by their size.
        validation_share: The share of networks (of INRs: of training images) for validation.
    """

    out: Path
    seed: int = 0
    shard_size: int = 500
    shard: str = "1/1"
    engine: Engine = "local"
    device: Device = "cpu"
    dtype: Dtype = "float32"
    together: int = 0
    validation_share: float = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        _at_least(self.shard_size, 1, "shard-size")
        _at_least(self.together, 0, "together")
        _share(self.validation_share, "validation-share")
        self.part()

    def part(self) -> Part:
        """Which part of the shards to build, from 0, and of how many."""
        return Part.parse(self.shard)


@dataclass(frozen=True)
class CnnZooOptions(BuildOptions):
    """Train a zoo of small classifiers with drawn hyperparameters.

    The recipe of the Small CNN Zoo: 3 x 3 convolutions with stride 2, the mean over all
    positions, a dense layer; or MLPs. Every network draws its hyperparameters on its own.

    Attributes:
        data: The images: digits, or a folder or .npz file; see nfn_graph.tasks.sources.
        networks: How many to train.
        arch: Convolutional networks or MLPs.
        widths: Channels or neurons of every hidden layer; one is drawn per network.
        depths: Hidden layers; one is drawn per network.
        padding: Of the convolutions; auto is 0, or 1 if the images are too small for that.
        activations: One is drawn.
        inits: One is drawn.
        init_scale: Log-uniform; a factor of the initial weights (normal and truncated_normal
            have a tenth of it as standard deviation).
        optimisers: One is drawn.
        learning_rate: Log-uniform; ten times as large for sgd.
        l2: Log-uniform; the penalty on the sum of squared weights.
        dropout: Uniform, for those networks that have dropout at all.
        dropout_share: The share of networks with dropout.
        train_fractions: One is drawn: the share of the training images that a network sees.
        epochs: The number of epochs, an integer drawn uniformly.
        checkpoints: When a network is written down, as shares of its training; each gives a row.
        batch_size: Images per step.
        test_share: The share of networks for testing.
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
    dropout_share: float = 0.5
    train_fractions: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    epochs: tuple[int, int] = (4, 40)
    checkpoints: tuple[float, ...] = (1.0,)
    batch_size: int = 64
    test_share: float = 0.15

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        _at_least(self.networks, 1, "networks")
        _at_least(self.batch_size, 1, "batch-size")
        for name in ("widths", "depths", "activations", "inits", "optimisers"):
            if not getattr(self, name):
                raise ValueError(f"Expected at least one value of --{name} (got none)")
        for width in self.widths:
            _at_least(width, 1, "widths")
        for depth in self.depths:
            _at_least(depth, 0 if self.arch == "mlp" else 1, "depths")
        _interval(self.init_scale, "init-scale", above=0)
        _interval(self.learning_rate, "learning-rate", above=0)
        _interval(self.l2, "l2", above=0)
        _interval(self.epochs, "epochs", above=0)
        _interval(self.dropout, "dropout", least=0, below=1)
        _share(self.dropout_share, "dropout-share")
        _share(self.validation_share + self.test_share, "validation-share and --test-share")
        for name in ("train_fractions", "checkpoints"):
            if not getattr(self, name):
                raise ValueError(f"Expected at least one value of --{name} (got none)")
            for value in getattr(self, name):
                _share(value, name.replace("_", "-"))


def _at_least(value: int, least: int, option: str) -> None:
    if value < least:
        raise ValueError(f"Expected --{option} of at least {least} (got {value})")


def _share(value: float, option: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"Expected --{option} within 0 and 1 (got {value})")


def _interval(
    values: tuple[float, float],
    option: str,
    *,
    above: float = float("-inf"),
    least: float = float("-inf"),
    below: float = float("inf"),
) -> None:
    low, high = values
    if not (low <= high and low > above and low >= least and high < below):
        raise ValueError(
            f"Expected --{option} as two numbers, the smaller first, within its limits "
            f"(got {low} {high})"
        )


@dataclass(frozen=True)
class InrZooOptions(BuildOptions):
    """Fit a zoo of SIRENs to images, or to the unsigned distance from shapes.

    Attributes:
        data: The images (digits, or a folder or .npz file), or the point clouds.
        kind: Whether data holds images or point clouds.
        images: Training images or shapes, validation included; 0 for all of them.
        test_images: Test images or shapes; 0 for all of them.
        fits: Networks per training image, with initialisations of their own.
        test_fits: Networks per validation or test image.
        widths: Neurons of the hidden layers; one is drawn per network. 32, for clouds 128.
        depths: Hidden layers; one is drawn per network. 2, for clouds 1.
        w0: The frequency factor of all hidden layers.
        steps: Steps of Adam.
        learning_rate: Of Adam.
        points: Points per step; 0 for all pixels of an image, or 1,024 of a shape.
        samples: Points around each shape whose distance is computed.
    """

    data: str = "digits"
    kind: Literal["image", "cloud"] = "image"
    images: int = 0
    test_images: int = 0
    fits: int = 1
    test_fits: int = 1
    widths: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    w0: float = 30.0
    steps: int = 1000
    learning_rate: float = 1e-3
    points: int = 0
    samples: int = 8192

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        for name in ("images", "test_images", "points"):
            _at_least(getattr(self, name), 0, name.replace("_", "-"))
        for name in ("fits", "test_fits", "steps", "samples"):
            _at_least(getattr(self, name), 1, name.replace("_", "-"))
        for name in ("widths", "depths"):
            for value in getattr(self, name):
                _at_least(value, 1, name)
        for name in ("w0", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"Expected --{name.replace('_', '-')} above 0 (got {getattr(self, name)})"
                )
