"""Weight-space features: what layers pass to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nfn_graph.features._fold import Levels, fold, owned_taps, unfold
from nfn_graph.features._incidence import Incidence
from nfn_graph.spec._sites import FoldedSpec
from nfn_graph.spec._types import Key, NetworkSpec, Symmetry

if TYPE_CHECKING:
    from nfn_graph.data._graph import WeightGraph


class WeightFeatures:
    """Features of all entries of a batch of networks, by level.

    Operations return new features; every tensor is `[count, taps, channels]`. A pytree of its
    tensors.

    Attributes:
        weights: Per weight type, one row per edge.
        neurons: Per neuron type, one row per neuron.
        network: `{"network": ...}`, one row per network; empty before the fold.
        spec: What the rows and taps mean: the networks' own :class:`NetworkSpec`, or the
            :class:`FoldedSpec` that layers work on.
        incidence: Which neurons the edges touch, shared by all features of a batch.
    """

    __slots__ = ("_origin", "incidence", "network", "neurons", "spec", "weights")

    def __init__(
        self,
        levels: Levels,
        spec: NetworkSpec | FoldedSpec,
        incidence: Incidence,
        origin: WeightGraph | None = None,
    ) -> None:
        self.weights, self.neurons, self.network = levels
        self.spec = spec
        self.incidence = incidence
        self._origin = origin

    @property
    def num_graphs(self) -> int:
        """The number of networks in the batch."""
        return self.incidence.num_graphs

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self._any.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        """The device of the features."""
        return self._any.device

    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """All tensors with the names of their types: weights, neurons, network."""
        yield from self.weights.items()
        yield from self.neurons.items()
        yield from self.network.items()

    def owned(self) -> WeightFeatures:
        """Zeros where a network of a union of specs owns no such entry; usually `self`."""
        if not isinstance(self.spec, FoldedSpec):
            return self
        if self.incidence.is_whole:
            return self
        masks = owned_taps(self.spec, self.incidence)
        if not masks:
            return self
        neurons = {k: x.where(masks[k], 0) if k in masks else x for k, x in self.neurons.items()}
        network = {k: x.where(masks[k], 0) if k in masks else x for k, x in self.network.items()}
        return self.replace(Levels(self.weights, neurons, network))

    def fold(self, symmetry: Symmetry | FoldedSpec) -> WeightFeatures:
        """The same features in the view that NP or HNP layers work on.

        Args:
            symmetry: The group, or the spec's own fold if that is at hand.
        """
        if isinstance(self.spec, FoldedSpec):
            if symmetry in (self.spec, self.spec.symmetry):
                return self
            return self.unfold().fold(symmetry)
        spec = symmetry if isinstance(symmetry, FoldedSpec) else self.spec.fold(symmetry)
        levels = fold(spec, self.incidence, self._levels)
        return WeightFeatures(levels, spec, self.incidence, self._origin)

    def unfold(self) -> WeightFeatures:
        """The same features as the networks' own tensors."""
        if not isinstance(self.spec, FoldedSpec):
            return self
        levels = unfold(self.spec, self.incidence, self._levels)
        return WeightFeatures(levels, self.incidence.spec, self.incidence, self._origin)

    def to_graph(self) -> WeightGraph:
        """The graph (or batch) with these features: the inverse of `graph.features(...)`."""
        if self._origin is None:
            raise ValueError(
                "Expected features made by graph.features(...) (got features without a graph)"
            )
        raw = self.unfold()
        return self._origin.with_features(raw.weights, raw.neurons)

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightFeatures:
        """Applies a function to every tensor; it may change the number of channels only."""
        return self._map_levels(lambda k, x: function(x))

    def map_types(self, function: Callable[[Key, Tensor], Tensor]) -> WeightFeatures:
        """Applies `function(type, tensor)` to every tensor that has taps."""
        return self._map_levels(lambda k, x: function(k, x) if x.shape[1] else x)

    def combine(
        self, other: WeightFeatures, function: Callable[[Tensor, Tensor], Tensor]
    ) -> WeightFeatures:
        """Applies a function to every tensor and its counterpart in `other`."""
        self._check_same(other)
        theirs = dict(other.tensors())
        return self._map_levels(lambda k, x: function(x, theirs[k]))

    @staticmethod
    def cat(features: Sequence[WeightFeatures]) -> WeightFeatures:
        """Features of the same networks side by side, along the channels."""
        if not features:
            raise ValueError("Expected at least one WeightFeatures to concatenate (got none)")
        first = features[0]
        for other in features[1:]:
            first._check_same(other)
        all_tensors = [dict(f.tensors()) for f in features]
        return first._map_levels(lambda k, _: torch.cat([t[k] for t in all_tensors], -1))

    def to(self, *args: Any, **kwargs: Any) -> WeightFeatures:
        """Moves or casts all tensors, as :meth:`torch.Tensor.to`."""
        moved = self.map(lambda x: x.to(*args, **kwargs))
        incidence = self.incidence.to(moved.device)
        return WeightFeatures(moved._levels, self.spec, incidence, self._origin)

    def detach(self) -> WeightFeatures:
        """Features that share memory but not gradients."""
        return self.map(Tensor.detach)

    def replace(self, levels: Levels) -> WeightFeatures:
        """Features of the same networks with other tensors."""
        return WeightFeatures(levels, self.spec, self.incidence, self._origin)

    def __add__(self, other: WeightFeatures | Tensor | float) -> WeightFeatures:
        return self._arithmetic(other, torch.add)

    def __sub__(self, other: WeightFeatures | Tensor | float) -> WeightFeatures:
        return self._arithmetic(other, torch.sub)

    def __mul__(self, other: WeightFeatures | Tensor | float) -> WeightFeatures:
        return self._arithmetic(other, torch.mul)

    def __truediv__(self, other: WeightFeatures | Tensor | float) -> WeightFeatures:
        return self._arithmetic(other, torch.div)

    def __rsub__(self, other: Tensor | float) -> WeightFeatures:
        return self.map(lambda x: other - x)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> WeightFeatures:
        return self.map(torch.neg)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{k if isinstance(k, str) else '->'.join(k[::2])} {list(x.shape)}"
            for k, x in self.tensors()
        )
        return f"WeightFeatures({self.num_graphs} networks; {shapes})"

    @property
    def _levels(self) -> Levels:
        return Levels(self.weights, self.neurons, self.network)

    def _map_levels(self, function: Callable[[Key, Tensor], Tensor]) -> WeightFeatures:
        return self.replace(
            Levels(
                {k: function(k, x) for k, x in self.weights.items()},
                {k: function(k, x) for k, x in self.neurons.items()},
                {k: function(k, x) for k, x in self.network.items()},
            )
        )

    @property
    def _any(self) -> Tensor:
        return next(x for _, x in self.tensors())

    def _arithmetic(
        self, other: WeightFeatures | Tensor | float, function: Callable[..., Tensor]
    ) -> WeightFeatures:
        if isinstance(other, WeightFeatures):
            return self.combine(other, function)
        return self.map(lambda x: function(x, other))

    def _check_same(self, other: WeightFeatures) -> None:
        if self.spec != other.spec:
            raise ValueError(f"Expected features of {self.spec} (got {other.spec})")
        if self.incidence is not other.incidence and (
            self.incidence.shapes != other.incidence.shapes
        ):
            raise ValueError(
                f"Expected features of the same networks (got sizes {self.incidence.shapes} "
                f"and {other.incidence.shapes})"
            )


def _flatten(features: WeightFeatures) -> tuple[list[Any], _Context]:
    context = _Context(features.spec, features.incidence, features._origin)
    return [features.weights, features.neurons, features.network], context


def _unflatten(levels: Any, context: _Context) -> WeightFeatures:
    return WeightFeatures(Levels(*levels), *context)


class _Context(NamedTuple):
    """What features of the same networks share; equal where these are of the same sizes."""

    spec: NetworkSpec | FoldedSpec
    incidence: Incidence
    origin: WeightGraph | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Context):
            return NotImplemented
        return self.spec == other.spec and (
            self.incidence is other.incidence or self.incidence.shapes == other.incidence.shapes
        )

    def __hash__(self) -> int:
        return hash(self.spec)


pytree.register_pytree_node(
    WeightFeatures, _flatten, _unflatten, serialized_type_name="nfn_graph.WeightFeatures"
)
