"""What all sources share: a label and a split for each of their images or shapes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from functools import cached_property

from torch import Tensor

from nfn_graph.messages import UserError

_TEST_EVERY = 5
_MOST_CLASSES = 100_000


class SourceError(UserError):
    """A data source that cannot be read, with the reason and what to do."""


class Labelled(ABC):
    """Things with labels and a split.

    Attributes:
        name: Where they came from, for metadata and messages.
        labels: `[count]`, int64, the class of each.
        is_test: `[count]`, bool, whether each belongs to the test split.
        classes: The names of the classes.
    """

    name: str
    labels: Tensor
    is_test: Tensor
    classes: tuple[str, ...]

    @property
    @abstractmethod
    def content(self) -> Tensor:
        """The things themselves, along the first axis."""

    def __len__(self) -> int:
        return len(self.content)

    @cached_property
    def train_index(self) -> Tensor:
        """Those of the training split."""
        return (~self.is_test).nonzero().squeeze(1)

    @cached_property
    def test_index(self) -> Tensor:
        """Those of the test split."""
        return self.is_test.nonzero().squeeze(1)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of everything, to notice that a resumed run reads other data."""
        digest = hashlib.blake2b(repr(tuple(self.content.shape)).encode(), digest_size=16)
        for tensor in (self.content, self.labels, self.is_test):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def check_both_splits(self) -> None:
        """Raises unless there is something to train on and something to test on."""
        if not len(self.test_index) or not len(self.train_index):
            raise SourceError(f"Expected training and test data in '{self.name}' (got one kind)")

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
    """The test split where a source has none: the fifth, the tenth and so on of an order."""
    return order % _TEST_EVERY == _TEST_EVERY - 1


def numbered_classes(labels: Tensor) -> tuple[str, ...]:
    """Names of classes that have none: their numbers, from 0 to the largest label."""
    last = int(labels.max()) if len(labels) else -1
    if last >= _MOST_CLASSES:
        raise SourceError(f"Expected labels below {_MOST_CLASSES:,} (got {last})")
    return tuple(str(i) for i in range(last + 1))
