"""Sums, means and copies between rows and the coarser rows that they belong to.

All of them act on rows, `[rows, width]`. The means over the weights of a target neuron are the
paper's row aggregates :math:`W_{j,*}`, those of a source neuron the column aggregates
:math:`W_{*,k}`, those of a network the layer aggregates :math:`W_{*,*}`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nfn_graph.features import Grouping
from nfn_graph.ops import _scatter
from nfn_graph.ops._backends import current_backend
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_expand, plain_segment_sum
from nfn_graph.ops._precision import sum_dtype

Reduce = Literal["mean", "sum", "add", "max"]


def segment_sum(x: Tensor, grouping: Grouping, relu: bool = False) -> Tensor:
    """Sums the rows of every group: `[rows, width] -> [groups, width]`.

    Args:
        x: The rows.
        grouping: The division of the rows into groups.
        relu: Whether to sum the ReLU of the rows.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.ops import segment_sum
        >>> features = WeightGraph.from_tensors([torch.ones(3, 2)]).features()
        >>> key = "input", "weight", "output"
        >>> segment_sum(features[key].flatten(1), features.rows(key).targets).flatten()
        tensor([2., 2., 2.])
    """
    backend = current_backend()
    if backend == "fused":
        return SegmentSum.apply(x, grouping, x if relu else None)
    x = x.relu() if relu else x
    if backend == "torch-scatter":
        return _scatter.segment_sum(x, grouping)
    return plain_segment_sum(x, grouping)


def segment_mean(x: Tensor, grouping: Grouping) -> Tensor:
    """Averages the rows of every group; the mean over nothing is 0.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.ops import segment_mean
        >>> features = WeightGraph.from_tensors([torch.ones(3, 2)]).features()
        >>> key = "input", "weight", "output"
        >>> segment_mean(features[key].flatten(1), features.rows(key).sources).flatten()
        tensor([1., 1.])
    """
    wide = x.to(sum_dtype(x.dtype))
    return divide_by_count(segment_sum(wide, grouping), grouping.group_sizes).to(x.dtype)


def segment_max(x: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """The maximum over the rows with each index, value by value; 0 where there are no rows.

    Example:
        >>> import torch
        >>> from nfn_graph.ops import segment_max
        >>> segment_max(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([0, 0, 1]), 3)
        tensor([[3.],
                [2.],
                [0.]])
    """
    where = index.long().unsqueeze(1).expand_as(x)
    zeros = x.new_zeros(num_groups, x.shape[1])
    return zeros.scatter_reduce(0, where, x, "amax", include_self=False)


def expand(x: Tensor, grouping: Grouping) -> Tensor:
    """Gives every row the value of its group: `[groups, width] -> [rows, width]`.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.ops import expand
        >>> features = WeightGraph.from_tensors([torch.ones(3, 2)]).features()
        >>> key = "input", "weight", "output"
        >>> expand(torch.tensor([[0.0], [1.0], [2.0]]), features.rows(key).targets).flatten()
        tensor([0., 0., 1., 1., 2., 2.])
    """
    backend = current_backend()
    if backend == "fused":
        return Expand.apply(x, grouping, None)
    if backend == "torch-scatter":
        return _scatter.expand(x, grouping)
    return plain_expand(x, grouping)


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
