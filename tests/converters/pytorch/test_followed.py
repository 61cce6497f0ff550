"""Operations that reveal or hide the order of neurons: exactly the free layers are free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import One, Two
from operations import FOLLOWED, UNCLEAR, Case
from permuting import assert_symmetric, free_sizes, only_export
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module

ALL = pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED.keys())


@ALL
def test_free_layers_are_free_and_no_others(case: Case) -> None:
    module, inputs = case.module(), case.tensors()
    graph = from_module(module, inputs, verify=True)
    assert free_sizes(graph) == case.free
    if case.free:
        assert_symmetric(graph, module, inputs)


@ALL
def test_the_exported_network_is_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = case.module(), case.tensors()
    expected = from_module(module, inputs).layout
    only_export(monkeypatch)
    assert from_module(module, inputs).layout == expected


@pytest.mark.parametrize("case", UNCLEAR.values(), ids=UNCLEAR.keys())
def test_the_number_of_axes_is_not_guessed(case: Case) -> None:
    module, inputs = case.module(), case.tensors()
    with pytest.raises(ConversionError, match="example_input"):
        from_module(module)
    graph = from_module(module, inputs)
    assert free_sizes(graph) == case.free
    assert_symmetric(graph, module, inputs)


@dataclass
class Scores:
    """Two outputs by name."""

    first: Tensor
    second: Tensor


def test_outputs_in_a_dataclass() -> None:
    module = One(
        lambda m, x: Scores(m.b(h := m.a(x)), m.c(h)),
        a=nn.Linear(3, 8), b=nn.Linear(8, 2), c=nn.Linear(8, 1),
    ).double()  # fmt: skip
    inputs = (torch.randn(4, 3).double(),)
    graph = from_module(module, inputs, verify=True)
    assert list(graph.spec.neuron) == ["input", "hidden1", "output", "output2"]
    assert_symmetric(graph, module, inputs)


def test_a_list_of_inputs_is_one_argument() -> None:
    module = One(
        lambda m, x: m.b(m.a(x[0]) + m.c(x[1])),
        a=nn.Linear(3, 8), c=nn.Linear(2, 8), b=nn.Linear(8, 2),
    )  # fmt: skip
    graph = from_module(module, [torch.randn(4, 3), torch.randn(4, 2)], verify=True)
    assert free_sizes(graph) == (8,)


class Remembering(nn.Module):
    """Keeps its result, as hooks for visualisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
        self.last: Any = None
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        """A network that writes to its own attributes."""
        self.last = h = self.a(x) * torch.ones(8)
        self.seen.append(h)
        self.by_name["h"] = h
        return self.b(h)


def test_the_module_keeps_its_attributes() -> None:
    module = Remembering()
    before = dict(vars(module))
    for example in (None, torch.randn(2, 3)):
        from_module(module, example)
        assert vars(module) == before
        assert module.last is None
        assert module.seen == []
        assert module.by_name == {}


def test_a_matrix_before_a_value_of_unknown_shape_needs_an_example() -> None:
    """A bias is added along the neurons of a vector, but along the columns of a matrix."""
    module = One(
        lambda m, x: m.v @ (m.w @ x + m.c).relu(),
        w=nn.Parameter(torch.rand(8, 3)), v=nn.Parameter(torch.rand(2, 8)),
        c=nn.Parameter(torch.rand(8)),
    )  # fmt: skip
    with pytest.raises(ConversionError, match=r"by a vector or by a matrix.*example_input"):
        from_module(module)


@pytest.mark.parametrize("squeezed", [False, True])
def test_single_outputs_that_are_added_are_one_neuron(squeezed: bool) -> None:
    """As in LPIPS, there is one weight per layer of a network, and all have one output."""

    def mean(h: Tensor) -> Tensor:
        return h.squeeze(1).mean((1, 2)) if squeezed else h.mean((2, 3))

    module = Two(
        lambda m, x, z: mean(m.a(x)) + mean(m.b(z)),
        a=nn.Conv2d(3, 1, 1, bias=False), b=nn.Conv2d(5, 1, 1, bias=False),
    ).double()  # fmt: skip
    x, z = torch.rand(2, 3, 4, 4).double(), torch.rand(2, 5, 2, 2).double()
    graph = from_module(module, (x, z), verify=True)
    assert list(graph.spec.weight) == [
        ("input", "weight", "output"),
        ("input2", "weight", "output"),
    ]
    assert graph.layout.shape.sizes == ((3,), (1,), (5,))


def test_a_layer_norm_over_several_axes_says_how_many_an_input_has() -> None:
    module = nn.Sequential(nn.LayerNorm([1, 9]), nn.Conv1d(1, 8, 3), nn.Conv1d(8, 2, 1))
    assert from_module(module).layout == from_module(module, torch.rand(2, 1, 9)).layout


def test_one_output_beside_an_axis_of_size_one_is_squeezed() -> None:
    module = One(
        lambda m, x: m.b(m.a(x).relu()).unsqueeze(-1).squeeze(),
        a=nn.Linear(3, 8), b=nn.Linear(8, 1),
    ).double()  # fmt: skip
    inputs = (torch.randn(4, 3).double(),)
    graph = from_module(module, inputs, verify=True)
    assert free_sizes(graph) == (8,)
    assert_symmetric(graph, module, inputs)
