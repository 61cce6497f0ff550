"""The tasks regress and classify on any store: splits, predict, and the command line."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nfn_graph.cli import main
from nfn_graph.converters import WeightDataset, from_module
from nfn_graph.converters.store import StoreWriter
from nfn_graph.converters.store.table import SPLITS, random_splits
from nfn_graph.tasks.classify import Classify, ClassifyOptions
from nfn_graph.tasks.regress import Regress, RegressOptions
from nfn_graph.tasks.training import evaluate, train

WIDTHS = (3, 4, 6)
COUNT = 60


def network(number: int) -> nn.Sequential:
    """An MLP of one of several widths and depths whose weights have a random spread."""
    torch.manual_seed(number)
    width = WIDTHS[number % 3]
    hidden = [nn.Linear(width, width), nn.ReLU()] if number % 2 else []
    made = nn.Sequential(nn.Linear(2, width), nn.ReLU(), *hidden, nn.Linear(width, 2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1 + number % 5)
    return made


def rows() -> list[dict[str, Any]]:
    """One label of every kind, with an offset that single precision would lose."""
    return [
        {
            "file": f"net{i:02d}.pt",
            "scale": 1e9 + float(i % 5),
            "size": ("small", "middle", "large")[i % 5 // 2],
            "is_deep": bool(i % 2),
            "width": WIDTHS[i % 3],
        }
        for i in range(COUNT)
    ]


def write_store(path: Path, change: Callable[[dict[str, Any]], Any] = lambda row: None) -> Path:
    """A store of these networks without splits, with changed rows."""
    found = rows()
    for row in found:
        change(row)
    graphs = [from_module(network(i)) for i in range(COUNT)]
    StoreWriter(path, {"key": "file"}).publish("all", list(zip(found, graphs, strict=True)))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("stores") / "store")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train_args(task: str, store: Path, out: Path, *more: str) -> list[str]:
    return ["train", task, "--zoo", str(store), "--out", str(out), "--preset", "tiny", *more]


def test_random_splits() -> None:
    found = random_splits(1000, (0.8, 0.1, 0.1), 3)
    assert [found.count(split) for split in SPLITS] == [800, 100, 100]
    assert found == random_splits(1000, (0.8, 0.1, 0.1), 3) != random_splits(1000, (0.8, 0.1, 0.1))
    for count in range(1, 30):
        assert len(random_splits(count, (0.34, 0.33, 0.33))) == count
    for shares in ((0.5, 0.5), (0.9, 0.2, -0.1), (0.5, 0.3, 0.3)):
        with pytest.raises(ValueError, match="shares of train, validation, test, which add up to"):
            random_splits(10, shares)


def test_models_that_run_the_networks(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outputs show the spread of the weights; networks with other inputs are refused."""
    options = ["--model", "probe", "--epochs", "20", "--learning-rate", "1e-2", "--probes", "9"]
    number, size = tmp_path / "number", tmp_path / "size"
    assert main(train_args("regress", store, number, *options, "--label", "scale")) == 0
    assert main(train_args("classify", store, size, *options, "--label", "size")) == 0
    for run in (number, size):
        losses = [float(row["train/loss"]) for row in table(run / "logs" / "metrics.csv")]
        assert losses[-1] < 0.5 * losses[0]
    assert "evaluates every network on 9 inputs" in (size / "report.html").read_text()
    graphs = [from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))]
    other = [{"file": "other.pt", "scale": 1.0}]
    StoreWriter(tmp_path / "other", {"key": "file"}).publish(
        "all", list(zip(other, graphs, strict=True))
    )
    capsys.readouterr()
    assert main(["evaluate", str(number), "--zoo", str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected networks with 2 neurons of type 'input'" in line and "(got 3)" in line


def test_regress(store: Path, tmp_path: Path) -> None:
    """Predictions have the scale of the labels; no file of the store says that it is a zoo."""
    run = tmp_path / "run"
    options = ["--label", "scale", "--epochs", "60", "--learning-rate", "1e-2"]
    assert main(train_args("regress", store, run, *options, "--model", "statnn")) == 0
    test = json.loads((run / "metrics.json").read_text())["test"]
    assert {"tau", "r2", "mae", "rmse"} <= set(test)
    assert test["tau"] > 0.5 and test["mae"] < 1.5
    found = table(run / "predictions.csv")
    truth = {row["file"]: row["scale"] for row in rows()}
    assert len(found) == 12 and {row["split"] for row in found} == {"test", "validation"}
    for row in found:
        assert float(row["target"]) == pytest.approx(truth[row["file"]], abs=1e-3)
        assert abs(float(row["prediction"]) - 1e9) < 100
    errors = [float(r["prediction"]) - float(r["target"]) for r in found if r["split"] == "test"]
    assert test["mae"] == pytest.approx(sum(map(abs, errors)) / len(errors), rel=1e-5)
    assert (run / "figures" / "scatter-test.png").stat().st_size > 1000


@pytest.mark.parametrize("label", ["size", "is_deep", "width"])
def test_classify(label: str, store: Path, tmp_path: Path) -> None:
    """Text, booleans and integers are classes, identified by their names."""
    run = tmp_path / "run"
    options = ["--label", label, "--split", "0.5", "0.25", "0.25", "--split-seed", "1"]
    assert main(train_args("classify", store, run, *options)) == 0
    test = json.loads((run / "metrics.json").read_text())["test"]
    names = {"size": ["large", "middle", "small"], "is_deep": ["False", "True"]}
    assert test["classes"] == names.get(label, ["3", "4", "6"])
    assert ("auc" in test) is (label == "is_deep") and 0 <= test["f1"] <= 1
    found = table(run / "predictions.csv")
    truth = {row["file"]: str(row[label]) for row in rows()}
    assert len(found) == 30
    assert all(row["target"] == truth[row["file"]] for row in found)
    assert all(row["prediction"] in test["classes"] for row in found)
    assert sum(map(sum, test["confusion"])) == test["networks"] == 15


def test_split_column(tmp_path: Path) -> None:
    """The column decides, unless random splits are requested; other networks stay out."""

    def divided(row: dict[str, Any]) -> None:
        number = int(row["file"][3:5])
        row["split"] = None if number < 10 else SPLITS[number % 3]

    store = write_store(tmp_path / "store", divided)
    train(Regress(RegressOptions(store, tmp_path / "own", label="scale", preset="tiny")))
    found = {row["file"]: row["split"] for row in table(tmp_path / "own" / "predictions.csv")}
    wanted = {f"net{i:02d}.pt": SPLITS[i % 3] for i in range(10, COUNT) if i % 3}
    assert found == wanted
    options = RegressOptions(
        store, tmp_path / "random", label="scale", preset="tiny", split=(0.8, 0.1, 0.1)
    )
    metrics = train(Regress(options))
    assert metrics["test"]["networks"] == 6
    # The split of an evaluation is that of the training.
    again = evaluate(tmp_path / "random", store, name="again", split="test")
    assert again == metrics["test"]


def test_where_comes_after_the_split(store: Path, tmp_path: Path) -> None:
    """A network that tests one model never trains another one, whatever --where selects."""
    tested = []
    for name, where in (("all", ()), ("narrow", ("width=3,4",))):
        options = ClassifyOptions(
            store, tmp_path / name, label="size", preset="tiny", where=where, model="statnn"
        )
        train(Classify(options))
        found = table(tmp_path / name / "predictions.csv")
        tested.append({row["file"] for row in found if row["split"] == "test"})
    assert tested[1] < tested[0]


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_weights_of_any_precision(precision: Any, tmp_path: Path) -> None:
    """Half, single and double precision in one store."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    networks = [
        ({"file": f"{i}", "y": float(i % 7)}, from_module(network(i).to(dtypes[i % 4])))
        for i in range(30)
    ]
    StoreWriter(tmp_path / "store", {}).publish("all", networks)
    options = RegressOptions(
        tmp_path / "store", tmp_path / "run", label="y", preset="tiny", precision=precision
    )
    assert math.isfinite(train(Regress(options))["test"]["mae"])


@pytest.mark.parametrize(
    ("task", "label", "message"),
    [
        (
            "regress",
            "colour",
            "to predict: scale, size, is_deep, width .got 'colour'",
        ),
        ("regress", None, "a column of .* to predict: scale, size, is_deep, width .got none"),
        ("regress", "size", "numbers in column 'size' .*got string.*train classify"),
        ("regress", "same", "different numbers in column 'same' .*got 7 for all 48"),
        ("regress", "gap", "a label for every network .*none for 1 of 48 .*'net00.pt'"),
        ("regress", "nan", "a label for every network in column 'nan'"),
        ("regress", "infinite", "finite numbers in column 'infinite'"),
        ("classify", "scale", "names or whole numbers as classes .*train regress"),
        ("classify", "same", "2 to 10,000 classes in column 'same' .*got 1: 7"),
        ("classify", "gap", "a label for every network in column 'gap'"),
    ],
)
def test_bad_labels(
    task: str, label: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one line, the exit code is 2, and nothing is written."""

    def spoilt(row: dict[str, Any]) -> None:
        is_first = row["file"] == "net00.pt"
        row |= {"same": 7, "gap": None if is_first else 1, "split": "train"}
        row |= {"nan": math.nan if is_first else 1.0, "infinite": math.inf if is_first else 1.0}
        row["split"] = random_splits(COUNT, (0.8, 0.1, 0.1), 2)[int(row["file"][3:5])]

    labels = ["--label", label] if label else []
    is_plain = label in (None, "colour")
    store = write_store(tmp_path / "store", (lambda row: None) if is_plain else spoilt)
    assert main(train_args(task, store, tmp_path / "run", *labels)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert not (tmp_path / "run").exists()


def test_an_empty_split(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--label", "scale", "--split", "0.9", "0.1", "0"]
    assert main(train_args("regress", store, tmp_path / "run", *options)) == 2
    assert "networks of split 'test'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def runs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that predicts numbers, and one that predicts classes."""
    out = tmp_path_factory.mktemp("runs")
    assert main(train_args("regress", store, out / "regress", "--label", "scale")) == 0
    assert main(train_args("classify", store, out / "classify", "--label", "size")) == 0
    return out


@pytest.mark.parametrize("task", ["regress", "classify"])
def test_predict(task: str, runs: Path, store: Path, tmp_path: Path) -> None:
    """Files in several formats and the store give the predictions of the training."""
    known = {row["file"]: row for row in table(runs / task / "predictions.csv")}
    (tmp_path / "new").mkdir()
    exported = tmp_path / "exported"
    formats = ("pt", "safetensors", "npz")
    for number, name in enumerate(known):
        format_ = formats[number % 3]
        where = ["--where", f"file={name}", "--format", format_]
        assert main(["export", str(store), "--out", str(exported / str(number)), *where]) == 0
        (file,) = (p for p in (exported / str(number)).iterdir() if p.suffix != ".parquet")
        file.rename(tmp_path / "new" / f"{Path(name).stem}.{format_}")
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(runs / task), str(tmp_path / "new"), "--out", str(out)]) == 0
    found = {f"{Path(row['file']).stem}.pt": row for row in table(out)}
    assert found.keys() == known.keys()
    for name, row in found.items():
        assert "target" not in row
        if task == "classify":
            assert row["prediction"] == known[name]["prediction"]
            assert float(row["probability"]) == pytest.approx(float(known[name]["probability"]))
        else:
            assert float(row["prediction"]) == pytest.approx(float(known[name]["prediction"]))
    whole = tmp_path / "store.csv"
    assert main(["predict", str(runs / task), str(store), "--out", str(whole)]) == 0
    of_store = {Path(row["file"]).name: row["prediction"] for row in table(whole)}
    assert len(of_store) == COUNT
    if task == "classify":
        assert all(of_store[name] == row["prediction"] for name, row in known.items())


def test_predict_what_fails(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that fail are listed and the others written; if all fail, nothing is written."""
    torch.save(network(0).state_dict(), tmp_path / "good.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    torch.save(nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2)).state_dict(), tmp_path / "other.pt")
    spoilt = network(2)
    with torch.no_grad():
        spoilt[0].weight[0, 0] = math.nan
    torch.save(spoilt.state_dict(), tmp_path / "nan.pt")
    deep = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(2, 2), nn.ReLU())])
    torch.save(deep.state_dict(), tmp_path / "deep.pt")
    names = ["broken.pt", "deep.pt", "good.pt", "nan.pt"]
    out = tmp_path / "out.csv"
    files = [str(tmp_path / name) for name in (*names, "missing.pt")]
    capsys.readouterr()
    command = ["predict", str(runs / "regress"), *files, "--out", str(out)]
    assert main(command) == 1
    shown = capsys.readouterr()
    for name in ("broken", "deep", "nan", "missing"):
        assert any(f"{name}.pt" in line for line in shown.err.splitlines()), name
    assert "1 predicted, 4 failed" in shown.out
    assert [Path(row["file"]).name for row in table(out)] == ["good.pt"]
    before = out.read_bytes()
    assert main(command) == 2 and out.read_bytes() == before
    assert "--overwrite" in capsys.readouterr().err
    nothing = tmp_path / "nothing.csv"
    command = ["predict", str(runs / "regress"), str(tmp_path / "broken.pt"), "--out"]
    assert main([*command, str(nothing)]) == 2
    assert not nothing.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_in_memory_or_not(workers: int, store: Path, tmp_path: Path) -> None:
    """The numbers are equal bit for bit."""
    found = []
    for kind in ("yes", "no"):
        options = ClassifyOptions(
            store,
            tmp_path / f"{kind}-{workers}",
            label="size",
            preset="tiny",
            noise=0.1,
            head_dropout=0.2,
            workers=workers,
            in_memory=kind,  # type: ignore[arg-type]
        )
        found.append(train(Classify(options)))
    assert {**found[0], "seconds": 0} == {**found[1], "seconds": 0}


def test_only_a_few_batches_are_read_at_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a store, no network is read by itself, and no batch is larger than requested."""
    counts: list[int] = []
    read = WeightDataset.__getitems__

    def counted(self: WeightDataset, indices: Any) -> Any:
        counts.append(len(indices))
        return read(self, indices)

    monkeypatch.setattr(WeightDataset, "__getitems__", counted)
    options = RegressOptions(
        store, tmp_path / "run", label="scale", preset="tiny", batch_size=5, in_memory="no"
    )
    monkeypatch.setattr("nfn_graph.tasks.training.data._FIT_BATCH", 10)
    train(Regress(options))
    assert max(counts) == 10 and counts.count(5) == 2 * 9


def test_killed_while_reading_from_the_store(store: Path, tmp_path: Path) -> None:
    """After `kill -9` of a run with a worker, the same command gives the same numbers."""
    options = ["--label", "scale", "--epochs", "12", "--in-memory", "no", "--workers", "1"]
    options += ["--noise", "0.05", "--schedule", "cosine"]

    def arguments(name: str) -> list[str]:
        return train_args("regress", store, tmp_path / name, *options)

    assert main(arguments("whole")) == 0
    history = tmp_path / "killed" / "logs" / "metrics.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "nfn_graph.cli", *arguments("killed")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 200
    while not (history.exists() and len(table(history)) >= 3):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "metrics.json").exists()
    assert main(arguments("killed")) == 0
    whole, killed = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    assert {**whole, "seconds": 0} == {**killed, "seconds": 0}
    assert table(history) == table(tmp_path / "whole" / "logs" / "metrics.csv")
