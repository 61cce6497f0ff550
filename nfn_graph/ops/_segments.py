"""Sums, means and copies between rows and the coarser rows that they belong to.

All of them act on rows, `[count, width]`. The means over the weights of a target neuron are
the paper's row aggregates :math:`W_{j,*}`, those of a source neuron the column aggregates
:math:`W_{*,k}`, those of a network the layer aggregates :math:`W_{*,*}`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nfn_graph.features import Segments
from nfn_graph.ops import _scatter
from nfn_graph.ops._backends import current_backend
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_expand, plain_segment_sum
from nfn_graph.ops._precision import sum_dtype

Reduce = Literal["mean", "sum", "max"]


def segment_sum(x: Tensor, segments: Segments, relu: bool = False) -> Tensor:
    """Sums the rows of every segment: `[rows, width] -> [segments, width]`.

    Args:
        x: The rows.
        segments: Which rows belong together.
        relu: Whether to sum the ReLU of the rows.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> from nfn_graph.ops import segment_sum
        >>> key = "input", "weight", "hidden1"
        >>> features = graph.features()
        >>> x = features.weights[key].flatten(1)
        >>> segment_sum(x, features.rows(key).targets).shape  # one sum for every target neuron
        torch.Size([4, 1])
    """
    backend = current_backend()
    if backend == "fused":
        return SegmentSum.apply(x, segments, x if relu else None)
    x = x.relu() if relu else x
    if backend == "torch-scatter":
        return _scatter.segment_sum(x, segments)
    return plain_segment_sum(x, segments)


def segment_mean(x: Tensor, segments: Segments) -> Tensor:
    """Averages the rows of every segment; the mean over nothing is 0.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> from nfn_graph.ops import segment_mean
        >>> key = "input", "weight", "hidden1"
        >>> features = graph.features()
        >>> x = features.weights[key].flatten(1)
        >>> segment_mean(x, features.rows(key).sources).shape  # one mean for every source neuron
        torch.Size([2, 1])
    """
    wide = x.to(sum_dtype(x.dtype))
    return divide_by_count(segment_sum(wide, segments), segments.counts).to(x.dtype)


def segment_max(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The largest of the rows with each index, value by value; 0 where there is none.

    Example:
        >>> import torch
        >>> from nfn_graph.ops import segment_max
        >>> segment_max(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([0, 0, 1]), 3)
        tensor([[3.],
                [2.],
                [0.]])
    """
    where = index.long().unsqueeze(1).expand_as(x)
    zeros = x.new_zeros(count, x.shape[1])
    return zeros.scatter_reduce(0, where, x, "amax", include_self=False)


def expand(x: Tensor, segments: Segments) -> Tensor:
    """Gives every row the value of its segment: `[segments, width] -> [rows, width]`.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> from nfn_graph.ops import expand
        >>> key = "input", "weight", "hidden1"
        >>> features = graph.features()
        >>> x = features.neurons["hidden1"].flatten(1)
        >>> expand(x, features.rows(key).targets).shape  # a row for every edge
        torch.Size([8, 1])
    """
    backend = current_backend()
    if backend == "fused":
        return Expand.apply(x, segments, None)
    if backend == "torch-scatter":
        return _scatter.expand(x, segments)
    return plain_expand(x, segments)


def divide_by_count(sums: Tensor, counts: Tensor) -> Tensor:
    """Turns sums into means; the mean over nothing is 0.

    Example:
        >>> import torch
        >>> from nfn_graph.ops import divide_by_count
        >>> divide_by_count(torch.tensor([[6.0], [0.0]]), torch.tensor([3, 0]))
        tensor([[2.],
                [0.]])
    """
    return sums / counts.clamp(min=1).to(sums.dtype).unsqueeze(1)
