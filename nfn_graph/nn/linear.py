"""The NF-Layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._fused import fused_message_passing
from nfn_graph.nn._layer_checks import (
    check_aggregate,
    check_features,
    check_folded,
    check_parameters,
)
from nfn_graph.nn._message_passing import message_passing
from nfn_graph.ops import Reduce, current_backend
from nfn_graph.ops._precision import autocast_dtype, cast, without_autocast
from nfn_graph.spec import FoldedSpec, Key, Part, Site
from nfn_graph.spec._checks import check_count


class NFLinear(nn.Module):
    r"""The complete equivariant linear layer of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (section 2.2; appendix B for NP, C for HNP), as message
    passing between sites. In a flat network these are weights, neurons and the network:

    .. math::
        \text{network} \quad g' &= N\,[\text{means of all weights}, \text{means of all
            neurons}, g] + b \\
        \text{neuron} \quad v'_j &= M_l\,[W_{j,\star}, W_{\star,j}, \ldots, v_j]
            + g'\text{'s message} \\
        \text{weight} \quad W'_{jk} &= D_t\,W_{jk} + \text{messages of neurons } j
            \text{ and } k + g'\text{'s message}

    Every map's output is split into the site's own new features and one message for each finer
    site. The layer has one parameter per orbit of the group on pairs of entries, so it can express
    all equivariant linear maps, :math:`f(\sigma U) = \sigma f(U)`, and no others; layers of a role
    type share their parameters, so it expresses fewer for them. The spec determines whether the
    group is NP or HNP. In PyG, the most similar layer is `MetaLayer`, which
    also updates edges, nodes and the graph.

    Args:
        spec: The folded spec of the features.
        in_channels: The number of input channels.
        out_channels: The number of output channels.
        bias: Whether to add a constant per output tap and channel.
        pointwise: Whether to drop all aggregates and messages (the paper's NFN_PT).
        aggr: `"mean"` or `"sum"` (or PyG's name for it, `"add"`), the paper's :math:`\star`.
        max_parameters: The number of parameters above which the layer raises an error.

    Shapes:
        - input: features of `spec` with `in_channels`.
        - output: features of `spec` with `out_channels`.

    Example:
        >>> import torch
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> layer = NFLinear(spec.fold("np"), in_channels=1, out_channels=8)
        >>> layer(graph.features("np")).neurons["hidden1"].shape
        torch.Size([4, 1, 8])
    """

    def __init__(
        self,
        spec: FoldedSpec,
        in_channels: int,
        out_channels: int,
        bias: bool = True,
        pointwise: bool = False,
        aggr: Reduce = "mean",
        max_parameters: int = 2**28,
    ) -> None:
        super().__init__()
        self.spec = check_folded(spec)
        self.in_channels = check_count(in_channels, 1, "in_channels")
        self.out_channels = check_count(out_channels, 1, "out_channels")
        self.pointwise = pointwise
        self.aggr: Reduce = check_aggregate(aggr, ("mean", "sum"))
        self._check_size(max_parameters)
        self.maps = nn.ParameterDict(
            {
                site.name: torch.empty(out_taps * out_channels, in_taps * in_channels)
                for site in spec.sites
                for out_taps, in_taps in [self._map_taps(site)]
                if out_taps
            }
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(spec.summary_taps * out_channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises maps uniformly, with variance 1/n for own entries and 1/(3n) for messages.

        Here n is the number of inputs of a site's map. Messages carry means over many entries,
        which hardly differ between entries. With equal variances, the features of an entry would
        contain little of the entry itself after a few layers.
        """
        for site in self.spec.sites:
            if site.name in self.maps:
                matrix = self.maps[site.name]
                parts = site.parts[-1:] if self.pointwise else site.parts
                for part, rows in self._split(matrix, parts):
                    _fill(rows, part, matrix.shape[1])
        if self.bias is not None:
            network = self.spec.sites[-1]
            for part, rows in self._split(self.bias, network.parts):
                # Without messages, a constant is added to the result of its own entry's map.
                taps = self.spec.site[part.key].taps if self.pointwise else network.read_taps
                _fill(rows, part, max(1, taps * self.in_channels))

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies the layer."""
        check_features(features, self.spec, self.in_channels)
        check_parameters(features, self.maps.values())
        features = features.zero_unfilled()
        values = self.values(features)
        maps = self.site_maps()
        with without_autocast(features.device):
            if self.pointwise:
                new = self._pointwise(values, maps)
            else:
                run = fused_message_passing if current_backend() == "fused" else message_passing
                mean = self.aggr == "mean"
                new = run(self.spec, features.incidence, values, maps, self.bias, mean)
        return features.replace(self.entries(new))

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        kind = "pointwise, " if self.pointwise else ""
        return f"{self.in_channels} -> {self.out_channels}, {kind}{self.spec}"

    def values(self, features: WeightFeatures) -> list[Tensor]:
        """The own entries of every site, `[rows, taps * channels]`, in the dtype of the
        computation.

        They are empty for a site of which the features contain no entries.
        """
        dtype = autocast_dtype(features.device) or features.dtype
        known = dict(features.tensors())
        rows = features.incidence.sites[self.spec.symmetry]
        empty = next(iter(known.values())).new_empty(0, dtype=dtype)
        return [
            cast(known[site.key].flatten(1), dtype)
            if site.key in known
            else empty.reshape(0 if site.taps else rows[i].num_rows, site.taps * self.in_channels)
            for i, site in enumerate(self.spec.sites)
        ]

    def site_maps(self) -> list[Tensor | None]:
        """The map of every site; None for a site with an empty summary."""
        return [self.maps.get(site.name) for site in self.spec.sites]

    def entries(self, new: Sequence[Tensor]) -> dict[Key, Tensor]:
        """The new entries of all sites as features, `[rows, taps, channels]`."""
        return {
            site.key: x.view(x.shape[0], site.taps, self.out_channels)
            for site, x in zip(self.spec.sites, new, strict=True)
            if site.key in self.spec.taps
        }

    def constants(self) -> dict[Key, Tensor | None]:
        """The constant term of every kind of entry."""
        if self.bias is None:
            return dict.fromkeys(self.spec.taps)
        return {part.key: x for part, x in self._split(self.bias, self.spec.sites[-1].parts)}

    def _pointwise(self, values: Sequence[Tensor], maps: Sequence[Tensor | None]) -> list[Tensor]:
        constants = self.constants()
        new = []
        for site, x, matrix in zip(self.spec.sites, values, maps, strict=True):
            constant = constants.get(site.key)
            constant = None if constant is None else constant.to(x.dtype)
            new.append(x if matrix is None else linear(x, matrix.to(x.dtype), constant))
        return new

    def _map_taps(self, site: Site) -> tuple[int, int]:
        """The numbers of taps that the map of a site returns and reads."""
        if self.pointwise:
            return site.taps, site.taps
        return site.summary_taps, site.read_taps

    def _split(self, parameter: Tensor, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
        """The rows of a parameter that belong to each part of a summary."""
        sizes = [part.taps * self.out_channels for part in parts]
        return zip(parts, parameter.split(sizes), strict=True)

    def _check_size(self, limit: int) -> None:
        pair = self.in_channels * self.out_channels
        sizes = {site: math.prod(self._map_taps(site)) * pair for site in self.spec.sites}
        total = sum(sizes.values())
        if total > limit:
            largest = max(sizes, key=sizes.__getitem__)
            raise UserError(
                f"Expected a layer of at most {limit:,} parameters (got {total:,}, of which "
                f"{sizes[largest]:,} at {_called(largest)}). HNP grows with the square of fixed "
                f"sizes: use 'np' with IOEncoding, fewer channels, or raise max_parameters."
            )


def _fill(rows: Tensor, part: Part, inputs: int) -> None:
    """Samples the rows of a part uniformly, given the number of inputs of their map."""
    variance = 1 / inputs if part.below is None else 1 / (3 * inputs)
    bound = math.sqrt(3 * variance)
    rows.uniform_(-bound, bound)


def _called(site: Site) -> str:
    if not site.indices:
        return "the network"
    if isinstance(site.key, str):
        return f"neuron type '{site.key}'"
    return f"site {site.name}" if site.key[0] == "*" else f"weight type {site.key}"
