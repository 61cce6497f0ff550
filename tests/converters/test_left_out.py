"""Every tensor is in the graph or listed as left out; what the outputs depend on is in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import One
from permuting import assert_symmetric, only_export
from torch import nn

from nfn_graph import WeightGraph, cli
from nfn_graph.converters import ConversionError, from_module, summary, to_state_dict

Run = Callable[..., Any]


def policy(run: Run, value: float = 0.0, shape: tuple[int, ...] = (2,)) -> nn.Module:
    """Two layers and a parameter beside them, the same weights every time."""
    torch.manual_seed(0)
    return One(
        run,
        a=nn.Linear(3, 8), b=nn.Linear(8, 2), free=nn.Parameter(torch.full(shape, value)),
    )  # fmt: skip


def features(graph: WeightGraph) -> list[torch.Tensor]:
    """All that a model would read."""
    return [graph[n.name].x for n in graph.spec.neurons] + [
        graph[w.key].edge_attr for w in graph.spec.weights
    ]


def head(m: nn.Module, x: Any) -> Any:
    """The action of a policy."""
    return m.b(m.a(x).tanh())


USED: dict[str, tuple[Run, tuple[int, ...], str]] = {
    "one deviation per output": (
        lambda m, x: (head(m, x), m.free.exp().expand(x.shape[0], 2)), (2,), "output"
    ),
    "before the outputs": (lambda m, x: (m.free, head(m, x)), (1, 2), "output"),
    "one number": (lambda m, x: {"y": head(m, x), "t": m.free.exp()}, (), "scalars"),
    "one number with an axis": (lambda m, x: [head(m, x), m.free], (1,), "scalars"),
    "two outputs of one size": (
        lambda m, x: (head(m, x), m.a(x)[:, :2], m.free), (2,), "scalars"
    ),
    "as many as no output": (lambda m, x: (head(m, x), m.free), (5,), "scalars"),
    "a table": (lambda m, x: (head(m, x), m.free), (2, 3), "scalars"),
    "a sum of its entries": (lambda m, x: (head(m, x), m.free.sum()), (5,), "scalars"),
    "a sum as an argument": (
        lambda m, x: m.b(F.normalize(m.a(x), eps=m.free.sum())), (5,), "scalars"
    ),
    "an argument of an operation": (
        lambda m, x: m.b(F.normalize(m.a(x), eps=m.free)), (), "scalars"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "shape", "place"), USED.values(), ids=USED.keys())
@pytest.mark.parametrize("exported", [False, True])
def test_a_parameter_that_outputs_depend_on_is_in_the_graph(
    run: Run, shape: tuple[int, ...], place: str, exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = policy(run, shape=shape), torch.randn(4, 3)
    if exported:
        only_export(monkeypatch)
    graph = from_module(module, x, verify=True)
    assert next(p.store for p in graph.layout.placements if "free" in p.keys) == place
    other = from_module(policy(run, -3.0, shape), x)
    assert any(not torch.equal(a, b) for a, b in zip(features(graph), features(other), strict=True))
    assert all(torch.equal(t, module.state_dict()[k]) for k, t in to_state_dict(graph).items())
    assert_symmetric(from_module(module.double(), x.double()), module, (x.double(),))


def test_the_place_of_a_maximum_of_a_free_parameter_has_it_in_the_graph() -> None:
    module = policy(lambda m, x: (head(m, x), m.free.argmax()), shape=(5,))
    assert "free" in from_module(module, torch.randn(4, 3), verify=True).layout.placed


def test_a_tensor_that_an_operation_takes_in_unseen_is_refused() -> None:
    module = policy(lambda m, x: m.b(F.normalize(m.a(x), eps=m.free)), shape=(8,))
    with pytest.raises(ConversionError, match=r"normalize.*got 'free' \[8\] as one of its arg"):
        from_module(module)


def test_verify_fails_where_an_output_depends_on_what_is_left_out() -> None:
    module = policy(lambda m, x: head(m, x) * m._parameters["free"].data.exp(), shape=())
    x = torch.randn(4, 3)
    assert "free" in from_module(module, x).layout.carried
    with pytest.raises(ConversionError, match=r"all parameters.*without 'free'"):
        from_module(module, x, verify=True)


def test_what_is_left_out_is_listed_with_the_reason() -> None:
    def run(m: nn.Module, x: Any) -> Any:
        m.free.exp()
        return head(m, x * m.mask)

    module = policy(run)
    module.register_buffer("mask", torch.tensor([True, False, True]))
    graph = from_module(module, torch.randn(4, 3), verify=True)
    table = summary(graph)
    assert dict(table.left_out) == {
        "free": "not a weight of the computation (unused, or a constant whose values it reads)",
        "mask": "whole numbers (counts, indices or masks)",
    }
    assert {*table.left_out, *graph.layout.placed} == set(module.state_dict())
    assert "Left out, whole numbers (counts, indices or masks): mask" in str(table)


def test_many_tensors_left_out_are_one_line_each_reason() -> None:
    spare = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(10))
    table = summary(from_module(One(lambda m, x: m.a(x), a=nn.Linear(3, 2), spare=spare)))
    assert len(table.left_out) == 50
    assert [note.rsplit(" and ", 1)[1] for note in table.notes] == ["32 more", "2 more"]


def test_inspect_lists_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    path = str(tmp_path / "x.pt")
    torch.save(module.state_dict(), path)
    assert cli.main(["inspect", path]) == 0
    reason = "whole numbers (counts, indices or masks)"
    assert f"Left out, {reason}: 1.num_batches_tracked" in capsys.readouterr().out
    assert cli.main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"1.num_batches_tracked": reason}
