r"""Metrics of predictions."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.optional import require


def kendall_tau(predicted: Tensor, true: Tensor) -> float:
    r"""Kendall's :math:`\tau_b`, the rank correlation that allows for ties."""
    stats = require("scipy.stats", "to compute Kendall's tau", "tasks")
    found = stats.kendalltau(predicted.double().numpy(), true.double().numpy(), variant="b")
    return float(found.statistic)


def tau_ceiling(true: Tensor) -> float:
    r"""The largest :math:`\tau_b` that predictions without ties can reach.

    With :math:`n_0` pairs of networks, of which :math:`n_1` are tied in the truth, it is
    :math:`(n_0 - n_1) / \sqrt{(n_0 - n_1)\,n_0}`.
    """
    _, counts = np.unique(true.double().numpy(), return_counts=True)
    pairs = len(true) * (len(true) - 1) / 2
    tied = float((counts * (counts - 1) / 2).sum())
    return math.sqrt((pairs - tied) / pairs) if pairs else math.nan


def r_squared(predicted: Tensor, true: Tensor) -> float:
    """The share of the variance that is explained; negative if the mean would do better."""
    left = (true.double() - predicted.double()).square().sum()
    total = (true.double() - true.double().mean()).square().sum()
    return float(1 - left / total) if total > 0 else math.nan


def mean_absolute_error(predicted: Tensor, true: Tensor) -> float:
    """The mean of the absolute differences."""
    return float((predicted.double() - true.double()).abs().mean())


def confusion_matrix(predicted: Tensor, true: Tensor, classes: int) -> list[list[int]]:
    """How many networks of each class (rows) were taken for each class (columns)."""
    counts = torch.bincount(true.long() * classes + predicted.long(), minlength=classes**2)
    return counts.view(classes, classes).tolist()
