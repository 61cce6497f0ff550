"""A ready neural functional network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.nn._checks import check_features
from nfn_graph.nn._chunked import ChunkedFeatures
from nfn_graph.nn.elementwise import Dropout, Residual, activation
from nfn_graph.nn.encoding import FourierFeatures, IOEncoding
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.norm import ChannelNorm, Standardize
from nfn_graph.nn.pool import Pool
from nfn_graph.ops import Reduce
from nfn_graph.ops._backends import current_backend, use_backend
from nfn_graph.spec import NetworkSpec, Symmetry


class NFN(nn.Module):
    r"""NF-Layers with all that stands before and behind them.

    ======================  =============================================================
    invariant               `out_features` given: activation after every NF-Layer, pooling,
                            an MLP; returns `[graphs, out_features]`
    equivariant             `out_features=None`: activation between NF-Layers; returns
                            :class:`WeightFeatures`, or a graph with `return_graph=True`
    ======================  =============================================================

    The models of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (appendix D):

    ======================  =============================================================
    generalisation          `channels=(16, 16, 5), out_features=1, head=(1000, 1000, 1000)`
    INR classification      `channels=(512,) * 3, out_features=10, head=(1000, 1000),
                            head_dropout=0.5, io_encoding="sinusoidal"`
    winning tickets         `channels=(64, 64, 64, 10), in_channels=2`
    INR editing             `channels=(128, 128, 1), edit_scale=0.01`
    ======================  =============================================================

    Args:
        spec: The networks' own spec; `NetworkSpec.union` of several.
        channels: Output channels of each NF-Layer.
        symmetry: `"np"` or `"hnp"`.
        in_channels: Channels of the graphs.
        out_features: Outputs per network of an invariant model.
        head: Hidden sizes of its MLP.
        head_dropout: Dropout in its MLP.
        pool: Aggregate of its invariant layer.
        pointwise: Whether the NF-Layers drop all aggregates (NFN_PT).
        io_encoding: See :class:`IOEncoding`; None for none.
        encode_layers: Whether the IO-encoding also tells depths apart.
        fourier_features: Number of Gaussian Fourier features of the values; 0 for none.
        fourier_scale: Their scale.
        standardize: Whether to standardize the input; fit `model.standardize` first.
        norm: Whether to normalise channels before every NF-Layer but the first.
        dropout: Dropout after every activation.
        residual: Whether layers that keep the number of channels add their input.
        act: Name of the activation in `torch.nn`.
        reduce: Aggregate of the NF-Layers.
        recompute: Whether to keep only the input of every layer for the backward pass and to
            compute the rest of it again: less memory, more time.
        edit_scale: For an equivariant model that edits its input:
            :math:`U' = U + \gamma\,\mathrm{NFN}(U)`, with a learned :math:`\gamma` that starts
            here.
        max_parameters: See :class:`NFLinear`.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        channels: Sequence[int],
        symmetry: Symmetry = "np",
        *,
        in_channels: int = 1,
        out_features: int | None = None,
        head: Sequence[int] = (1000, 1000),
        head_dropout: float = 0.0,
        pool: Reduce = "mean",
        pointwise: bool = False,
        io_encoding: Literal["learned", "sinusoidal"] | None = None,
        encode_layers: bool = False,
        fourier_features: int = 0,
        fourier_scale: float = 10.0,
        standardize: bool = False,
        norm: bool = False,
        dropout: float = 0.0,
        residual: bool = False,
        act: str = "ReLU",
        reduce: Reduce = "mean",
        recompute: bool = False,
        edit_scale: float | None = None,
        max_parameters: int = 2**28,
    ) -> None:
        super().__init__()
        _check_options(spec, channels, in_channels, out_features, edit_scale)
        if symmetry == "np" and io_encoding != "learned":
            spec = spec.unsized  # Then any number of inputs and outputs will do.
        activation(act)  # Refuses an unknown name also where no layer uses it.
        self.spec = spec
        self.symmetry: Symmetry = symmetry
        self.folded = spec.fold(symmetry)
        self.recompute = recompute
        self.standardize = Standardize(spec, in_channels) if standardize else None
        width = in_channels
        before: list[nn.Module] = []
        if fourier_features:
            before.append(FourierFeatures(width, fourier_features, fourier_scale))
            width = 2 * fourier_features
        if io_encoding is not None:
            encoding = IOEncoding(spec, width, io_encoding, encode_layers=encode_layers)
            before.append(encoding)
            width = encoding.out_channels
        self.before = nn.Sequential(*before)
        options: dict[str, Any] = {
            "pointwise": pointwise,
            "reduce": reduce,
            "max_parameters": max_parameters,
        }
        widths = pairwise([width, *channels])
        layers = [NFLinear(self.folded, c_in, c_out, **options) for c_in, c_out in widths]
        is_invariant = out_features is not None
        # An activation in the pool keeps one tensor less than one before it.
        in_pool = is_invariant and not dropout and not (residual and _keeps_channels(layers[-1]))
        active = len(layers) - (in_pool or not is_invariant)
        self.layers = nn.Sequential()
        for i, layer in enumerate(layers):
            behind = act if i < active else None
            self.layers.append(_block(layer, norm and i > 0, behind, dropout, residual))
        self.edit_scale: nn.Parameter | None = None
        if edit_scale is not None:
            self.edit_scale = nn.Parameter(torch.tensor(edit_scale))
        self.pool: Pool | None = None
        self.head: nn.Sequential | None = None
        if out_features is not None:
            self.pool = Pool(self.folded, pool, act=activation(act) if in_pool else None)
            sizes = [self.pool.num_entries * channels[-1], *head]
            self.head = mlp(sizes, out_features, head_dropout)

    def forward(
        self,
        graph: WeightGraph | WeightFeatures,
        return_graph: bool = False,
        chunk_edges: int | None = None,
    ) -> Tensor | WeightFeatures | WeightGraph:
        """Applies the model to a graph, a batch, or features before the fold.

        Args:
            graph: The input.
            return_graph: Whether an equivariant model returns a graph.
            chunk_edges: Without gradients, how many edges of one type to hold at a time, for
                networks whose features do not fit into memory; the result is the same.
        """
        features = self._features(graph)
        if self.pool is not None and return_graph:
            raise ValueError("Expected an equivariant model to return a graph (got an invariant)")
        given = features
        if self.standardize is not None:
            features = self.standardize(features)
        features = self.before(features).fold(self.folded)
        if chunk_edges is not None:
            chunked = ChunkedFeatures(features, chunk_edges).apply(self.layers)
            if self.pool is not None and self.head is not None:
                return self.head(chunked.summary(self.pool))
            features = chunked.features()
        else:
            for layer in self.layers:
                features = self._run(layer, features)
        if self.pool is not None and self.head is not None:
            return self.head(self.pool(features).flatten(1))
        if self.edit_scale is not None:
            features = given.fold(self.folded) + features * self.edit_scale
        return features.to_graph() if return_graph else features

    def _features(self, graph: WeightGraph | WeightFeatures) -> WeightFeatures:
        if isinstance(graph, WeightGraph):
            return graph.features(spec=self.spec)
        if not isinstance(graph, WeightFeatures):
            raise TypeError(
                f"Expected a WeightGraph, a Batch or WeightFeatures (got {type(graph).__name__}). "
                f"Several graphs become one batch by nfn_graph.Batch.from_data_list."
            )
        check_features(graph, self.spec)
        return graph

    def _run(self, layer: nn.Module, features: WeightFeatures) -> WeightFeatures:
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(features)
        if torch.compiler.is_compiling():
            return checkpoint(layer, features, use_reentrant=False)
        # The backward pass may run after the block that chose the kernels, and elsewhere.
        backend = current_backend()
        return checkpoint(
            layer,
            features,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), use_backend(backend)),
        )


