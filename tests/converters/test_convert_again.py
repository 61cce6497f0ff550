"""Converting into a folder that holds graphs already: of the same files, and of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from nfn_graph import cli
from nfn_graph.converters import conversion_jobs, to_state_dict
from nfn_graph.converters.store.reader import Store


def write(path: Path) -> dict[str, torch.Tensor]:
    path.parent.mkdir(parents=True, exist_ok=True)
    state_dict = checkpoints.mlp().state_dict()
    torch.save(state_dict, path)
    return state_dict


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def names(out: Path) -> list[str]:
    return Store(out).table.column("file").to_pylist()


def is_of(out: Path, name: str, state_dict: dict[str, torch.Tensor]) -> bool:
    found = to_state_dict(Store(out).graph(names(out).index(name)))
    return all(torch.equal(found[key], tensor) for key, tensor in state_dict.items())


@pytest.mark.parametrize("parallel_from", [1, 32])
def test_the_graph_of_another_file_is_not_replaced(
    parallel_from: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(conversion_jobs, "_PARALLEL_FROM", parallel_from)
    first, second, out = tmp_path / "A" / "model.pt", tmp_path / "B" / "model.pt", tmp_path / "out"
    weights, others = write(first), write(second)
    assert cli.main(["convert", str(first), "--out", str(out), "--workers", "2"]) == 0
    assert cli.main(["convert", str(second), "--out", str(out), "--workers", "2"]) == 1
    assert names(out) == ["model.pt"] and is_of(out, "model.pt", weights)
    assert str(first) in report(out)["failed"][str(second)]
    assert "--overwrite" in capsys.readouterr().err
    # Together they have folders of their own.
    assert cli.main(["convert", str(first), str(second), "--out", str(out)]) == 0
    assert names(out) == ["A/model.pt", "B/model.pt", "model.pt"]
    assert is_of(out, "A/model.pt", weights) and is_of(out, "B/model.pt", others)
    assert is_of(out, "model.pt", weights)
    assert cli.main(["convert", str(second), "--out", str(out), "--overwrite"]) == 0
    assert len(names(out)) == 3 and is_of(out, "model.pt", others)


def test_one_file_under_two_paths_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "A" / "model.pt")
    (tmp_path / "link").symlink_to(tmp_path / "A")
    monkeypatch.chdir(tmp_path / "A")
    for path in ("model.pt", "../A/model.pt", "../link/model.pt"):
        assert cli.main(["convert", path, "--out", str(tmp_path / "out")]) == 0, path
    changed = write(tmp_path / "A" / "model.pt")
    os.utime("model.pt", ns=(1, 1))
    assert cli.main(["convert", "model.pt", "--out", str(tmp_path / "out")]) == 0
    assert names(tmp_path / "out") == ["model.pt"]
    assert is_of(tmp_path / "out", "model.pt", changed)


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_file_that_became_unreadable_keeps_its_graph(damage: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.pt", tmp_path / "out"
    weights = write(path)
    assert cli.main(["convert", str(path), "--out", str(out)]) == 0
    path.unlink()
    if damage == "damaged":
        path.write_bytes(b"nonsense" * 9)
    assert cli.main(["convert", str(path), "--out", str(out)]) == 1
    assert is_of(out, "model.pt", weights)
    reason = report(out)["failed"][str(path)]
    assert "'model.pt'" in reason and "earlier" in reason
    # A file that never had one is only refused.
    (tmp_path / "other.pt").write_bytes(b"nonsense" * 9)
    assert cli.main(["convert", str(tmp_path / "other.pt"), "--out", str(out)]) == 1
    assert "earlier" not in report(out)["failed"][str(tmp_path / "other.pt")]
