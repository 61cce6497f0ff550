"""The published package `nfn` 0.1.2 as an oracle, layer by layer."""

import nfn.layers as theirs
import pytest
import torch
from torch import nn

from nfn_graph import NFLinear
from nfn_graph.interop._nfn_linear import find_pieces
from nfn_graph.interop.nfn import batch_from_nfn, from_nfn, spec_from_nfn, to_nfn
from nfn_graph.testing import completeness, matrices_of, orbit_labels, random_graph
from published import DEEP, NETWORKS, Published, assert_same, draw

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", NETWORKS)
def test_np_linear(name):
    features, spec = draw(name)
    assert_same(theirs.NPLinear(spec, 3, 4), features, "np")


@pytest.mark.parametrize("name", DEEP)
def test_np_linear_with_io_embed(name):
    features, spec = draw(name)
    layer = theirs.NPLinear(spec, 3, 4, io_embed=True)
    assert_same(layer, features, "np")
    assert_same(layer, features, "graph")


@pytest.mark.parametrize("name", DEEP)
def test_hnp_linear_is_embedded(name):
    features, spec = draw(name)
    assert_same(theirs.HNPLinear(spec, 3, 4), features, "hnp")


@pytest.mark.parametrize("name", NETWORKS)
def test_pointwise(name):
    features, spec = draw(name)
    assert_same(theirs.Pointwise(spec, 3, 4), features, "np")


@pytest.mark.parametrize("name", NETWORKS)
def test_np_pool(name):
    features, spec = draw(name)
    assert_same(theirs.NPPool(spec), features, "np")


@pytest.mark.parametrize("name", DEEP)
def test_hnp_pool(name):
    features, spec = draw(name)
    layer = theirs.HNPPool(spec)
    assert_same(layer, features, "hnp")
    assert layer(features).shape[-1] == theirs.HNPPool.get_num_outs(spec)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["learned", "fourier", "norm", "scale"])
def test_encodings_and_norms(name, kind):
    features, spec = draw(name)
    layer: nn.Module
    if kind == "learned":
        layer = theirs.LearnedPosEmbedding(spec, 3)
    elif kind == "fourier":
        layer = theirs.GaussianFourierFeatureTransform(spec, 3, mapping_size=5, scale=2)
    elif kind == "norm":
        layer = theirs.SimpleLayerNorm(spec, 3)
    else:
        layer = theirs.LearnedScale(spec, 1.0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert_same(layer, features, None if kind == "learned" else "np")


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "mixed"])
@pytest.mark.parametrize("with_layers", [False, True])
def test_sinusoidal_encoding(name, with_layers):
    features, spec = draw(name)
    layer = theirs.IOSinusoidalEncoding(spec, 8, 5, enc_layers=with_layers)
    assert_same(layer, features, None, from_nfn(layer, in_channels=3))


def test_sinusoidal_encoding_of_a_last_convolution():
    """The published layer raises; ours encodes the outputs at the weight and at the bias alike."""
    features, spec = draw("mixed")
    layer = theirs.IOSinusoidalEncoding(spec)
    with pytest.raises(RuntimeError):
        layer(features)
    out = to_nfn(from_nfn(layer, in_channels=3)(batch_from_nfn(features).features()))
    code = out.biases[-1][:, 3:, :, None, None, None]
    assert torch.equal(out.weights[-1][:, 3:], code.expand_as(out.weights[-1][:, 3:]))


@pytest.mark.parametrize(
    ("sizes", "parameters", "rank", "orbits"),
    [
        ((2, 3, 4, 2), 142, 112, 114),
        ((2, 4, 3), 147, 114, 117),
        ((2, 3, 2), None, 72, 74),
        ((2, 3, 4, 3, 2), 198, 162, 164),
    ],
)
def test_hnp_span_is_a_strict_subset(sizes, parameters, rank, orbits):
    _, published_spec = draw(sizes)
    spec = spec_from_nfn(published_spec).fold("hnp")
    graph = random_graph(spec.unfolded, dict(zip(spec.unfolded.neuron, sizes, strict=True)))
    layers = [Published(theirs.HNPLinear(published_spec, 1, 1), "hnp"), NFLinear(spec, 1, 1)]
    their_maps, our_maps = (matrices_of(layer, graph, spec, (1, 1)).flatten(1) for layer in layers)
    used = [int((x.abs().amax(1) > 0).sum()) for x in (their_maps, our_maps)]
    assert used[0] == parameters or parameters is None
    assert used[1] == orbits == int(orbit_labels(graph, "hnp").max()) + 1
    spans = (their_maps, our_maps, torch.cat([their_maps, our_maps]))
    ranks = [int(torch.linalg.matrix_rank(x)) for x in spans]
    assert ranks == [rank, orbits, orbits]


@pytest.mark.parametrize(
    ("sizes", "parameters"), [((2, 3, 4, 2), 62), ((2, 3, 4, 3, 2), 100), ((2, 3), 10)]
)
def test_np_span_is_ours(sizes, parameters):
    _, published_spec = draw(sizes)
    spec = spec_from_nfn(published_spec).fold("np")
    layer = Published(theirs.NPLinear(published_spec, 1, 1), "np")
    assert completeness(layer, spec) == (parameters,) * 3


def test_what_the_published_hnp_layer_lacks():
    """The map from the last hidden bias to the last weight starts at 0, and is then learned."""
    features, published_spec = draw("2-3-4-2")
    layer = from_nfn(theirs.HNPLinear(published_spec, 3, 4))
    spec = spec_from_nfn(published_spec).fold("hnp")
    pieces = find_pieces(spec)["hidden2"]
    last, bias = pieces["hidden2", "weight", "output"], pieces["hidden2"]
    rows, columns = slice(last.start * 4, last.stop * 4), slice(bias.start * 3, bias.stop * 3)
    parameter = layer.maps["hidden2"]
    assert (parameter[rows, columns] == 0).all()
    assert (parameter != 0).sum() == parameter.numel() - 2 * 4 * 3
    out = layer(batch_from_nfn(features).features("hnp"))
    sum(x.square().sum() for _, x in out.tensors()).backward()
    assert (parameter.grad[rows, columns] != 0).all()


def test_one_layer_under_hnp():
    features, spec = draw("2-3")
    with pytest.raises(IndexError):
        theirs.HNPLinear(spec, 3, 4)
    ours = spec_from_nfn(spec).fold("hnp")
    out = NFLinear(ours, 3, 4)(batch_from_nfn(features).features("hnp"))
    assert to_nfn(out).weights[0].shape == (2, 4, 3, 2)
    with pytest.raises(ValueError, match="at least two layers"):
        from_nfn(theirs.HNPPool(spec))
