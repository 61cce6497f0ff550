"""Three networks of different widths, one batch, one model that predicts and one that edits."""

import torch
from torch import nn

from nfn_graph import NFN, Batch, WeightGraph
from nfn_graph.testing import assert_invariant


def network(width: int) -> WeightGraph:
    """A small image-to-number MLP, as a graph."""
    layers = [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)]
    return WeightGraph.from_tensors([f.weight for f in layers], [f.bias for f in layers])


torch.manual_seed(0)
with torch.no_grad():
    graphs = [network(width) for width in (16, 32, 24)]
    batch = Batch.from_data_list(graphs)
    print(graphs[0])
    print(batch)

    classifier = NFN(graphs[0].spec, channels=(16, 16), symmetry="hnp", out_features=10)
    print("class scores:", tuple(classifier(batch).shape))

    editor = NFN(graphs[0].spec, channels=(16, 1), symmetry="hnp")
    edited = editor(batch, return_graph=True)
    print("edited weights of the second network:")
    for key, tensor in edited[1].to_tensors().items():
        print(f"  {key:9} {tuple(tensor.shape)}")

    assert_invariant(classifier, batch, "hnp", folded=False)
    print("permuting hidden neurons changes no score")
