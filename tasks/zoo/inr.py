"""Zoos of SIRENs fitted to images or shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from tyro.conf import arg

from nfn_graph.converters.commands import unset
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    check_above,
    check_at_least,
    check_networks,
    check_part,
    check_several,
)
from nfn_graph.tasks.sources import Clouds, Images, open_clouds, open_images, sample_distances
from nfn_graph.tasks.zoo.builder import BuildOptions, Built, OnSteps, Row, Split, ZooBuilder
from nfn_graph.tasks.zoo.recipes import check_recipe
from nfn_graph.tasks.zoo.seeds import Draws, generator_of, seed_of
from nfn_graph.tasks.zoo.siren import (
    FitSettings,
    FitTargets,
    Siren,
    SirenInit,
    SirenShape,
    fit_sirens,
    pixel_grid,
)

_CLOUD_POINTS = 1024
_MAX_DISTANCE = 1.0


@dataclass(frozen=True)
class InrZooOptions(BuildOptions):
    """Fit a zoo of SIRENs to images, or to the unsigned distance from shapes.

    Attributes:
        recipe: Make networks like those of a published zoo. Its options are those of the recipe
            unless they are given as well.
        data: The images: digits, an .npz file, or a folder with the idx files of MNIST, with
            CIFAR batches, or with pictures in a subfolder per class. With --kind cloud: an .npz
            file, or a folder with .off or .ply files in a subfolder per class.
        kind: Whether --data contains images or point clouds.
        images: The number of training and validation images or shapes; 0 for all of them.
        test_images: The number of test images or shapes; 0 for all of them.
        fits: The number of networks per training image, each with its own initialisation.
        test_fits: The number of networks per validation or test image.
        widths: Neurons of the hidden layers; one width is sampled for every network.
        depths: Numbers of hidden layers; one is sampled for every network.
        w0: The frequency factor of all hidden layers.
        steps: The number of training steps.
        learning_rate: The learning rate of Adam.
        points: The number of points per training step; 0 for all pixels of an image, or for 1,024
            points of a shape.
        samples: The number of points around each shape whose distance is computed.
        init: The initialisation of the weights: that of Sitzmann et al., or that of DWSNets.
        same_init: Whether all networks of one shape start with the same weights.
        output_offset: A number between 0 and 1 that is added to the outputs.
        stop_psnr: The peak signal-to-noise ratio, in decibels, at which the training of a network
            ends before --steps; 0 for none.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import InrZooOptions
        >>> InrZooOptions(Path("zoo"), images=100, fits=2).w0
        30.0
    """

    recipe: Annotated[Literal["dws", "nfn", "inr2vec"] | None, unset("{dws,nfn,inr2vec}")] = None
    data: str = "digits"
    kind: Literal["image", "cloud"] = "image"
    images: int = 0
    test_images: int = 0
    fits: int = 1
    test_fits: int = 1
    widths: Annotated[
        tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="(default: 32, for clouds 128)")
    ] = ()
    depths: Annotated[
        tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="(default: 2, for clouds 1)")
    ] = ()
    w0: float = 30.0
    steps: int = 1000
    learning_rate: float = 1e-3
    points: int = 0
    samples: int = 8192
    init: SirenInit = "sitzmann"
    same_init: bool = False
    output_offset: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.5, for clouds 0)")
    ] = None
    stop_psnr: float = 0.0

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_recipe("inr", self)
        for name in ("images", "test_images", "points", "stop_psnr"):
            check_at_least(name, getattr(self, name), 0)
        if self.output_offset is not None:
            check_part("output_offset", self.output_offset)
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


class InrFit(NamedTuple):
    """One network of a zoo: which image or shape it is fitted to, and its shape and seed."""

    network: int
    seed: int
    image: int
    fit: int
    label: int
    split: Split
    shape: SirenShape


class InrZooBuilder(ZooBuilder[InrZooOptions, Images | Clouds, InrFit]):
    """Builds a zoo of SIRENs."""

    kind = "inr"
    OPTIONS = InrZooOptions

    def __init__(self, options: InrZooOptions, source: Images | Clouds | None = None) -> None:
        super().__init__(options, source)
        is_image = isinstance(self.source, Images)
        offset = options.output_offset
        self.settings = FitSettings(
            options.w0,
            (0.5 if is_image else 0.0) if offset is None else offset,
            options.steps,
            options.learning_rate,
            options.points or (0 if is_image else _CLOUD_POINTS),
            options.seed,
            options.init,
            options.stop_psnr,
        )

    def open_source(self) -> Images | Clouds:
        """The images or shapes that the options name."""
        opener = open_images if self.options.kind == "image" else open_clouds
        return opener(self.options.data)

    def facts(self) -> dict[str, Any]:
        """The data, and how the networks are to be read."""
        source = self.source
        shape = list(source.shape) if isinstance(source, Images) else None
        return {
            "fingerprint": source.fingerprint,
            "classes": list(source.classes),
            "signal": "unsigned distance" if shape is None else "image",
            "image_shape": shape,
            "convention": "hidden layers sin(w0 * (W x + b)), output W x + b + output_offset; "
            "coordinates (row, column) or (x, y, z) within [-1, 1], both ends included",
            "output_offset": self.settings.offset,
        }

    def list_networks(self) -> list[InrFit]:
        """All networks of the zoo."""
        return list_fits(self.options, self.source)

    def steps(self, item: InrFit) -> int:
        """All networks take the same number of steps."""
        return self.options.steps

    def alike(self, item: InrFit) -> SirenShape:
        """Networks of one shape."""
        return item.shape

    def name(self, item: InrFit) -> str:
        """The name of the shape."""
        return item.shape.name

    def largest_activation(self, item: InrFit) -> int:
        """The size of the largest activation over all points of a training step."""
        points = self.settings.points
        if isinstance(self.source, Images) and not points:
            points = self.source.shape[1] * self.source.shape[2]
        return points * max(item.shape.hidden)

    def module(self, item: InrFit) -> tuple[nn.Module, tuple[int, ...]]:
        """The network, which reads a point."""
        siren = Siren(item.shape, self.settings.w0, self.settings.offset)
        return siren, (item.shape.inputs,)

    def train(self, group: list[InrFit], on_steps: OnSteps) -> Iterator[Built[InrFit]]:
        """The fitted networks."""
        targets = targets_of(self.source, group, self.options.samples)
        targets = FitTargets(*(x.to(self.device, self.dtype) for x in targets))
        seeds = [self.options.seed if self.options.same_init else fit.seed for fit in group]
        found = fit_sirens(group[0].shape, seeds, targets, self.settings, on_steps)
        for i, (fit, error) in enumerate(zip(group, found.errors.tolist(), strict=True)):
            parameters = {key: x[i].cpu() for key, x in found.parameters.items()}
            yield Built(fit, _row(fit, self.options, self.settings, error), parameters)


def _row(fit: InrFit, options: InrZooOptions, settings: FitSettings, error: float) -> Row:
    shape = fit.shape
    return {
        **fit._asdict(),
        "shape": "-".join(map(str, (shape.inputs, *shape.hidden, shape.outputs))),
        "width": shape.hidden[0],
        "depth": len(shape.hidden),
        "w0": options.w0,
        "output_offset": settings.offset,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "points": settings.points,
        "mse": error,
        "psnr": _psnr(error),
    }


def list_fits(options: InrZooOptions, source: Images | Clouds) -> list[InrFit]:
    """The networks of a zoo: training images in random order, then validation, then test."""
    chosen: dict[Split, list[int]] = {"train": [], "validation": [], "test": []}
    for image in _drawn(source.train_index, options.images, options, "images", source.name):
        draw = Draws(options.seed, image, "split").uniform(0, 1)
        chosen["validation" if draw < options.validation_share else "train"].append(image)
    chosen["test"] = _drawn(
        source.test_index, options.test_images, options, "test-images", source.name
    )
    is_image = isinstance(source, Images)
    inputs, outputs = (2, source.shape[0]) if isinstance(source, Images) else (3, 1)
    widths = options.widths or ((32,) if is_image else (128,))
    depths = options.depths or ((2,) if is_image else (1,))
    fits: list[InrFit] = []
    for split, images in chosen.items():
        copies = options.fits if split == "train" else options.test_fits
        for image, fit in ((i, f) for i in images for f in range(copies)):
            network = len(fits)
            draws = Draws(options.seed, network, "architecture")
            shape = SirenShape(inputs, (draws.choice(widths),) * draws.choice(depths), outputs)
            seed = seed_of(options.seed, network)
            label = int(source.labels[image])
            fits.append(InrFit(network, seed, image, fit, label, split, shape))
    return fits


def targets_of(source: Images | Clouds, fits: Sequence[InrFit], samples: int) -> FitTargets:
    """The targets of some networks."""
    index = torch.tensor([fit.image for fit in fits])
    if isinstance(source, Images):
        _, height, width = source.shape
        return FitTargets(pixel_grid(height, width), source.values(index).flatten(2))
    # All fits of a shape see the same points.
    seeds = [seed_of(fit.image, "distance") for fit in fits]
    points, distances = sample_distances(source.points[index], samples, seeds)
    return FitTargets(
        points.transpose(1, 2).contiguous(), distances.clamp(max=_MAX_DISTANCE).transpose(1, 2)
    )


def _psnr(error: float) -> float:
    """The PSNR of a mean squared error, in decibels; NaN for a fit that diverged."""
    return math.inf if error == 0 else -10 * math.log10(error)


def _drawn(index: Tensor, count: int, options: InrZooOptions, option: str, name: str) -> list[int]:
    """The first `count` images in an order that the seed decides; all of them for 0."""
    if count > len(index):
        raise UserError(
            f"Expected at most {len(index)} for --{option}, as many as '{name}' has (got {count})"
        )
    order = torch.randperm(len(index), generator=generator_of(options.seed, option))
    return index[order][: count or None].tolist()
