"""The counterparts of the published layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph.interop._nfn_data import spec_from_nfn
from nfn_graph.interop._nfn_linear import carry_hnp, carry_np, carry_pointwise, find_pieces
from nfn_graph.interop._nfn_modules import JointNorm, MatrixDropout, ReorderedPool, TypeScale
from nfn_graph.messages import UserError
from nfn_graph.nn import Activation, Dropout, Fold, FourierFeatures, IOEncoding, Pool, Residual
from nfn_graph.nn.encoding import position_name
from nfn_graph.spec import NETWORK, Key, NetworkSpec, Symmetry, module_name

View = Symmetry | Literal["any", "unknown"] | None

_ELEMENTWISE = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Identity),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.sin, nn.functional.relu, nn.functional.gelu),
    *(nn.functional.silu, nn.functional.leaky_relu, nn.functional.elu, nn.functional.tanh),
}
_REFUSED = {
    "NPAttention": "attention between weights has no counterpart here",
    "ParamLayerNorm": "it normalises fixed positions together with channels, ChannelNorm does not",
    "FlattenWeights": "it needs networks of one size; stack the tensors of to_nfn(features)",
    "UnflattenWeights": "it needs networks of one size",
    "CrossAttnEncoder": "it needs networks of one size",
    "CrossAttnDecoder": "it needs networks of one size",
    "StatFeaturizer": "quantiles have no counterpart here; see Pool for mean, sum and max",
    "ChannelLayerNorm": "it takes a tensor, not features; SimpleLayerNorm comes over",
}


class Replacement(NamedTuple):
    """A layer, and the view of the features that it works on; `"any"` if it works on all views."""

    view: View
    module: nn.Module


def convert(module: Any, in_channels: int | None) -> list[Replacement]:
    """The layers that replace one published layer."""
    name = published_name(module)
    if name not in _CONVERTERS:
        reason = _REFUSED.get(name, "only layers of the package 'nfn' can come before its pooling")
        raise TypeError(
            f"Expected a layer with an exact counterpart (got {type(module).__name__}: {reason})"
        )
    steps = _CONVERTERS[name](module, in_channels)
    if name != "ResBlock":  # Its parts have been converted already.
        is_trained = any(p.requires_grad for p in module.parameters())
        for step in steps:
            step.module.train(module.training).requires_grad_(is_trained)
    return steps


def assemble(steps: Sequence[Replacement], view: View = "unknown") -> list[nn.Module]:
    """Puts layers in a sequence, with a :class:`Fold` wherever the view changes.

    Args:
        steps: The layers.
        view: The view of the input. If unknown, the first layer is a :class:`Fold`.
    """
    modules: list[nn.Module] = []
    for step in steps:
        needed = step.view
        if needed == "any" and view == "unknown":
            needed = None
        if needed != "any" and needed != "unknown" and needed != view:
            modules.append(Fold(needed).train(step.module.training))
            view = needed
        modules.append(step.module)
    return modules


def flatten(*modules: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`."""
    for module in modules:
        if isinstance(module, nn.Sequential):
            yield from flatten(*module)
        else:
            yield module


def published_name(module: object) -> str:
    """The class name of a layer of `nfn`, found without importing `nfn`; '' for other modules."""
    kind = type(module)
    is_known = kind.__module__.split(".")[0] == "nfn" or kind is nn.Identity
    return kind.__name__ if is_known else ""


def _fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Zeroes all parameters except those that are given."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.zero_()
            if name in values:
                parameter.add_(values[name])


def _np_linear(module: Any, _: int | None) -> list[Replacement]:
    spec = spec_from_nfn(module.network_spec)
    linear = Replacement("np", carry_np(module, spec))
    if not module.io_embed:
        return [linear]
    first, last = spec.weights[0], spec.weights[-1]
    encoding = IOEncoding(spec, module.c_in, "learned").to(module.in_embed)

    def positions(x: Tensor, taps: int) -> Tensor:
        """Reshapes `[1, (channels, taps), positions]` to `[positions, taps, channels]`."""
        return x.reshape(module.c_in, taps, -1).permute(2, 1, 0)

    source, target = position_name(first.key, "source"), position_name(last.key, "target")
    values = {
        source: positions(module.in_embed, first.taps),
        target: positions(module.out_embed, last.taps),
        last.target: positions(module.out_bias_embed, 1),
    }
    _fill(encoding, {f"positions.{name}": x for name, x in values.items()})
    return [Replacement(None, encoding), linear]


def _pool(module: Any, symmetry: Symmetry) -> list[Replacement]:
    spec = spec_from_nfn(module.network_spec)
    if symmetry == "hnp" and len(spec.weights) == 1:
        raise UserError(
            "Expected an HNPPool of at least two layers (got one; the published one averages "
            "over outputs there, which keep their order, and Pool does not)"
        )
    folded = spec.fold(symmetry)
    pieces = find_pieces(folded)[NETWORK]
    stores = [store for weight in spec.weights for store in (weight.key, weight.target)]
    index = [i for store in stores for i in range(pieces[store].start, pieces[store].stop)]
    return [Replacement(symmetry, ReorderedPool(Pool(folded), index))]


