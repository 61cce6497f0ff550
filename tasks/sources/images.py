"""Labelled images with their split, whatever file they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nfn_graph.tasks.sources.labelled import Labelled, SourceError, every_fifth, numbered_classes


@dataclass(frozen=True, eq=False)
class Images(Labelled):
    """Images with labels and a split.

    Args:
        name: Where they came from, for metadata and messages.
        pixels: `[count, channels, height, width]`, uint8, or float32 within [0, 1].
        labels: `[count]`, int64, the class of each.
        is_test: `[count]`, bool, whether each belongs to the test split.
        classes: The names of the classes.
    """

    name: str
    pixels: Tensor
    labels: Tensor
    is_test: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.pixels.dim() != 4 or self.pixels.dtype not in (torch.uint8, torch.float32):
            raise SourceError(
                f"Expected images [count, channels, height, width] of uint8 or float32 in "
                f"'{self.name}' (got {list(self.pixels.shape)} of {self.pixels.dtype})"
            )
        if 0 in self.pixels.shape:
            raise SourceError(
                f"Expected images in '{self.name}' (got shape {list(self.pixels.shape)})"
            )
        self.check_labels()
        if self.pixels.dtype == torch.float32 and not (
            bool((self.pixels >= 0).all()) and bool((self.pixels <= 1).all())
        ):
            raise SourceError(
                f"Expected pixels within [0, 1] in '{self.name}' (got "
                f"{float(self.pixels.min())} to {float(self.pixels.max())}). Scale them first."
            )

    @property
    def content(self) -> Tensor:
        """The pixels."""
        return self.pixels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def values(self, index: Tensor | slice) -> Tensor:
        """The pixels of some images as float32 within [0, 1]."""
        chosen = self.pixels[index]
        return chosen if chosen.is_floating_point() else chosen.to(torch.float32) / 255

    @classmethod
    def joined(
        cls,
        name: str,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor] | None,
        classes: Sequence[str] | None = None,
    ) -> Images:
        """Images and labels of both splits; without a test split, every fifth image is one."""
        pixels, labels = train
        if test is None:
            is_test = every_fifth(torch.arange(len(pixels)))
        else:
            if pixels.shape[1:] != test[0].shape[1:]:
                raise SourceError(
                    f"Expected test images of shape {list(pixels.shape[1:])} in '{name}', as in "
                    f"the training split (got {list(test[0].shape[1:])})"
                )
            is_test = torch.cat(
                [
                    torch.zeros(len(pixels), dtype=torch.bool),
                    torch.ones(len(test[0]), dtype=torch.bool),
                ]
            )
            pixels, labels = torch.cat([pixels, test[0]]), torch.cat([labels, test[1]])
        labels = labels.to(torch.int64)
        names = numbered_classes(labels) if classes is None else tuple(classes)
        return cls(name, pixels, labels, is_test, names)
