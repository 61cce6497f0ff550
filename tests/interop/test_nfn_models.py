"""Models of the published package `nfn` 0.1.2, converted to ours."""

import subprocess
import sys

import nfn.layers as theirs
import pytest
import torch
from nfn.common import NetworkSpec as PublishedSpec
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from torch import nn

from nfn_graph import Batch, Dropout, IOEncoding, Residual
from nfn_graph.interop.nfn import batch_from_nfn, from_nfn, spec_from_nfn, to_nfn
from nfn_graph.testing import assert_equivariant, assert_invariant, random_graph
from published import NETWORKS, assert_same, draw, tensors

pytestmark = pytest.mark.usefixtures("float64")


def np_model(spec: PublishedSpec, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        theirs.IOSinusoidalEncoding(spec),
        theirs.NPLinear(spec, channels + 13, 5, io_embed=True),
        theirs.TupleOp(nn.ReLU()),
        theirs.NPLinear(spec, 5, 4, io_embed=True),
        theirs.TupleOp(nn.ReLU()),
        theirs.HNPPool(spec),
        nn.Flatten(start_dim=-2),
        nn.Linear(4 * theirs.HNPPool.get_num_outs(spec), 2),
    )


def hnp_model(spec: PublishedSpec, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        theirs.HNPLinear(spec, channels, 4),
        theirs.TupleOp(nn.GELU()),
        nn.Sequential(theirs.HNPLinear(spec, 4, 4), theirs.TupleOp(nn.Tanh())),
        theirs.HNPPool(spec),
        nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2)),
    )


def residual_model(spec: PublishedSpec, channels: int = 3) -> nn.Sequential:
    """The view changes within a block: the norm is NP, the layer HNP."""
    return nn.Sequential(
        theirs.TupleOp(theirs.ChannelLinear(channels, 4)),
        theirs.ResBlock(
            theirs.HNPLinear(spec, 4, 4),
            theirs.TupleOp(nn.SiLU(inplace=True)),
            0.5,
            theirs.SimpleLayerNorm(spec, 4),
        ),
        theirs.ChannelDropout(0.5),
        theirs.NPLinear(spec, 4, 2),
    ).eval()


@pytest.mark.parametrize("name", ["2-3-4", "2-3-4-2", "3x3", "mixed-linear"])
@pytest.mark.parametrize("build", [np_model, hnp_model, residual_model])
def test_whole_models(name, build):
    features, spec = draw(name)
    model = build(spec)
    model(features)
    assert_same(model, features, "graph")
    assert_same(model, features, None)
    assert_same(model, features, "hnp")


