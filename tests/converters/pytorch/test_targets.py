"""Functions are recognised by their origin, not by their name alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import One
from permuting import assert_symmetric, free_sizes
from torch import Tensor, fx, nn

from nfn_graph.converters import ConversionError, from_module, handles
from nfn_graph.converters.pytorch import handling
from nfn_graph.converters.wiring import Wiring


def threshold(x: Tensor) -> Tensor:
    """This is not torch's function: it reveals the order of the entries."""
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def normalize(x: Tensor) -> Tensor:
    """Neither is this one: it treats the first entry differently."""
    return x / x[..., :1]


def stochastic_depth(x: Tensor, rate: float, training: bool) -> Tensor:
    """As in torchvision, which does not look inside: the identity in eval mode."""
    if not training or rate == 0.0:
        return x
    return x * torch.empty_like(x).bernoulli_(1.0 - rate)


def num_groups(channels: int) -> int:
    """A function that only uses sizes."""
    return channels // channels


def ramp(size: int) -> Tensor:
    """A constant made by a function that is not followed."""
    return torch.arange(size).double()


fx.wrap("threshold")
fx.wrap("normalize")
fx.wrap("stochastic_depth")
fx.wrap("num_groups")
fx.wrap("ramp")


def between(function: Callable[..., Any]) -> nn.Module:
    """A function between two layers."""
    return One(
        lambda m, x: m.b(function(m.a(x))), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
    ).double()  # fmt: skip


INPUT = torch.randn(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(("name", "free"), [("threshold", ()), ("normalize", (1, 7))])
def test_a_function_with_a_name_of_torch_is_looked_into(name: str, free: tuple[int, ...]) -> None:
    # By its name in this module, which torch.fx replaces while it traces.
    module = between(lambda h: globals()[name](h))
    with pytest.raises(ConversionError, match=rf"\.{name}, whose.*example_input"):
        from_module(module)
    assert free_sizes(from_module(module, INPUT, verify=True)) == free


def test_stochastic_depth_is_the_identity() -> None:
    module = One(
        lambda m, x: m.b((h := m.a(x)) + stochastic_depth(m.c(h), 0.5, m.training)),
        a=nn.Linear(3, 8), c=nn.Linear(8, 8), b=nn.Linear(8, 2),
    ).double().eval()  # fmt: skip
    with pytest.raises(ConversionError, match=r"\.stochastic_depth, whose.*example_input"):
        from_module(module)
    graph = from_module(module, INPUT, verify=True)
    assert free_sizes(graph) == (8,)
    assert_symmetric(graph, module, (INPUT,))


def test_functions_of_sizes_are_called() -> None:
    module = between(lambda h: nn.functional.group_norm(h, num_groups(8)))
    assert free_sizes(from_module(module, INPUT, verify=True)) == (8,)
    assert free_sizes(from_module(module)) == (8,)


def test_a_function_of_sizes_that_returns_a_constant() -> None:
    module = between(lambda h: h * ramp(8))
    assert free_sizes(from_module(module)) == ()
    assert free_sizes(from_module(module, INPUT, verify=True)) == ()
    unknown = between(lambda h: h + ramp(h.shape[0])[:, None])
    with pytest.raises(ConversionError, match=r"\.ramp, whose.*example_input"):
        from_module(unknown)
    assert free_sizes(from_module(unknown, INPUT, verify=True)) == (8,)


@pytest.fixture
def own_sigmoid() -> Iterator[Any]:
    """An operator called `graph_tests::sigmoid` that does not compute a sigmoid."""
    library = torch.library.Library("graph_tests", "FRAGMENT")
    library.define("sigmoid(Tensor x) -> Tensor")
    library.impl("sigmoid", lambda x: x * torch.arange(8), "CompositeExplicitAutograd")
    library.impl("sigmoid", torch.empty_like, "Meta")
    yield torch.ops.graph_tests.sigmoid
    library._destroy()


@pytest.mark.parametrize("overload", [False, True])
def test_an_operator_of_another_namespace_is_refused(own_sigmoid: Any, overload: bool) -> None:
    module = between(own_sigmoid.default if overload else own_sigmoid)
    for example in (None, INPUT):
        with pytest.raises(ConversionError, match="graph_tests::sigmoid"):
            from_module(module, example)


def test_operators_of_aten_are_known_by_their_own_arguments() -> None:
    """`aten.batch_norm` takes the parameters before the statistics."""
    aten = torch.ops.aten
    module = One(
        lambda m, x: m.b(
            aten.batch_norm(
                aten.relu.default(m.a(x)), m.n.weight, m.n.bias, m.n.running_mean,
                m.n.running_var, False, 0.1, 1e-5, False,
            )
        ),
        a=nn.Linear(3, 8), b=nn.Linear(8, 2), n=nn.BatchNorm1d(8),
    ).double().eval()  # fmt: skip
    graph = from_module(module, INPUT, verify=True)
    keys = [p.keys[0] for p in graph.layout.placements if p.keys[0].startswith("n.")]
    assert keys == ["n.weight", "n.bias", "n.running_mean", "n.running_var"]


@torch.library.custom_op("nfn_graph_tests::dense", mutates_args=())
def dense(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """An operator of another package."""
    return x @ weight.T * scale


@dense.register_fake
def _(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


class Dense(nn.Module):
    """A network of that operator, reached by its name or by its function."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers."""
        called = torch.ops.nfn_graph_tests.dense if self.by_name else dense
        return self.last(called(x, self.weight, 2.0).relu())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("example", [None, torch.randn(2, 3)])
def test_own_operators_are_known_once_they_are_registered(
    by_name: bool, example: Tensor | None
) -> None:
    with pytest.raises(ConversionError, match=r"handles\('nfn_graph_tests::dense'\)"):
        from_module(Dense(by_name), example)

    @handles("nfn_graph_tests::dense")
    def _dense(wiring: Wiring, x: Any, weight: Any, scale: float) -> Any:
        return wiring.linear(x, weight)

    try:
        network = Dense(by_name).double()
        graph = from_module(network, None if example is None else example.double())
        assert free_sizes(graph) == (4,)
        assert_symmetric(graph, network, (torch.randn(5, 3, dtype=torch.float64),))
    finally:
        del handling.HANDLERS["nfn_graph_tests::dense"]


def test_bugs_of_handlers_are_not_blamed_on_arguments() -> None:
    @handles("nfn_graph_tests::dense")
    def _dense(wiring: Wiring, x: Any, weight: Any, scale: float) -> Any:
        return {}["missing"]

    try:
        with pytest.raises(RuntimeError, match=r"a bug in nfn-graph: .*KeyError"):
            from_module(Dense(True))
    finally:
        del handling.HANDLERS["nfn_graph_tests::dense"]
