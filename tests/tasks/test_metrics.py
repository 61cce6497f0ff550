"""Metrics compared with scikit-learn and with results computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics as oracle

from nfn_graph.tasks.metrics import class_metrics, kendall_tau, regression_metrics, tau_ceiling


def test_tau_ceiling_is_reached_and_never_passed() -> None:
    true = torch.tensor([0.1, 0.1, 0.1, 0.5, 0.5, 0.7, 0.9])
    best = max(kendall_tau(torch.randperm(7).double(), true) for _ in range(2_000))
    ordered = torch.arange(7.0)
    assert kendall_tau(ordered, true) == pytest.approx(tau_ceiling(true), abs=1e-12)
    assert best <= tau_ceiling(true) + 1e-12
    assert tau_ceiling(torch.tensor([1.0, 2, 3])) == 1
    assert kendall_tau(-ordered, true) == pytest.approx(-tau_ceiling(true))


def test_numbers_by_hand() -> None:
    true, predicted = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.1, 0.5, 0.7])
    found = regression_metrics(predicted, true)
    assert found["r2"] == pytest.approx(1 - 0.1 / 0.5)
    assert found["mae"] == pytest.approx(0.4 / 3)
    assert found["rmse"] == pytest.approx(math.sqrt(0.1 / 3))
    assert found["tau"] == found["tau_ceiling"] == 1
    assert regression_metrics(true, true)["r2"] == 1


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_numbers(offset: float) -> None:
    """This also holds for labels that are large compared with their differences."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(50, generator=generator).double() + offset
    predicted = true + torch.randn(50, generator=generator).double() / 2
    found = regression_metrics(predicted, true)
    assert found["r2"] == pytest.approx(oracle.r2_score(true, predicted), rel=1e-6)
    assert found["mae"] == pytest.approx(oracle.mean_absolute_error(true, predicted), rel=1e-6)
    wanted = math.sqrt(oracle.mean_squared_error(true, predicted))
    assert found["rmse"] == pytest.approx(wanted, rel=1e-6)


def test_equal_numbers_have_no_ranks() -> None:
    found = regression_metrics(torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.5]))
    assert math.isnan(found["tau"]) and math.isnan(found["r2"]) and found["mae"] > 0


def test_a_single_network_has_no_rank() -> None:
    found = regression_metrics(torch.tensor([0.1]), torch.tensor([0.5]))
    assert math.isnan(found["tau"]) and found["mae"] == pytest.approx(0.4)


@pytest.mark.parametrize("classes", [2, 4])
def test_classes(classes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    true = torch.randint(classes, (80,), generator=generator)
    logits = torch.randn(80, classes, generator=generator)
    logits[torch.arange(80), true] += 1
    probability, predicted = logits.softmax(1).max(1)
    found = class_metrics(predicted, true, probability, classes)
    assert found["accuracy"] == oracle.accuracy_score(true, predicted)
    wanted = oracle.f1_score(true, predicted, average="macro")
    assert found["f1"] == pytest.approx(wanted, rel=1e-6)
    assert found["confusion"] == oracle.confusion_matrix(true, predicted).tolist()
    assert ("auc" in found) is (classes == 2)
    if classes == 2:
        wanted = oracle.roc_auc_score(true, logits.softmax(1)[:, 1])
        assert found["auc"] == pytest.approx(wanted, rel=1e-6)


def test_one_class_only() -> None:
    """Nothing can be ranked, and a class that does not occur does not count."""
    true = torch.zeros(3, dtype=torch.long)
    found = class_metrics(true, true, torch.tensor([0.9, 0.8, 0.7]), 2)
    assert math.isnan(found["auc"]) and found["accuracy"] == found["f1"] == 1


def test_confusion_has_the_truth_in_rows() -> None:
    predicted, true = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 1, 2, 1])
    found = class_metrics(predicted, true, torch.ones(4), 3)["confusion"]
    assert found == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
