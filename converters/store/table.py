"""Helpers for the table of a store: pyarrow, imported when it is used, and the split column.

All tables use the same names of splits: `train`, `validation` and `test`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nfn_graph.converters.errors import require
from nfn_graph.messages import UserError

_PURPOSE = "for the table of a store"


def arrow() -> Any:
    """The package `pyarrow`."""
    return require("pyarrow", _PURPOSE)


def compute() -> Any:
    """The module `pyarrow.compute`."""
    return require("pyarrow.compute", _PURPOSE)


def parquet() -> Any:
    """The module `pyarrow.parquet`."""
    return require("pyarrow.parquet", _PURPOSE)


#: The column of a table that names the split of every network.
COLUMN = "split"
SPLITS = ("train", "validation", "test")
#: The shares that are used by default.
DEFAULT_SHARES = (0.8, 0.1, 0.1)


def random_splits(count: int, shares: Sequence[float], seed: int = 0) -> list[str]:
    """Returns a split for each of `count` networks; it depends only on the seed and the count."""
    check_shares(shares)
    # Ends are rounded instead of sizes, so that the sizes always add up to the count.
    ends = [round(count * sum(shares[: i + 1])) for i in range(len(SPLITS))]
    ends[-1] = count
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    found = np.empty(count, dtype=object)
    begin = 0
    for split, end in zip(SPLITS, ends, strict=True):
        found[order[begin:end]] = split
        begin = end
    return list(found)


def check_shares(shares: Sequence[float]) -> None:
    """Raises unless there is a share for every split, none is negative, and they add up to 1."""
    is_right = len(shares) == len(SPLITS) and min(shares) >= 0
    if not is_right or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        got = " ".join(f"{share:g}" for share in shares)
        raise UserError(
            f"Expected --split as the shares of {', '.join(SPLITS)}, which add up to 1, such as "
            f"0.8 0.1 0.1 (got {got})"
        )
