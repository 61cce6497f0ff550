"""The demonstration on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nfn_graph.cli import main
from nfn_graph.tasks.demo import MODELS, SEEN, UNSEEN
from nfn_graph.tasks.zoo import open_zoo_folder


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    options = ["--networks", "24", "--unseen", "6", "--epochs", "1", "--seed", "3"]
    assert main(["demo", "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out
    page = (out / "report.html").read_text()
    for model in MODELS:
        metrics = json.loads((out / "runs" / model / "metrics.json").read_text())
        for part in (metrics["test"], metrics["evaluations"]["unseen-widths"]):
            assert f"{part['tau']:.3f}" in printed
            assert f"{part['tau']:.3f}" in page
    assert page.count("data:image/png;base64,") == 3 * len(MODELS)
    assert {row["width"] for row in open_zoo_folder(out / "zoo").rows} == set(SEEN)
    unseen = open_zoo_folder(out / "unseen-widths")
    assert {row["width"] for row in unseen.rows} <= set(UNSEEN)
    assert not set(SEEN) & set(UNSEEN)