def _check_options(
    spec: NetworkSpec,
    channels: Sequence[int],
    in_channels: int,
    out_features: int | None,
    edit_scale: float | None,
) -> None:
    if not isinstance(spec, NetworkSpec):
        raise TypeError(
            f"Expected the networks' own NetworkSpec, such as batch.spec "
            f"(got {type(spec).__name__})"
        )
    if not channels:
        raise ValueError("Expected the channels of at least one NF-Layer (got none)")
    if edit_scale is not None and (out_features is not None or channels[-1] != in_channels):
        raise ValueError(
            f"Expected an equivariant model with {in_channels} output channels to edit its "
            f"input (got channels {tuple(channels)}, out_features={out_features})"
        )


def _block(
    layer: NFLinear, norm: bool, act: str | None, dropout: float, residual: bool
) -> nn.Module:
    """An NF-Layer with what stands before and behind it."""
    parts: list[nn.Module] = [ChannelNorm(layer.spec, layer.in_channels)] if norm else []
    parts.append(layer)
    if act is not None:
        parts.append(activation(act))
        parts += [Dropout(dropout)] if dropout else []
    block = nn.Sequential(*parts)
    return Residual(block) if residual and _keeps_channels(layer) else block


def _keeps_channels(layer: NFLinear) -> bool:
    return layer.in_channels == layer.out_channels


def mlp(sizes: Sequence[int], out_features: int, dropout: float) -> nn.Sequential:
    """Linear layers with ReLU and dropout between them."""
    layers: list[nn.Module] = []
    for first, second in pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))
