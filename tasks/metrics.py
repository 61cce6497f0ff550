r"""Metrics of predictions.

Errors, F1, the ROC curve and the confusion matrix are torchmetrics'. Its Kendall's tau takes time
in proportion to the square of the number of networks, its :math:`R^2` subtracts large sums of
squares from each other, and its accuracy is rounded to single precision; these are our own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor
from torchmetrics.functional import mean_absolute_error, mean_squared_error
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_confusion_matrix,
    multiclass_f1_score,
)

from nfn_graph.converters.errors import require


def regression_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    r"""Kendall's :math:`\tau_b` and its ceiling, :math:`R^2`, mean absolute and root mean squared
    error."""
    predicted, true = predicted.double(), true.double()
    return {
        "tau": kendall_tau(predicted, true),
        "tau_ceiling": tau_ceiling(true),
        "r2": r_squared(predicted, true),
        "mae": float(mean_absolute_error(predicted, true)),
        "rmse": float(mean_squared_error(predicted, true, squared=False)),
    }


def class_metrics(
    predicted: Tensor, true: Tensor, probability: Tensor, classes: int
) -> dict[str, Any]:
    """Accuracy, macro F1 and the confusion matrix; for two classes, the area under the ROC curve.

    Args:
        predicted: The predicted class of every network.
        true: The true class of every network.
        probability: The predicted probability of the predicted class.
        classes: The number of classes.
    """
    found: dict[str, Any] = {
        "accuracy": float((predicted == true).double().mean()),
        "f1": float(multiclass_f1_score(predicted, true, classes, average="macro")),
    }
    if classes == 2:
        # The ROC curve is only defined if there are networks of both classes.
        both = len(true.unique()) == 2
        second = probability.where(predicted == 1, 1 - probability)
        found["auc"] = float(binary_auroc(second, true)) if both else math.nan
    # Rows are true classes, columns are predicted classes.
    found["confusion"] = multiclass_confusion_matrix(predicted, true, classes).tolist()
    return found


def kendall_tau(predicted: Tensor, true: Tensor) -> float:
    r"""Kendall's :math:`\tau_b`, the rank correlation that allows for ties."""
    if len(true) < 2:
        return math.nan  # There is nothing to rank.
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
