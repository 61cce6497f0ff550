"""Batches of networks of different sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils.data
from torch import Tensor
from torch_geometric.data import Batch as PyGBatch
from torch_geometric.data.batch import DynamicInheritance
from torch_geometric.loader.dataloader import Collater as PyGCollater

from nfn_graph.data._graph import WeightGraph, attribute_of
from nfn_graph.data._layout import Layout
from nfn_graph.features import group_of_rows
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec


class _StaticInheritance(DynamicInheritance, type(WeightGraph)):  # type: ignore[misc]
    """Keeps PyG from deriving a class for every kind of graph: this one is already derived."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_base_cls", None)
        return type.__call__(cls, *args, **kwargs)


# PyG's Batch and HeteroData contradict each other in their annotations.
class Batch(PyGBatch, WeightGraph, metaclass=_StaticInheritance):  # type: ignore[misc, metaclass]
    """Networks of different widths, and of different types, as one graph.

    A network that lacks a type of the union gets an empty store for it before PyG collates the
    graphs, so that pointers and `batch[i]` are correct.

    Example:
        >>> from nfn_graph import Batch, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> batch = Batch.from_data_list([random_graph(spec, {"hidden1": n}) for n in (3, 5)])
        >>> batch.num_graphs, batch["hidden1"].x.shape, batch[1]["hidden1"].x.shape
        (2, torch.Size([8, 1, 1]), torch.Size([5, 1, 1]))
    """

    @classmethod
    def from_data_list(  # type: ignore[override]
        cls,
        data_list: Sequence[WeightGraph],
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
    ) -> Batch:
        """Batches graphs.

        Args:
            data_list: The graphs, at least one, none of them a batch.
            follow_batch: As in PyG.
            exclude_keys: As in PyG.
        """
        graphs = list(data_list)
        if not graphs:
            raise UserError("Expected at least one graph to batch (got none)")
        for graph in graphs:
            if not isinstance(graph, WeightGraph) or isinstance(graph, PyGBatch):
                raise TypeError(f"Expected WeightGraphs to batch (got {type(graph).__name__})")
        spec = NetworkSpec.union(graph.spec for graph in graphs)
        _check_channels(graphs)
        batch: Batch = super().from_data_list(
            [_inside(graph, spec) for graph in graphs], follow_batch, exclude_keys
        )
        return batch

    @classmethod
    def from_stores(
        cls,
        layouts: Sequence[Layout],
        stores: Mapping[Key, Tensor],
        attributes: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Builds a batch from features that are already concatenated.

        The result is the same as that of :meth:`from_data_list`, without making a graph of every
        network.

        Args:
            layouts: The layout of every network.
            stores: The features `[rows, taps, channels]` of every type of their union, network
                after network.
            attributes: Attributes of the graphs, such as labels, with one row per network.
        """
        if not layouts:
            raise UserError("Expected at least one layout to batch (got none)")
        # Most networks of a batch share their layout.
        kinds = {id(layout): layout for layout in layouts}
        spec = NetworkSpec.union(layout.spec for layout in kinds.values())
        inside = {number: layout.inside(spec) for number, layout in kinds.items()}
        # Types that the first network lacks follow its own types.
        own = layouts[0].spec
        keys: list[Key] = [*{**own.neuron, **spec.neuron}, *{**own.weight, **spec.weight}]
        rows = {number: [layout.num_rows(key) for key in keys] for number, layout in kinds.items()}
        sizes = torch.tensor([rows[id(layout)] for layout in layouts]).t().contiguous()
        labels = {"layout": [inside[id(layout)] for layout in layouts], **(attributes or {})}
        none = torch.zeros(len(layouts), dtype=torch.long)
        mapping: dict[Any, dict[str, Any]] = {"_global_store": labels}
        slices: dict[Any, Any] = dict.fromkeys(labels, torch.arange(len(layouts) + 1))
        increments: dict[Any, Any] = {**dict.fromkeys(labels, none), "layout": None}
        for key, counts in zip(keys, sizes, strict=True):
            name = attribute_of(key)
            pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            mapping[key] = {name: stores[key]}
            if isinstance(key, str):
                mapping[key]["batch"] = group_of_rows(counts, int(pointers[-1]))
                mapping[key]["ptr"] = pointers.clone()
            slices[key], increments[key] = {name: pointers}, {name: none}
        batch: Batch = cls.from_dict(mapping)
        batch._num_graphs = len(layouts)
        batch._inc_dict, batch._slice_dict = increments, slices
        return batch

    def get_example(self, idx: int) -> WeightGraph:
        """The network at a position, with its original types."""
        number = int(idx)
        if not -self.num_graphs <= number < self.num_graphs:
            raise IndexError(f"Expected an index below {self.num_graphs} (got {number})")
        graph = cast("WeightGraph", super().get_example(number % self.num_graphs))
        graph.layout = graph.layout.inside(None)
        for key in {*graph.node_types, *graph.edge_types} - graph.layout.spec.types.keys():
            del graph[key]
        return graph

    def __reduce__(self) -> Any:
        return Batch, (), self.__dict__.copy()


class GraphList(Sequence[WeightGraph]):
    """Graphs that can be batched without making each of them.

    `dataset.__getitems__` may return such a list: any loader can treat it as a list of graphs, and
    :class:`DataLoader` calls :meth:`collate`. With workers, it does so in the process that uses the
    batch, so that little data is sent there; a list must therefore be cheap to pickle.
    """

    def collate(self) -> Batch:
        """Makes the batch of all graphs, equal to that of `Batch.from_data_list`."""
        raise NotImplementedError


class DataLoader(torch.utils.data.DataLoader[Any]):
    """PyG's `DataLoader` with :class:`Batch` for weight graphs, also inside tuples and dicts.

    Args:
        dataset: The graphs.
        batch_size: The number of graphs per batch.
        shuffle: Whether to shuffle every epoch.
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: For `torch.utils.data.DataLoader`.

    Example:
        >>> from nfn_graph import DataLoader, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graphs = [random_graph(spec, {"hidden1": n}) for n in range(2, 12)]
        >>> [batch.num_graphs for batch in DataLoader(graphs, batch_size=4)]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("collate_fn", None)  # Lightning rebuilds loaders from their attributes.
        self.follow_batch = follow_batch
        self.exclude_keys = exclude_keys
        collate = _Collater(dataset, follow_batch, exclude_keys)
        super().__init__(dataset, batch_size, shuffle, collate_fn=collate, **kwargs)


class _Collater(PyGCollater):
    def __call__(self, batch: Sequence[Any]) -> Any:
        if isinstance(batch, GraphList) and not self.follow_batch and not self.exclude_keys:
            is_worker = torch.utils.data.get_worker_info() is not None
            return _CollatedWhenSent(batch) if is_worker else batch.collate()
        if isinstance(batch[0], WeightGraph):
            return Batch.from_data_list(batch, self.follow_batch, self.exclude_keys)
        return super().__call__(list(batch))


class _CollatedWhenSent:
    """A list of graphs that is sent to another process, where it arrives as a batch."""

    def __init__(self, graphs: GraphList) -> None:
        self._graphs = graphs

    def __reduce__(self) -> Any:
        return type(self._graphs).collate, (self._graphs,)


def _inside(graph: WeightGraph, spec: NetworkSpec) -> WeightGraph:
    """Returns a shallow copy with empty stores for the types that the graph lacks, if any."""
    layout = graph.layout.inside(spec)
    if layout is graph.layout and layout.within is None:
        return graph
    own = graph.spec
    out = copy.copy(graph)
    out.layout = layout
    like = graph[own.weights[0].key].edge_attr
    for key, taps in spec.taps.items():
        if key not in own.taps:
            out[key][attribute_of(key)] = like.new_empty(0, taps, like.shape[-1])
    return out


def _check_channels(graphs: Sequence[WeightGraph]) -> None:
    channels = [next(iter(graph.edge_stores)).edge_attr.shape[-1] for graph in graphs]
    for number, found in enumerate(channels):
        if found != channels[0]:
            raise UserError(
                f"Expected {channels[0]} channels of every graph, as in graph 0 "
                f"(got {found} in graph {number})"
            )
