"""Packages that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any


def require(package: str, purpose: str, extra: str = "converters") -> Any:
    """Imports an optional package, or says what needs it and how to install it.

    Args:
        package: The module to import.
        purpose: What needs it, as in "to read .safetensors files".
        extra: The extra of this package that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.split(".")[0]
        raise ModuleNotFoundError(
            f"Expected the package '{top}' {purpose} (got: {error}). "
            f"Install it with: pip install 'nfn-graph[{extra}]'",
            name=top,
        ) from error
