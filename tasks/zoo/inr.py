"""Zoos of SIRENs fitted to images or shapes: `build_inr_zoo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from tyro.conf import arg

from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import (
    check_above,
    check_at_least,
    check_networks,
    check_several,
)
from nfn_graph.tasks.sources import Clouds, Images, open_clouds, open_images, sample_distances
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
)
from nfn_graph.tasks.zoo.seeds import Draws, generator_of, seed_of
from nfn_graph.tasks.zoo.siren import FitSettings, FitTargets, SirenShape, fit_sirens, pixel_grid

_CLOUD_POINTS = 1024
_MAX_DISTANCE = 1.0


@dataclass(frozen=True)
class InrZooOptions(BuildOptions):
    """Fit a zoo of SIRENs to images, or to the unsigned distance from shapes.

    Attributes:
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


class InrFit(NamedTuple):
    """One network of a zoo: which image or shape it is fitted to, and its shape and seed."""

    network: int
    seed: int
    image: int
    fit: int
    label: int
    split: Split
    shape: SirenShape


def build_inr_zoo(
    options: InrZooOptions,
    *,
    source: Images | Clouds | None = None,
    progress: bool = False,
) -> Path:
    """Fits a zoo of SIRENs, or what is missing of it.

    Args:
        options: What to build, and where.
        source: The data, if not to be read from `options.data`.
        progress: Whether to show a progress bar.

    Returns:
        The zoo's folder, for `open_zoo_folder` and `render_zoo`.
    """
    options.check()
    device, dtype = device_of(options), dtype_of(options)
    if source is None:
        opener = open_images if options.kind == "image" else open_clouds
        source = opener(options.data)
    fits = list_fits(options, source)
    is_image = isinstance(source, Images)
    offset = 0.5 if is_image else 0.0
    points = options.points or (0 if is_image else _CLOUD_POINTS)
    settings = FitSettings(
        options.w0, offset, options.steps, options.learning_rate, points, options.seed
    )
    writer = ZooWriter(Path(options.out), "inr", plain_options(options), _facts(source, offset))

    def train(chosen: Sequence[InrFit], on_steps: OnSteps) -> list[BuiltNetwork]:
        built: list[BuiltNetwork] = []
        for group in grouped(
            chosen,
            key=lambda fit: fit.shape,
            order=lambda fit: fit.network,
            together=lambda fit: networks_together(options, _entries(fit, source, points)),
        ):
            targets = FitTargets(
                *(x.to(device, dtype) for x in targets_of(source, group, options.samples))
            )
            shape = group[0].shape
            found = fit_sirens(shape, [f.seed for f in group], targets, settings, on_steps)
            errors = found.errors.tolist()
            for i, (fit, error) in enumerate(zip(group, errors, strict=True)):
                parameters = {key: x[i].cpu() for key, x in found.parameters.items()}
                built.append((_row(fit, options, settings, error), shape.name, parameters))
        built.sort(key=lambda network: network[0]["network"])
        return built

    build = partial(build_inr_zoo, source=source)
    return build_shards(
        options, writer, fits, lambda fit: options.steps, train, build, progress=progress
    )


def _facts(source: Images | Clouds, offset: float) -> dict[str, Any]:
    """What a reader of a zoo must know about its data, and how its networks are to be read."""
    shape = list(source.shape) if isinstance(source, Images) else None
    return {
        "fingerprint": source.fingerprint,
        "classes": list(source.classes),
        "signal": "unsigned distance" if shape is None else "image",
        "image_shape": shape,
        "convention": "hidden layers sin(w0 * (W x + b)), output W x + b + output_offset; "
        "coordinates (row, column) or (x, y, z) within [-1, 1], both ends included",
        "output_offset": offset,
    }


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
    """The networks of a zoo: training images in a drawn order, then validation, then test."""
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
    """What some networks are fitted to."""
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
    """In decibels, of a mean squared error; that of a fit that diverged is NaN as well."""
    return math.inf if error == 0 else -10 * math.log10(error)


def _entries(fit: InrFit, source: Images | Clouds, points: int) -> int:
    if isinstance(source, Images) and not points:
        points = source.shape[1] * source.shape[2]
    return points * max(fit.shape.hidden)


def _drawn(index: Tensor, count: int, options: InrZooOptions, option: str, name: str) -> list[int]:
    """The first `count` images in an order that the seed decides; all of them for 0."""
    if count > len(index):
        raise UserError(
            f"Expected at most {len(index)} for --{option}, as many as '{name}' has (got {count})"
        )
    order = torch.randperm(len(index), generator=generator_of(options.seed, option))
    return index[order][: count or None].tolist()
