"""The public names and their signatures, as listed in `public_api.txt`: no change by accident.

After a change on purpose: `python tests/test_public_api.py --update`, and a line in the changelog.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nfn_graph
from test_readme import PAGES, blocks

PAGES_IMPORT = "imported by the pages of the documentation"
LISTING = Path(__file__).with_name("public_api.txt")
MODULES = (
    "nfn_graph",
    "nfn_graph.nn",
    "nfn_graph.symmetry",
    "nfn_graph.testing",
    "nfn_graph.transforms",
    "nfn_graph.interop.nfn",
    "nfn_graph.converters",
    "nfn_graph.converters.zoos",
    "nfn_graph.tasks.models",
    "nfn_graph.tasks.reports",
    "nfn_graph.tasks.sources",
    "nfn_graph.tasks.training",
    "nfn_graph.tasks.zoo",
)


def lines_of(name: str) -> Iterator[str]:
    """A line for every public name of a module, and for what its classes offer."""
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        full = f"{name}.{public}"
        if name != "nfn_graph" and getattr(nfn_graph, public, None) is value:
            yield f"{full} = nfn_graph.{public}"
            continue
        yield f"{full}{described(value)}"
        for member, found in members(value, module) if inspect.isclass(value) else ():
            yield f"{full}.{member}{described(found)}"


def imported_by_pages() -> list[str]:
    """What the pages import from other modules than those listed: users will, too."""
    found = set()
    for page in PAGES:
        for _, source in blocks(page.read_text("utf-8"), "python"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nfn_graph"):
                    found |= {(str(node.module), name.name) for name in node.names}
    lines = []
    for name, public in sorted(found):
        module = importlib.import_module(name)
        if name in MODULES:
            assert public in module.__all__, (name, public)
        else:
            lines.append(f"{name}.{public}{described(getattr(module, public))}")
    return lines


def members(kind: type, module: ModuleType) -> Iterator[tuple[str, object]]:
    """What a class offers, but for what it has from another listed class, torch or PyG."""
    listed = [getattr(module, public) for public in module.__all__]
    ours = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("nfn_graph") and (base is kind or base not in listed)
    ]
    for name in sorted({name for base in ours for name in vars(base)}):
        found = inspect.getattr_static(kind, name)
        is_offered = callable(getattr(kind, name)) or is_property(found) or is_attribute(found)
        if is_offered and not name.startswith("_"):
            yield name, found


def is_property(found: object) -> bool:
    return isinstance(found, property | functools.cached_property)


def is_attribute(found: object) -> bool:
    return inspect.ismemberdescriptor(found)


def described(found: object) -> str:
    """The arguments of a function or class, or what else it is."""
    if is_property(found):
        return ": property"
    if is_attribute(found):
        return ": attribute"
    if isinstance(found, ModuleType):
        return ": module"
    if typing.get_origin(found) is not None:
        return f" = {str(found).removeprefix('typing.')}"
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if inspect.isclass(found) and not has_own_arguments(found):
        return f": {', '.join(base.__name__ for base in found.__bases__)}"
    if not callable(found):
        return f": {type(found).__name__}"  # A constant.
    # Where a default lies in memory says nothing.
    return re.sub(r" at 0x[0-9a-f]+", "", arguments(inspect.signature(found)))


def has_own_arguments(kind: type) -> bool:
    """Whether a class says how it is made; if not, the arguments are those of another package."""
    module = str(getattr(kind.__init__, "__module__", ""))
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple) or "nfn_graph" in module


def arguments(signature: inspect.Signature) -> str:
    """Names, annotations as they are written, defaults: the same in every version of Python."""
    parts, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        kind = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        text = f"{stars}{parameter.name}{annotation(parameter.annotation, ': ')}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parts.append(text)
    return f"({', '.join(parts)}){annotation(signature.return_annotation, ' -> ')}"


def annotation(found: object, before: str) -> str:
    if found is inspect.Parameter.empty:
        return ""
    if isinstance(found, typing.ForwardRef):
        found = found.__forward_arg__
    return before + (found if isinstance(found, str) else inspect.formatannotation(found))


def listed() -> dict[str, list[str]]:
    """The lines of the listing, by module."""
    found: dict[str, list[str]] = {}
    for line in LISTING.read_text("utf-8").splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        elif line:
            found[next(reversed(found))].append(line)
    return found


def update() -> None:
    """Writes the listing anew."""
    parts = ["\n".join([f"# {name}", *lines_of(name)]) for name in MODULES]
    parts.append("\n".join([f"# {PAGES_IMPORT}", *imported_by_pages()]))
    LISTING.write_text("\n\n".join(parts) + "\n", "utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_names_and_signatures_are_those_of_the_listing(name):
    check(list(lines_of(name)), listed()[name])


def test_what_pages_import_is_listed():
    check(imported_by_pages(), listed()[PAGES_IMPORT])


def check(actual, expected):
    changes = [f"- {line}" for line in expected if line not in actual]
    changes += [f"+ {line}" for line in actual if line not in expected]
    hint = "If this is meant: python tests/test_public_api.py --update"
    assert not changes, "\n".join([hint, *changes])


def test_the_listing_has_no_other_modules():
    assert list(listed()) == [*MODULES, PAGES_IMPORT]


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
        for member, found in members(value, module) if inspect.isclass(value) else ():
            assert is_attribute(found) or inspect.getdoc(getattr(value, member)), (public, member)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_lists_is_all_that_it_gives(name):
    """Everything imported for users is in `__all__`, in order, and nothing else is."""
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
    """Constants, classes, functions: the order that ruff keeps."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def test_every_layer_is_a_name_of_the_package():
    assert set(nfn_graph.nn.__all__) <= set(nfn_graph.__all__)
    for name in nfn_graph.nn.__all__:
        assert getattr(nfn_graph.nn, name) is getattr(nfn_graph, name)


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("Expected --update (it writes the listing anew)")
    update()
