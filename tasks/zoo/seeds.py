"""Seeds that depend on their purpose only.

Network 17 of a zoo is the same network in whatever shard, group or process it is trained.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Choice = TypeVar("Choice")


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for a purpose, such as `seed_of(zoo_seed, network, "dropout")`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(*parts: int | str) -> torch.Generator:
    """A generator on the CPU for a purpose; a GPU gets the same numbers, copied."""
    return torch.Generator().manual_seed(seed_of(*parts))


def random_bytes(stream: np.random.SFC64, shape: Sequence[int]) -> Tensor:
    """The next bytes of a stream, eight per draw: several times faster than `bernoulli_`."""
    count = math.prod(shape)
    words: np.ndarray = stream.random_raw(-(-count // 8))
    return torch.from_numpy(words.view(np.uint8)[:count]).view(*shape)


class Draws:
    """Samples values from given distributions, in the order of the calls."""

    def __init__(self, *parts: int | str) -> None:
        # Only `random()` is used, whose sequence Python guarantees for all versions.
        self._random = random.Random(seed_of(*parts)).random

    def uniform(self, low: float, high: float) -> float:
        """Uniform over an interval."""
        return low + (high - low) * self._random()

    def log_uniform(self, low: float, high: float) -> float:
        """Uniform in the logarithm; a range of one value may be that of 0."""
        if low == high:
            self._random()
            return low
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def integer(self, low: int, high: int) -> int:
        """One of the integers from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def choice(self, values: Sequence[Choice]) -> Choice:
        """One of several values."""
        return values[int(self._random() * len(values))]
