"""Imports models of the published package `nfn` (Zhou et al., PyPI `nfn` 0.1.2).

    model = from_nfn(published)            # an nn.Sequential of nfn's layers
    model(batch_from_nfn(features))        # what published(features) gives
    model(Batch.from_data_list(graphs))    # what it cannot take: networks of any widths

`docs/coming-from-nfn.md` gives the reasons to move. The parameters that the published `HNPLinear`
lacks are 0 in an imported model and can be learned. One-layer networks, for which it raises an
`IndexError`, work here.

What comes over:

======================================  ==================================================
published                               here
======================================  ==================================================
`NPLinear`, `HNPLinear`, `Pointwise`    `NFLinear` on the `"np"`, `"hnp"`, `"np"` fold
`NPLinear(io_embed=True)`               a learned `IOEncoding` of the unfolded features, and
                                        `NFLinear`
`NPPool`, `HNPPool`                     `Pool` in the published order and shape
`IOSinusoidalEncoding`                  `IOEncoding`, `"sinusoidal"`
`LearnedPosEmbedding`                   `IOEncoding`, `"learned"`; embeddings that are shared
                                        there (over taps, between last weight and bias) are
                                        equal here, until they are trained
`GaussianFourierFeatureTransform`       `FourierFeatures`
`TupleOp`, `ResBlock`                   `Activation` or `Dropout`, `Residual`
`SimpleLayerNorm`                       `JointNorm` of :mod:`nfn_graph.interop._nfn_modules`
`LearnedScale`                          `TypeScale` of the same
`ChannelDropout`                        `MatrixDropout` of the same
`nn.Sequential`                         `nn.Sequential`, with copies of all that follows the
                                        pooling
======================================  ==================================================

If the last layer is a convolution, the published `IOSinusoidalEncoding` uses the encoding of the
inputs for the outputs by mistake, and usually raises an error; the encoding here is the intended
one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from nfn_graph.interop._nfn_data import batch_from_nfn, spec_from_nfn, to_nfn
from nfn_graph.interop._nfn_layers import Replacement, assemble, convert, flatten, published_name
from nfn_graph.nn import Fold

__all__ = ["batch_from_nfn", "from_nfn", "spec_from_nfn", "to_nfn"]

_POOLS = ("NPPool", "HNPPool")


def from_nfn(module: nn.Module, in_channels: int | None = None) -> nn.Module:
    """Converts a layer or model of the published package, with its parameters.

    Args:
        module: A layer of `nfn`, or an `nn.Sequential` of such layers and the modules after the
            pooling.
        in_channels: The number of input channels, which is needed only for an
            `IOSinusoidalEncoding` that is not followed by a layer with known channels.

    Returns:
        For an `nn.Sequential`, one that takes a graph, a batch or features. For a layer, our
        layer, which takes features in the view of its spec. Parameters are copies.

    Example:
        >>> import torch
        >>> from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
        >>> from nfn.layers import NPLinear, NPPool
        >>> features = WeightSpaceFeatures([torch.randn(8, 1, 3, 2)], [torch.randn(8, 1, 3)])
        >>> spec = network_spec_from_wsfeat(features)
        >>> published = nn.Sequential(NPLinear(spec, 1, 4), NPPool(spec))
        >>> ours = from_nfn(published)(batch_from_nfn(features))
        >>> torch.allclose(ours, published(features), atol=1e-5)
        True
    """
    modules = list(flatten(module))
    pools = (i for i, part in enumerate(modules, 1) if published_name(part) in _POOLS)
    pooled = next(pools, len(modules))
    steps: list[Replacement] = []
    for i, part in enumerate(modules[:pooled]):
        known = _in_channels(modules[i:pooled])
        steps += convert(part, in_channels if known is None else known)
    layers = assemble(steps)
    if not isinstance(module, nn.Sequential) and len(layers) == 2 and isinstance(layers[0], Fold):
        return layers[1]
    model = nn.Sequential(*layers, *(copy.deepcopy(part) for part in modules[pooled:]))
    model.training = module.training
    return model


def _in_channels(modules: Sequence[Any]) -> int | None:
    """The number of input channels of the first layer, if it or a later layer has this number."""
    added = 0
    for module in modules:
        name = published_name(module)
        if name == "IOSinusoidalEncoding":
            added += module.num_out_chan(0)
        elif name == "ResBlock":
            known = _in_channels([*flatten(module.norm), *flatten(module.base_layer)])
            return None if known is None else known - added
        elif name == "TupleOp" and published_name(module.op) == "ChannelLinear":
            return int(module.op.linear.in_features) - added
        for attribute in ("c_in", "in_channels", "channels"):
            if hasattr(module, attribute):
                return int(getattr(module, attribute)) - added
    return None
