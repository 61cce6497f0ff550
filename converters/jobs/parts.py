"""Parts of the work for several machines: `--shard 2/4`."""

from __future__ import annotations

from typing import NamedTuple

from nfn_graph.messages import UserError


class Part(NamedTuple):
    """One of several parts of the work.

    Attributes:
        number: Which one, from 0.
        total: Of how many.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part that `--shard 2/4` names: the second of four."""
        first, slash, second = text.partition("/")
        if slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
            return cls(int(first) - 1, int(second))
        raise UserError(f"Expected --shard as I/N with 1 <= I <= N (got '{text}')")

    @property
    def suffix(self) -> str:
        """What tells its files from those of other parts; nothing if it is all of the work."""
        return "" if self.total == 1 else f"-{self.number + 1}of{self.total}"
