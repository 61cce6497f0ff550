"""Labels: from a table about checkpoints to columns of a store."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoints
import killing
import pyarrow
import pytest
import torch
from pyarrow import parquet

from nfn_graph import UserError, WeightGraph, cli
from nfn_graph.converters import WeightDataset, build_store, load, to_state_dict
from nfn_graph.converters.conversion.labels import Fractions
from nfn_graph.converters.store.table import SPLITS

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of checkpoints, half of them in a folder inside."""
    monkeypatch.chdir(tmp_path)
    for i in range(COUNT):
        path = tmp_path / "nets" / ("deep" if i % 2 else ".") / f"{i:03d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoints.mlp((3, 4 + i % 3, 2)).state_dict(), path)
    return tmp_path


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    """Labels of every type, with gaps."""
    return [
        {
            "file": f"{i:03d}",
            "width": 4 + i % 3,
            "score": None if i == 3 else i / 8,
            "kind": f"k{i % 2}",
            "is_odd": bool(i % 2),
        }
        for i in range(count)
    ]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    """A table in the format of its suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(found), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, found)) + "\n\n", "utf-8")
    else:
        lines = [",".join(found[0])]
        lines += [",".join("" if v is None else str(v) for v in row.values()) for row in found]
        path.write_text("\n".join(lines), "utf-8")
    return path


def convert(labels: Path, *options: str, out: str = "store") -> int:
    return cli.main(["convert", "nets", "--out", out, "--labels", str(labels), *options])


@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet", "labels.jsonl"])
def test_labels_become_columns_of_their_types(folder: Path, name: str) -> None:
    assert convert(write(folder / name, rows())) == 0
    dataset = WeightDataset("store")
    types = {field.name: str(field.type) for field in dataset.table.schema}
    expected = {"width": "int64", "score": "double", "kind": "string", "is_odd": "bool"}
    assert {name: types[name] for name in expected} == expected
    for row, graph in zip(dataset.table.to_pylist(), dataset, strict=True):
        path = folder / "nets" / row["file"]
        (label,) = (label for label in rows() if label["file"] == path.stem)
        assert {name: row[name] for name in expected} == {name: label[name] for name in expected}
        torch.testing.assert_close(to_state_dict(graph), torch.load(path), rtol=0, atol=0)
    assert Counter(dataset.table.column("split").to_pylist()) == {
        "train": 10,
        "validation": 1,
        "test": 1,
    }
    numbers = WeightDataset("store", attributes={"y": "width"})
    assert [graph.y.item() for graph in numbers] == dataset.table.column("width").to_pylist()


def test_a_column_of_splits_is_used(folder: Path) -> None:
    spelled = ("train", "Training", "val", "valid", "dev", "validation", "test", "TEST")
    table = [{**row, "split": spelled[i % 8]} for i, row in enumerate(rows())]
    labels = write(folder / "labels.csv", table)
    assert convert(labels) == 0
    found = WeightDataset("store").table.to_pylist()
    splits = {Path(row["file"]).stem: row["split"] for row in found}
    meaning = (*["train"] * 2, *["validation"] * 4, *["test"] * 2)
    assert splits == {row["file"]: meaning[i % 8] for i, row in enumerate(table)}


@pytest.mark.parametrize(
    "spelling", ["nets/{}", "./nets/{}", "../{folder}/nets/{}", "{path}/nets/{}"]
)
def test_paths_name_files(folder: Path, spelling: str) -> None:
    """The table may be in another folder than the one where the command runs."""
    inside = {f"{i:03d}": f"deep/{i:03d}.pt" if i % 2 else f"{i:03d}.pt" for i in range(COUNT)}
    (folder / "tables").mkdir()
    table = []
    for row in rows():
        file = spelling.format(inside[row["file"]], folder=folder.name, path=folder)
        table.append({**row, "file": f"../{file}" if file.startswith("..") else file})
    assert convert(write(folder / "tables" / "labels.csv", table)) == 0
    for row in WeightDataset("store").table.to_pylist():
        assert row["is_odd"] == (int(Path(row["file"]).stem) % 2 == 1)


def test_files_and_rows_without_each_other_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write(folder / "labels.csv", [*rows()[2:], {**rows()[0], "file": "other.pt"}])
    assert convert(labels) == 1
    captured = capsys.readouterr()
    assert "10 converted, 0 skipped, 2 failed, 1 rows without a file" in captured.out
    lines = captured.err.splitlines()
    assert [
        name in line for name, line in zip(("000.pt", "001.pt", "other.pt"), lines, strict=True)
    ]
    report = json.loads((folder / "store" / "report.json").read_text())
    assert len(report["failed"]) == 2
    assert report["rows_without_file"] == ["row 11 (other.pt)"]
    assert len(WeightDataset("store")) == 10


BAD = {
    "missing": (None, r"labels\.csv"),
    "suffix": (("labels.xlsx", b"x"), r"\.csv, \.parquet"),
    "empty": (("labels.csv", b""), "Empty CSV"),
    "head only": (("labels.csv", b"file,y\n"), "a row for each file"),
    "encoding": (
        ("labels.csv", "file,y\n000.pt,\xe9\n".encode("latin-1")),
        "not UTF-8, at byte 14",
    ),
    "excel": (("labels.csv", "file,y\n000.pt,1\n".encode("utf-16")), "not UTF-8, at byte 0"),
    "ragged": (("labels.csv", b"file,y\n000.pt\n"), "2 columns, got 1"),
    "duplicate rows": (
        ("labels.csv", b"file,y\n000.pt,1\n000.pt,1\n"),
        "rows 1 and 2 for '000.pt'",
    ),
    "duplicate columns": (("labels.csv", b"file,y,y\n000.pt,1,2\n"), "different names"),
    "no file column": (("labels.csv", b"name,y\nother,1\n"), "names the files, such as '000.pt'"),
    "two file columns": (("labels.csv", b"a,b\n000.pt,000\n002.pt,002\n"), "(got a, b)"),
    "reserved": (("labels.csv", b"file,row\n000.pt,1\n"), "(got 'row'). Rename it"),
    "split": (("labels.csv", b"file,split\n000.pt,train\n002.pt,tets\n"), "(got 'tets' in row 2)"),
    "no split": (("labels.csv", b"file,split\n000.pt,train\n002.pt,\n"), "(got None in row 2)"),
    "empty split": (("labels.csv", b"file,y\n000.pt,1\n002.pt,1\n"), "each of train, validation"),
    "nested": (("labels.jsonl", b'{"file": "000.pt", "y": [1]}\n'), "column 'y'"),
    "mixed": (
        ("labels.jsonl", b'{"file": "000.pt", "y": 1}\n{"file": "002.pt", "y": "a"}\n'),
        "'y'",
    ),
    "no json": (("labels.jsonl", b'{"file": "000.pt"}\n{"fil'), "in line 2"),
    "no object": (("labels.jsonl", b"[1]\n"), "list in line 1"),
    "no parquet": (("labels.parquet", b"PAR1xxxxPAR1"), "a table of labels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_labels_are_one_line_and_nothing_is_written(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, message = BAD[name]
    path = folder / (file[0] if file else "labels.csv")
    if file:
        path.write_bytes(file[1])
    assert convert(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.replace("\\", "") in line
    assert not (folder / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--file-column", "nothing"], "file, width, score, kind, is_odd (got 'nothing')"),
        (["--file-column", "kind"], "'000.pt'"),
        (["--split", "0.5", "0.5", "0.5"], "add up to 1"),
        (["--split", "1.2", "-0.1", "-0.1"], "add up to 1"),
        (["--seed", "-1"], "at least 0"),
    ],
)
def test_bad_options_are_one_line_and_nothing_is_written(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(write(folder / "labels.csv", rows()), *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "store").exists()


def test_options_of_labels_need_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--split", "0.8", "0.1", "0.1"], ["--file-column", "file"]):
        assert cli.main(["convert", "nets", "--out", "store", *options]) == 2
        assert "--labels" in capsys.readouterr().err


def test_names_of_several_files_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(checkpoints.mlp().state_dict(), "nets/deep/000.pt")
    torch.save(checkpoints.mlp().state_dict(), "nets/deep/b.pt")
    torch.save(checkpoints.mlp().state_dict(), "nets/b.npz")
    labels = folder / "labels.csv"
    labels.write_text("file,y\n000.pt,1\n001.pt,1\n002.pt,1\nb,1\n")
    assert convert(labels) == 2
    # 000.pt is also the whole name of one of them.
    assert "'b' for 'b.npz' and 'deep/b.pt'" in capsys.readouterr().err
    labels.write_text("file,y\n000.pt,1\ndeep/000.pt,2\n002.pt,3\n")
    assert convert(labels) == 1
    found = {row["file"]: row["y"] for row in WeightDataset("store").table.to_pylist()}
    assert found == {"000.pt": 1, "deep/000.pt": 2, "002.pt": 3}


def test_changed_labels_are_written_and_splits_stay(folder: Path) -> None:
    labels = write(folder / "labels.csv", rows(8))
    assert convert(labels) == 1
    before = {row["file"]: row for row in WeightDataset("store").table.to_pylist()}
    changed = [{**row, "score": 9.5 if i == 1 else row["score"]} for i, row in enumerate(rows())]
    write(labels, changed)
    assert convert(labels) == 0
    report = json.loads((folder / "store" / "report.json").read_text())
    assert (report["converted"], report["skipped"]) == (5, 7)
    after = {row["file"]: row for row in WeightDataset("store").table.to_pylist()}
    assert after["deep/001.pt"]["score"] == 9.5
    assert {name: after[name]["split"] for name in before} == {
        name: row["split"] for name, row in before.items()
    }
    counts = Counter(row["split"] for row in after.values())
    assert [counts[split] for split in SPLITS] == Fractions().counts(COUNT)


def test_labels_that_do_not_fit_the_store_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write(folder / "labels.csv", rows())
    assert convert(labels) == 0
    assert cli.main(["convert", "nets", "--out", "store"]) == 2
    assert "width, score, kind, is_odd, split" in capsys.readouterr().err
    assert convert(write(labels, [{**row, "width": "wide"} for row in rows()])) == 2
    assert "Expected int64 in column 'width'" in capsys.readouterr().err
    assert WeightDataset("store").table.column("width").to_pylist()[0] == 4


@pytest.mark.parametrize("parts", [1, 3])
def test_machines_divide_alike(folder: Path, parts: int) -> None:
    labels = write(folder / "labels.csv", rows())
    for part in range(parts):
        options = ["--shard", f"{part + 1}/{parts}", "--seed", "4"]
        assert convert(labels, *options, out=f"store{parts}") == 0
    assert convert(labels, "--seed", "4", out="whole") == 0
    columns = [
        WeightDataset(name).table.select(["file", "split"]).to_pylist()
        for name in (f"store{parts}", "whole")
    ]
    assert columns[0] == columns[1]


def test_seeds_differ(folder: Path) -> None:
    labels = write(folder / "labels.csv", rows())
    found = set()
    for seed in range(3):
        assert (
            convert(labels, "--seed", str(seed), "--split", "0.5", "0.5", "0", out=str(seed)) == 0
        )
        found.add(tuple(WeightDataset(str(seed)).table.column("split").to_pylist()))
    assert len(found) == 3
    assert {Counter(splits)["train"] for splits in found} == {6}


@pytest.mark.parametrize("total", [3, 4, 7, 10, 99, 1000])
@pytest.mark.parametrize("parts", [(0.8, 0.1, 0.1), (0.98, 0.01, 0.01), (0.5, 0.0, 0.5)])
def test_shares_are_met(total: int, parts: tuple[float, float, float]) -> None:
    counts = Fractions(parts).counts(total)
    assert sum(counts) == total
    for count, part in zip(counts, parts, strict=True):
        assert (count > 0) == (part > 0)
        # The tolerance covers rounding, and one network for each part that would be empty.
        assert abs(count - part * total) < 3


def test_a_killed_conversion_keeps_its_labels(tmp_path: Path) -> None:
    files = killing.write_files(tmp_path / "nets", 120)
    table = [{"name": path.name, "number": i} for i, path in enumerate(files)]
    labels = write(tmp_path / "labels.csv", table)
    out = tmp_path / "store"
    moments = random.Random(0)
    options = ["--labels", str(labels)]
    killing.kill_at_random(killing.start(tmp_path / "nets", out, 16, *options), out, moments)
    arguments = ["convert", str(tmp_path / "nets"), "--out", str(out), *options]
    assert cli.main([*arguments, "--workers", "2", "--shard-size", "16"]) == 0
    found = WeightDataset(out).table.to_pylist()
    assert [row["number"] for row in found] == list(range(120))
    assert [Counter(row["split"] for row in found)[split] for split in SPLITS] == [96, 12, 12]


class TestBuildStore:
    def test_files_and_graphs_together(self, folder: Path) -> None:
        files = sorted((folder / "nets").glob("*.pt"))
        graph = WeightGraph.from_tensors([torch.randn(2, 3)])
        networks: list[tuple[Any, dict[str, Any]]] = [(path, {"y": 1.5}) for path in files]
        networks += [(graph, {"y": 2.5}), (graph, {"y": 3.5, "file": "mine"})]
        assert build_store(networks, "store").converted == len(files) + 2
        dataset = WeightDataset("store", attributes={"y": "y"})
        by_name = {row["file"]: i for i, row in enumerate(dataset.table.to_pylist())}
        mine = dataset[by_name["mine"]]
        assert mine.y.item() == 3.5
        assert torch.equal(mine.to_tensors()["0.weight"], graph.to_tensors()["0.weight"])
        first = dataset[by_name["000.pt"]]
        assert to_state_dict(first).keys() == to_state_dict(load(files[0])).keys()
        again = build_store(networks, "store")
        assert (again.converted, again.skipped) == (0, len(networks))
        other = WeightGraph.from_tensors([torch.randn(2, 3)])
        again = build_store([*networks[:-1], (other, networks[-1][1])], "store")
        assert (again.converted, again.skipped) == (1, len(networks) - 1)

    def test_failures_are_told(self, folder: Path) -> None:
        (folder / "bad.pt").write_bytes(b"nonsense" * 9)
        good = [(path, {"y": 1}) for path in sorted((folder / "nets").glob("*.pt"))]
        report = build_store([*good, (folder / "bad.pt", {"y": 2})], folder / "store")
        assert report.converted == len(good)
        assert list(report.failed) == [str(folder / "bad.pt")]

    @pytest.mark.parametrize(
        ("networks", "message"),
        [
            ([], "a row for each file"),
            ([("nets/000.pt", {"y": 1}), ("nets/000.pt", {"y": 2})], "rows 1 and 2"),
            ([("nets/000.pt", {"y": 1}), ("nets/002.pt", {"y": "a"})], "one type for label 'y'"),
            ([("nets/000.pt", {1: 1})], "names of labels"),
            ([("nets/000.pt", {"split": "train"}), ("nets/002.pt", {})], "(got None in row 2)"),
        ],
    )
    def test_bad_lists(self, folder: Path, networks: Any, message: str) -> None:
        with pytest.raises(UserError) as error:
            build_store(networks, folder / "store")
        assert message in str(error.value)
        assert not (folder / "store").exists()
