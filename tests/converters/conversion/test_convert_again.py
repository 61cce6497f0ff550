"""Converting into a folder that already holds graphs, of the same or of other files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from nfn_graph import cli
from nfn_graph.converters import to_state_dict
from nfn_graph.converters.conversion import sharding
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
    monkeypatch.setattr(sharding, "_PARALLEL_FROM", parallel_from)
    first, second, out = tmp_path / "A" / "model.pt", tmp_path / "B" / "model.pt", tmp_path / "out"
    weights, others = write(first), write(second)
    assert cli.main(["convert", str(first), "--out", str(out), "--workers", "2"]) == 0
    assert cli.main(["convert", str(second), "--out", str(out), "--workers", "2"]) == 2
    assert names(out) == ["model.pt"] and is_of(out, "model.pt", weights)
    assert str(first) in report(out)["failed"][str(second)]
    assert "--overwrite" in capsys.readouterr().err
    # Together the new one has a folder of its own; the known one keeps its name.
    assert cli.main(["convert", str(first), str(second), "--out", str(out)]) == 0
    assert names(out) == ["B/model.pt", "model.pt"]
    assert is_of(out, "B/model.pt", others) and is_of(out, "model.pt", weights)
    third = write(tmp_path / "C" / "model.pt")
    arguments = ["convert", str(tmp_path / "C" / "model.pt"), "--out", str(out)]
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert names(out) == ["B/model.pt", "model.pt"] and is_of(out, "model.pt", third)


def test_names_stay_when_files_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, out = tmp_path / "zoo", tmp_path / "out"
    before = {f"a/{i}.pt": write(zoo / "a" / f"{i}.pt") for i in range(3)}
    monkeypatch.chdir(tmp_path)
    arguments = ["convert", "zoo", "--out", str(out)]
    assert cli.main(arguments) == 0
    assert names(out) == list(before)
    before |= {f"b/{i}.pt": write(zoo / "b" / f"{i}.pt") for i in range(2)}
    assert cli.main(arguments) == 0
    assert report(out)["skipped"] == 3 and report(out)["converted"] == 2
    assert names(out) == list(before)
    # The files come from another folder, and one was changed; it keeps its name.
    before["b/1.pt"] = write(zoo / "b" / "1.pt")
    os.utime(zoo / "b" / "1.pt", ns=(1, 1))
    assert cli.main(["convert", "zoo/a/../b", "--out", str(out)]) == 0
    assert report(out)["skipped"] == 1 and report(out)["converted"] == 1
    assert cli.main(["convert", "zoo/a/../b", "--out", str(out), "--overwrite"]) == 0
    assert names(out) == list(before)
    assert all(is_of(out, name, weights) for name, weights in before.items())


def test_names_are_normal(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.pt")
    write(tmp_path / "y.pt")
    files = [str(tmp_path / "a" / "x.pt"), str(tmp_path / "a" / ".." / "y.pt")]
    assert cli.main(["convert", *files, "--out", str(tmp_path / "out")]) == 0
    assert names(tmp_path / "out") == ["a/x.pt", "y.pt"]


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.pt")
    (tmp_path / "in" / "link.pt").symlink_to(tmp_path / "in" / "a.pt")
    assert cli.main(["convert", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    assert report(tmp_path / "out")["skipped"] == 1
    assert names(tmp_path / "out") == ["a.pt"]


def test_two_files_of_a_run_never_get_one_name(tmp_path: Path) -> None:
    """The first was named below its own folder, where the second has its name from the start."""
    zoo, out = tmp_path / "zoo", tmp_path / "out"
    weights = write(zoo / "a" / "model.pt")
    assert cli.main(["convert", str(zoo / "a"), "--out", str(out)]) == 0
    write(zoo / "model.pt")
    for options in ([], ["--overwrite"]):
        assert cli.main(["convert", str(zoo), "--out", str(out), *options]) == 1
        assert list(report(out)["failed"]) == [str(zoo / "model.pt")]
        assert names(out) == ["model.pt"] and is_of(out, "model.pt", weights)


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_a_name_that_is_no_text_costs_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal does not interpret the name of a file that failed either."""
    write(tmp_path / "in" / "a.pt")
    (tmp_path / "in" / os.fsdecode(b"\xff.pt")).write_bytes((tmp_path / "in" / "a.pt").read_bytes())
    (tmp_path / "in" / "\x1b[2J.pt").write_bytes(b"nonsense" * 9)
    assert cli.main(["convert", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 1
    assert names(tmp_path / "out") == ["a.pt"]
    first, second = capsys.readouterr().err.splitlines()
    assert first.isprintable() and "UTF-8" in first and "\\udcff.pt" in first
    assert second.isprintable() and "\\x1b[2J.pt" in second
    assert len(report(tmp_path / "out")["failed"]) == 2


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_architecture_is_said_and_repaired(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = write(tmp_path / "model.pt"), tmp_path / "out"
    arguments = ["convert", str(tmp_path / "model.pt"), "--out", str(out)]
    assert cli.main(arguments) == 0
    (victim,) = (out / "architectures").iterdir()
    content = victim.read_bytes()
    victim.unlink()
    if damage == "flipped":
        victim.write_bytes(content.replace(b"weight", b"weighs", 1))
    capsys.readouterr()
    for command in (arguments, ["store", str(out)]):
        assert cli.main(command) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert victim.name in line and "--overwrite" in line and "Errno" not in line
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert victim.read_bytes() == content and is_of(out, "model.pt", weights)
    assert cli.main(["store", str(out), "--verify"]) == 0


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
    assert cli.main(["convert", str(path), "--out", str(out)]) == 2
    assert is_of(out, "model.pt", weights)
    reason = report(out)["failed"][str(path)]
    assert "'model.pt'" in reason and "previous content" in reason
    # A file that never had one is only refused.
    (tmp_path / "other.pt").write_bytes(b"nonsense" * 9)
    assert cli.main(["convert", str(tmp_path / "other.pt"), "--out", str(out)]) == 2
    assert "previous content" not in report(out)["failed"][str(tmp_path / "other.pt")]
