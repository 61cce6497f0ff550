"""The weights of a network as a typed graph of neurons."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage

from nfn_graph.data._chain import chain_layout
from nfn_graph.data._layout import Layout, gather_tensors, scatter_tensors
from nfn_graph.data._plain import to_data, to_hetero_data
from nfn_graph.features import Incidence, WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec, Symmetry

_Graph = TypeVar("_Graph", bound="WeightGraph")

_COLLATE_HINT = (
    "Batch networks with nfn_graph.Batch.from_data_list or nfn_graph.DataLoader, which keep "
    "different networks apart."
)


class WeightStorage(EdgeStorage):
    """The edges of one weight type.

    PyG's transforms silently skip edges without an `edge_index`, and here they would skip all
    edges. Reading the `edge_index`, or asking whether there is one, therefore raises an error that
    says how to get one.
    """

    def __getitem__(self, key: str) -> Any:
        if key == "edge_index" and key not in self._mapping:
            raise UserError(
                f"Expected edges with an edge_index (got {self._key} of a WeightGraph, which "
                f"stores none). Use graph.materialize()."
            )
        return super().__getitem__(key)


class WeightGraph(HeteroData):
    r"""A network as a PyG graph: neurons are nodes by layer, weights are edges.

    Every neuron type has a node store with `x` of shape `[neurons, taps, channels]`, its biases and
    norm parameters (there are no taps if it has neither). Every weight type has an edge store with
    `edge_attr` of shape `[edges, taps, channels]`, ordered target-major like a `[out, in, ...]`
    tensor. Layers are completely connected, so no `edge_index` is stored; :meth:`materialize` adds
    it. Graphs are made by :meth:`from_tensors`, :meth:`from_placements` and the converters.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> weights, biases = [torch.ones(4, 2), torch.ones(1, 4)], [torch.ones(4), torch.ones(1)]
        >>> graph = WeightGraph.from_tensors(weights, biases)
        >>> graph["hidden1"].x.shape, graph["input", "weight", "hidden1"].edge_attr.shape
        (torch.Size([4, 1, 1]), torch.Size([8, 1, 1]))
        >>> graph.to_tensors()["0.weight"].equal(weights[0])
        True
    """

    @classmethod
    def from_tensors(
        cls,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        keys: Sequence[tuple[str, str]] | None = None,
    ) -> WeightGraph:
        """Makes the graph of a chain of layers: an MLP or a plain CNN.

        Args:
            weights: Tensors `[out, in, ...]`, first layer first. The axes after the second one are
                those of convolution kernels.
            biases: Tensors `[out]`, or None for a layer without a bias.
            keys: The names of each layer's weight and bias; by default, `("0.weight", "0.bias")`
                for the first layer, and so on.

        The graph shares the memory of the tensors, and gradients flow back to them. Detach
        parameters that are only data.
        """
        return cls.from_placements(*chain_layout(weights, biases, keys))

    @classmethod
    def from_placements(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> WeightGraph:
        """Builds a graph from named tensors and a layout with placements."""
        if not layout.placements:
            raise UserError("Expected a layout with placements of tensors (got none)")
        missing = [p.keys[0] for p in layout.placements if p.keys[0] not in tensors]
        if missing:
            raise UserError(f"Expected tensors {missing} (got {list(tensors)})")
        stores = gather_tensors(layout, tensors)
        like = next(iter(stores.values()))
        for name in layout.spec.neuron.keys() - stores.keys():
            stores[name] = like.new_empty(layout.num_rows(name), 0, 1)
        return cls._of(layout, stores)

    @property
    def layouts(self) -> list[Layout]:
        """The layout of the network, or of every network of a batch."""
        layout = self._global_store.get("layout")
        if layout is None:
            raise UserError(
                "Expected a graph made by WeightGraph.from_tensors, a converter or "
                "nfn_graph.Batch (got one without a layout)"
            )
        return [layout] if isinstance(layout, Layout) else list(layout)

    @property
    def spec(self) -> NetworkSpec:
        """The types of the network, or of all networks of a batch."""
        # Networks of one kind share a spec, and comparing objects is faster than comparing specs.
        given = (layout.within or layout.spec for layout in self.layouts)
        first, *others = dict.fromkeys({id(spec): spec for spec in given}.values())
        for other in others:
            if set(other.unsized.types.values()) != set(first.unsized.types.values()):
                raise UserError(
                    f"Expected a batch of networks that share their types (got "
                    f"{len(others) + 1} different specs, collated by PyG's own Batch, which mixes "
                    f"up networks: {first.difference(other)}). {_COLLATE_HINT}"
                )
        return NetworkSpec.union([first, *others])

    def features(
        self, symmetry: Symmetry | None = None, spec: NetworkSpec | None = None
    ) -> WeightFeatures:
        """Makes the features that layers work on.

        Args:
            symmetry: `"np"` or `"hnp"` for the folded view of that group; None for the networks'
                own tensors.
            spec: A spec that contains all types of this graph and possibly more, such as that of a
                model that was built for several kinds of networks. The graph's own spec if None.
        """
        own = self.spec
        self._check(own)
        if spec is None:
            spec = own
        elif spec != own:
            _check_holds(spec, own)
        stores = stored_tensors(self, own)
        like = stores[own.weights[0].key]
        dtype = reduce(torch.promote_types, {x.dtype for x in stores.values()})
        for key in spec.taps.keys() - stores.keys():
            stores[key] = like.new_empty(0, spec.taps[key], like.shape[-1])
        tensors = {key: stores[key].to(dtype) for key in spec.taps}
        shapes = [layout.shape_in(spec) for layout in self.layouts]
        incidence = Incidence.of(spec, shapes, like.device)
        raw = WeightFeatures(tensors, spec, incidence, self)
        return raw if symmetry is None else raw.fold(symmetry)

    def with_features(self, tensors: Mapping[Any, Tensor]) -> WeightGraph:
        """Replaces the values of the network or batch; labels and all other attributes are kept."""
        graph, spec = copy.copy(self), self.spec
        for key in spec.types:
            graph[key][attribute_of(key)] = tensors[key]
        graph._check(spec)
        return graph

    def rebuilt(self, layout: Layout, stores: Mapping[Key, Tensor]) -> WeightGraph:
        """Makes a network of another layout with the labels of this one.

        Attributes that were added to single stores are dropped, since their rows change.
        """
        graph = WeightGraph._of(layout, stores)
        for name, value in self._global_store.items():
            if name != "layout":
                graph[name] = value
        graph._check(layout.spec)
        return graph

    @classmethod
    def _of(cls, layout: Layout, stores: Mapping[Key, Tensor]) -> WeightGraph:
        mapping: dict[Any, dict[str, Any]] = {"_global_store": {"layout": layout}}
        for key in layout.spec.types:
            mapping[key] = {attribute_of(key): stores[key]}
        return cls.from_dict(mapping)

    def to_tensors(self) -> dict[str, Tensor]:
        """Restores the tensors that the graph was made from, by name and bit for bit.

        With one channel they have their original shapes; with several channels, these are the last
        axis.
        """
        if len(self.layouts) != 1 or not isinstance(self.layout, Layout):
            raise UserError("Expected one network (got a batch; take batch[i] of it)")
        if not self.layout.placements:
            raise UserError(
                "Expected a graph made from tensors (got one made from features, such as by "
                "nfn_graph.testing.random_graph)"
            )
        tensors = scatter_tensors(self.layout, stored_tensors(self, self.spec))
        return {key: x.squeeze(-1) if x.shape[-1] == 1 else x for key, x in tensors.items()}

    def run(
        self,
        inputs: Tensor | Sequence[Tensor],
        *,
        per_network: bool = False,
        return_activations: bool = False,
    ) -> Any:
        r"""Runs the network, or every network of a batch, on inputs.

        Networks with the same computation run together even if their widths differ. The result is
        differentiable with respect to the features and the inputs. Sums use at least float32, also
        under autocast. With several channels, the first one holds the weights.

        Args:
            inputs: The input with a batch axis, as the network itself takes it, or a sequence for a
                network with several inputs.
            per_network: Whether every network has its own inputs, along a first axis.
            return_activations: Whether to return the activations of the neuron types as well.

        Returns:
            The output, or a tuple if the network has several outputs; for a batch,
            `[networks, ...]`. With `return_activations`, also a dictionary of tensors
            `[neurons, inputs, ...]` for the neuron types, in the order of the rows of
            `graph[name].x`: the last values that the network computes for these neurons before it
            mixes them with others.

        Raises:
            ValueError: The computation of the network is not known (the message gives the reason),
                or the network does not accept such inputs.
        """
        from nfn_graph.run import run  # `run` is built on `data`.

        return run(self, inputs, per_network=per_network, return_activations=return_activations)

    def to(
        self: _Graph,
        device: int | str | torch.device | torch.dtype | None = None,
        *args: str | torch.dtype,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> _Graph:
        """Moves all tensors to a device, as in PyG, and casts the features.

        As in PyG, this changes the graph itself. Labels and other attributes keep their dtype.

        Args:
            device: The device, or the dtype of the features.
            *args: The dtype of the features, and the names of the attributes to move or cast; by
                default, all of them.
            dtype: The dtype of the features.
            non_blocking: Whether to copy without waiting; see :meth:`torch.Tensor.to`.
        """
        given = [x for x in (device, *args, dtype) if isinstance(x, torch.dtype)]
        names = [x for x in args if not isinstance(x, torch.dtype)]
        for wanted in given:
            if not wanted.is_floating_point:
                raise TypeError(f"Expected a floating-point dtype of the features (got {wanted})")
        if device is not None and not isinstance(device, torch.dtype):
            super().to(device, *names, non_blocking=non_blocking)
        for wanted in given:
            for store in (*self.node_stores, *self.edge_stores):
                name = attribute_of(store._key)
                if name in store and name in (names or [name]):
                    store[name] = store[name].to(wanted)
        return self

    def materialize(self) -> HeteroData:
        """Makes a plain `HeteroData` with `edge_index` and two-dimensional features.

        PyG's heterogeneous convolutions and its transforms of the topology need this form.
        """
        return to_hetero_data(self)

    def to_homogeneous(self, *args: Any, spec: NetworkSpec | None = None, **kwargs: Any) -> Data:
        """Makes a plain `Data` for any PyG model, with taps padded by zeros, masks and type ids.

        `x` is `[nodes, taps * channels]` with the mask `x_mask`, `edge_attr` is
        `[edges, taps * channels]` with `edge_mask`; `node_type` and `edge_type` are
        positions in the spec; `batch` gives the network of each node.

        Without `spec`, the positions and the number of taps are those of this graph, so the same id
        can stand for another type in other networks. A model of several kinds of networks needs one
        spec for all of them.

        Args:
            spec: A spec that contains all types of this graph, such as `NetworkSpec.union` of all
                networks.
        """
        if args or kwargs:
            raise TypeError(
                "Expected no argument except spec. For the options of PyG's own method, call "
                "materialize().to_homogeneous(...)."
            )
        return to_data(self, spec)

    @classmethod
    def from_dict(cls: type[_Graph], mapping: dict[str, Any]) -> _Graph:
        """Builds a graph from its stores, as in PyG."""
        graph = cls()
        for key, attributes in mapping.items():
            store = graph._global_store if key == "_global_store" else graph[key]
            for name, value in attributes.items():
                setattr(store, name, value)
        return graph

    def get_edge_store(self, src: str, rel: str, dst: str) -> WeightStorage:
        """The store of an edge type, which is created if it does not exist."""
        key = (src, rel, dst)
        if key not in self._edge_store_dict:
            self._check_type_name(rel)
            self._edge_store_dict[key] = WeightStorage(_parent=self, _key=key)
        return self._edge_store_dict[key]

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "_slice_dict" and "layout" in self._global_store:
            # PyG sets this attribute after collating, so this is where a mixed-up batch is refused.
            self._check(self.spec)
        super().__setattr__(key, value)

    def __repr__(self) -> str:
        if "layout" not in self._global_store:
            return f"{type(self).__name__}()"
        try:
            spec = self.spec
            self._check(spec)
        except ValueError:
            return super().__repr__()
        names = [f"{n.name}{'[fixed]' if n.fixed else ''}" for n in spec.neurons]
        for w in spec.weights:
            names.append(f"{w.source} -> {w.target}{'' if w.name == 'weight' else f' ({w.name})'}")
        stored = list(stored_tensors(self, spec).values())
        types = [f"{n} {x.shape[0]} x {x.shape[1]}" for n, x in zip(names, stored, strict=True)]
        count = "" if isinstance(self.layout, Layout) else f"{len(self.layouts)} networks, "
        lines = [
            f"{type(self).__name__}({count}{sum(x.shape[0] * x.shape[1] for x in stored)} "
            f"entries, {stored[0].shape[-1]} channel(s), {stored[0].dtype}",
            f"  neurons: {', '.join(types[: len(spec.neurons)])}",
            f"  weights: {', '.join(types[len(spec.neurons) :])}",
        ]
        extra = [k for k in self._global_store.keys() if k != "layout"]  # noqa: SIM118
        return "\n".join(lines + [f"  also: {', '.join(extra)}"] * bool(extra)) + ")"

    def _check(self, spec: NetworkSpec) -> None:
        """Compares the stores with the layouts without reading the memory of any tensor."""
        # Networks of one kind share a layout.
        layouts = {id(layout): layout for layout in self.layouts}
        counts = Counter(map(id, self.layouts))
        known = {*self.node_types, *self.edge_types}
        channels = None
        for key, type_ in spec.types.items():
            what = f"{'neuron' if isinstance(key, str) else 'weight'} type {key!r}"
            x = self[key].get(attribute_of(key)) if key in known else None
            if not isinstance(x, Tensor):
                raise UserError(
                    f"Expected a tensor '{attribute_of(key)}' of {what} (got {x}). {_COLLATE_HINT}"
                )
            rows = sum(counts[i] * layout.num_rows(key) for i, layout in layouts.items())
            if x.dim() != 3 or tuple(x.shape[:2]) != (rows, type_.taps):
                raise UserError(
                    f"Expected features [{rows}, {type_.taps}, channels] of {what} "
                    f"(got {list(x.shape)})"
                )
            channels = x.shape[2] if channels is None else channels
            if x.shape[2] != channels:
                raise UserError(
                    f"Expected {channels} channels of {what}, as of the others (got {x.shape[2]})"
                )


def attribute_of(key: Key) -> str:
    """The attribute of a type's store that holds its features."""
    return "x" if isinstance(key, str) else "edge_attr"


def stored_tensors(graph: WeightGraph, spec: NetworkSpec) -> dict[Key, Tensor]:
    """The features of every type, as they are in the stores of the graph.

    Example:
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2)])
        >>> list(stored_tensors(graph, graph.spec))
        ['input', 'output', ('input', 'weight', 'output')]
    """
    return {key: graph[key][attribute_of(key)] for key in spec.types}


def _check_holds(spec: NetworkSpec, own: NetworkSpec) -> None:
    """Raises an error unless `spec` has every type of `own`."""
    known = spec.unsized.types
    for key, type_ in own.unsized.types.items():
        if key not in known:
            raise UserError(
                f"Expected a spec with all types of the graph (got one without {key!r}). "
                f"Use NetworkSpec.union of the specs of all networks."
            )
        if known[key] != type_:
            raise UserError(f"Expected {key!r} as in the spec: {known[key]} (got {type_})")
    for name, neuron in own.neuron.items():
        size = spec.neuron[name].size
        if size not in (None, neuron.size):
            raise UserError(
                f"Expected {size} neurons of the fixed neuron type '{name}' (got "
                f"{neuron.size or 'different sizes'}). Use 'np' and NetworkSpec.union of the "
                f"specs of all networks, which leaves sizes open."
            )
