"""`nfn-graph zoo info` says what is in a folder, whoever published it."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
import torch
from imitations_cnn import wild_park
from imitations_inr import dws_fashion

from nfn_graph.cli import main
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo


def test_a_published_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dws_fashion(tmp_path / "fmnist_inrs")
    assert main(["zoo", "info", str(tmp_path / "fmnist_inrs")]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:])
    found = {name: text.strip() for name, text in lines.items()}
    assert found["layout"] == "DWSNets FashionMNIST INRs"
    assert found["networks"] == "4" and found["splits"] == "train 2, validation 1, test 1"
    assert found["w0"] == "30.0" and found["output_offset"] == "0.5"
    assert "seq.1.weight 32 x 32" in found["tensors"]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild_park(tmp_path / "zoo")
    splits = (tmp_path / "cnn_park_splits.json").rename(tmp_path / "elsewhere.json")
    command = ["zoo", "info", str(tmp_path / "zoo"), "--split-file", str(splits), "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] == "CNN Wild Park"
    assert facts["splits"] == {"train": 4, "validation": 1, "test": 3}
    assert facts["first network"]["config"]["residual"] == [-1, -1, 0, 1]


def test_a_zoo_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = CnnZooOptions(out=tmp_path / "zoo", networks=4, epochs=(1, 1), widths=(4,))
    build_zoo(options)
    assert main(["zoo", "info", str(tmp_path / "zoo"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] == "nfn-graph" and facts["kind"] == "cnn"
    assert facts["networks"] == sum(facts["splits"].values()) > 0
    assert facts["options"]["networks"] == 4


def test_a_store_that_is_no_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(checkpoints.mlp().state_dict(), tmp_path / "x.pt")
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "x.pt"), "--out", str(out)]) == 0
    assert main(["zoo", "render", str(out), "--output", str(tmp_path / "x.png")]) == 2
    assert f"nfn-graph store {out}" in capsys.readouterr().err
    assert main(["zoo", "info", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["networks"] == 1 and facts["first network"]["file"] == "x.pt"


def test_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "info", str(tmp_path)]) == 2
    assert "an empty folder" in capsys.readouterr().err
