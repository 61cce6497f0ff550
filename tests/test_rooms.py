"""The rules of the three rooms, read off the syntax trees: who imports whom, and what is banned."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"nfn_graph": "nfn_graph", "converters": "nfn_graph.converters", "tasks": "nfn_graph.tasks"}

# What each room must not import; the command line stands above all of them.
ABOVE = {
    "core": ("nfn_graph.converters", "nfn_graph.tasks", "nfn_graph.cli"),
    "converters": ("nfn_graph.tasks", "nfn_graph.cli"),
    "tasks": ("nfn_graph.cli",),
    "cli": (),
}
CORE_DEPENDENCIES = {"nfn_graph", "torch", "torch_geometric", "torch_scatter"}
# What brings models over from another package may ask for that package.
INTEROP_DEPENDENCIES = {"nfn"}
# What unpickles, runs text, or reaches beyond this machine.
UNSAFE_MODULES = (
    *("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml", "code"),
    *("urllib.request", "http.client", "ftplib", "requests", "socket", "torch.hub"),
)
UNSAFE_CALLS = (
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
)


def is_inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def room_of(module: str) -> str:
    for room in ("converters", "tasks", "cli"):
        if is_inside(module, (f"nfn_graph.{room}",)):
            return room
    return "core"


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            target = node.args[0]
            if name.split(".")[-1] in ("import_module", "__import__") and isinstance(
                target, ast.Constant
            ):
                yield node.lineno, str(target.value)


def banned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and description of every construct that no room may use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert"
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function in UNSAFE_CALLS:
            yield node.lineno, f"{function}()"
        if keywords.get("shell", "False") != "False":
            yield node.lineno, "a shell"
        # Lightning reads the checkpoint.
        if "ckpt_path" in keywords and keywords.get("weights_only") != "True":
            yield node.lineno, "ckpt_path without weights_only=True"
        is_torch_load = function.startswith("torch.") and function.endswith(".load")
        if is_torch_load and keywords.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if keywords.get("allow_pickle", "False") != "False":
            yield node.lineno, "allow_pickle"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every broken rule of one file, as `line: what`."""
    tree = ast.parse(source)
    room = room_of(module)
    found = set(banned(tree))
    for line, name in imports(tree, module, is_package):
        top = name.split(".")[0]
        if is_inside(name, ABOVE[room]):
            found.add((line, f"{room} imports {name}"))
        if is_inside(name, UNSAFE_MODULES):
            found.add((line, f"import of {top}"))
        if name in ("torch.load", "torch.serialization.load"):
            found.add((line, f"import of {name}: call it in full"))
        allowed = CORE_DEPENDENCIES | sys.stdlib_module_names
        if is_inside(module, ("nfn_graph.interop",)):
            allowed = allowed | INTEROP_DEPENDENCIES
        if room == "core" and top not in allowed:
            found.add((line, f"core imports {top}, which is no dependency of it"))
    return [f"{line}: {what}" for line, what in sorted(found)]


def files() -> list[tuple[Path, str]]:
    """Every file of the rooms, with its name as a module."""
    found = []
    for folder, package in ROOMS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *parts]).removesuffix(".__init__")
            found.append((path, module))
    return found


@pytest.mark.parametrize(("path", "module"), files(), ids=[m for _, m in files()])
def test_rules_hold(path: Path, module: str) -> None:
    assert violations(path.read_text("utf-8"), module, path.name == "__init__.py") == []


def test_every_room_is_read() -> None:
    modules = {module for _, module in files()}
    assert modules >= {"nfn_graph", "nfn_graph.converters", "nfn_graph.tasks"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nfn_graph.spec", "import nfn_graph.converters"),
        ("nfn_graph.spec", "from nfn_graph import tasks"),
        ("nfn_graph.spec", "from . import converters"),
        ("nfn_graph.nn.linear", "from ..converters.files import load"),
        ("nfn_graph.spec", "def f():\n    from nfn_graph.converters import load"),
        ("nfn_graph.spec", "import_module('nfn_graph.tasks')"),
        ("nfn_graph.spec", "from nfn_graph.cli import main"),
        ("nfn_graph.spec", "import h5py"),
        ("nfn_graph.converters.files", "from nfn_graph.tasks import zoo"),
        ("nfn_graph.converters.files", "from .. import tasks"),
        ("nfn_graph.converters.files", "import pickle"),
        ("nfn_graph.converters.files", "from pickle import loads"),
        ("nfn_graph.converters.files", "torch.load(path)"),
        ("nfn_graph.converters.files", "torch.load(path, weights_only=False)"),
        ("nfn_graph.converters.files", "torch.load(path, weights_only=flag)"),
        ("nfn_graph.converters.files", "from torch import load"),
        ("nfn_graph.converters.files", "np.load(path, allow_pickle=True)"),
        ("nfn_graph.converters.files", "import yaml"),
        ("nfn_graph.converters.files", "from urllib.request import urlopen"),
        ("nfn_graph.converters.files", "subprocess.run(text, shell=True)"),
        ("nfn_graph.converters.files", "os.system(text)"),
        ("nfn_graph.converters.files", "torch.jit.load(path)"),
        ("nfn_graph.tasks.zoo", "trainer.fit(module, ckpt_path=path)"),
        ("nfn_graph.tasks.zoo", "compile(text, 'file', 'exec')"),
        ("nfn_graph.tasks.zoo", "x = eval(text)"),
        ("nfn_graph.tasks.zoo", "exec(text)"),
        ("nfn_graph.tasks.zoo", "assert x"),
        ("nfn_graph.tasks.zoo", "from nfn_graph.cli import main"),
    ],
)
def test_breaches_are_found(module: str, source: str) -> None:
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nfn_graph.spec", "import math\nimport torch\nfrom torch_geometric.data import Data"),
        ("nfn_graph.nn.linear", "from ..spec import NetworkSpec\nfrom . import pool"),
        ("nfn_graph.nn.linear", "model.eval()\ncheckpoint.load(path)"),
        ("nfn_graph.converters.files", "import h5py\nfrom nfn_graph import WeightGraph"),
        ("nfn_graph.converters.files", "torch.load(path, weights_only=True)"),
        ("nfn_graph.converters.files", "np.load(path, allow_pickle=False)"),
        ("nfn_graph.converters.files", "subprocess.Popen([name])\nre.compile(text)"),
        ("nfn_graph.tasks.zoo", "trainer.fit(module, ckpt_path=path, weights_only=True)"),
        ("nfn_graph.tasks.zoo", "from ..converters import load"),
        ("nfn_graph.cli", "from nfn_graph.converters import load\nfrom nfn_graph import tasks"),
    ],
)
def test_good_code_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_count_from_the_package() -> None:
    source = "from .converters import load"
    assert violations(source, "nfn_graph", is_package=True)
    assert not violations(source, "nfn_graph.nn", is_package=True)
