"""Every public class and function has an example in its docstring, and the examples are run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest

import nfn_graph
from nfn_graph import converters, tasks
from pages import reference


def documented() -> list[str]:
    """The modules with an example."""
    found = set()
    for room in (nfn_graph, converters, tasks):
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


@pytest.mark.parametrize("name", [m for _, modules in reference.PAGES.values() for m in modules])
def test_every_public_name_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    public = {member: getattr(module, member) for member in getattr(module, "__all__", ())}
    kinds = (inspect.isclass, inspect.isfunction)
    named = {member: value for member, value in public.items() if any(k(value) for k in kinds)}
    missing = [m for m, value in named.items() if ">>> " not in (inspect.getdoc(value) or "")]
    assert missing == []
