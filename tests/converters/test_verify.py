"""`from_module(..., verify=True)`: the numerical check, and what it cannot check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import One
from torch import nn

from nfn_graph.converters import ConversionError, from_module
from nfn_graph.run import OPERATIONS

S = nn.Sequential


def test_verify_finds_what_the_operations_do_not_show() -> None:
    """These numbers are read in a way that the tracer cannot see, so they are not permuted."""
    module = One(
        lambda m, x: m.b(m.a(x) * float(m.b._parameters["weight"].data[0, 0])),
        a=nn.Linear(3, 5), b=nn.Linear(5, 2),
    )  # fmt: skip
    x = torch.randn(2, 3)
    from_module(module, x)
    with pytest.raises(ConversionError, match="depends on the order of its neurons"):
        from_module(module, x, verify=True)


@pytest.mark.parametrize("wide", range(2, 10))
def test_verify_finds_a_false_symmetry_of_two_neurons(wide: int) -> None:
    """A single random permutation leaves two neurons in place half of the time."""
    module = One(
        lambda m, x: m.c(m.b(m.a(x)) * float(m.b._parameters["bias"].data[0])),
        a=nn.Linear(3, wide), b=nn.Linear(wide, 2), c=nn.Linear(2, 2),
    )  # fmt: skip
    with pytest.raises(ConversionError, match="depends on the order"):
        from_module(module, torch.randn(2, 3), verify=True)


def test_verify_needs_an_example_and_values() -> None:
    with pytest.raises(ValueError, match="example_input"):
        from_module(S(nn.Linear(3, 2)), verify=True)
    with pytest.raises(ValueError, match="meta"):
        from_module(S(nn.Linear(3, 2)).to("meta"), torch.randn(1, 3), verify=True)


class Result:
    """A class that nothing is known about."""

    def __init__(self, y: Any) -> None:
        self.y = y


class Wrapping(nn.Module):
    """A network that returns an object, except while it is traced."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, x: Any) -> Any:
        """An object around a tensor."""
        y = self.a(x)
        return self.wrap(y) if isinstance(y, torch.Tensor) else y


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Wrapping(Result), r"tensors as outputs.*Result"),
        (Wrapping(lambda y: None), r"tensors as outputs.*none"),
        (S(One(lambda m, x: m.a(x.float()), a=nn.Linear(3, 2))), r"runs in float64"),
        (One(lambda m, x: m.a(x).float(), a=nn.Linear(3, 2)), r"float64.*torch.float32"),
        (One(lambda m, x: m.a(x) / 0, a=nn.Linear(3, 2)), r"finite outputs"),
        (
            One(lambda m, x: m.a(x + torch.randn_like(x)), a=nn.Linear(3, 2)),
            r"deterministic.*runs twice",
        ),
        (
            S(nn.Linear(3, 4), One(lambda m, x: F.dropout(x)), nn.Linear(4, 2)),
            r"deterministic.*runs twice",
        ),
    ],
)
def test_what_cannot_be_verified_is_an_error(module: nn.Module, reason: str) -> None:
    x = torch.randn(2, 3)
    from_module(module, x)
    with pytest.raises(ConversionError, match=reason):
        from_module(module, x, verify=True)


def test_verify_takes_outputs_of_any_kind() -> None:
    module = One(
        lambda m, x: {"a": [h := m.a(x), None], "b": (h.argmax(1), h > 0, 3)}, a=nn.Linear(3, 2)
    )
    graph = from_module(module, torch.randn(2, 3), verify=True)
    assert graph.to_tensors().keys() == {"a.weight", "a.bias"}


def test_verify_runs_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = S(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(2, 3)
    from_module(module, x, verify=True)
    monkeypatch.setitem(OPERATIONS, "tanh", torch.sin)
    with pytest.raises(ConversionError, match="computes what the network computes"):
        from_module(module, x, verify=True)
