"""`torch.func` through layers and models."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, jacrev, stack_module_state, vjp, vmap

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, Batch, NFLinear, Pool, WeightFeatures, use_backend
from nfn_graph.features import Incidence
from nfn_graph.features._rows import is_lasting

SYMMETRIES = ["np", "hnp"]
NETWORKS = ["mlp", "cnn", "self", "residual", "one layer"]


def setting(network: str, symmetry: str) -> tuple[WeightFeatures, NFLinear]:
    features = batch_of(NAMED_SPECS[network], (2, 3), channels=2).features(symmetry)
    return features, NFLinear(features.spec, 2, 2).double()


def flat(features: WeightFeatures) -> torch.Tensor:
    return torch.cat([x.flatten() for _, x in features.tensors()])


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_functional_call_and_grad(network, symmetry):
    features, layer = setting(network, symmetry)
    parameters = parameters_of(layer)
    doubled = {name: 2 * p for name, p in parameters.items()}
    out = functional_call(layer, doubled, (features,))
    torch.testing.assert_close(flat(out), 2 * flat(layer(features)))

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return flat(functional_call(layer, values, (features,))).square().sum()

    found = grad(loss)(parameters)
    flat(layer(features)).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_vjp_and_jacrev_of_inputs(network, symmetry):
    features, layer = setting(network, symmetry)
    _, pull = vjp(lambda f: flat(layer(f)), features)
    cotangent = torch.randn_like(flat(layer(features)))
    (found,) = pull(cotangent)
    jacobian = jacrev(lambda f: flat(layer(f)))(features)
    for key, x in features.tensors():
        matrix = dict(jacobian.tensors())[key].reshape(len(cotangent), -1)
        expected = (cotangent @ matrix).reshape(x.shape)
        torch.testing.assert_close(dict(found.tensors())[key], expected)
    with use_backend("plain"):
        plain = jacrev(lambda f: flat(layer(f)))(features)
    for (_, x), (_, y) in zip(jacobian.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_vmap_over_inputs_over_parameters_and_over_both(network, symmetry):
    features, layer = setting(network, symmetry)
    several = [features.map(torch.randn_like) for _ in range(3)]
    stacked = features.replace(
        {k: torch.stack([f[k] for f in several]) for k, _ in features.tensors()}
    )
    out = vmap(lambda f: flat(layer(f)))(stacked)
    torch.testing.assert_close(out, torch.stack([flat(layer(f)) for f in several]))
    layers = [NFLinear(layer.spec, 2, 2).double() for _ in range(3)]
    states, _ = stack_module_state(layers)

    def run(state: dict[str, torch.Tensor], f: WeightFeatures) -> torch.Tensor:
        return flat(functional_call(layer, state, (f,)))

    expected = torch.stack([flat(each(features)) for each in layers])
    torch.testing.assert_close(vmap(run, (0, None))(states, features), expected)
    pairs = torch.stack([flat(each(f)) for each, f in zip(layers, several, strict=True)])
    torch.testing.assert_close(vmap(run)(states, stacked), pairs)
    # The gradients of all layers of an ensemble, in one call.
    found = vmap(grad(lambda s, f: run(s, f).square().sum()), (0, None))(states, features)
    for i, each in enumerate(layers):
        flat(each(features)).square().sum().backward()
        for name, p in each.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_whole_models(symmetry):
    spec = NAMED_SPECS["mlp"]
    features = batch_of(spec, (2, 3), channels=1).features()
    options = {"io_encoding": "learned", "norm": True, "out_features": 2, "head": (4,)}
    model = NFN(spec, (3, 3), symmetry, act="Tanh", **options).double()
    parameters = parameters_of(model)

    def run(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, values, (features,))

    jacobian = jacrev(run)(parameters)
    out = model(features)
    for i in range(out.shape[0]):
        grads = torch.autograd.grad(
            out[i, 1], list(model.parameters()), retain_graph=True, allow_unused=True
        )
        for name, g in zip(parameters, grads, strict=True):
            expected = torch.zeros_like(parameters[name]) if g is None else g
            torch.testing.assert_close(jacobian[name][i, 1], expected)


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_second_derivatives(network, symmetry, backend):
    features, layer = setting(network, symmetry)
    parameters = list(layer.parameters())
    key = next(k for k, x in features.tensors() if x.numel())
    value = features[key].clone().requires_grad_()

    def penalty() -> torch.Tensor:
        """Returns the slope of a loss in a random direction of the input and the parameters."""
        with use_backend(backend):
            loss = flat(layer(features.replace({key: value}))).tanh().sum()
        slopes = torch.autograd.grad(loss, [value, *parameters], create_graph=True)
        return sum(x.square().sum() for x in slopes)

    found = torch.autograd.grad(penalty(), [value, *parameters])
    # By central differences along a random direction.
    step, directions = 1e-5, [torch.randn_like(x) for x in (value, *parameters)]
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for x, direction in zip((value, *parameters), directions, strict=True):
                x.add_(sign * step * direction)
        values.append(penalty().detach())
    slope = (values[0] - values[1]) / (2 * step)
    expected = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
    torch.testing.assert_close(expected, slope, rtol=1e-5, atol=1e-6)


def test_pools_have_second_derivatives_on_every_backend():
    batch = Batch.from_data_list([batch_of(NAMED_SPECS["mlp"])[i] for i in range(3)])
    features = batch.features("np")
    pool = Pool(features.spec)
    key = next(iter(features.weights))

    def run(x: torch.Tensor) -> torch.Tensor:
        return pool(features.map_types(lambda k, y: x if k == key else y)).sin()

    value = features.weights[key].clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (value,), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (value,), fast_mode=True)


def test_nothing_made_inside_a_transform_outlives_it():
    features, layer = setting("mlp", "np")
    fresh = Incidence(features.incidence.spec, features.incidence.shapes, features.device)
    inside = WeightFeatures(dict(features.tensors()), features.spec, fresh)
    grad(lambda p: flat(functional_call(layer, p, (inside,))).sum())(parameters_of(layer))
    assert not fresh._scales
    layer(inside)
    kept = [x for scales in fresh._scales.values() for x in scales if x is not None]
    assert kept
    assert all(map(is_lasting, kept))
    # An incidence that is created inside a transform is not cached either.
    widths = chain((2, 29, 31, 2))
    model = NFN(widths.spec, (2,), out_features=1, head=(4,)).double()
    grad(lambda p: functional_call(model, p, (widths,)).sum())(parameters_of(model))
    assert widths.features().incidence.is_lasting
    assert model(widths).shape == (1, 1)
