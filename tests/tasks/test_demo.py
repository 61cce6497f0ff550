"""The demonstration on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nfn_graph.cli import main
from nfn_graph.tasks.demo import MODELS, SEEN, UNSEEN
from nfn_graph.tasks.metrics import kendall_tau
from nfn_graph.tasks.zoo import open_zoo_folder

UNKNOWN = "unseen-widths"


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    options = ["--networks", "24", "--unseen", "6", "--epochs", "1", "--seed", "3"]
    assert main(["demo", "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out
    page = (out / "report.html").read_text()
    for model in MODELS:
        metrics = json.loads((out / "runs" / model / "metrics.json").read_text())
        for part in (metrics["test"], metrics["evaluations"][UNKNOWN]):
            assert f"{part['tau']:.3f}" in printed
            assert f"{part['tau']:.3f}" in page
    assert page.count("data:image/png;base64,") == 3 * len(MODELS) + 1  # The probes.
    assert "evaluates the network" in page
    for part in (open_zoo_folder(out / "zoo").where(split="test"), open_zoo_folder(out / UNKNOWN)):
        rows = [row for row in part.rows if row["is_finite"]]
        names = ("train_accuracy", "test_accuracy")
        ceiling = kendall_tau(*(torch.tensor([row[name] for row in rows]) for name in names))
        assert f"{ceiling:.3f}" in printed
        assert f"{ceiling:.3f}" in page
    assert {row["width"] for row in open_zoo_folder(out / "zoo").rows} == set(SEEN)
    unseen = open_zoo_folder(out / UNKNOWN)
    assert {row["width"] for row in unseen.rows} <= set(UNSEEN)
    assert not set(SEEN) & set(UNSEEN)
