"""pyarrow, imported when a table is read or written."""

from __future__ import annotations

import importlib
from typing import Any


def arrow() -> Any:
    """The package `pyarrow`."""
    return _import("pyarrow")


def parquet() -> Any:
    """The module `pyarrow.parquet`."""
    return _import("pyarrow.parquet")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Expected the package 'pyarrow' for the table of a zoo (got: {error}). Install it "
            f"with: pip install 'nfn-graph[tasks]'",
            name="pyarrow",
        ) from error
