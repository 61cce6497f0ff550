"""A pool that applies the activation before it: the same numbers with fewer stored tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, jacrev, vmap

from networks import NAMED_SPECS, all_groupings, batch_of, chain
from nfn_graph import NFN, Activation, Batch, NFLinear, Pool, WeightFeatures, use_backend
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_segment_sum

SYMMETRIES = ["np", "hnp"]
ACTS = [nn.ReLU(), nn.SiLU(), nn.Sigmoid()]


def mixed(symmetry: str) -> WeightFeatures:
    """Features of networks of different widths and depths, with both signs."""
    batch = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3))])
    return batch.features(symmetry).map(lambda x: torch.randn_like(x).requires_grad_())


def tensors(features: WeightFeatures) -> list[torch.Tensor]:
    return [x for _, x in features.tensors() if x.numel()]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_the_activation_may_stand_before_the_pool_or_in_it(symmetry, act, reduce):
    features = mixed(symmetry)
    for full in (False, True):
        apart = Pool(features.spec, reduce, full)
        inside = Pool(features.spec, reduce, full, act=Activation(act))
        # Entries that belong to no network stay zero, whatever the activation makes of zero.
        expected, actual = apart(features.map(act).zero_unfilled()), inside(features)
        assert_close(actual, expected)
        weight = torch.randn_like(expected)
        grads = [
            torch.autograd.grad((x * weight).sum(), tensors(features)) for x in (actual, expected)
        ]
        for x, y in zip(*grads, strict=True):
            assert_close(x, y)
        with use_backend("plain"):
            assert_close(inside(features), expected)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_gradcheck_of_the_pool(symmetry):
    features = mixed(symmetry)
    pool = Pool(features.spec, act=Activation(nn.ReLU()))
    keys = [key for key, x in features.tensors() if x.numel()]

    def run(*values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(keys, values, strict=True))
        return pool(features.map_types(lambda key, x: given.get(key, x))).sin()

    # Finite differences do not work at the kink of the ReLU.
    values = [(x + 0.1 * x.sign()).detach().requires_grad_() for x in tensors(features)]
    assert torch.autograd.gradcheck(run, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


def test_gated_sums_and_expansions():
    for grouping in all_groupings():
        x = torch.randn(len(grouping.order), 2, dtype=torch.float64, requires_grad=True)
        y = torch.randn(grouping.num_groups, 2, dtype=torch.float64, requires_grad=True)
        gate = torch.randn_like(x).detach()
        assert_close(SegmentSum.apply(x, grouping, x), plain_segment_sum(x.relu(), grouping))
        expanded = y.index_select(0, grouping.index).where(gate > 0, 0)
        assert_close(Expand.apply(y, grouping, gate), expanded)
        for function, value in ((SegmentSum, x), (Expand, y)):
            run = lambda v, f=function, s=grouping, g=gate: f.apply(v, s, g)  # noqa: E731
            assert torch.autograd.gradcheck(run, (value,))
            assert torch.autograd.gradgradcheck(lambda v, r=run: r(v).sin(), (value,))


def test_nothing_hides_a_nan_or_an_infinity():
    grouping = all_groupings()[0]
    x = torch.ones(len(grouping.order), 1, dtype=torch.float64)
    x[0] = torch.nan
    assert SegmentSum.apply(x, grouping, x).isnan().any()
    y = torch.full((grouping.num_groups, 1), torch.inf, dtype=torch.float64)
    assert (Expand.apply(y, grouping, -x.nan_to_num(1)) == 0).all()


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_models_with_relu_inside_transforms(symmetry):
    features = batch_of(NAMED_SPECS["mlp"], (2, 3), channels=1).features()
    model = NFN(features.spec, (3, 3), symmetry, out_features=2, head=(4,)).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def run(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, values, (features,))

    found = jacrev(run)(parameters)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    each = vmap(grad(lambda values: run(values).sum()))(stacked)
    with use_backend("plain"):
        expected = jacrev(run)(parameters)
        singly = [
            grad(lambda values: run(values).sum())({n: p[i] for n, p in stacked.items()})
            for i in range(2)
        ]
    for name in parameters:
        assert_close(found[name], expected[name])
        for i in range(2):
            assert_close(each[name][i], singly[i][name])


def test_the_pool_keeps_only_its_input():
    features = batch_of(NAMED_SPECS["mlp"], (20, 20)).features("np")
    features = features.map(lambda x: x.requires_grad_())
    ours = {x.untyped_storage().data_ptr() for x in features.weights.values()}
    least = min(x.nbytes for x in features.weights.values())

    def kept(*modules: nn.Module) -> list[torch.Tensor]:
        """Returns the stored tensors of the size of a weight type, except the input."""
        found = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.nbytes >= least and x.untyped_storage().data_ptr() not in ours:
                found.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            nn.Sequential(*modules)(features)
        return found

    act = Activation(nn.ReLU())
    assert not kept(Pool(features.spec, act=act))
    assert len(kept(act, Pool(features.spec))) >= len(features.weights)


def test_a_model_leaves_its_last_activation_to_the_pool():
    spec = NAMED_SPECS["mlp"]
    for options, inside in (({}, True), ({"dropout": 0.1}, False), ({"residual": True}, False)):
        model = NFN(spec, (4, 4), out_features=1, **options)
        assert (model.pool.act is not None) == inside
        acts = [m for m in model.modules() if isinstance(m, Activation)]
        assert len(acts) == 2
    assert sum(isinstance(m, Activation) for m in NFN(spec, (4, 4)).modules()) == 1


def test_outputs_without_gradients():
    """If nothing depends on an output, its gradient is None instead of zeros."""
    features = mixed("np")
    layer = NFLinear(features.spec, features.channels, 2).double()
    inputs = [*tensors(features), *layer.parameters()]
    for i in range(len(tensors(layer(features)))):
        found = []
        for backend in ("fused", "plain"):
            with use_backend(backend):
                loss = tensors(layer(features))[i].sin().sum()
            found.append(
                torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            )
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
