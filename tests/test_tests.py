"""The tests themselves: each can fail, and shared code is not in a test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
FILES = sorted(FOLDER.rglob("test_*.py"))
# Calls that fail if something is wrong, by their names: of pytest, torch and nfn_graph.testing.
CHECKS = re.compile(r"(?:^|[._])(?:raises|warns|fail|gradcheck|gradgradcheck|assert\w*|check\w*)$")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def can_fail(function: ast.FunctionDef, helpers: dict[str, ast.FunctionDef]) -> bool:
    """Whether a test asserts something, by itself or in a function of its file that it calls."""
    others = {name: helper for name, helper in helpers.items() if helper is not function}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).partition("[")[0]
            if CHECKS.search(name) or (name.isupper() and name.startswith("CHECK")):
                return True
            if name in others and can_fail(others.pop(name), others):
                return True
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_test_can_fail(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    helpers = {function.name: function for function in functions(tree)}
    tests = [f for f in functions(tree) if f.name.startswith("test_")]
    assert [f"line {f.lineno}: {f.name}" for f in tests if not can_fail(f, helpers)] == []


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)


def test_no_test_is_imported() -> None:
    tests = {path.stem for path in FILES}
    found = [
        f"{path.name} imports {module}"
        for path in sorted(FOLDER.rglob("*.py"))
        for module in imported(ast.parse(path.read_text("utf-8")))
        if tests.intersection(module.split("."))
    ]
    assert found == []


def test_no_two_files_have_one_name() -> None:
    """If two helpers had one name, a test would get the one that was imported first."""
    names = Counter(path.name for path in FOLDER.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_folders_are_those_of_the_code() -> None:
    """Tests of `converters/keras/handlers.py` are in `tests/converters/keras`."""
    root = FOLDER.parent
    rooms = {"nfn_graph": root / "nfn_graph", "converters": root, "tasks": root}
    expected = {
        path.parent.relative_to(above).as_posix()
        for room, above in rooms.items()
        for path in (root / room).rglob("__init__.py")
    }
    expected.add("benchmarks")
    assert {path.parent.relative_to(FOLDER).as_posix() for path in FILES} == expected
    assert {path.parent for path in FOLDER.rglob("*.py")} == {path.parent for path in FILES}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("f()", False),
        ("assert True", False),
        ("assert f() == 1", True),
        ("with pytest.raises(ValueError): f()", True),
        ("torch.testing.assert_close(f(), 1)", True),
        ("helper()", True),
        ("idle()", False),
    ],
)
def test_tests_without_an_assertion_are_found(body: str, expected: bool) -> None:
    source = f"def test_it():\n    {body}\ndef helper():\n    assert f()\ndef idle():\n    idle()"
    helpers = {function.name: function for function in functions(ast.parse(source))}
    assert can_fail(helpers["test_it"], helpers) == expected
