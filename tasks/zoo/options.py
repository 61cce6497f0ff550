"""The options of the zoo builders; the command line is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from nfn_graph.converters.conversion.jobs import Engine, Part
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    check_above,
    check_at_least,
    check_interval,
    check_networks,
    check_part,
    check_several,
    check_share,
    check_split,
    flag,
)
from nfn_graph.tasks.zoo.architecture import Activation, InitKind
from nfn_graph.tasks.zoo.optimisers import Optimiser

Split = Literal["train", "validation", "test"]
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
        validation_share: The share of the networks (of INRs: of the training images) by which
            the best epoch of a model is chosen.
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
        check_at_least("shard_size", self.shard_size, 1)
        check_at_least("together", self.together, 0)
        check_share("validation_share", self.validation_share)
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
        data: The images: digits (they come with scikit-learn), an .npz file, or a folder with the
            idx files of MNIST, with CIFAR batches, or with pictures in a subfolder per class.
        networks: How many to train.
        arch: Convolutional networks or MLPs.
        widths: Channels or neurons of every hidden layer; one is drawn per network.
        depths: Hidden layers; one is drawn per network.
        padding: Of the convolutions; auto is 0, or 1 if the images are too small for that.
        activations: After every hidden layer; one is drawn per network.
        inits: How weights are initialised; one is drawn per network.
        init_scale: A factor of the initial weights, log-uniform between the two numbers (normal
            and truncated_normal have a tenth of it as standard deviation).
        optimisers: One is drawn per network.
        learning_rate: Log-uniform between the two numbers; ten times as large for sgd.
        l2: The penalty on the sum of squared weights, log-uniform between the two numbers.
        dropout: The probability of an activation to be dropped, uniform between the two numbers,
            for those networks that have dropout at all.
        dropout_share: The share of networks with dropout.
        train_fractions: The share of the training images that a network sees; one is drawn.
        epochs: How often a network sees them: an integer between the two, drawn uniformly.
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


@dataclass(frozen=True)
class InrZooOptions(BuildOptions):
    """Fit a zoo of SIRENs to images, or to the unsigned distance from shapes.

    Attributes:
        data: The images: digits, an .npz file, or a folder with the idx files of MNIST, with
            CIFAR batches, or with pictures in a subfolder per class. Of --kind cloud: an .npz
            file, or a folder with .off or .ply files in a subfolder per class.
        kind: Whether data holds images or point clouds.
        images: Training images or shapes, validation included; 0 for all of them.
        test_images: Test images or shapes; 0 for all of them.
        fits: Networks per training image, with initialisations of their own.
        test_fits: Networks per validation or test image.
        widths: Neurons of the hidden layers; one is drawn per network.
        depths: Hidden layers; one is drawn per network.
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
    widths: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: 32, for clouds 128)")] = ()
    depths: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: 2, for clouds 1)")] = ()
    w0: float = 30.0
    steps: int = 1000
    learning_rate: float = 1e-3
    points: int = 0
    samples: int = 8192

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        for name in ("images", "test_images", "points"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("fits", "test_fits"):
            check_networks(name, getattr(self, name))
        for name in ("steps", "samples"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("widths", "depths"):
            if getattr(self, name):
                check_several(name, getattr(self, name), 1)
        for name in ("w0", "learning_rate"):
            check_above(name, getattr(self, name), 0)
        if self.kind == "image" and self.samples != InrZooOptions.samples:
            raise UserError(f"Expected no --samples with --kind image (got {self.samples})")
