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
from typing import Any

import torch
from torch import Tensor

from nfn_graph.nn._batch_rows import BatchRows
from nfn_graph.nn._steps import (
    Maps,
    Values,
    collect,
    edge_sums,
    map_summaries,
    read_edges,
    spread,
    spread_network,
    tapped,
)

Plain = Callable[[BatchRows, Values, Maps], Values]


def fused_layer(plain: Plain, batch: BatchRows, values: Values, maps: Maps) -> Values:
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
    def forward(plain: Plain, batch: BatchRows, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, maps = _values(batch, tensors), _maps(batch, tensors)
        sums = edge_sums(batch, values.weights)
        neurons, summary = collect(batch, sums, values.neurons, values.network)
        del sums
        mapped, message = map_summaries(batch, neurons, summary, maps)
        return (*spread(batch, values, maps.weights, mapped, message), *neurons, summary)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain, ctx.batch = inputs[:2]
        read = output[_num_values(ctx.batch) :]
        ctx.mark_non_differentiable(*read)
        ctx.set_materialize_grads(False)  # What was read has none, and is large.
        ctx.shapes = [x.shape for x in output[: _num_values(ctx.batch)]]
        ctx.save_for_backward(*inputs[2:], *read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = _num_values(ctx.batch)
        needs = ctx.needs_input_grad[2:]
        wanted = (any(needs[:count]), any(needs[count:]))
        saved = ctx.saved_tensors
        flat = [
            saved[0].new_zeros(shape) if g is None else g.contiguous()
            for g, shape in zip(grads, ctx.shapes, strict=False)
        ]
        # A function of its own only for those who look into the gradient.
        watched = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        gradient = _FusedGradient.apply if watched else _FusedGradient.forward
        found = gradient(ctx.plain, ctx.batch, wanted, *flat, *saved)
        values = found[:count] if wanted[0] else (None,) * count
        maps: list[Tensor | None] = [None] * (len(needs) - count)
        if wanted[1]:
            computed = iter(found[count if wanted[0] else 0 :])
            maps = [None if x is None else next(computed) for x in saved[count : len(needs)]]
        return (None, None, *values, *maps)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], plain: Plain, batch: BatchRows, *tensors: Tensor
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
        plain: Plain, batch: BatchRows, wanted: tuple[bool, bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        count = _num_values(batch)
        grads, inputs = _values(batch, tensors), tensors[count:]
        values, maps = _values(batch, inputs), _maps(batch, inputs)
        *reads, summary = inputs[-len(batch.neurons) - 1 :]
        ends = edge_sums(batch, grads.weights)
        sums, total = collect(batch, ends, grads.neurons, grads.network)
        del ends
        found: list[Tensor] = []
        if wanted[1]:
            rows = (read_edges(x, batch, i) for i, x in enumerate(values.weights))
            found += [g.t() @ x for g, x in zip(grads.weights, rows, strict=True)]
            for g, x, matrix in zip(sums, reads, maps.neurons, strict=True):
                if matrix is not None:
                    found.append(g.t() @ x)
            found.append((total.t() @ summary).to(maps.network.dtype))
            if maps.bias is not None:
                found.append(total.sum(0).to(maps.bias.dtype))
        if not wanted[0]:
            return tuple(found)
        mapped, message = _map_gradients(batch, maps, sums, total)
        del sums  # The largest tensors come now.
        adjoint = [
            _adjoint(matrix, wires.is_self)
            for matrix, wires in zip(maps.weights, batch.wiring.bundles, strict=True)
        ]
        return (*spread(batch, grads, adjoint, mapped, message), *found)

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
        batch: BatchRows,
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

            pull: Callable[..., Any] = torch.func.vjp(function, *values, *present)[1]
            found = pull(tuple(grads))
            return (*found[: count * wanted[0]], *(found[count:] if wanted[1] else ()))

        outputs = torch.vmap(one, in_dims[3:], randomness=info.randomness)(*tensors)
        return outputs, (0,) * len(outputs)


def _map_gradients(
    batch: BatchRows, maps: Maps, sums: Sequence[Tensor], total: Tensor
) -> tuple[list[Tensor], Tensor]:
    """What all neurons and the network say back."""
    message = total @ maps.network.to(total.dtype)
    if batch.scales:
        tapped(message, batch.scales[-1]).mul_(batch.scales[-1])
    message = message.to(maps.network.dtype)
    mapped = spread_network(batch, message)
    for i, (x, read, matrix) in enumerate(zip(mapped, sums, maps.neurons, strict=True)):
        if matrix is None:
            continue
        if batch.scales:
            scale = batch.scales[i]
            tapped(x, scale).addcmul_(tapped(read @ matrix, scale), scale)
        else:
            x.addmm_(read, matrix)
    return mapped, message


def _adjoint(matrix: Tensor, is_self: bool) -> Tensor:
    """The map of the gradients. Transposing edges is its own adjoint."""
    if not is_self:
        return matrix.t()
    return matrix.reshape(matrix.shape[0], 2, -1).permute(2, 1, 0).flatten(1)


def _num_values(batch: BatchRows) -> int:
    return len(batch.edges) + len(batch.neurons) + 1


def _values(batch: BatchRows, tensors: Sequence[Tensor]) -> Values:
    weights, neurons = batch.sizes
    both = weights + neurons
    return Values(tensors[:weights], tensors[weights:both], tensors[both])


def _maps(batch: BatchRows, tensors: Sequence[Tensor]) -> Maps:
    weights, neurons = batch.sizes
    maps = tensors[weights + neurons + 1 :]
    both = weights + neurons
    return Maps(maps[:weights], maps[weights:both], maps[both], maps[both + 1])


def _flat(values: Values) -> tuple[Tensor, ...]:
    return (*values.weights, *values.neurons, values.network)
