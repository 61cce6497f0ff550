"""The public names: each has a description, and `__all__` of every folder is complete.

Their signatures are in `docs/api`, which `tests/test_docs.py` compares with the code, so no
public name changes by accident. After an intended change, run `make reference`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType

import pytest

import nfn_graph
from pages import PAGES, blocks, reference

MODULES = [name for _, modules in reference.PAGES.values() for name in modules]


def test_pages_import_public_names_only():
    found = set()
    for page in PAGES:
        for _, source in blocks(page.read_text("utf-8"), "python"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nfn_graph"):
                    found |= {(str(node.module), name.name) for name in node.names}
    assert len(found) > 20
    for name, public in found:
        if name in MODULES:
            assert public in importlib.import_module(name).__all__, (name, public)
        else:
            assert "._" not in f"{name}.{public}", (name, public)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in module.__all__:
        value = getattr(module, public)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        # A dataclass without one has its signature in its place.
        assert value.__doc__ and not value.__doc__.startswith(f"{public}("), public
        for member, found in reference.members(value, module) if inspect.isclass(value) else ():
            assert reference.is_attribute(found) or inspect.getdoc(getattr(value, member)), (
                public,
                member,
            )


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_lists_is_all_that_it_gives(name):
    """`__all__` lists, in order, everything that is imported for users, and nothing else."""
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__, key=lambda n: (order(n), n))
    if not module.__file__.endswith("__init__.py"):
        return
    given = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and not isinstance(value, ModuleType)
    }
    assert given - {"version"} == {n for n in module.__all__ if n in given}


def order(name: str) -> int:
    """Sorts constants, classes and functions in the order of ruff."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def test_every_layer_is_a_name_of_the_package():
    assert set(nfn_graph.nn.__all__) <= set(nfn_graph.__all__)
    for name in nfn_graph.nn.__all__:
        assert getattr(nfn_graph.nn, name) is getattr(nfn_graph, name)
