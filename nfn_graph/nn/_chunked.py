"""Inference in chunks of edges, for networks whose features do not fit into memory.

Between two layers only the neurons' messages are kept. An edge's features follow from its own
entries and from the messages of its two neurons, so they are computed again, chunk by chunk,
whenever a layer needs their sums. The result is exact and needs the memory of one chunk, but every
layer is computed again for each of the layers after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._fused import average, bag_messages, bag_sums, transposed
from nfn_graph.nn._layer_checks import check_folded
from nfn_graph.nn._message_passing import down, up
from nfn_graph.nn.elementwise import Dropout, Residual
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.pool import Pool, network_summary
from nfn_graph.ops._precision import autocast_dtype, sum_dtype, without_autocast
from nfn_graph.spec import Key, Site


class Stage(NamedTuple):
    """An NF-Layer with the modules before and behind it, which act on single entries.

    The `messages` to the weights of each leaf are a table of the messages of all its covers, or the
    constant of a pointwise layer.
    """

    before: Sequence[nn.Module]
    layer: NFLinear
    behind: Sequence[nn.Module]
    residual: bool
    messages: dict[Key, Tensor | None]

    @classmethod
    def of(cls, module: nn.Module) -> Stage:
        """Splits one stage of a model into its modules."""
        residual = isinstance(module, Residual)
        inner = module.layer if isinstance(module, Residual) else module
        parts: list[nn.Module] = list(inner) if isinstance(inner, nn.Sequential) else [inner]
        if any(isinstance(part, Dropout) and part.training and part.p for part in parts):
            raise UserError("Expected a model in eval() for chunk_edges (got one in train())")
        layers = [(i, part) for i, part in enumerate(parts) if isinstance(part, NFLinear)]
        if len(layers) != 1:
            raise UserError(f"Expected one NFLinear in a stage (got {len(layers)})")
        place, layer = layers[0]
        return cls(parts[:place], layer, parts[place + 1 :], residual, {})


class ChunkedFeatures:
    """Features whose edges exist only in chunks.

    Args:
        features: The folded input.
        chunk_edges: The number of edges of one type to hold at a time.
    """

    def __init__(self, features: WeightFeatures, chunk_edges: int) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "Expected torch.no_grad() or torch.inference_mode() for chunk_edges (got "
                "gradients enabled). For training use recompute=True."
            )
        if chunk_edges < 1:
            raise UserError(f"Expected chunk_edges of at least 1 (got {chunk_edges})")
        self.input = features
        self.spec = check_folded(features.spec)
        self.chunk_edges = chunk_edges
        self.stages: list[Stage] = []
        # Weights at leaves are processed in chunks; all other features are kept in memory.
        self.leaves: dict[Key, int] = {
            site.key: number
            for number, site in enumerate(self.spec.sites)
            if site.is_leaf and not isinstance(site.key, str)
        }
        held = {k: x for k, x in features.tensors() if k not in self.leaves}
        self.small = features._with(held)

    def apply(self, modules: Iterable[nn.Module]) -> ChunkedFeatures:
        """Applies stages of a model one after another."""
        for module in modules:
            stage = Stage.of(module)
            layer = stage.layer
            read = _run(stage.before, self.small).zero_unfilled()
            values = layer.values(read)
            tables = {} if layer.pointwise else self._sums(stage, values[-1].dtype)
            with without_autocast(read.device):
                if layer.pointwise:
                    found = layer._pointwise(values, layer.site_maps())
                    stage.messages.update(layer.constants())
                else:
                    found = self._message_passing(layer, values, tables)
                    stage.messages.update({k: found[number] for k, number in self.leaves.items()})
            held = {k: x for k, x in layer.entries(found).items() if k not in self.leaves}
            new = _run(stage.behind, self.small._with(held))
            self.small = self.small + new if stage.residual else new
            self.stages.append(stage)
        return self

    def features(self) -> WeightFeatures:
        """All features, with the weights of each type in one tensor."""
        like, channels = next(iter(self.small.tensors()))[1], self.small.channels
        tensors: dict[Key, Tensor] = {}
        for key, taps in self.spec.taps.items():
            if key not in self.leaves:
                tensors[key] = self.small[key]
                continue
            out = like.new_empty(self.input[key].shape[0], taps, channels)
            for start, x in self._chunks(key):
                out.narrow(0, start, len(x)).copy_(x)
            tensors[key] = out
        return self.small._with(tensors)

    def summary(self, pool: Pool) -> Tensor:
        """The result of a pool: `[graphs, entries * channels]`."""
        if pool.full and self.spec.symmetry == "hnp":
            # Its further entries are aggregates over fixed axes, so they need the features.
            return pool(self.features()).flatten(1)
        like = next(iter(self.small.tensors()))[1]
        act: list[nn.Module] = [] if pool.act is None else [pool.act]
        totals: dict[Key, Tensor] = {}
        for key in self.leaves:
            networks = self.input.incidence.graph_of(key, self.spec)
            shape = (self.input.num_graphs, self.spec.taps[key] * self.small.channels)
            lowest, reduce = (-torch.inf, "amax") if pool.aggr == "max" else (0.0, "sum")
            total = like.new_full(shape, lowest, dtype=sum_dtype(like.dtype))
            for start, x in self._chunks(key, act):
                rows = networks.narrow(0, start, len(x)).long()
                where = rows.unsqueeze(1).expand(len(x), shape[1])
                total.scatter_reduce_(0, where, x.flatten(1).to(total.dtype), reduce)
            sizes = networks.bincount(minlength=shape[0])
            totals[key] = total.where(sizes.unsqueeze(1) > 0, 0.0)
        return network_summary(_run(act, self.small).zero_unfilled(), self.spec, pool.aggr, totals)

    def _sums(self, stage: Stage, dtype: torch.dtype) -> dict[int, Sequence[Tensor]]:
        """The sums of the weights of every leaf, for each of its covers."""
        found: dict[int, Sequence[Tensor]] = {}
        for key, number in self.leaves.items():
            rows = self.input.incidence.sites[self.spec.symmetry][number]
            shape = (sum(rows.cover_sizes), self.spec.taps[key] * stage.layer.in_channels)
            table = torch.zeros(shape, dtype=sum_dtype(dtype), device=self.input.device)
            for start, x in self._chunks(key, stage.before):
                numbers = torch.arange(start, start + len(x), device=x.device)
                for cover_rows in rows.cover_rows_of(numbers).unbind(1):
                    table.index_add_(0, cover_rows, x.flatten(1).to(table.dtype))
            found[number] = table.split_with_sizes(rows.cover_sizes)
        return found

    def _message_passing(
        self, layer: NFLinear, values: Sequence[Tensor], tables: Mapping[int, Sequence[Tensor]]
    ) -> list[Tensor]:
        """The new entries of all sites but the leaves, and for these, the messages of all covers.

        Args:
            layer: The layer.
            values: The own entries of the other sites.
            tables: The sums of the leaves for each of their covers.
        """
        incidence, dtype = self.input.incidence, values[-1].dtype
        rows = incidence.sites[self.spec.symmetry]
        sums = bag_sums(rows, dtype)
        summaries = up(self.spec, values, lambda i, x: tables.get(i) or sums(i, x))
        if layer.aggr == "mean":
            average(self.spec, incidence, summaries)
        matrices = transposed(layer.site_maps())
        message = bag_messages(self.spec, rows, summaries, matrices, layer.bias)

        def received_or_new(number: int, received: list[Tensor]) -> Tensor:
            return torch.cat(received).to(dtype) if number in tables else message(number, received)

        return down(self.spec, dtype, received_or_new)

    def _chunks(self, key: Key, before: Sequence[nn.Module] = ()) -> Iterator[tuple[int, Tensor]]:
        """Yields the first row of every chunk and its weights `[size, taps, channels]`.

        The weights are computed by all stages and then by the modules `before`.
        """
        site, entries = self.spec.site[key], self.input[key]
        edges = self.input.incidence.sites[self.spec.symmetry][self.leaves[key]]
        for start in range(0, entries.shape[0], self.chunk_edges):
            size = min(self.chunk_edges, entries.shape[0] - start)
            rows = torch.arange(start, start + size, device=entries.device)
            if site.is_self:
                # A weight and its transpose read each other, so both are computed.
                rows = torch.cat([rows, edges.transposed.narrow(0, start, size)])
            x, cover_rows = entries.index_select(0, rows), edges.cover_rows_of(rows)
            for stage in self.stages:
                x = self._leaf_step(stage, site, x, cover_rows)
            yield start, self._entries(before, key, x).narrow(0, 0, size)

    def _leaf_step(self, stage: Stage, site: Site, x: Tensor, cover_rows: Tensor) -> Tensor:
        layer, message = stage.layer, stage.messages[site.key]
        read = self._entries(stage.before, site.key, x).flatten(1)
        read = read.to(autocast_dtype(read.device) or read.dtype)
        matrix = layer.maps[site.name].to(read.dtype)
        with without_autocast(read.device):
            if layer.pointwise or message is None:
                new = linear(read, matrix, None if message is None else message.to(read.dtype))
            else:
                if site.is_self:
                    read = torch.cat([read, read.roll(len(read) // 2, 0)], 1)
                new = embedding_bag(cover_rows, message, mode="sum").addmm_(read, matrix.t())
        new = new.view(len(x), site.taps, layer.out_channels)
        new = self._entries(stage.behind, site.key, new)
        return x + new if stage.residual else new

    def _entries(self, modules: Sequence[nn.Module], key: Key, x: Tensor) -> Tensor:
        """Applies modules that act on single entries."""
        if not modules:
            return x
        return _run(modules, self.input._with({key: x}))[key]


def _run(modules: Sequence[nn.Module], features: WeightFeatures) -> WeightFeatures:
    for module in modules:
        features = module(features)
    return features
