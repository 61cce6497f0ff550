"""What the keys of a state dict say: which belong together, and their order."""

from __future__ import annotations

import re
from typing import NamedTuple

_ROLES = {"weight", "weights", "kernel", "w", "bias", "biases", "b"}
_WORDS = re.compile(r"\d+|[A-Za-z]+")


def stem(key: str) -> str:
    """A key without the words that tell a weight from its bias: `fc1_weight` gives `fc.1`."""
    cut = max(key.rfind("."), key.rfind("/")) + 1
    module, last = key[:cut], key[cut:]
    words = [word for word in _WORDS.findall(last) if word.lower() not in _ROLES]
    return ".".join([*_WORDS.findall(module), *words])


class Name(NamedTuple):
    """A key as its words, numbers left out, and those numbers."""

    template: str
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, key: str) -> Name:
        """The name that a key gives."""
        numbers = tuple(int(n) for n in re.findall(r"\d+", key))
        return cls(re.sub(r"\d+", "#", key), numbers)


def spelled(key: str) -> str:
    """A key in small letters, with the words of `resBlock` apart."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
