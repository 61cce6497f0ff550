"""What the keys of a state dict say: which belong together, and their order."""

from __future__ import annotations

import re
from typing import NamedTuple

_BIASES = {"bias", "biases", "b"}
_ROLES = {"weight", "weights", "kernel", "w"} | _BIASES
_WORDS = re.compile(r"\d+|[A-Za-z]+")


def stem(key: str) -> str:
    """A key without the words that tell a weight from its bias: `fc1_weight` gives `fc.1`."""
    module, words = _parts(key)
    return ".".join([*_WORDS.findall(module), *(w for w in words if w.lower() not in _ROLES)])


def is_bias(key: str) -> bool:
    """Whether a key is named as a bias."""
    return not _BIASES.isdisjoint(word.lower() for word in _parts(key)[1])


def _parts(key: str) -> tuple[str, list[str]]:
    """The module of a key, and the words of its last part."""
    cut = max(key.rfind("."), key.rfind("/")) + 1
    return key[:cut], _WORDS.findall(key[cut:])


class Name(NamedTuple):
    """A key as its words, numbers left out, and those numbers.

    Attributes:
        template: The words, with a sign where a number was.
        numbers: The numbers.
        indices: For every number, whether it is the index of a container, as the first one of
            `layers.0.fc1`, and not a part of a name, as the second one.
    """

    template: str
    numbers: tuple[int, ...]
    indices: tuple[bool, ...]

    @classmethod
    def of(cls, key: str) -> Name:
        """The name that a key gives."""
        found = list(re.finditer(r"\d+", key))
        indices = (
            key[m.start() - 1 : m.start()] in ("", ".", "/")
            and key[m.end() : m.end() + 1] in ("", ".", "/")
            for m in found
        )
        template = re.sub(r"\d+", "#", stem(key))
        return cls(template, tuple(int(m[0]) for m in found), tuple(indices))

    def precedes(self, other: Name) -> bool:
        """Whether numbers count this one before another of the same words."""
        return self.template == other.template and self.numbers < other.numbers

    def is_indexed_before(self, other: Name) -> bool:
        """Whether indices in a container that both are in, which are an order, say so."""
        numbers = zip(self.numbers, other.numbers, self.indices, other.indices, strict=False)
        words = zip(self.template.split("."), other.template.split("."), strict=False)
        for mine, theirs in words:
            if mine != theirs:
                return False
            if mine == "#":
                first, second, *are_indices = next(numbers)
                if first != second:
                    return first < second and all(are_indices)
        return False


def spelled(key: str) -> str:
    """A key in small letters, with the words of `resBlock` apart."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
