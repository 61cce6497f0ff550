"""Numbers of 8 bits, which torch can store but can hardly compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from nfn_graph import cli
from nfn_graph.converters import draw, from_state_dict, summary, to_state_dict
from nfn_graph.converters.io import load, save

TYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def state_dict(dtype: torch.dtype) -> dict[str, Any]:
    """An MLP whose weights are in a narrow type, with all its bit patterns in the first."""
    model = checkpoints.mlp((16, 16, 4, 2))
    tensors: dict[str, Any] = {key: x.to(dtype) for key, x in model.state_dict().items()}
    tensors["0.weight"] = torch.arange(256).to(torch.uint8).view(dtype).view(16, 16)
    return tensors


def check_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tables_and_pictures(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = state_dict(dtype)
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    graph = load(path)
    row = next(row for row in summary(graph).rows if row.type == "input -> hidden1")
    values = tensors["0.weight"].double()
    finite = values[values.isfinite()]
    assert row.nan == int(values.isnan().sum()) and row.inf == int(values.isinf().sum())
    assert row.zeros == int((values == 0).sum())
    assert row.mean == pytest.approx(float(finite.mean()))
    assert row.std == pytest.approx(float(finite.std(correction=0)))
    draw(graph).savefig(tmp_path / "x.png")
    assert cli.main(["inspect", str(path)]) == 0
    assert cli.main(["draw", str(path), "-o", str(tmp_path / "y.png")]) == 0
    save(graph, tmp_path / "y.pt")
    check_bits(to_state_dict(load(tmp_path / "y.pt")), tensors)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_mixed_with_wider_types(dtype: torch.dtype) -> None:
    """In such checkpoints, norms and biases keep a wider type."""
    tensors: dict[str, Any] = state_dict(dtype)
    tensors["1.weight"] = torch.arange(256).to(torch.uint8)[::16].clone().view(dtype)
    tensors["1.bias"] = torch.randn(16)
    tensors["0.bias"] = torch.arange(240, 256).to(torch.uint8).view(dtype)
    tensors = dict(sorted(tensors.items()))
    graph = from_state_dict(tensors, channels={"twin": dict(tensors)})
    assert summary(graph).rows
    check_bits(to_state_dict(graph), tensors)
    check_bits(to_state_dict(graph, channel="twin"), tensors)


def test_one_file_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds whatever happens to the network, including a bug of ours."""
    from nfn_graph.converters import commands

    paths = [tmp_path / f"{name}.pt" for name in "abc"]
    for path in paths:
        torch.save(checkpoints.mlp().state_dict(), path)
    real, calls = commands.summary, []

    def fail_once(graph: Any) -> Any:
        calls.append(graph)
        if len(calls) == 2:
            raise NotImplementedError("not for this type")
        return real(graph)

    monkeypatch.setattr(commands, "summary", fail_once)
    assert cli.main(["inspect", *map(str, paths)]) == 1
    captured = capsys.readouterr()
    assert str(paths[0]) in captured.out and str(paths[2]) in captured.out
    line = captured.err.splitlines()[-1]
    assert str(paths[1]) in line and "NotImplementedError" in line
