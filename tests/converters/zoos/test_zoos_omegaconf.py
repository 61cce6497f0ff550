"""Checkpoints of the CNN Wild Park as they were published: their configuration is an object.

`omegaconf_checkpoint.pt` was written with torch.save and OmegaConf 2.4.0, from a structured
configuration of the published class CNNConfig inside a larger one. Neither OmegaConf nor the class
is installed here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from imitations_cnn import PARK, ParkNet, wild_park

from nfn_graph.converters import ConversionError, load, open_zoo, to_module

FILE = Path(__file__).parent / "omegaconf_checkpoint.pt"


def published() -> ParkNet:
    """The network of the file, whose weights are values of a sine one after the other."""
    network, start = ParkNet(PARK[2]), 0
    with torch.no_grad():
        for parameter in network.parameters():
            numbers = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.copy_(0.3 * torch.sin(numbers).view(parameter.shape))
            start += parameter.numel()
    return network


def place(path: Path, name: str = "run_a") -> Path:
    folder = path / name / "checkpoint_000010"
    folder.mkdir(parents=True)
    shutil.copy(FILE, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def test_a_safe_load_refuses_it() -> None:
    with pytest.raises(ConversionError, match=r"objects made by .*omegaconf"):
        load(FILE)


def test_it_computes_without_the_classes(tmp_path: Path) -> None:
    place(tmp_path / "zoo", "run_a")
    place(tmp_path / "zoo", "run_b")
    zoo = open_zoo(tmp_path / "zoo")
    inputs = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = published().double()(inputs)
        for i in range(2):
            torch.testing.assert_close(zoo.module(i).double()(inputs), expected, rtol=0, atol=1e-9)
            actual = to_module(zoo[i], ParkNet(PARK[2])).double()(inputs)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    assert zoo.row(0) == {
        "path": "run_a/checkpoint_000010/checkpoint.pt",
        "run": "run_a",
        "test/acc": 0.4321,
        "iteration": 10,
        "config": PARK[2],
    }
    assert "omegaconf" not in sys.modules and "experiments" not in sys.modules


def test_it_may_lie_beside_plain_ones(tmp_path: Path) -> None:
    imitation = wild_park(tmp_path / "zoo")
    (tmp_path / "cnn_park_splits.json").unlink()
    place(tmp_path / "zoo", "run_z")
    zoo = open_zoo(tmp_path / "zoo")
    assert len(zoo) == len(imitation.networks) + 1
    assert zoo[-1].row["config"] == PARK[2] and zoo[0].row["config"] == PARK[0]


class Dangerous:
    """The contents of a file by an attacker."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("__import__('pathlib').Path('ran').touch()",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path / "zoo")
    content = {
        "model": published().state_dict(),
        "config": PARK[2],
        "last_result": {"test/acc": 0.5},
        "iteration": 10,
        "extra": Dangerous(),
    }
    torch.save(content, path)
    assert open_zoo(tmp_path / "zoo")[0].row["test/acc"] == 0.5
    torch.save({**content, "config": Dangerous()}, path)
    with pytest.raises(ConversionError, match=r"Expected 'config' .*checkpoint\.pt'.*to_container"):
        open_zoo(tmp_path / "zoo")[0]
    assert not (tmp_path / "ran").exists()
    # The file would be dangerous if it were unpickled.
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists()
