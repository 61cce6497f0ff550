"""`nfn-graph run`: a checkpoint file on inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nfn_graph import cli
from nfn_graph.converters import from_module, save


@pytest.fixture
def network(tmp_path: Path) -> nn.Module:
    """A network, its checkpoint, its graph, and inputs."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.save(module.state_dict(), tmp_path / "mlp.pt")
    save(from_module(module), tmp_path / "graph.safetensors", as_graph=True)
    np.save(tmp_path / "x.npy", torch.randn(5, 3).numpy())
    return module


def test_outputs_are_written(network: nn.Module, tmp_path: Path) -> None:
    x = np.load(tmp_path / "x.npy")
    expected = network(torch.from_numpy(x)).detach().numpy()
    for file, options in (("mlp.pt", ["--activation", "relu"]), ("graph.safetensors", [])):
        given = [str(tmp_path / file), "--input", str(tmp_path / "x.npy"), *options]
        assert cli.main(["run", *given, "-o", str(tmp_path / "y.npy")]) == 0
        assert np.allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-6)
        assert cli.main(["run", *given, "-o", str(tmp_path / "y.npz")]) == 0
        assert np.allclose(np.load(tmp_path / "y.npz")["arr_0"], expected, atol=1e-6)


def test_outputs_are_printed(
    network: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "graph.safetensors"), "--input", str(tmp_path / "x.npy")]
    assert cli.main(["run", *given]) == 0
    first = network(torch.from_numpy(np.load(tmp_path / "x.npy")))[0, 0].detach()
    assert f"{float(first):.4f}"[:5] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["mlp.pt", "--input", "x.npy"], "activation="),
        (["graph.safetensors", "--input", "mlp.pt"], "Expected an .npy file"),
        (["graph.safetensors", "--input", "x.npy", "-o", "y.txt"], "Expected an .npz file"),
        (["graph.safetensors", "--input", "x.npy", "x.npy"], "Expected [1] inputs (got 2)"),
    ],
)
def test_errors_are_one_line(
    network: nn.Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *options]) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1
