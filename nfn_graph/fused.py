r"""The NF-Layer as one autograd function.

The layer of :mod:`nfn_graph.nn.linear`, which is its definition, in few and large steps:

.. math::
    \text{collect}\quad & s_l = [v_l, \textstyle\sum W_{j,\star}, \sum W_{\star,j}, \ldots],
        \qquad s = [\textstyle\sum s_l, g] \\
    \text{map}\quad & m = N s / n + b, \qquad m_l = M_l\,(s_l / n_l) + m \\
    \text{spread}\quad & W'_{jk} = (m_j + m_k) + D\,W_{jk}

Collecting and spreading are adjoint, so the gradient is the same computation with transposed
maps. The largest tensors are written once: `embedding_bag` writes the sum of an edge's two
messages, and the product is added to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.kernels import bag_ends, bag_sum
from nfn_graph.ops import with_transposed
from nfn_graph.rows import EdgeRows, NeuronRows
from nfn_graph.wiring import Wiring


@dataclass(frozen=True, eq=False)
class Batched:
    """What the layer needs to know of a batch.

    Attributes:
        wiring: The layout of the summaries.
        edges: The edges of every bundle.
        neurons: The neurons of every type.
        mean: Whether the summaries are means, not sums.
        scales: For every neuron type and then for the network, `[rows, taps, 1]`, what turns
            the sums of a summary into means; none for sums.
    """

    wiring: Wiring
    edges: tuple[EdgeRows, ...]
    neurons: tuple[NeuronRows, ...]
    mean: bool
    scales: tuple[Tensor, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of bundles and of neuron types."""
        return len(self.edges), len(self.neurons)


class Values(NamedTuple):
    """One tensor `[rows, taps * channels]` for every type of each level."""

    weights: Sequence[Tensor]
    neurons: Sequence[Tensor]
    network: Tensor


class Maps(NamedTuple):
    """The matrices `[out, in]` of the three levels; none for a neuron without taps."""

    weights: Sequence[Tensor]
    neurons: Sequence[Tensor | None]
    network: Tensor
    bias: Tensor | None


Plain = Callable[[Batched, Values, Maps], Values]


def fused_layer(plain: Plain, batch: Batched, values: Values, maps: Maps) -> Values:
    """Computes `plain(batch, values, maps)`.

    Args:
        plain: The same function in operations that every transform of torch knows.
        batch: Which rows belong together.
        values: The input.
        maps: The parameters.
    """
    flat = (*values.weights, *values.neurons, values.network)
    parameters = (*maps.weights, *maps.neurons, maps.network, maps.bias)
    outputs = _FusedLayer.apply(plain, batch, *flat, *parameters)
    return _values(batch, outputs)


class _FusedLayer(torch.autograd.Function):
    """Inputs: values, maps. Outputs: values, then what the gradient needs."""

    @staticmethod
    def forward(plain: Plain, batch: Batched, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, maps = _values(batch, tensors), _maps(batch, tensors)
        sums, summary = _collect(batch, values)
        if batch.scales:
            for x, scale in zip((*sums, summary), batch.scales, strict=True):
                _taps(x, scale).mul_(scale)
        if maps.bias is None:
            message = summary @ maps.network.t()
        else:
            message = torch.addmm(maps.bias, summary, maps.network.t())
        mapped = _spread_network(batch, message)
        for x, read, matrix in zip(mapped, sums, maps.neurons, strict=True):
            if matrix is not None:
                x.addmm_(read, matrix.t())
        return (*_spread(batch, values, maps.weights, mapped, message), *sums, summary)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain, ctx.batch = inputs[:2]
        read = output[_num_values(ctx.batch) :]
        ctx.mark_non_differentiable(*read)
        ctx.save_for_backward(*inputs[2:], *read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = _num_values(ctx.batch)
        needs = ctx.needs_input_grad[2:]
        wanted = (any(needs[:count]), any(needs[count:]))
        saved = ctx.saved_tensors
        flat = [g.contiguous() for g in grads[:count]]
        found = _FusedGradient.apply(ctx.plain, ctx.batch, wanted, *flat, *saved)
        values = found[:count] if wanted[0] else (None,) * count
        maps: list[Tensor | None] = [None] * (len(needs) - count)
        if wanted[1]:
            computed = iter(found[count if wanted[0] else 0 :])
            maps = [None if x is None else next(computed) for x in saved[count : len(needs)]]
        return (None, None, *values, *maps)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], plain: Plain, batch: Batched, *tensors: Tensor
    ) -> Any:
        def one(*each: Tensor) -> tuple[Tensor, ...]:
            return _flat(plain(batch, _values(batch, each), _maps(batch, each)))

        outputs = torch.vmap(one, in_dims[2:], randomness=info.randomness)(*tensors)
        # Under vmap the gradient starts from the inputs again.
        unread = [x.new_empty(0) for x in outputs[: len(batch.neurons) + 1]]
        return (*outputs, *unread), (*(0 for _ in outputs), *(None for _ in unread))