def _sinusoidal(module: Any, in_channels: int | None) -> list[Replacement]:
    if in_channels is None:
        raise UserError(
            "Expected in_channels, the channels of the input of IOSinusoidalEncoding "
            "(got None, and no later layer has this number). Use from_nfn(module, in_channels=...)."
        )
    encoding = IOEncoding(
        spec_from_nfn(module.network_spec),
        in_channels,
        "sinusoidal",
        max_frequency=module.max_freq,
        num_bands=module.num_bands,
        encode_layers=module.enc_layers,
    )
    return [Replacement(None, encoding)]


def _learned_positions(module: Any, _: int | None) -> list[Replacement]:
    spec = spec_from_nfn(module.network_spec)
    inputs, outputs = module.inp_emb.weight, module.out_emb.weight
    encoding = IOEncoding(spec, module.channels, "learned", encode_layers=True).to(inputs)
    values: dict[str, Tensor] = {}
    for i, weight in enumerate(spec.weights):
        values[f"layers.{module_name(weight.key)}"] = module.weight_emb.weight[i]
        values[f"layers.{weight.target}"] = module.bias_emb.weight[i]
    first, last = spec.weights[0], spec.weights[-1]
    values[f"positions.{position_name(first.key, 'source')}"] = inputs.unsqueeze(1)
    values[f"positions.{position_name(last.key, 'target')}"] = outputs.unsqueeze(1)
    values[f"positions.{last.target}"] = outputs.unsqueeze(1)
    _fill(encoding, values)
    return [Replacement(None, encoding)]


def _fourier(module: Any, _: int | None) -> list[Replacement]:
    frequencies: Tensor = module._B.detach().clone()
    layer = FourierFeatures(frequencies.shape[0], frequencies.shape[1], module.scale)
    layer.frequencies = frequencies
    return [Replacement("any", layer)]


def _tuple_op(module: Any, _: int | None) -> list[Replacement]:
    op = module.op
    if type(op) is nn.Dropout:
        return [Replacement("any", Dropout(op.p))]
    if published_name(op) == "ChannelLinear":
        return [Replacement("any", Activation(copy.deepcopy(op.linear)))]
    kind = type(op) if isinstance(op, nn.Module) else op
    if kind not in _ELEMENTWISE and not (kind is nn.PReLU and op.num_parameters == 1):
        raise TypeError(
            f"Expected a TupleOp of an activation that acts on single values (got {op}). "
            f"If it does, use nfn_graph.Activation in its place."
        )
    op = copy.deepcopy(op)
    if getattr(op, "inplace", False):
        op.inplace = False
    return [Replacement("any", Activation(op))]


def _res_block(module: Any, in_channels: int | None) -> list[Replacement]:
    parts = [module.norm, module.base_layer, module.activation, module.dropout]
    inner = flatten(*(part for part in parts if part is not None))
    steps = [step for part in inner for step in convert(part, in_channels)]
    # Input and output are added, so the block must begin and end in the same view.
    views: list[View] = [step.view for step in steps if step.view != "any"]
    view = views[-1] if views else "any"
    return [Replacement(view, Residual(nn.Sequential(*assemble(steps, view))))]


def _simple_norm(module: Any, _: int | None) -> list[Replacement]:
    spec = spec_from_nfn(module.network_spec)

    def carried(parameter: str) -> dict[str, Tensor]:
        return {
            module_name(key): getattr(norm, parameter)
            .detach()
            .reshape(module.channels, -1)
            .t()
            .clone()
            for key, norm in _by_type(spec, module.w_norms, module.v_norms)
        }

    return [Replacement("np", JointNorm(carried("gamma"), carried("beta"), module.w_norms[0].eps))]


def _scale(module: Any, _: int | None) -> list[Replacement]:
    spec = NetworkSpec.chain(len(module.weight_scales))
    scales = _by_type(spec, module.weight_scales, module.bias_scales)
    return [Replacement("np", TypeScale({module_name(k): x.detach().clone() for k, x in scales}))]


def _by_type(
    spec: NetworkSpec, of_weights: Sequence[Any], of_biases: Sequence[Any]
) -> Iterator[tuple[Key, Any]]:
    for weight, first, second in zip(spec.weights, of_weights, of_biases, strict=True):
        yield weight.key, first
        yield weight.target, second


_CONVERTERS: dict[str, Callable[[Any, int | None], list[Replacement]]] = {
    "NPLinear": _np_linear,
    "HNPLinear": lambda m, _: [Replacement("hnp", carry_hnp(m, spec_from_nfn(m.network_spec)))],
    "Pointwise": lambda m, _: [
        Replacement("np", carry_pointwise(m, spec_from_nfn(m.network_spec)))
    ],
    "NPPool": lambda m, _: _pool(m, "np"),
    "HNPPool": lambda m, _: _pool(m, "hnp"),
    "IOSinusoidalEncoding": _sinusoidal,
    "LearnedPosEmbedding": _learned_positions,
    "GaussianFourierFeatureTransform": _fourier,
    "TupleOp": _tuple_op,
    "ResBlock": _res_block,
    "SimpleLayerNorm": _simple_norm,
    "ChannelDropout": lambda m, _: [Replacement("np", MatrixDropout(m.dropout))],
    "LearnedScale": _scale,
    "Identity": lambda m, _: [Replacement("any", nn.Identity())],
}
