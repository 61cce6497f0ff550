"""What no file of the package may do: unpickle, run text, connect to a network, or assert."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path for room in ("nfn_graph", "converters", "tasks") for path in (ROOT / room).rglob("*.py")
]

# Calls that unpickle, run text, or connect to other machines.
UNSAFE_MODULES = (
    *("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml", "code"),
    *("urllib.request", "http.client", "ftplib", "requests", "socket", "torch.hub"),
)
UNSAFE_CALLS = (
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything imported; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name, target = ast.unparse(node.func), node.args[0]
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


def violations(source: str) -> list[str]:
    """Returns every violation in one file, as `line: description`."""
    tree = ast.parse(source)
    found = set(banned(tree))
    for line, name in imports(tree):
        if any(name == module or name.startswith(f"{module}.") for module in UNSAFE_MODULES):
            found.add((line, f"import of {name}"))
        if name in ("torch.load", "torch.serialization.load"):
            found.add((line, f"import of {name}: call it in full"))
    return [f"{line}: {what}" for line, what in sorted(found)]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_rules_hold(path: Path) -> None:
    assert violations(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "import yaml",
        "from urllib.request import urlopen",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "torch.jit.load(path)",
        "trainer.fit(module, ckpt_path=path)",
        "compile(text, 'file', 'exec')",
        "x = eval(text)",
        "exec(text)",
        "assert x",
        "import_module('pickle')",
    ],
)
def test_breaches_are_found(source: str) -> None:
    assert len(violations(source)) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()\ncheckpoint.load(path)",
        "import h5py\nfrom nfn_graph import WeightGraph",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "subprocess.Popen([name])\nre.compile(text)",
        "trainer.fit(module, ckpt_path=path, weights_only=True)",
    ],
)
def test_good_code_passes(source: str) -> None:
    assert violations(source) == []
