"""float64, float32, bfloat16 and autocast, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, FourierFeatures, IOEncoding, NFLinear, Pool, use_backend

SYMMETRIES = ["np", "hnp"]
BACKENDS = ["fused", "plain"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


def relative(x: Tensor, y: Tensor) -> float:
    x, y = x.detach(), y.detach()
    return float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "cnn", "self"])
def test_layers_in_every_dtype(network, symmetry, dtype, backend):
    features = batch_of(NAMED_SPECS[network]).features(symmetry)
    reference = NFLinear(features.spec, 3, 4).double()
    layer = NFLinear(features.spec, 3, 4).to(dtype)
    layer.load_state_dict(reference.state_dict())
    inputs = features.to(dtype).map(lambda x: x.requires_grad_())
    with use_backend(backend):
        out = layer(inputs)
    expected = reference(features)
    assert out.dtype == dtype
    for (_, x), (_, y) in zip(out.tensors(), expected.tensors(), strict=True):
        assert relative(x, y) < TOLERANCE[dtype]
    sum(x.sum() for _, x in out.tensors()).backward()
    sum(x.sum() for _, x in expected.tensors()).backward()
    for p, q in zip(layer.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == dtype
        assert relative(p.grad, q.grad) < TOLERANCE[dtype]
    assert all(x.grad.dtype == dtype for _, x in inputs.tensors() if x.numel())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("pointwise", [False, True])
def test_autocast_forward_and_backward(pointwise, symmetry, backend):
    spec = NAMED_SPECS["mlp"]
    features = batch_of(spec).features().to(torch.float32)
    options = {"in_channels": 3, "out_features": 2, "head": (8,), "pointwise": pointwise}
    model = NFN(spec, (4, 4), symmetry, norm=True, residual=True, **options)
    expected = model(features)
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        out = model(features)
        inner = model.layers[0][0](features.fold(symmetry))
    assert out.dtype == inner.dtype == torch.bfloat16
    assert relative(out, expected) < 0.1
    out.float().square().sum().backward()
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.grad.dtype == torch.float32
        assert relative(p.grad, g) < 0.3


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_takes_means_over_more_entries_than_it_can_count(backend):
    """Sums of 120,000 entries are beyond 65,504, the largest number of float16."""
    features = chain((300, 400, 10), dtype=torch.float32).features("np")
    features = features.map(lambda x: 1 + torch.rand(*x.shape[:2], 2)).map(Tensor.requires_grad_)
    layer, pool = NFLinear(features.spec, 2, 2), Pool(features.spec)
    inputs = [x for _, x in features.tensors() if x.numel()]

    def run() -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
        out = layer(features)
        pooled = pool(out)
        # The loss is scaled, as in training, because small gradients of float16 would be lost.
        grads = torch.autograd.grad(1024 * pooled.float().square().sum(), inputs)
        return [x for _, x in out.tensors() if x.numel()], pooled, grads

    expected = run()
    with use_backend(backend), torch.autocast("cpu", torch.float16):
        outputs, pooled, grads = run()
    for x, y in zip(
        [*outputs, pooled, *grads], [*expected[0], expected[1], *expected[2]], strict=True
    ):
        # `index_add` rounds after every addition, several hundred times in a row.
        assert relative(x, y) < (0.05 if backend == "plain" else 0.02)
    assert outputs[0].dtype == pooled.dtype == torch.float16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("aggregate", ["mean", "sum"])
@pytest.mark.parametrize("cast", [True, False])
def test_float16_sums_over_the_edges_of_one_neuron(cast, aggregate, backend):
    """2,048 edges of 33.0 sum to 67,584, which is finite if results of float32 are kept."""
    features = chain((2048, 3, 2), dtype=torch.float32).features("np")
    features = features.map(lambda x: torch.full_like(x, 33.0))
    layer = NFLinear(features.spec, 1, 2, aggr=aggregate)
    with torch.no_grad():
        for site, matrix in zip(layer.spec.sites, layer.site_maps(), strict=True):
            if matrix is not None and not site.is_leaf:
                matrix.mul_(1e-3 if aggregate == "sum" else 1)
    expected, pooled = layer(features), Pool(features.spec)(features)
    with use_backend(backend):
        if cast:
            with torch.autocast("cpu", torch.float16):
                found = layer(features)
        else:
            found = layer.half()(features.to(torch.float16))
        halved = Pool(features.spec)(features.to(torch.float16))
    assert found.dtype == torch.float16
    for (_, x), (_, y) in zip(found.tensors(), expected.tensors(), strict=True):
        assert x.isfinite().all()
        assert relative(x, y) < 0.01
    assert relative(halved, pooled) < 0.01


def test_encodings_keep_their_digits():
    """Large angles and many positions, in a dtype with few digits."""
    raw = chain((784, 3, 2), dtype=torch.float32).features()
    fourier, positions = FourierFeatures(1, 8, scale=10.0), IOEncoding(raw.spec, 1)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = fourier(raw)
    pairs = [(encoded, fourier(raw)), (positions(raw.to(torch.bfloat16)), positions(raw))]
    for actual, expected in pairs:
        for (_, x), (_, y) in zip(actual.tensors(), expected.tensors(), strict=True):
            assert not x.numel() or (x.float() - y).abs().max() < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_of_another_dtype_than_the_layer_are_refused(backend):
    features = batch_of(NAMED_SPECS["mlp"]).features("np")
    layer = NFLinear(features.spec, 3, 4)
    wrong = r"torch.float32, like the parameters of the layer \(got torch.float64\)"
    with use_backend(backend), pytest.raises(ValueError, match=wrong):
        layer(features)
    with use_backend(backend), pytest.raises(ValueError, match=r"features on meta, .* \(got cpu\)"):
        layer.double().to("meta")(features)
