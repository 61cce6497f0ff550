"""The demo on a small scale."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nfn_graph.cli import main
from nfn_graph.tasks import demo
from nfn_graph.tasks.demo import MODELS, SEEN, UNSEEN
from nfn_graph.tasks.metrics import kendall_tau
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder

UNKNOWN = "unseen-widths"


def test_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_here(options: CnnZooOptions, **more: Any) -> Path:
        """Starting two processes would take longer than training so few networks."""
        assert options.engine == "processes"
        return build_zoo(replace(options, engine="local"), **more)

    monkeypatch.setattr(demo, "build_zoo", build_here)
    out = tmp_path / "demo"
    options = ["--networks", "24", "--unseen", "6", "--epochs", "1", "--seed", "3"]
    assert main(["demo", "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out
    squeezed = re.sub(" +", " ", printed)
    page = (out / "report.html").read_text()
    for model in MODELS:
        metrics = json.loads((out / "runs" / model / "metrics.json").read_text())
        parts = (metrics["test"], metrics["evaluations"][UNKNOWN])
        numbers = [f"{part[name]:.3f}" for part in parts for name in ("tau", "r2")]
        assert re.search(rf"^ {model} .*\s{re.escape(' '.join(numbers))}\s", squeezed, re.M)
        assert all(number in page for number in numbers)
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