class _FusedGradient(torch.autograd.Function):
    """Inputs: gradients of the values; values, maps and what forward read. Outputs: gradients
    of the values if wanted, then of the maps if wanted."""

    @staticmethod
    def forward(
        plain: Plain, batch: Batched, wanted: tuple[bool, bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        count = _num_values(batch)
        grads, inputs = _values(batch, tensors), tensors[count:]
        values, maps = _values(batch, inputs), _maps(batch, inputs)
        *reads, summary = inputs[-len(batch.neurons) - 1 :]
        sums, total = _collect(batch, grads)
        found: list[Tensor] = []
        if wanted[0]:
            found += _values_gradient(batch, grads, maps, sums, total)
        if wanted[1]:
            rows = [_read(x, batch, i) for i, x in enumerate(values.weights)]
            found += [g.t() @ x for g, x in zip(grads.weights, rows, strict=True)]
            for g, x, matrix in zip(sums, reads, maps.neurons, strict=True):
                if matrix is not None:
                    found.append(g.t() @ x)
            found.append(total.t() @ summary)
            if maps.bias is not None:
                found.append(total.sum(0))
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "Expected a first derivative of the fused layer (got a second one). "
            "Use `with nfn_graph.use_backend('plain'):` around the forward pass."
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        plain: Plain,
        batch: Batched,
        wanted: tuple[bool, bool],
        *tensors: Tensor,
    ) -> Any:
        count = _num_values(batch)

        def one(*each: Tensor) -> tuple[Tensor, ...]:
            grads, values, rest = each[:count], each[count : 2 * count], each[2 * count :]
            maps = rest[: -len(batch.neurons) - 1]
            present = [x for x in maps if x is not None]

            def function(*inputs: Tensor) -> tuple[Tensor, ...]:
                given = iter(inputs[count:])
                filled = [None if x is None else next(given) for x in maps]
                flat = (*inputs[:count], *filled)
                return _flat(plain(batch, _values(batch, flat), _maps(batch, flat)))

            _, pull = torch.func.vjp(function, *values, *present)
            found = pull(tuple(grads))
            return (*found[: count * wanted[0]], *(found[count:] if wanted[1] else ()))

        outputs = torch.vmap(one, in_dims[3:], randomness=info.randomness)(*tensors)
        return outputs, (0,) * len(outputs)


def _values_gradient(
    batch: Batched, grads: Values, maps: Maps, sums: Sequence[Tensor], total: Tensor
) -> tuple[Tensor, ...]:
    message = total @ maps.network
    if batch.scales:
        _taps(message, batch.scales[-1]).mul_(batch.scales[-1])
    mapped = _spread_network(batch, message)
    for i, (x, read, matrix) in enumerate(zip(mapped, sums, maps.neurons, strict=True)):
        if matrix is None:
            continue
        if batch.scales:
            scale = batch.scales[i]
            _taps(x, scale).addcmul_(_taps(read @ matrix, scale), scale)
        else:
            x.addmm_(read, matrix)
    adjoint = [
        _adjoint(matrix, wires.is_self)
        for matrix, wires in zip(maps.weights, batch.wiring.bundles, strict=True)
    ]
    return _spread(batch, grads, adjoint, mapped, message)


def _collect(batch: Batched, values: Values) -> tuple[list[Tensor], Tensor]:
    """Every neuron's own values beside the sums over its edges; their sums per network."""
    wiring = batch.wiring
    sums = {
        "target": [bag_sum(x, e.targets) for x, e in zip(values.weights, batch.edges, strict=True)],
        "source": [bag_sum(x, e.sources) for x, e in zip(values.weights, batch.edges, strict=True)],
    }
    neurons, totals = [], []
    for wires, own, rows in zip(wiring.neurons, values.neurons, batch.neurons, strict=True):
        neuron = torch.cat([own, *(sums[end][i] for i, end in wires.incident)], 1)
        neurons.append(neuron)
        totals.append(_parts(bag_sum(neuron, rows.graphs), wires.taps))
    # A sum over all edges is one over the sums at their targets.
    whole = [totals[b.target.neuron][b.target.part] for b in wiring.bundles]
    return neurons, torch.cat([*whole, *(parts[0] for parts in totals), values.network], 1)


def _spread_network(batch: Batched, message: Tensor) -> list[Tensor]:
    """What the network says to each neuron: to its own taps and, as every edge has one
    target, to its edges as a target."""
    wiring = batch.wiring
    said = _parts(message, wiring.summary)
    silence = torch.zeros_like(message)
    own = said[len(wiring.bundles) :]
    spread = []
    for i, (wires, rows) in enumerate(zip(wiring.neurons, batch.neurons, strict=True)):
        row = [own[i]]
        for bundle, end in wires.incident:
            to_edges = said[bundle]
            if end == "source":
                to_edges = silence.narrow(1, 0, to_edges.shape[1])
            row.append(to_edges)
        spread.append(torch.cat(row, 1).index_select(0, rows.graphs.index))
    return spread


def _spread(
    batch: Batched,
    values: Values,
    maps: Sequence[Tensor],
    mapped: Sequence[Tensor],
    message: Tensor,
) -> tuple[Tensor, ...]:
    """Every level's part of what was mapped; to the edges also their own map."""
    wiring = batch.wiring
    parts = [_parts(x, wires.taps) for x, wires in zip(mapped, wiring.neurons, strict=True)]
    weights = []
    for i, (x, matrix, wires) in enumerate(zip(values.weights, maps, wiring.bundles, strict=True)):
        ends = [parts[place.neuron][place.part] for place in (wires.target, wires.source)]
        new = bag_ends(torch.cat(ends), batch.edges[i])
        weights.append(new.addmm_(_read(x, batch, i), matrix.t()))
    # Not views: users may change what they get in place.
    neurons = [neuron[0].clone() for neuron in parts]
    return (*weights, *neurons, _parts(message, wiring.summary)[-1].clone())


def _read(x: Tensor, batch: Batched, bundle: int) -> Tensor:
    """What an edge reads: itself, and in a self weight its transposed edge."""
    return with_transposed(x, batch.edges[bundle]) if batch.wiring.bundles[bundle].is_self else x


def _adjoint(matrix: Tensor, is_self: bool) -> Tensor:
    """The map of the gradients. Transposing edges is its own adjoint."""
    if not is_self:
        return matrix.t()
    return matrix.reshape(matrix.shape[0], 2, -1).permute(2, 1, 0).flatten(1)


def _parts(x: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
    """The parts of a summary, side by side."""
    channels = x.shape[1] // max(sum(taps), 1)
    return x.split([count * channels for count in taps], 1)


def _taps(x: Tensor, like: Tensor) -> Tensor:
    return x.view(x.shape[0], like.shape[1], x.shape[1] // max(like.shape[1], 1))


def _num_values(batch: Batched) -> int:
    return len(batch.edges) + len(batch.neurons) + 1


def _values(batch: Batched, tensors: Sequence[Tensor]) -> Values:
    weights, neurons = batch.sizes
    both = weights + neurons
    return Values(tensors[:weights], tensors[weights:both], tensors[both])


def _maps(batch: Batched, tensors: Sequence[Tensor]) -> Maps:
    weights, neurons = batch.sizes
    maps = tensors[weights + neurons + 1 :]
    both = weights + neurons
    return Maps(maps[:weights], maps[weights:both], maps[both], maps[both + 1])


def _flat(values: Values) -> tuple[Tensor, ...]:
    return (*values.weights, *values.neurons, values.network)
