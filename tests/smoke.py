"""Checks an installed package outside the repository: `python smoke.py library|core|tasks`.

As a library, it converts networks and trains on them. With `core`, torch and torch-geometric are
all that is there, and what needs more says how to get it; with `tasks`, all is there, and the
command line builds a zoo and trains on it. Prints the version and the place, or fails.
"""

import importlib.util
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import nfn_graph
from nfn_graph import NFN, DataLoader
from nfn_graph.converters import from_module, load, save, to_module
from nfn_graph.testing import assert_invariant


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"Expected {what}")


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns the command `nfn-graph`, as installed or as a module."""
    command = [sys.executable, "-W", "ignore", "-m", "nfn_graph.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def convert_and_train(folder: Path) -> None:
    """Goes from modules to files, to graphs, to a trained model, and back."""
    networks = [mlp(4 + i) for i in range(12)]
    graphs = []
    for i, network in enumerate(networks):
        save(from_module(network), folder / f"{i}.pt")
        graph = load(folder / f"{i}.pt")
        graph.y = graph.features().weights["input", "weight", "hidden1"].square().mean().view(1)
        graphs.append(graph)
    copy = to_module(graphs[5], mlp(9))
    x = torch.randn(3, 2)
    check(torch.equal(copy(x), networks[5](x)), "the same network from its graph")
    model = NFN(graphs[0].spec, (8, 8), "hnp", out_features=1, head=(16,))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(20):
        for batch in DataLoader(graphs, batch_size=12):
            loss = (model(batch).squeeze(1) - batch.y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    check(losses[-1] < losses[0] / 2, f"the loss to fall to a half (got {losses})")
    assert_invariant(model, graphs[0], "hnp", folded=False)


def check_missing_extras(folder: Path) -> None:
    """Checks that one line says which extras to install if they are missing."""
    try:
        save(from_module(mlp(3)), folder / "network.safetensors")
        check(False, "no safetensors in an environment of the core alone")
    except ModuleNotFoundError as error:
        check("pip install 'nfn-graph[converters]'" in str(error), f"the extra (got {error})")
    for command, extra in (("inspect", "converters"), ("train", "tasks")):
        out = run(command, "x")
        one_line = out.returncode == 2 and out.stderr.count("\n") == 1
        check(one_line, f"one line and exit code 2 (got {out.returncode}: {out.stderr})")
        hint = f"pip install 'nfn-graph[{extra}]'"
        check(hint in out.stderr, f"the extra '{extra}' to be named (got {out.stderr})")


def check_commands(folder: Path) -> None:
    """Converts, builds a small zoo and trains a model on it with commands."""
    zoo, model, store = (str(folder / name) for name in ("zoo", "run", "store"))
    build = ["--networks", "24", "--widths", "4", "--depths", "1", "--epochs", "1", "2"]
    task = ["predict-generalization", "--zoo", zoo, "--out", model]
    for arguments in (
        ["convert", str(folder / "0.pt"), str(folder / "1.pt"), "--out", store],
        ["draw", str(folder / "0.pt"), "-o", str(folder / "network.png")],
        ["zoo", "cnn", "--out", zoo, *build],
        ["train", *task, "--preset", "tiny", "--epochs", "1"],
    ):
        out = run(*arguments)
        check(out.returncode == 0, f"success of {arguments} (got {out.stdout}{out.stderr})")
    check((folder / "run" / "report.html").stat().st_size > 1000, "a report")


if __name__ == "__main__":
    torch.manual_seed(0)
    check(nfn_graph.__version__ == version("nfn-graph"), "one version")
    check(run("--version").stdout == f"nfn-graph {nfn_graph.__version__}\n", "the same version")
    with tempfile.TemporaryDirectory() as name:
        convert_and_train(Path(name))
        if sys.argv[1] == "core":
            check(importlib.util.find_spec("tyro") is None, "an environment without extras")
            check_missing_extras(Path(name))
        elif sys.argv[1] == "tasks":
            check_commands(Path(name))
    print(nfn_graph.__version__, Path(nfn_graph.__file__).parent)
