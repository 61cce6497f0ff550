"""Less memory and the same numbers: recomputation in training, chunks of edges in inference."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, Batch, NetworkSpec, NFLinear, WeightFeatures, use_backend

SYMMETRIES = ["np", "hnp"]
OPTIONS = [
    {},
    {"norm": True, "residual": True, "io_encoding": "learned"},
    {"pointwise": True, "residual": True},
    {"aggr": "sum", "pool": "max"},
]


def models(spec, symmetry: str, options: dict) -> tuple[NFN, NFN]:
    common = {"in_channels": 3, "act": "SiLU", **options}
    pool = common.pop("pool", "mean")
    scorer = NFN(spec, (4, 4), symmetry, out_features=2, head=(8,), pool=pool, **common)
    return scorer.double().eval(), NFN(spec, (4, 4, 2), symmetry, **common).double().eval()


@pytest.mark.parametrize("chunk_edges", [1, 7, 10**6])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "self", "parallel", "one layer"])
def test_chunks_of_edges_change_nothing(network, symmetry, options, chunk_edges):
    spec = NAMED_SPECS[network]
    batch = batch_of(spec, (3, 4))
    with torch.inference_mode():
        for model in models(spec, symmetry, options):
            expected, actual = model(batch), model(batch, chunk_edges=chunk_edges)
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
                continue
            for (_, x), (_, y) in zip(actual.tensors(), expected.tensors(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"norm": True, "residual": True}, {"pointwise": True}])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "self"])
def test_chunks_under_autocast(network, symmetry, options):
    spec = NAMED_SPECS[network]
    batch = batch_of(spec, (3, 4))
    features = batch.features().to(torch.float32)
    for model in models(spec, symmetry, options):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected, actual = model.float()(features), model(features, chunk_edges=7)
        pairs = [(actual, expected)]
        if isinstance(expected, WeightFeatures):
            found = zip(actual.tensors(), expected.tensors(), strict=True)
            pairs = [(x, y) for (_, x), (_, y) in found]
        for x, y in pairs:
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_chunks_where_types_are_missing(symmetry):
    batch = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3))])
    for pool in ("mean", "max"):
        model = NFN(batch.spec, (4, 4), symmetry, out_features=2, head=(8,), pool=pool).double()
        with torch.no_grad():
            torch.testing.assert_close(model(batch, chunk_edges=5), model(batch))


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "self", "parallel", "one layer"])
def test_chunks_and_a_pool_of_all_entries(network, symmetry):
    batch = batch_of(NAMED_SPECS[network], (3, 4))
    options = {"in_channels": 3, "out_features": 2, "head": (8,), "pool_full": True}
    model = NFN(batch.spec, (4, 4), symmetry, **options).double()
    with torch.no_grad():
        torch.testing.assert_close(model(batch, chunk_edges=7), model(batch))


def test_chunks_hold_no_more_edges_than_asked_for():
    seen: list[int] = []

    class Watched(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return x.relu()

    batch = batch_of(NAMED_SPECS["mlp"], (20, 20))
    model = NFN(batch.spec, (4, 4), in_channels=3, out_features=1, head=(4,)).double().eval()
    for act in (model.layers[0][1], model.pool.act):
        act.function = Watched()
    with torch.no_grad():
        model(batch, chunk_edges=60)
    assert max(seen) == 60


def test_chunks_refuse_gradients_dropout_and_nonsense():
    batch = batch_of(NAMED_SPECS["mlp"])
    model = NFN(batch.spec, (4,), in_channels=3, out_features=1, dropout=0.5).double()
    with pytest.raises(ValueError, match=r"inference_mode\(\) for chunk_edges \(got gradients"):
        model(batch, chunk_edges=10)
    with torch.no_grad(), pytest.raises(ValueError, match=r"in eval\(\) for chunk_edges"):
        model(batch, chunk_edges=10)
    with torch.no_grad(), pytest.raises(ValueError, match=r"at least 1 \(got 0\)"):
        model.eval()(batch, chunk_edges=0)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_recomputation_changes_no_bit(symmetry):
    batch = batch_of(NAMED_SPECS["mlp"])
    options = {"in_channels": 3, "out_features": 2, "head": (8,), "dropout": 0.3}
    plain = NFN(batch.spec, (4, 4), symmetry, **options).double()
    thrifty = NFN(batch.spec, (4, 4), symmetry, recompute=True, **options).double()
    thrifty.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, thrifty):
        torch.manual_seed(1)
        model(batch).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backends", [("plain", "fused"), ("fused", "plain")])
def test_recomputation_uses_the_kernels_of_the_forward_pass(backends):
    """The backward pass runs outside the block, on a GPU even in another thread."""
    batch = batch_of(NAMED_SPECS["mlp"])
    model = NFN(batch.spec, (4, 4), in_channels=3, out_features=2, head=(8,), recompute=True)
    with use_backend(backends[0]):
        loss = model.double()(batch).square().sum()
    with use_backend(backends[1]):
        loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.recompute = False
    model.zero_grad()
    model(batch).square().sum().backward()
    for x, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(x, p.grad, rtol=1e-10, atol=1e-10)


def test_recomputation_keeps_less():
    def kept(**options) -> int:
        batch = batch_of(NAMED_SPECS["mlp"], (20, 20))
        model = NFN(batch.spec, (8,) * 4, in_channels=3, out_features=1, **options).double()
        storages: dict[int, int] = {}
        held = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            held.append(x)
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(batch)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for pointer, size in storages.items() if pointer not in weights)

    assert kept(recompute=True) < 0.75 * kept()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_frees_the_input_of_every_layer(mode):
    alive: list[weakref.ref] = []
    most = 0

    class Watched(NFLinear):
        def forward(self, features: WeightFeatures) -> WeightFeatures:
            nonlocal most
            out = super().forward(features)
            alive.append(weakref.ref(next(iter(out.weights.values()))))
            most = max(most, sum(ref() is not None for ref in alive))
            return out

    batch = batch_of(NAMED_SPECS["mlp"], channels=1)
    model = NFN(batch.spec, (4,) * 6, out_features=1, head=(4,)).double()
    for block in model.layers:
        block[0].__class__ = Watched
    gc.disable()
    try:
        with mode():
            model(batch)
    finally:
        gc.enable()
    assert len(alive) == 6
    # The output of a layer is freed before the next layer creates its own.
    assert most == 1


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_a_layer_saves_every_tensor_once(symmetry):
    """Hooks such as those of `save_on_cpu` copy every tensor that is saved."""
    features = batch_of(NetworkSpec.chain(3, input_size=2, output_size=1)).features(symmetry)
    layer = NFLinear(features.spec, 3, 3).double()
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(features)
    pointers = [x.data_ptr() for x in saved if x.numel()]
    assert len(pointers) == len(set(pointers)) > 0
