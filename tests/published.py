"""The published package `nfn` 0.1.2 as an oracle: its inputs, and comparison with ours."""

import torch
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from torch import Tensor, nn

from nfn_graph.interop.nfn import batch_from_nfn, from_nfn, to_nfn

MIXED = [(3, 3), (1, 1), (5, 3)]
NETWORKS = {
    "2-3": ((2, 3), None),
    "2-3-4": ((2, 3, 4), None),
    "2-3-4-2": ((2, 3, 4, 2), None),
    "2-3-4-5-1": ((2, 3, 4, 5, 1), None),
    "3x3": ((1, 4, 3, 2), [(3, 3), (3, 3), ()]),
    "3x3-short": ((2, 3, 2), [(3, 3), ()]),
    "mixed": ((2, 4, 3, 5), MIXED),
    "mixed-linear": ((2, 4, 3, 5, 2), [*MIXED, ()]),
}
DEEP = [name for name in NETWORKS if name != "2-3"]


def draw(name, networks=2, channels=3):
    """Random published features of a network, and their spec."""
    sizes, kernels = NETWORKS[name] if isinstance(name, str) else (name, None)
    layers = list(zip(sizes[:-1], sizes[1:], kernels or [()] * len(sizes[1:]), strict=True))
    weights = [torch.randn(networks, channels, n, m, *k, requires_grad=True) for m, n, k in layers]
    biases = [torch.randn(networks, channels, n, requires_grad=True) for n in sizes[1:]]
    features = WeightSpaceFeatures(weights, biases)
    return features, network_spec_from_wsfeat(features)


def tensors(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    output = output if isinstance(output, WeightSpaceFeatures) else to_nfn(output)
    return [*output.weights, *output.biases]


def assert_same(layer: nn.Module, features, view=None, ours=None) -> None:
    """Outputs and input gradients of a published layer and of its counterpart agree."""
    ours = from_nfn(layer) if ours is None else ours
    batch = batch_from_nfn(features)
    expected = tensors(layer(features))
    actual = tensors(ours(batch if view == "graph" else batch.features(view)))
    weights = [torch.randn_like(x) for x in expected]
    inputs = [*features.weights, *features.biases]
    gradients = [
        torch.autograd.grad(
            sum((c * x).sum() for c, x in zip(weights, out, strict=True)),
            inputs,
            allow_unused=True,
            materialize_grads=True,
        )
        for out in (actual, expected)
    ]
    for x, y in zip([*actual, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


class Published(nn.Module):
    """A published layer that takes and returns our features, for our checkers."""

    def __init__(self, layer, symmetry):
        super().__init__()
        self.layer, self.symmetry = layer, symmetry

    def forward(self, features):
        return batch_from_nfn(self.layer(to_nfn(features))).features(self.symmetry)
