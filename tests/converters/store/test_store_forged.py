"""Stores with damage and matching checksums: the damage is reported, and nothing is misread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from comparing import assert_same_graph
from stores import graphs, write_store

import resealing
from nfn_graph import DataLoader, cli
from nfn_graph.converters import ConversionError, WeightDataset
from nfn_graph.converters.store import Store, find_damage
from resealing import edit_header, edit_json, edit_record, edit_table, with_column

GRAPHS = graphs()
NAMES = ("mlp", "signalling", "buffers", "labels")


def architecture(folder: Path, shard: str = "00000") -> Path:
    """The first architecture of a shard."""
    record = json.loads((folder / "shards" / f"{shard}.json").read_text())
    return folder / "architectures" / f"{record['architectures'][0]}.json"


def column(name: str, change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    """Changes the values of a column."""
    return lambda folder: edit_table(
        folder, lambda t: with_column(t, name, change(t.column(name).to_pylist()))
    )


def noted(position: int, notes: object) -> Callable[[Path], None]:
    """Replaces the notes of a network."""
    text = json.dumps(notes)
    return column("notes", lambda v: [text if i == position else n for i, n in enumerate(v)])


def retyped(header: dict[str, Any]) -> None:
    """Other numbers of the same size."""
    for entry in header.values():
        if entry.get("dtype") == "F32":
            entry["dtype"] = "I32"


def twice(table: Any) -> Any:
    return table.append_column("number", table.column("number"))


# What is done to a store, and the folder or file that the error must name.
FORGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a row before the first": (column("row", lambda v: [-1, *v[1:]]), "metadata"),
    "rows exchanged": (column("row", lambda v: [v[1], v[0], *v[2:]]), "metadata"),
    "a row behind the last": (column("row", lambda v: [2**40, *v[1:]]), "metadata"),
    "a row missing": (column("row", lambda v: [None, *v[1:]]), "metadata"),
    "rows as text": (column("row", lambda v: [str(n) for n in v]), "metadata"),
    "rows with a fraction": (column("row", lambda v: [n + 0.5 for n in v]), "metadata"),
    "another shard": (column("shard", lambda v: ["00009", *v[1:]]), "metadata"),
    "another architecture": (column("architecture", lambda v: ["x", *v[1:]]), "metadata"),
    "architectures as numbers": (column("architecture", lambda v: [1] * len(v)), "metadata"),
    "notes as numbers": (column("notes", lambda v: [1] * len(v)), "metadata"),
    "notes that are no JSON": (column("notes", lambda v: ["{", *v[1:]]), "metadata"),
    "a list as notes": (noted(0, []), "metadata"),
    "notes for a tensor": (noted(0, [[], {"hidden1/x": 5}]), "metadata"),
    "notes for a type that is not there": (noted(0, [[], {"hidden7/x": 5}]), "metadata"),
    "notes for a layout": (noted(0, [[], {"graph/layout": 5}]), "metadata"),
    "a carried value too many": (noted(0, [[{"count": 5}], {}]), "metadata"),
    "a carried value too few": (column("notes", lambda v: [None] * len(v)), "metadata"),
    "a column twice": (lambda f: edit_table(f, twice), "metadata"),
    "no column of rows": (lambda f: edit_table(f, lambda t: t.drop_columns(["row"])), "metadata"),
    "other types in another shard": (column("number", lambda v: [[n] for n in v]), ""),
    "a number of networks as text": (lambda f: edit_record(f, networks("4")), "shards"),
    "more networks than bytes": (lambda f: edit_record(f, networks(2**62)), "shards"),
    "architectures that are none": (
        lambda f: edit_record(f, lambda d: d.update(architectures=[{}])),
        "shards",
    ),
    "no sizes": (lambda f: edit_record(f, lambda d: d.pop("sizes")), "shards"),
    "sizes as text": (lambda f: edit_record(f, lambda d: d.update(sizes="x")), "shards"),
    "other numbers of the same size": (lambda f: edit_header(f, retyped), "weights"),
    "a key that is no column": (
        lambda f: edit_json(f / "store.json", lambda d: d.update(key="x")),
        "store.json",
    ),
    "a key that names nothing": (
        lambda f: edit_json(f / "store.json", lambda d: d.update(key="half")),
        "store.json",
    ),
    "tensors of other shapes": (
        lambda f: edit_json(architecture(f), lambda d: d["tensors"][0].__setitem__(2, [1])),
        "architectures",
    ),
    "tensors without a shape": (
        lambda f: edit_json(architecture(f), lambda d: d["tensors"][0].pop()),
        "architectures",
    ),
    "a tensor twice": (
        lambda f: edit_json(
            architecture(f),
            lambda d: d["layout"]["placements"].append(d["layout"]["placements"][0]),
        ),
        "architectures",
    ),
}


def networks(number: object) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(networks=number)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", [GRAPHS[name] for name in (*NAMES, *NAMES)])


def test_resealing_alone_is_no_damage(store: Path) -> None:
    resealing.reseal(store)
    assert list(find_damage(store)) == []
    for position, name in enumerate(NAMES):
        assert_same_graph(Store(store).graph(position), GRAPHS[name])


@pytest.mark.parametrize("name", FORGED)
def test_what_no_checksum_shows_is_named(
    store: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, place = FORGED[name]
    forge(store)
    resealing.reseal(store)
    with pytest.raises(ConversionError, match="Expected") as caught:
        opened = Store(store)
        [opened.graph(i) for i in range(len(opened))]
    assert "\n" not in str(caught.value)
    # Batches are read by other code.
    with pytest.raises(ConversionError, match="Expected"):
        list(DataLoader(WeightDataset(store), batch_size=1))
    damage = list(find_damage(store))
    # An architecture may belong to several shards.
    assert damage and all(str(d.path).startswith(str(store / place)) for d in damage)
    assert cli.main(["store", str(store), "--verify"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("damaged: ") and not captured.err
    assert cli.main(["export", str(store), "--out", str(store.with_name("out"))]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nfn-graph: Expected ") and captured.err.count("\n") == 1
    assert "mistake" not in captured.err


def test_text_that_is_no_text_is_refused(store: Path) -> None:
    wrong = pa.StringArray.from_buffers(
        4, pa.py_buffer(b"\0\0\0\0" * 4 + b"\4\0\0\0"), pa.py_buffer(b"\xff" * 4)
    )
    edit_table(store, lambda t: t.append_column("name", wrong))
    resealing.reseal(store)
    with pytest.raises(ConversionError, match=r"00000\.parquet"):
        Store(store)


def test_files_that_are_exported_have_names(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in ("00000", "00004"):
        edit_table(store, lambda t: t.append_column("file", pa.array([1, 2, 3, 4])), shard)
    resealing.reseal(store)
    assert cli.main(["export", str(store), "--out", str(store.with_name("out"))]) == 2
    assert "Expected files below" in capsys.readouterr().err