@pytest.mark.parametrize("build", [np_model, hnp_model])
def test_mixed_batch_equals_single_runs(build):
    """Networks of different widths in one batch, which the published model cannot take."""
    networks = [draw(sizes, networks=1)[0] for sizes in [(2, 3, 4, 2), (2, 7, 1, 2), (2, 5, 5, 2)]]
    model = build(network_spec_from_wsfeat(networks[0]))
    expected = torch.cat([model(features) for features in networks])
    batch = Batch.from_data_list([batch_from_nfn(features)[0] for features in networks])
    torch.testing.assert_close(from_nfn(model)(batch), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_features_there_and_back(name):
    features, _ = draw(name)
    batch = batch_from_nfn(features)
    assert batch.num_graphs == 2 and batch.features().channels == 3
    for networks in (batch, batch.features("np"), batch.features("hnp")):
        for x, y in zip(tensors(to_nfn(networks)), tensors(features), strict=True):
            assert torch.equal(x, y)
    one = to_nfn(batch[1])
    for x, y in zip(tensors(one), tensors(features), strict=True):
        assert torch.equal(x[0], y[1])


def test_parameters_are_copies_and_modes_are_kept():
    features, spec = draw("2-3-4")
    model = np_model(spec).requires_grad_(False)
    ours = from_nfn(model)
    batch = batch_from_nfn(features)
    before = ours(batch)
    for parameter in model.parameters():
        parameter.add_(1.0)
    assert torch.equal(ours(batch), before)
    assert not any(p.requires_grad for p in ours.parameters())
    assert ours.training and not any(m.training for m in from_nfn(model.eval()).modules())


def test_dropout_of_whole_channels_of_weights_and_of_single_biases():
    features, _ = draw((5, 40, 30), channels=6)
    features = features.map(torch.ones_like)
    layer = from_nfn(theirs.ChannelDropout(0.5))
    out = to_nfn(layer(batch_from_nfn(features).features("np")))
    matrices = out.weights[0].flatten(2)
    assert ((matrices == 0).all(-1) | (matrices == 2).all(-1)).all()
    assert set(matrices.unique().tolist()) == {0.0, 2.0}
    kept = (out.biases[0] != 0).double().mean(-1)
    assert ((kept > 0.1) & (kept < 0.9)).all()
    assert isinstance(from_nfn(theirs.TupleOp(nn.Dropout(0.3))), Dropout)


@pytest.mark.parametrize("build", [np_model, hnp_model])
def test_moved_models_are_invariant(build):
    features, spec = draw("2-3-4-2")
    published = build(spec)
    published(features)
    assert_invariant(from_nfn(published), batch_from_nfn(features), "hnp", folded=False)


def test_moved_layers_are_equivariant():
    features, spec = draw("2-3-4-2")
    scale = theirs.LearnedScale(spec, 0.5)
    norm = theirs.SimpleLayerNorm(spec, 3)
    for parameter in [*scale.parameters(), *norm.parameters()]:
        nn.init.normal_(parameter)
    for layer in (scale, norm, theirs.ChannelDropout(0.5).eval()):
        assert_equivariant(from_nfn(layer), batch_from_nfn(features), "np", folded=True)
    moved = from_nfn(residual_model(spec))
    assert_equivariant(moved, batch_from_nfn(features), "hnp", folded=False)


def test_the_dropout_of_a_block_comes_along():
    _, spec = draw("2-3-4-2")
    moved = from_nfn(residual_model(spec))
    block = next(m for m in moved.modules() if isinstance(m, Residual))
    assert [m.p for m in block.modules() if isinstance(m, Dropout)] == [0.5]


def test_encodings_of_a_spec_without_sizes():
    """nfn writes -1 if a size is open; the encoding uses the sizes of the networks."""
    features, spec = draw("2-3-4")
    layers = [theirs.IOSinusoidalEncoding(spec), theirs.NPLinear(spec, 16, 2)]
    assert_same(nn.Sequential(*layers), features, "graph")


def test_activations_leave_their_input_alone():
    features, _ = draw("2-3")
    graph = batch_from_nfn(features)
    before = [x.clone() for _, x in graph.features().tensors()]
    from_nfn(theirs.TupleOp(nn.ReLU(inplace=True)))(graph.features())
    for x, (_, y) in zip(before, graph.features().tensors(), strict=True):
        assert torch.equal(x, y)


def test_channels_of_the_encoding_are_found():
    _, spec = draw("2-3-4")
    encoding = theirs.IOSinusoidalEncoding(spec)
    norm = theirs.SimpleLayerNorm(spec, 16)
    act = theirs.TupleOp(nn.ReLU())
    for rest in (
        [act, theirs.NPLinear(spec, 16, 2)],
        [theirs.ResBlock(theirs.NPLinear(spec, 16, 16), act, 0, norm)],
        [theirs.IOSinusoidalEncoding(spec, num_bands=1), theirs.Pointwise(spec, 19, 2)],
    ):
        found = next(m for m in from_nfn(nn.Sequential(encoding, *rest)) if type(m) is IOEncoding)
        assert (found.in_channels, found.out_channels) == (3, 16)
    with pytest.raises(ValueError, match="Expected in_channels"):
        from_nfn(nn.Sequential(encoding, theirs.NPPool(spec)))


def test_what_has_no_counterpart_is_refused():
    _, spec = draw("2-3-4")
    for layer in (
        theirs.NPAttention(spec, 8),
        theirs.ParamLayerNorm(spec, 3),
        theirs.FlattenWeights(spec),
        theirs.StatFeaturizer(),
        theirs.ChannelLayerNorm(3),
        nn.ReLU(),
    ):
        with pytest.raises(TypeError, match=rf"exact counterpart \(got {type(layer).__name__}: "):
            from_nfn(nn.Sequential(theirs.NPLinear(spec, 3, 3), layer))
    for op in (nn.Softmax(1), nn.PReLU(3), nn.LayerNorm(3), torch.softmax):
        with pytest.raises(TypeError, match="acts on single values"):
            from_nfn(theirs.TupleOp(op))


def test_bad_input():
    features, spec = draw("2-3-4")
    model = from_nfn(np_model(spec))
    with pytest.raises(TypeError, match="batch_from_nfn"):
        model(features)
    mixed = Batch.from_data_list([batch_from_nfn(draw(s, 1)[0])[0] for s in [(2, 3), (2, 4)]])
    with pytest.raises(ValueError, match="networks of one size"):
        to_nfn(mixed)
    with pytest.raises(ValueError, match="batch and channel sizes of the weights"):
        batch_from_nfn(WeightSpaceFeatures(features.weights, [b[:, :1] for b in features.biases]))
    with pytest.raises(ValueError, match="same batch"):
        batch_from_nfn(WeightSpaceFeatures([w[0] for w in features.weights], features.biases))
    no_bias = random_graph(spec_from_nfn(spec).chain(2, biases=False, input_size=2, output_size=4))
    with pytest.raises(ValueError, match="a bias in each"):
        to_nfn(no_bias)
    unknown = random_graph(spec_from_nfn(draw("3x3")[1]))
    with pytest.raises(ValueError, match="kernel size"):
        to_nfn(unknown)


def test_the_package_is_imported_only_when_needed(monkeypatch):
    code = "import sys, nfn_graph.interop.nfn; sys.exit('nfn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    batch = batch_from_nfn(draw("2-3")[0])
    monkeypatch.setitem(sys.modules, "nfn.common", None)
    with pytest.raises(ImportError, match="pip install nfn"):
        to_nfn(batch)
