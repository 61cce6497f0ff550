"""Creates a network with the names of a family on the meta device, so that it can be followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families.recognition import Found, Heads

# The number of tokens in an example, unless tables determine it.
_TOKENS = 3


def family_network(
    found: Found, tensors: Mapping[str, Tensor], heads: Heads
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns the network of a state dict, and example inputs.

    Args:
        found: The family and the names of its tensors.
        tensors: The state dict; only shapes and dtypes are read.
        heads: The number of heads.
    """
    network = _Transformer(found, tensors, heads).to("meta")
    example = network.example()
    try:
        network(*example)
    except (RuntimeError, ValueError, AssertionError) as error:  # torch's errors about shapes.
        raise ConversionError(
            f"Expected tensors of {found.family.name} whose shapes fit together (got "
            f"{str(error).splitlines()[0]}). Pass the network as arch"
        ) from error
    return network, example


class _Transformer(nn.Module):
    """Adds attention and dense layers to a residual stream, block by block.

    Norms, activation functions and scales that do not affect the symmetry are left out.
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
        """Returns inputs on the meta device: words or patches."""
        family, first = self._found.family, self._found.prefix
        if family.tables:
            words = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
            return (words,) * len(self._tables)
        if not family.patches:
            return (self._like(1, _TOKENS, self._width),)
        weight = self._weight(first + family.patches)
        count = self._weight(first + family.added).shape[-2] - bool(family.token)
        if weight.dim() == 2:
            return (self._like(1, count, weight.shape[1]),)
        if weight.dim() != 4:
            raise ConversionError(
                f"Expected patches of images, a weight [width, channels, height, width] (got "
                f"'{first}{family.patches}' of shape {list(weight.shape)})"
            )
        _, channels, height, width = weight.shape
        return (self._like(1, channels, count * height, width),)

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
        """Computes the residual stream, or the layers that follow it, from one input per table."""
        family, first = self._found.family, self._found.prefix
        x = self._stream([x for x in (a, b, c) if x is not None])
        for name in family.final.split():
            x = self._norm(first + name, x)
        *ups, down = family.dense.split()
        for block in self._found.blocks:
            for name in family.norms.split():
                x = self._norm(f"{block}.{name}", x)
            x = x + self._attention(block, x)
            h = reduce(torch.mul, (self._linear(f"{block}.{name}", x).relu() for name in ups))
            x = x + self._linear(f"{block}.{down}", h)
        return self._outputs(x)

    @property
    def _tables(self) -> list[str]:
        """The tables that the file contains."""
        full = [self._found.prefix + name for name in self._found.family.tables.split()]
        return [name for name in full if name in self._found.names]

    def _stream(self, inputs: Sequence[Tensor]) -> Tensor:
        family, first = self._found.family, self._found.prefix
        if family.tables:
            pairs = zip(inputs, self._tables, strict=True)
            return reduce(torch.add, (F.embedding(x, self._weight(name)) for x, name in pairs))
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
        return x + self._weight(first + family.added)

    def _attention(self, block: str, x: Tensor) -> Tensor:
        family = self._found.family
        *names, out = (f"{block}.{name}" for name in family.attention.split())
        parts = [self._linear(name, x) for name in names]
        q, k, v = parts[0].chunk(3, -1) if family.is_fused else parts
        queries, keys = self._heads.queries, self._key_heads[block]
        counts = (queries, keys, keys)
        q, k, v = (
            y.unflatten(-1, (count, -1)).transpose(1, 2)
            for y, count in zip((q, k, v), counts, strict=True)
        )
        if family.rotary:
            q, k = (self._rotated(y) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=keys != queries)
        return self._linear(out, y.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        """Applies rotary positions; which dimensions are rotated together does not matter here."""
        half = self._size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.angles + turned * self.angles

    def _outputs(self, x: Tensor) -> list[Tensor]:
        """Returns the outputs of the network."""
        names, prefix = self._found.names, self._found.prefix
        pooler = prefix + self._found.family.pooler
        pooled = self._linear(pooler, x).tanh() if pooler in names else None
        results = []
        for chain in self._found.family.outputs:
            full = [n[1:] if n.startswith("^") else prefix + n for n in chain.split()]
            if all(name in names for name in full):
                # Names do not show whether it reads the stream or the pooler. Adding both ties
                # their neurons, so the result is valid in either case.
                y = x if pooled is None else x + pooled
                for name in full:
                    y = self._linear(name, y).tanh()
                results.append(y)
        return results or ([x] if pooled is None else [x, pooled])

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
        name = f"{self._found.blocks[0]}.{self._found.family.query}"
        return self._weight(name).shape[0 if self._found.family.in_out else 1]

    def _like(self, *shape: int) -> Tensor:
        dtype = self._weight(f"{self._found.blocks[0]}.{self._found.family.query}").dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def _register(self, key: str, tensor: Tensor) -> None:
        """Adds a tensor below the modules that its key names."""
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

    def _check_heads(self) -> tuple[int, dict[str, int]]:
        """Returns the dimensions of a query head, and the number of key heads of every block."""
        family, queries, size = self._found.family, self._heads.queries, 0
        counts: dict[str, int] = {}
        for block in self._found.blocks:
            query, *others, _ = family.attention.split()
            total = self._outputs_of(f"{block}.{query}")
            width, rest = divmod(total, 3) if family.is_fused else (total, 0)
            if rest or width % queries or size not in (0, width // queries):
                raise ConversionError(
                    f"Expected {queries} heads with equal numbers of dimensions (got {total} "
                    f"outputs of '{block}.{query}')"
                )
            size = width // queries
            counts[block] = queries
            for name in others:
                found = self._outputs_of(f"{block}.{name}")
                if name == others[0]:
                    counts[block] = max(found // size, 1)
                keys = self._heads.keys or counts[block]
                if found % keys or queries % keys or keys != counts[block]:
                    raise ConversionError(
                        f"Expected {self._heads.keys or queries} heads of {size} dimensions each "
                        f"(got {found} outputs of '{block}.{name}')"
                    )
        return size, counts

    def _outputs_of(self, name: str) -> int:
        return self._weight(name).shape[int(self._found.family.in_out)]
