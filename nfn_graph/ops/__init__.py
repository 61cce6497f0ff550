"""The scatters and gathers that layers are made of, and the kernels behind them."""

from nfn_graph.ops._backends import current_backend, use_backend
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_expand, plain_segment_sum
from nfn_graph.ops._segments import Reduce, divide_by_count, expand, segment_max, segment_sum

__all__ = [
    "Expand",
    "Reduce",
    "SegmentSum",
    "current_backend",
    "divide_by_count",
    "expand",
    "plain_expand",
    "plain_segment_sum",
    "segment_max",
    "segment_sum",
    "use_backend",
]
