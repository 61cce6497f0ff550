"""`torch.compile(fullgraph=True, dynamic=True)` of models on features."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, Batch, NetworkSpec, NFLinear, WeightFeatures

SYMMETRIES = ["np", "hnp"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Clears compiled code of other tests."""
    torch._dynamo.reset()


def batches(count: int) -> list[Batch]:
    """Batches of 2 to 5 networks, all of different widths."""
    found = []
    for i in range(count):
        widths = [(2, 3 + (7 * i + 3 * j) % 6, 4 + (i + 2 * j) % 5, 3) for j in range(2 + i % 4)]
        found.append(Batch.from_data_list([chain(w, dtype=torch.float32) for w in widths]))
    return found


def assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        return
    assert isinstance(actual, WeightFeatures)
    assert isinstance(expected, WeightFeatures)
    for (key, x), (other, y) in zip(actual.tensors(), expected.tensors(), strict=True):
        assert key == other
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def compiled(model: torch.nn.Module, backend: str = "eager") -> torch.nn.Module:
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend)


@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "aot_eager"), ({"io_encoding": "sinusoidal", "norm": True, "residual": True}, "eager")],
)
@pytest.mark.parametrize("kind", [{}, {"out_features": 3, "head": (8,)}])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_one_graph_serves_batches_of_all_widths(symmetry, kind, options, backend):
    data = batches(10)
    spec = data[0].spec
    model = NFN(spec, (4, 4), symmetry, **kind, **options)
    fast = compiled(model, backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in data:
            features = batch.features(spec=model.spec)
            assert_same(fast(features), model(features))


def test_a_recompilation_would_be_seen():
    model = NFN(batches(1)[0].spec, (4,), "np")
    fast = compiled(model)
    first = batches(1)[0].features(spec=model.spec)
    fast(first)
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError),
    ):
        fast(first.to(torch.float64))


def test_sizes_equal_by_accident_cost_one_more_graph_and_no_third():
    """If sizes are equal in the first batch, the compiler assumes that they always are."""
    equal = Batch.from_data_list([chain((2, 5, 5, 3), dtype=torch.float32)] * 2)
    model = NFN(equal.spec, (4,), "np")
    fast = compiled(model)
    for batch in (equal, batches(1)[0]):
        fast(batch.features(spec=model.spec))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(10):
            features = batch.features(spec=model.spec)
            assert_same(fast(features), model(features))


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_gradients_of_a_compiled_model(symmetry):
    data = batches(3)
    model = NFN(data[0].spec, (4, 4), symmetry, out_features=3, head=(8,))
    fast = compiled(model, "aot_eager")
    parameters = list(model.parameters())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in data:
            features = batch.features(spec=model.spec)
            found = torch.autograd.grad(fast(features).sin().sum(), parameters)
            expected = torch.autograd.grad(model(features).sin().sum(), parameters)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_layers_of_every_network_compile(network, symmetry):
    features = batch_of(NAMED_SPECS[network]).features(symmetry)
    layer = NFLinear(features.spec, 3, 2).double()
    assert_same(compiled(layer)(features), layer(features))


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_mixed_depths_compile(symmetry):
    graphs = [chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 4, 6, 3))]
    batch = Batch.from_data_list(graphs)
    spec = NetworkSpec.union(g.spec for g in graphs)
    model = NFN(spec, (4, 4), symmetry, out_features=1, head=(8,)).double()
    features = batch.features(spec=model.spec)
    assert_same(compiled(model)(features), model(features))


# The compiler itself uses torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_default_compiler():
    features = batches(1)[0].features("np")
    layer = NFLinear(features.spec, 1, 4)
    assert_same(compiled(layer, "inductor")(features), layer(features))
