"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import nfn_graph
from nfn_graph import converters


def documented() -> list[str]:
    """The modules with an example."""
    found = set()
    for room in (nfn_graph, converters):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            spec = importlib.util.find_spec(module.name)
            assert spec is not None and spec.origin is not None
            if ">>> " in Path(spec.origin).read_text("utf-8"):
                found.add(module.name)
    return sorted(found)


@pytest.mark.parametrize("name", documented())
def test_examples_do_what_they_show(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
