"""The counterparts of the published layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph.interop._nfn_data import spec_from_nfn
from nfn_graph.interop._nfn_linear import by_type, carry_hnp, carry_np, carry_pointwise, find_pieces
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
    if name == "ResBlock":
        return [_res_block(module, in_channels)]
    if name not in _COUNTERPARTS:
        reason = _REFUSED.get(name, "only layers of the package 'nfn' can come before its pooling")
        raise TypeError(
            f"Expected a layer with an exact counterpart (got {type(module).__name__}: {reason})"
        )
    view, make = _COUNTERPARTS[name]
    steps = [Replacement(view, make(module, in_channels))]
    if name == "NPLinear" and module.io_embed:
        steps.insert(0, Replacement(None, _io_embedding(module)))
    is_trained = any(p.requires_grad for p in module.parameters())
    for step in steps:
        step.module.train(module.training).requires_grad_(is_trained)
    return steps


def assemble(steps: Sequence[Replacement], view: View = "unknown") -> list[nn.Module]:
    """Puts layers in a sequence, with a :class:`Fold` wherever the view of the input changes."""
    modules: list[nn.Module] = []
    for needed, module in steps:
        if needed == "any" and view == "unknown":
            needed = None
        if needed != "any" and needed != "unknown" and needed != view:
            modules.append(Fold(needed).train(module.training))
            view = needed
        modules.append(module)
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


def _of_chain(
    carry: Callable[[Any, NetworkSpec], nn.Module],
) -> Callable[[Any, int | None], nn.Module]:
    """Gives a function the spec of the published layer, instead of the number of channels."""
    return lambda module, _: carry(module, spec_from_nfn(module.network_spec))


def _learned_encoding(
    spec: NetworkSpec, channels: int, ends: Sequence[Tensor], layers: Mapping[Key, Tensor]
) -> nn.Module:
    """An encoding with these values of positions `[positions, taps, channels]` and of layers.

    The positions are those of the inputs at the first weight, and of the outputs at the last weight
    and at the last bias.
    """
    first, last = spec.weights[0], spec.weights[-1]
    names = (position_name(first.key, "source"), position_name(last.key, "target"), last.target)
    values = {f"positions.{name}": x for name, x in zip(names, ends, strict=True)}
    values |= {f"layers.{module_name(key)}": x for key, x in layers.items()}
    encoding = IOEncoding(spec, channels, "learned", encode_layers=bool(layers)).to(ends[0])
    with torch.no_grad():
        for name, parameter in encoding.named_parameters():
            parameter.zero_()
            if name in values:
                parameter.add_(values[name])
    return encoding


def _io_embedding(module: Any) -> nn.Module:
    spec = spec_from_nfn(module.network_spec)
    embedded = (module.in_embed, module.out_embed, module.out_bias_embed)
    taps = (spec.weights[0].taps, spec.weights[-1].taps, 1)
    # Each is `[1, (channels, taps), positions]`.
    ends = [
        x.reshape(module.c_in, n, -1).permute(2, 1, 0) for x, n in zip(embedded, taps, strict=True)
    ]
    return _learned_encoding(spec, module.c_in, ends, {})


def _learned_positions(module: Any, spec: NetworkSpec) -> nn.Module:
    inputs, outputs = module.inp_emb.weight.unsqueeze(1), module.out_emb.weight.unsqueeze(1)
    layers = dict(by_type(spec, module.weight_emb.weight, module.bias_emb.weight))
    return _learned_encoding(spec, module.channels, (inputs, outputs, outputs), layers)


def _pool(module: Any, symmetry: Symmetry) -> nn.Module:
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
    return ReorderedPool(Pool(folded), index)


def _sinusoidal(module: Any, in_channels: int | None) -> nn.Module:
    if in_channels is None:
        raise UserError(
            "Expected in_channels, the channels of the input of IOSinusoidalEncoding "
            "(got None, and no later layer has this number). Use from_nfn(module, in_channels=...)."
        )
    return IOEncoding(
        spec_from_nfn(module.network_spec),
        in_channels,
        "sinusoidal",
        max_frequency=module.max_freq,
        num_bands=module.num_bands,
        encode_layers=module.enc_layers,
    )


def _fourier(module: Any, _: int | None) -> nn.Module:
    frequencies: Tensor = module._B.detach().clone()
    layer = FourierFeatures(frequencies.shape[0], frequencies.shape[1], module.scale)
    layer.frequencies = frequencies
    return layer


def _tuple_op(module: Any, _: int | None) -> nn.Module:
    op = module.op
    if type(op) is nn.Dropout:
        return Dropout(op.p)
    if published_name(op) == "ChannelLinear":
        return Activation(copy.deepcopy(op.linear))
    kind = type(op) if isinstance(op, nn.Module) else op
    if kind not in _ELEMENTWISE and not (kind is nn.PReLU and op.num_parameters == 1):
        raise TypeError(
            f"Expected a TupleOp of an activation that acts on single values (got {op}). "
            f"If it does, use nfn_graph.Activation in its place."
        )
    op = copy.deepcopy(op)
    if getattr(op, "inplace", False):
        op.inplace = False
    return Activation(op)


def _res_block(module: Any, in_channels: int | None) -> Replacement:
    parts = [module.norm, module.base_layer, module.activation, module.dropout]
    inner = flatten(*(part for part in parts if part is not None))
    steps = [step for part in inner for step in convert(part, in_channels)]
    # Input and output are added, so the block must begin and end in the same view.
    views: list[View] = [step.view for step in steps if step.view != "any"]
    view = views[-1] if views else "any"
    return Replacement(view, Residual(nn.Sequential(*assemble(steps, view))))


def _simple_norm(module: Any, spec: NetworkSpec) -> nn.Module:
    norms = list(by_type(spec, module.w_norms, module.v_norms))

    def carried(parameter: str) -> dict[str, Tensor]:
        values = ((key, getattr(norm, parameter).detach()) for key, norm in norms)
        return {module_name(k): x.reshape(module.channels, -1).t().clone() for k, x in values}

    return JointNorm(carried("gamma"), carried("beta"), module.w_norms[0].eps)


def _scale(module: Any, _: int | None) -> nn.Module:
    spec = NetworkSpec.chain(len(module.weight_scales))
    scales = by_type(spec, module.weight_scales, module.bias_scales)
    return TypeScale({module_name(k): x.detach().clone() for k, x in scales})


# For every published layer, the view that its counterpart works on, and how to make it.
_COUNTERPARTS: dict[str, tuple[View, Callable[[Any, int | None], nn.Module]]] = {
    "NPLinear": ("np", _of_chain(carry_np)),
    "HNPLinear": ("hnp", _of_chain(carry_hnp)),
    "Pointwise": ("np", _of_chain(carry_pointwise)),
    "NPPool": ("np", lambda module, _: _pool(module, "np")),
    "HNPPool": ("hnp", lambda module, _: _pool(module, "hnp")),
    "IOSinusoidalEncoding": (None, _sinusoidal),
    "LearnedPosEmbedding": (None, _of_chain(_learned_positions)),
    "GaussianFourierFeatureTransform": ("any", _fourier),
    "TupleOp": ("any", _tuple_op),
    "SimpleLayerNorm": ("np", _of_chain(_simple_norm)),
    "ChannelDropout": ("np", lambda module, _: MatrixDropout(module.dropout)),
    "LearnedScale": ("np", _scale),
    "Identity": ("any", lambda *_: nn.Identity()),
}
