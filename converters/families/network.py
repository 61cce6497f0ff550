"""A network with the names of a family, on the meta device, whose computation can be followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families.recognition import Found, Heads

# Tokens of an example, where tables do not say how many there are.
_TOKENS = 3


def family_network(
    found: Found, tensors: Mapping[str, Tensor], heads: Heads
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network of a state dict, and example inputs.

    Args:
        found: The family and the names of its tensors.
        tensors: The state dict; only shapes and dtypes are read.
        heads: The number of heads.
    """
    network = _Transformer(found, tensors, heads)
    return network.to("meta"), network.example()


class _Transformer(nn.Module):
    """Adds attention and dense layers to a stream, block by block.

    Norms, activation functions and scales are left out where they change no symmetry.
    """

    angles: Tensor

    def __init__(self, found: Found, tensors: Mapping[str, Tensor], heads: Heads) -> None:
        super().__init__()
        self._found, self._heads = found, heads
        for key, tensor in tensors.items():
            self._register(key, tensor)
        self._size, self._key_heads = self._check_heads()
        angles = torch.empty(_TOKENS, self._size, device="meta")
        self.register_buffer("angles", angles, persistent=False)

    def example(self) -> tuple[Tensor, ...]:
        """Inputs on the meta device: words or patches."""
        family, first = self._found.family, self._found.prefix
        if family.tables:
            words = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
            return (words,) * sum(first + name in self._found.names for name in family.tables)
        if not family.patches:
            return (self._like(1, _TOKENS, self._width),)
        weight = self._weight(first + family.patches)
        count = self._weight(first + family.added[0]).shape[-2] - bool(family.token)
        if weight.dim() == 2:
            return (self._like(1, count, weight.shape[1]),)
        _, channels, height, width = weight.shape
        return (self._like(1, channels, count * height, width),)

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
        """The stream, or whatever follows it, of one input or of one for each table."""
        family, first = self._found.family, self._found.prefix
        x = self._stream([x for x in (a, b, c) if x is not None])
        for name in family.final:
            x = self._norm(first + name, x)
        for block in self._found.blocks:
            for name in family.norms:
                x = self._norm(f"{block}.{name}", x)
            x = x + self._attention(block, x)
            h = self._linear(f"{block}.{family.up}", x).relu()
            if family.gate:
                h = h * self._linear(f"{block}.{family.gate}", x)
            x = x + self._linear(f"{block}.{family.down}", h)
        return self._outputs(x)

    def _stream(self, inputs: Sequence[Tensor]) -> Tensor:
        family, first = self._found.family, self._found.prefix
        if family.tables:
            tables = [n for n in (first + t for t in family.tables) if n in self._found.names]
            parts = [F.embedding(x, self._weight(n)) for x, n in zip(inputs, tables, strict=True)]
            return sum(parts[1:], parts[0])
        if not family.patches:
            return inputs[0]
        name = first + family.patches
        weight, bias = self._weight(name), self._bias(name)
        if weight.dim() == 2:
            x = F.linear(inputs[0], weight, bias)
        else:
            x = F.conv2d(inputs[0], weight, bias, stride=tuple(weight.shape[2:]))
            x = x.flatten(2).transpose(1, 2)
        if family.token:
            x = torch.cat([self._weight(first + family.token), x], 1)
        for added in family.added:
            x = x + self._weight(first + added)
        return x

    def _attention(self, block: str, x: Tensor) -> Tensor:
        family = self._found.family
        if family.fused:
            q, k, v = self._linear(f"{block}.{family.query}", x).chunk(3, -1)
        else:
            names = (family.query, family.key, family.value)
            q, k, v = (self._linear(f"{block}.{name}", x) for name in names)
        q, k, v = (y.unflatten(-1, (-1, self._size)).transpose(1, 2) for y in (q, k, v))
        if family.rotary:
            q, k = (self._rotated(y) for y in (q, k))
        if self._key_heads == 1:
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            is_grouped = self._key_heads != self._heads.queries
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)
        return self._linear(f"{block}.{family.out}", y.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotary positions; which dimensions are rotated together does not matter here."""
        half = self._size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.angles + turned * self.angles

    def _outputs(self, x: Tensor) -> list[Tensor]:
        """What the network returns."""
        names, prefix = self._found.names, self._found.prefix
        pooler = prefix + self._found.family.pooler
        pooled = self._linear(pooler, x).tanh() if pooler in names else x
        results = []
        for chain in self._found.family.outputs:
            full = [n[1:] if n.startswith("^") else prefix + n for n in chain]
            if all(name in names for name in full):
                y = pooled
                for name in full:
                    y = self._linear(name, y).tanh()
                results.append(y)
        return results or ([x] if pooled is x else [x, pooled])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if name not in self._found.names:
            return x
        return F.layer_norm(x, (x.shape[-1],), self._weight(name), self._bias(name))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weight(name), self._bias(name)
        if not self._found.family.in_out or not name.startswith(self._found.blocks):
            return F.linear(x, weight, bias)
        y = x @ weight
        return y if bias is None else y + bias

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(self._found.names[name]["weight"])

    def _bias(self, name: str) -> Tensor | None:
        key = self._found.names[name].get("bias")
        return None if key is None else self.get_parameter(key)

    @property
    def _width(self) -> int:
        name = f"{self._found.blocks[0]}.{self._found.family.up}"
        return self._weight(name).shape[0 if self._found.family.in_out else 1]

    def _like(self, *shape: int) -> Tensor:
        dtype = self._weight(f"{self._found.blocks[0]}.{self._found.family.up}").dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def _register(self, key: str, tensor: Tensor) -> None:
        """Puts a tensor below the modules that its key names."""
        *path, name = key.split(".")
        parent: nn.Module = self
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.is_floating_point():
            parent.register_parameter(name, nn.Parameter(like, requires_grad=False))
        else:
            parent.register_buffer(name, like)

    def _check_heads(self) -> tuple[int, int]:
        """The dimensions of a head, and the number of heads of keys and values."""
        family, (queries, keys) = self._found.family, self._heads
        axis, size, count = int(family.in_out), 0, queries
        for block in self._found.blocks:
            total = self._weight(f"{block}.{family.query}").shape[axis]
            width, rest = divmod(total, 3) if family.fused else (total, 0)
            if rest or width % queries or size not in (0, width // queries):
                raise ConversionError(
                    f"Expected {queries} heads of equally many dimensions (got {total} outputs of "
                    f"'{block}.{family.query}')"
                )
            size = width // queries
            if family.key:
                other = self._weight(f"{block}.{family.key}").shape[axis]
                count = max(other // size, 1)
                if other % size or queries % count or keys not in (None, count):
                    raise ConversionError(
                        f"Expected {keys or queries} heads of {size} dimensions each (got {other} "
                        f"outputs of '{block}.{family.key}')"
                    )
        return size, count
