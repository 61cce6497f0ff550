"""pyarrow, imported when a table is read or written."""

from __future__ import annotations

from typing import Any

from nfn_graph.converters.errors import require

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
