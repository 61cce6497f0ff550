"""pyarrow, imported when a table is read or written."""

from __future__ import annotations

from typing import Any

from nfn_graph.converters.optional import require

_PURPOSE = "for the table of a zoo"


def arrow() -> Any:
    """The package `pyarrow`."""
    return require("pyarrow", _PURPOSE, "tasks")


def parquet() -> Any:
    """The module `pyarrow.parquet`."""
    return require("pyarrow.parquet", _PURPOSE, "tasks")
