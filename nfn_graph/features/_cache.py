"""A bounded cache of incidences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Something that knows its memory, and whether it may outlive the current call."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""

    @property
    def is_lasting(self) -> bool:
        """Whether its tensors are ordinary ones, not those of a mode or transform."""


Value = TypeVar("Value", bound=Sized)


class IncidenceCache(Generic[Value]):
    """The values used last, as many as fit.

    Args:
        max_entries: How many to keep.
        max_bytes: How much memory they may have together; one that is larger than this by
            itself is not kept.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        if value.is_lasting and value.num_bytes <= self.max_bytes:
            with self._lock:
                # What was used last may have grown since. Measuring all values for every new
                # one would cost more than making it.
                if self._values:
                    last = next(reversed(self._values))
                    self._sizes[last] = self._values[last].num_bytes
                self._values[key] = value
                self._sizes[key] = value.num_bytes
                self._shrink()
        return value

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._values.clear()
            self._sizes.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        with self._lock:
            return sum(value.num_bytes for value in self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def _shrink(self) -> None:
        total = sum(self._sizes.values())
        while len(self._values) > self.max_entries or total > self.max_bytes:
            key, _ = self._values.popitem(last=False)
            total -= self._sizes.pop(key)
