"""The attention modules of torch.nn in plain operations, which can be followed one by one.

torch's own code takes fast paths that depend on values, so it cannot be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from nfn_graph.converters.errors import ConversionError


def attend(
    m: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Computes the result of `nn.MultiheadAttention` on batches of sequences."""
    if m.bias_k is not None or m.bias_v is not None or m.add_zero_attn:
        raise ConversionError(
            "Expected MultiheadAttention without further keys and values (got add_bias_kv or "
            "add_zero_attn)"
        )
    heads, inner = m.num_heads, m.head_dim
    q, k, v = _projected(m, query, key, value)
    if not m.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    q, k, v = (x.unflatten(-1, (heads, inner)).transpose(-3, -2) for x in (q, k, v))
    scores = torch.matmul(q / math.sqrt(inner), k.transpose(-2, -1))
    if attn_mask is not None:
        mask = _as_number(attn_mask)
        if not isinstance(mask, fx.Proxy) and mask.dim() == 3:
            # One mask for every entry of the batch and every head.
            mask = mask.unflatten(0, (-1, heads))
        scores = scores + mask
    if key_padding_mask is not None:
        scores = scores + _as_number(key_padding_mask).unsqueeze(-2).unsqueeze(-2)
    weights = torch.softmax(scores, -1)
    y = torch.matmul(weights, v).transpose(-3, -2).flatten(-2)
    if not m.batch_first:
        y = y.transpose(0, 1)
    y = F.linear(y, m.out_proj.weight, m.out_proj.bias)
    if not need_weights:
        return y, None
    return y, weights.mean(-3) if average_attn_weights else weights


def _as_number(mask: Any) -> Any:
    """Converts a mask of booleans or numbers to one that is added to scores."""
    args = (mask, "mask", None, "", torch.float32)
    if isinstance(mask, fx.Proxy):
        return mask.tracer.create_proxy("call_function", F._canonical_mask, args, {})
    return F._canonical_mask(*args)


def _projected(m: nn.MultiheadAttention, query: Any, key: Any, value: Any) -> list[Any]:
    """Computes queries, keys and values."""
    weights: Any = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    if m.in_proj_weight is not None:
        weights = _thirds(m.in_proj_weight)
    biases = [None] * 3 if m.in_proj_bias is None else _thirds(m.in_proj_bias)
    return [F.linear(*parts) for parts in zip((query, key, value), weights, biases, strict=True)]


def _thirds(stored: Any) -> list[Any]:
    parts = stored.chunk(3)
    return [parts[i] for i in range(3)]


# Hints that a mask is causal, named `*is_causal`, change nothing.


def encode_layer(
    m: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Computes the result of `nn.TransformerEncoderLayer`."""

    def attention(x: Any) -> Any:
        return attend(m.self_attn, x, x, x, src_key_padding_mask, False, src_mask)[0]

    x = _residual(m, src, attention, m.norm1)
    return _residual(m, x, lambda x: _feed_forward(m, x), m.norm2)


def decode_layer(
    m: nn.TransformerDecoderLayer,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Computes the result of `nn.TransformerDecoderLayer`."""

    def attention(x: Any) -> Any:
        return attend(m.self_attn, x, x, x, tgt_key_padding_mask, False, tgt_mask)[0]

    def cross(x: Any) -> Any:
        masks = (memory_key_padding_mask, False, memory_mask)
        return attend(m.multihead_attn, x, memory, memory, *masks)[0]

    x = _residual(m, tgt, attention, m.norm1)
    x = _residual(m, x, cross, m.norm2)
    return _residual(m, x, lambda x: _feed_forward(m, x), m.norm3)


def encode(m: nn.TransformerEncoder, src: Any, mask: Any = None, *masks: Any, **named: Any) -> Any:
    """Computes the result of `nn.TransformerEncoder`."""
    for layer in m.layers:
        src = layer(src, mask, *masks, **named)
    return src if m.norm is None else m.norm(src)


def decode(m: nn.TransformerDecoder, tgt: Any, memory: Any, *masks: Any, **named: Any) -> Any:
    """Computes the result of `nn.TransformerDecoder`."""
    for layer in m.layers:
        tgt = layer(tgt, memory, *masks, **named)
    return tgt if m.norm is None else m.norm(tgt)


def transform(
    m: nn.Transformer,
    src: Any,
    tgt: Any,
    src_mask: Any = None,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    src_key_padding_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Computes the result of `nn.Transformer`."""
    memory = m.encoder(src, src_mask, src_key_padding_mask)
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return m.decoder(tgt, memory, *masks)


def _residual(m: Any, x: Any, block: Callable[[Any], Any], norm: nn.Module) -> Any:
    return x + block(norm(x)) if m.norm_first else norm(x + block(x))


def _feed_forward(m: Any, x: Any) -> Any:
    return m.linear2(m.activation(m.linear1(x)))


PLAIN: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: attend,
    nn.TransformerEncoderLayer: encode_layer,
    nn.TransformerDecoderLayer: decode_layer,
    nn.TransformerEncoder: encode,
    nn.TransformerDecoder: decode,
    nn.Transformer: transform,
}
