"""The scatter and gather operations of the layers, and the kernels behind them."""

from nfn_graph.ops._backends import current_backend, use_backend
from nfn_graph.ops._precision import sum_dtype, without_autocast
from nfn_graph.ops._segments import (
    Reduce,
    divide_by_count,
    expand,
    segment_max,
    segment_mean,
    segment_sum,
)

__all__ = [
    "Reduce",
    "current_backend",
    "divide_by_count",
    "expand",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "sum_dtype",
    "use_backend",
    "without_autocast",
]
