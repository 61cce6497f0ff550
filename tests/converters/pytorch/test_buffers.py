"""Buffers: those with floating-point numbers are weights, integers are carried along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import One
from operations import Case
from permuting import assert_symmetric, free_sizes, only_export
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, to_state_dict
from nfn_graph.converters.pytorch import tracing


class FrozenBatchNorm(nn.Module):
    """As in torchvision, statistics and parameters are buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 1)

    def forward(self, x: Tensor) -> Tensor:
        """One scale and one shift, both computed from buffers alone."""
        weight, bias, mean, variance = (
            buffer.reshape(1, -1, 1, 1)
            for buffer in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def masked(run: Callable[..., Any], mask: Tensor, persistent: bool = True) -> nn.Module:
    """Two layers, one of which is combined with a buffer."""
    module = One(run, a=nn.Linear(3, 8), b=nn.Linear(8, 2))
    module.register_buffer("mask", mask, persistent=persistent)
    return module


FLOAT = torch.rand(8)
BOOL = FLOAT > 0.5
FLAT = ((4, 3),)

BUFFERS: dict[str, Case] = {
    "frozen batch norm": Case(
        lambda: One(
            lambda m, x: m.b(m.norm(m.a(x)).mean((2, 3))),
            a=nn.Conv2d(3, 8, 3, bias=False), norm=FrozenBatchNorm(8), b=nn.Linear(8, 2),
        ),
        ((1, 3, 5, 5),), (8,),
    ),
    "a computed mask": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * (m.mask * 2)), FLOAT), FLAT, (8,)
    ),
    "a mask of weights": Case(
        lambda: masked(
            lambda m, x: m.b(F.linear(x, m.a.weight * m.mask, m.a.bias)),
            torch.rand(8, 3),
        ),
        FLAT, (8,),
    ),
    "random features": Case(
        lambda: masked(lambda m, x: m.b((x @ m.mask.T).sin()), torch.rand(8, 3)), FLAT, (8,)
    ),
    "as many as a buffer has": Case(
        lambda: masked(lambda m, x: m.b(m.a(x).view(-1, m.mask.shape[0])), FLOAT), FLAT, (8,)
    ),
    "a scalar": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * m.mask.exp()), torch.rand(())), FLAT, (8,)
    ),
    "no part of the state dict": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * (m.mask * 2)), FLOAT, persistent=False),
        FLAT, (),
    ),
    "a boolean mask": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * m.mask), BOOL), FLAT, ()
    ),
    "a boolean mask as numbers": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * m.mask.to(x.dtype)), BOOL), FLAT, ()
    ),
    "a filled mask": Case(
        lambda: masked(lambda m, x: m.b(m.a(x).masked_fill(m.mask, 0.0)), BOOL), FLAT, ()
    ),
    "an integer scalar": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * m.mask), torch.tensor(3)), FLAT, (8,)
    ),
    "chosen inputs": Case(
        lambda: masked(lambda m, x: m.b(m.a(x[:, m.mask])), torch.tensor([2, 0, 1])), FLAT, (8,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers_are_followed_alike_in_both_ways(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = case.module(), case.tensors()
    graph = from_module(module, inputs, verify=True)
    assert free_sizes(graph) == case.free
    if case.free:
        assert_symmetric(graph, module, inputs)
    else:
        assert torch.equal(to_state_dict(graph).get("mask", module.mask), module.mask)
    only_export(monkeypatch)
    assert from_module(module, inputs).layout == graph.layout


def test_computed_buffers_are_taps() -> None:
    case = BUFFERS["frozen batch norm"]
    graph = from_module(case.module())
    assert graph.spec.neuron["hidden1"].taps == 4
    assert not graph.layout.carried


@pytest.mark.parametrize("mask", [torch.rand(8, 3) > 0.5, torch.ones(8, 3, dtype=torch.int64)])
def test_whole_numbers_beside_weights_are_refused_as_a_mask(
    mask: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in MADE, the order of the neurons determines which weights exist."""
    module = masked(lambda m, x: m.b(F.linear(x, m.a.weight * m.mask.float())), mask)
    for _ in range(2):
        with pytest.raises(ConversionError, match=r"'mask', a mask.*floating-point buffer"):
            from_module(module, torch.randn(2, 3))
        monkeypatch.setattr(tracing, "_symbolic_trace", None)


@pytest.mark.parametrize("cast", [lambda q: q, lambda q: q.float(), lambda q: q.float() * 2])
def test_whole_numbers_as_weights_are_refused(cast: Callable[[Tensor], Tensor]) -> None:
    whole = torch.ones(8, 3, dtype=torch.int8)
    module = masked(lambda m, x: m.b(F.linear(x, cast(m.mask))), whole)
    for example in (None, torch.randn(2, 3)):
        with pytest.raises(ConversionError, match=r"'mask' of torch.int8.*quantised"):
            from_module(module, example)


def test_quantised_weights_are_refused() -> None:
    module = masked(
        lambda m, x: m.b(F.linear(x, m.mask.to(x.dtype) * m.scale)),
        torch.ones(8, 3, dtype=torch.int8),
    )
    module.register_buffer("scale", torch.rand(8, 1))
    for example in (None, torch.randn(2, 3)):
        with pytest.raises(ConversionError, match=r"'mask'.*integer tensor"):
            from_module(module, example)


def test_a_weight_is_never_made_a_constant() -> None:
    module = masked(
        lambda m, x: m.b(F.linear(x, m.mask) * m.table.sort()[0]), torch.rand(8, 3)
    )  # fmt: skip
    module.register_buffer("table", torch.rand(8))
    for example in (None, torch.randn(2, 3)):
        with pytest.raises(ConversionError, match=r"sort.*stay in place"):
            from_module(module, example)


CONSTANTS: dict[str, Case] = {
    "a value in Python": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * float(m.mask[0])), FLOAT), FLAT, (8,)
    ),
    "a choice by value": Case(
        lambda: masked(lambda m, x: m.b(m.a(x)) if m.mask > 0 else x, torch.tensor(3.0)),
        FLAT, (8,),
    ),
    "sorted": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) * m.mask.sort()[0]), FLOAT), FLAT, ()
    ),
    "part of a table": Case(
        lambda: masked(lambda m, x: m.b(m.a(x) + m.mask[:5]), torch.rand(9, 8)), ((2, 5, 3),), ()
    ),
    "frequencies of an encoding": Case(
        lambda: One(
            lambda m, x: m.b(m.a((x[..., None] * m.mask).sin().flatten(1)).relu()),
            a=nn.Linear(12, 8), b=nn.Linear(8, 2), mask=nn.Buffer(torch.rand(4)),
        ),
        FLAT, (8,),
    ),
    "a statistic of a norm, moved": Case(
        lambda: One(
            lambda m, x: m.b(m.mask(m.a(x)) * m.mask.running_mean.flip(0)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2), mask=nn.BatchNorm1d(8),
        ),
        FLAT, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_other_uses_of_buffers_make_them_constants(case: Case) -> None:
    """Their values stay; neurons that are combined with them keep their order."""
    module, inputs = case.module(), case.tensors()
    graph = from_module(module, inputs, verify=True)
    assert free_sizes(graph) == case.free
    assert {"mask", "mask.running_mean"} & set(graph.layout.carried)
    if case.free:
        assert_symmetric(graph, module, inputs)


def test_values_of_buffers_are_read_without_an_example() -> None:
    for name in ("a value in Python", "a choice by value", "sorted"):
        graph = from_module(CONSTANTS[name].module())
        assert free_sizes(graph) == CONSTANTS[name].free
        assert set(graph.layout.carried) == {"mask"}


class Counting(nn.Module):
    """Counts its calls, in a buffer and outside of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """A linear map."""
        self.calls += 1
        self.seen.add_(1)
        return self.a(x)


@pytest.mark.parametrize("exported", [False, True])
def test_buffers_keep_their_values(exported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Counting()
    calls, seen = module.calls, module.seen
    if exported:
        monkeypatch.setattr(tracing, "_symbolic_trace", None)
    graph = from_module(module, torch.randn(2, 3))
    assert module.calls is calls
    assert module.seen is seen
    assert calls.item() == 0
    assert seen.tolist() == [0.0, 0.0]
    assert to_state_dict(graph)["calls"].item() == 0


def test_parameters_without_a_shape_are_refused() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    for example in (None, torch.randn(2, 3)):
        with pytest.raises(ConversionError, match=r"'0.weight' of a lazy module"):
            from_module(module, example)
