"""Weight-space features, which layers pass to each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nfn_graph.features._fold import filled_taps, fold, unfold
from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import Rows
from nfn_graph.messages import UserError
from nfn_graph.spec import NETWORK, FoldedSpec, Key, NetworkSpec, Symmetry, WeightKey, type_label

# Graphs create features, which only keep a reference to their graph.
if TYPE_CHECKING:
    from nfn_graph.data import WeightGraph


class WeightFeatures:
    """Features of all entries of a batch of networks: one tensor for every type.

    Every tensor has the shape `[rows, taps, channels]`. Operations return new features. The class
    is registered as a pytree of its tensors.

    Args:
        tensors: The features of every type, in the order weights, neurons, network.
        spec: The meaning of rows and taps: the networks' own :class:`NetworkSpec`, or the
            :class:`FoldedSpec` that layers work on.
        incidence: The rows that belong together, shared by all features of a batch.
        origin: The graph that the features came from.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> features = graph.features("hnp")
        >>> doubled = features.map(lambda x: 2 * x)
        >>> doubled.to_graph()["hidden1"].x.equal(2 * graph["hidden1"].x)
        True
    """

    __slots__ = ("_origin", "_tensors", "incidence", "spec")

    def __init__(
        self,
        tensors: Mapping[Key, Tensor],
        spec: NetworkSpec | FoldedSpec,
        incidence: Incidence,
        origin: WeightGraph | None = None,
    ) -> None:
        self._tensors = dict(tensors)
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

    def tensors(self) -> ItemsView[Key, Tensor]:
        """All types with their tensors: weights, neurons, network."""
        return self._tensors.items()

    def __getitem__(self, key: Key) -> Tensor:
        return self._tensors[key]

    @property
    def weights(self) -> dict[WeightKey, Tensor]:
        """The features of the weights, one row per edge."""
        return {k: x for k, x in self._tensors.items() if not isinstance(k, str)}

    @property
    def neurons(self) -> dict[str, Tensor]:
        """The features of the neurons: biases and norm parameters."""
        return {k: x for k, x in self._tensors.items() if isinstance(k, str) and k != NETWORK}

    @property
    def network(self) -> dict[str, Tensor]:
        """`{"network": ...}`, one row per network; empty before the fold."""
        return {NETWORK: self._tensors[NETWORK]} if NETWORK in self._tensors else {}

    def rows(self, key: Key) -> Rows:
        """The rows of a type in groups: weights by target and source neuron, neurons by network."""
        if not isinstance(self.spec, FoldedSpec):
            return self.incidence.rows(key)
        number = self.spec.sites.index(self.spec.site[key])
        return self.incidence.sites[self.spec.symmetry][number]

    def graph_of(self, key: Key) -> Tensor:
        """`[rows]`, the network of each row of a type."""
        return self.incidence.graph_of(key, self.spec)

    def zero_unfilled(self) -> WeightFeatures:
        """Zeroes taps that a network of a union of specs does not have; usually returns `self`."""
        if not isinstance(self.spec, FoldedSpec) or self.incidence.is_whole:
            return self
        masks = filled_taps(self.spec, self.incidence)
        found = {k: x.where(masks[k], 0) for k, x in self._tensors.items() if k in masks}
        return self.replace(found) if found else self

    def fold(self, symmetry: Symmetry | FoldedSpec) -> WeightFeatures:
        """Folds the features into the view that NP or HNP layers work on.

        Args:
            symmetry: The symmetry group, or the folded spec itself if it is available.
        """
        if isinstance(self.spec, FoldedSpec):
            if symmetry in (self.spec, self.spec.symmetry):
                return self
            return self.unfold().fold(symmetry)
        spec = symmetry if isinstance(symmetry, FoldedSpec) else self.spec.fold(symmetry)
        tensors = fold(spec, self.incidence, self._tensors)
        return WeightFeatures(tensors, spec, self.incidence, self._origin)

    def unfold(self) -> WeightFeatures:
        """Unfolds the features into the networks' own tensors."""
        if not isinstance(self.spec, FoldedSpec):
            return self
        tensors = unfold(self.spec, self.incidence, self._tensors)
        return WeightFeatures(tensors, self.incidence.spec, self.incidence, self._origin)

    def to_graph(self) -> WeightGraph:
        """The graph (or batch) with these features: the inverse of `graph.features(...)`."""
        if self._origin is None:
            raise UserError(
                "Expected features made by graph.features(...) (got features without a graph)"
            )
        return self._origin.with_features(self.unfold()._tensors)

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightFeatures:
        """Applies a function to every tensor; it may change the number of channels only."""
        return self._map(lambda k, x: function(x))

    def map_types(self, function: Callable[[Key, Tensor], Tensor]) -> WeightFeatures:
        """Applies `function(type, tensor)` to every tensor that has taps.

        Tensors without taps stay as they are, so the function must keep the number of channels.
        """
        return self._map(lambda k, x: function(k, x) if x.shape[1] else x)

    def combine(
        self, other: WeightFeatures, function: Callable[[Tensor, Tensor], Tensor]
    ) -> WeightFeatures:
        """Applies a function to every tensor and its counterpart in `other`."""
        self._check_same(other)
        return self._map(lambda k, x: function(x, other[k]))

    @staticmethod
    def cat(features: Sequence[WeightFeatures]) -> WeightFeatures:
        """Concatenates features of the same networks along the channels."""
        if not features:
            raise UserError("Expected at least one WeightFeatures to concatenate (got none)")
        first = features[0]
        for other in features[1:]:
            first._check_same(other)
        return first._map(lambda k, _: torch.cat([f[k] for f in features], -1))

    def to(self, *args: Any, **kwargs: Any) -> WeightFeatures:
        """Moves or casts all tensors, as :meth:`torch.Tensor.to`.

        The labels of the graph that they came from move to the device as well.
        """
        moved = self.map(lambda x: x.to(*args, **kwargs))
        device, origin = moved.device, self._origin
        if device == self.device:
            return moved
        if origin is not None:
            origin = copy.copy(origin).to(device)
        return WeightFeatures(moved._tensors, self.spec, self.incidence.to(device), origin)

    def detach(self) -> WeightFeatures:
        """Returns features that share memory but not gradients."""
        return self.map(Tensor.detach)

    def replace(self, tensors: Mapping[Any, Tensor]) -> WeightFeatures:
        """Replaces the tensors of some types."""
        return self._with({**self._tensors, **tensors})

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
        shapes = ", ".join(f"{type_label(k)} {list(x.shape)}" for k, x in self.tensors())
        return f"WeightFeatures({self.num_graphs} networks; {shapes})"

    def _with(self, tensors: Mapping[Key, Tensor]) -> WeightFeatures:
        """Makes features of the same networks from these tensors only."""
        return WeightFeatures(tensors, self.spec, self.incidence, self._origin)

    def _map(self, function: Callable[[Key, Tensor], Tensor]) -> WeightFeatures:
        return self._with({k: function(k, x) for k, x in self._tensors.items()})

    @property
    def _any(self) -> Tensor:
        return next(iter(self._tensors.values()))

    def _arithmetic(
        self, other: WeightFeatures | Tensor | float, function: Callable[..., Tensor]
    ) -> WeightFeatures:
        if isinstance(other, WeightFeatures):
            return self.combine(other, function)
        return self.map(lambda x: function(x, other))

    def _check_same(self, other: WeightFeatures) -> None:
        if self.spec != other.spec:
            raise UserError(f"Expected features of {self.spec} (got {other.spec})")
        mine, theirs = self.incidence, other.incidence
        if mine is not theirs and mine.shapes != theirs.shapes:
            raise UserError(
                f"Expected features of the same networks (got sizes {mine.shapes} and "
                f"{theirs.shapes})"
            )


def _flatten(features: WeightFeatures) -> tuple[list[Any], _Context]:
    context = _Context(features.spec, features.incidence, features._origin)
    return [features._tensors], context


def _unflatten(children: Any, context: _Context) -> WeightFeatures:
    return WeightFeatures(children[0], context.spec, context.incidence, context.origin)


class _Context(NamedTuple):
    """The context that features share; contexts of networks with equal sizes are equal."""

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
