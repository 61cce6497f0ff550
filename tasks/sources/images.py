"""Labelled images with their split from any kind of file, and the base class of all sources."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nfn_graph.messages import UserError

_TEST_EVERY = 5
_MOST_CLASSES = 100_000


class SourceError(UserError):
    """Raised for a data source that cannot be read; the message has the reason and advice.

    Example:
        >>> from nfn_graph.tasks.sources import SourceError, open_images
        >>> try:
        ...     open_images(__file__)
        ... except SourceError as error:
        ...     print(str(error)[:27])
        Expected a source of images
    """


class Labelled(ABC):
    """Examples with labels and a split, such as images or shapes.

    Attributes:
        name: The origin of the data, for metadata and messages.
        labels: The class of each, `[count]`, int64.
        is_test: Whether each belongs to the test split, `[count]`, bool.
        classes: The names of the classes.
    """

    name: str
    labels: Tensor
    is_test: Tensor
    classes: tuple[str, ...]

    @property
    @abstractmethod
    def content(self) -> Tensor:
        """The examples themselves, along the first axis."""

    def __len__(self) -> int:
        return len(self.content)

    @cached_property
    def train_index(self) -> Tensor:
        """The positions of the training examples."""
        return (~self.is_test).nonzero().squeeze(1)

    @cached_property
    def test_index(self) -> Tensor:
        """The positions of the test examples."""
        return self.is_test.nonzero().squeeze(1)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of everything, by which a resumed run notices other data."""
        digest = hashlib.blake2b(repr(tuple(self.content.shape)).encode(), digest_size=16)
        for tensor in (self.content, self.labels, self.is_test):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def check_both_splits(self) -> None:
        """Raises unless there are training and test examples."""
        if not len(self.test_index) or not len(self.train_index):
            raise SourceError(
                f"Expected training and test data in '{self.name}' (got only one of them)"
            )

    def check_labels(self) -> None:
        """Raises unless each has a label of a class, and a split."""
        count = len(self)
        for what, values in (("labels", self.labels), ("split flags", self.is_test)):
            if tuple(values.shape) != (count,):
                raise SourceError(
                    f"Expected {count} {what} in '{self.name}', one for each "
                    f"(got shape {list(values.shape)})"
                )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise SourceError(
                f"Expected labels from 0 to {len(self.classes) - 1} in '{self.name}' "
                f"(got {low} to {high})"
            )


def every_fifth(order: Tensor) -> Tensor:
    """Returns a test split for a source without one: the fifth, the tenth example and so on."""
    return order % _TEST_EVERY == _TEST_EVERY - 1


def numbered_classes(labels: Tensor) -> tuple[str, ...]:
    """Returns names for classes without names: their numbers, from 0 to the largest label."""
    last = int(labels.max()) if len(labels) else -1
    if last >= _MOST_CLASSES:
        raise SourceError(f"Expected labels below {_MOST_CLASSES:,} (got {last})")
    return tuple(str(i) for i in range(last + 1))


@dataclass(frozen=True, eq=False)
class Images(Labelled):
    """Images with labels and a split.

    Args:
        name: The origin of the data, for metadata and messages.
        pixels: `[count, channels, height, width]`, uint8, or float32 within [0, 1].
        labels: The class of each, `[count]`, int64.
        is_test: Whether each belongs to the test split, `[count]`, bool.
        classes: The names of the classes.

    Example:
        >>> import torch
        >>> from nfn_graph.tasks.sources import Images
        >>> pixels, labels = torch.rand(10, 1, 8, 8), torch.arange(10) % 2
        >>> images = Images("noise", pixels, labels, torch.arange(10) >= 8, ("a", "b"))
        >>> len(images.classes), int(images.is_test.sum())
        (2, 2)
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

    def in_grey(self) -> Images:
        """The same images with the mean of their colours as the only channel."""
        if self.shape[0] == 1:
            return self
        return replace(self, pixels=self.values(slice(None)).mean(1, keepdim=True))

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
            is_test = torch.arange(len(pixels) + len(test[0])) >= len(pixels)
            pixels, labels = torch.cat([pixels, test[0]]), torch.cat([labels, test[1]])
        labels = labels.to(torch.int64)
        names = numbered_classes(labels) if classes is None else tuple(classes)
        return cls(name, pixels, labels, is_test, names)
