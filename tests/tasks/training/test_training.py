"""Training from end to end: runs, reports, resuming, evaluation, and the command line."""

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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from zoo_data import tiny_images

from nfn_graph import Batch, WeightGraph
from nfn_graph.cli import main
from nfn_graph.tasks.classify_inr import ClassifyInr, ClassifyInrOptions
from nfn_graph.tasks.metrics import kendall_tau
from nfn_graph.tasks.models import ModelName
from nfn_graph.tasks.regress import (
    PredictGeneralization,
    PredictGeneralizationOptions,
)
from nfn_graph.tasks.training import evaluate, train
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.training.run_batches import EpochSampler
from nfn_graph.tasks.winning_tickets import WinningTickets, WinningTicketsOptions
from nfn_graph.tasks.zoo import (
    CnnZooOptions,
    InrZooOptions,
    build_zoo,
    open_zoo_folder,
)
from nfn_graph.transforms import CanonicalForm

IMAGES = tiny_images()


def small_zoo(out: Path) -> CnnZooOptions:
    return CnnZooOptions(
        out, networks=40, widths=(3, 4), depths=(1, 2), epochs=(1, 4), batch_size=16
    )


@pytest.fixture(scope="module")
def cnn_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_zoo(small_zoo(tmp_path_factory.mktemp("zoos") / "cnn"), source=IMAGES)


@pytest.fixture(scope="module")
def wide_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoos") / "wide"
    options = CnnZooOptions(out, networks=10, widths=(6,), depths=(2,), epochs=(1, 4), seed=1)
    return build_zoo(options, source=IMAGES)


@pytest.fixture(scope="module")
def inr_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoos") / "inr"
    options = InrZooOptions(out, widths=(3, 5), steps=5)
    return build_zoo(options, source=IMAGES)


def generalization(zoo: Path, out: Path, **options: Any) -> PredictGeneralization:
    chosen = PredictGeneralizationOptions(zoo, out, **{"preset": "tiny", **options})
    return PredictGeneralization(chosen)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_images_have_no_grid(cnn_zoo: Path, tmp_path: Path) -> None:
    """The control with fixed probes is for networks that read coordinates."""
    with pytest.raises(ValueError, match=r"at most 4 coordinates .*Use learned probes"):
        train(generalization(cnn_zoo, tmp_path / "run", model="probe-grid"))


@pytest.mark.parametrize("model", [m for m in get_args(ModelName) if m != "probe-grid"])
def test_every_model_trains(model: str, cnn_zoo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    metrics = train(generalization(cnn_zoo, run, model=model))
    assert json.loads((run / "metrics.json").read_text()) == metrics
    rows = [row for row in rows_of(run / "predictions.csv") if row["split"] == "test"]
    columns = ([float(row[name]) for row in rows] for name in ("prediction", "target"))
    assert metrics["test"]["tau"] == pytest.approx(
        kendall_tau(*(torch.tensor(c, dtype=torch.float64) for c in columns)), abs=1e-9
    )
    zoo = open_zoo_folder(cnn_zoo).where(split="test")
    wanted = [row["test_accuracy"] for row in zoo.rows if row["is_finite"]]
    assert [float(row["target"]) for row in rows] == pytest.approx(wanted)
    history = rows_of(run / "logs" / "metrics.csv")
    assert [row["epoch"] for row in history] == ["0", "1"]
    assert all(float(row["train/loss"]) > 0 for row in history)
    assert (run / "figures" / "scatter-test.png").stat().st_size > 1000
    assert f"{metrics['test']['tau']:.3f}" in (run / "report.html").read_text()
    assert list((run / "logs").glob("events.out.tfevents.*"))


def test_training_learns(cnn_zoo: Path, tmp_path: Path) -> None:
    options = {"epochs": 30, "model": "statnn", "head": (32,), "learning_rate": 1e-2}
    train(generalization(cnn_zoo, tmp_path / "run", **options))
    losses = [float(row["train/loss"]) for row in rows_of(tmp_path / "run/logs/metrics.csv")]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.02


def test_same_seed_same_result(cnn_zoo: Path, tmp_path: Path) -> None:
    same = ("test", "validation", "parameters", "best_epoch")
    found = [
        train(generalization(cnn_zoo, tmp_path / name, seed=seed, head_dropout=0.3, noise=0.1))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert all(found[0][key] == found[1][key] for key in same)
    assert found[0]["test"] != found[2]["test"]


def test_order_depends_on_seed_and_epoch() -> None:
    sampler, other = EpochSampler(range(20), 0), EpochSampler(range(20), 1)
    first = list(sampler)
    assert sorted(first) == list(range(20)) and first == list(sampler) != list(other)
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize("model", ["nfn-hnp", "mlp-aug"])
def test_killed_run_ends_as_an_uninterrupted_one(model: str, cnn_zoo: Path, tmp_path: Path) -> None:
    """A run is killed with `kill -9` after some epochs, and the same command runs again."""
    arguments = ["--zoo", str(cnn_zoo), "--model", model, "--preset", "tiny", "--epochs", "12"]
    arguments += ["--head-dropout", "0.2", "--noise", "0.05", "--schedule", "cosine"]

    def command(out: Path) -> list[str]:
        task = ["train", "predict-generalization", "--out", str(out), *arguments]
        return [sys.executable, "-m", "nfn_graph.cli", *task]

    subprocess.run(command(tmp_path / "whole"), check=True, capture_output=True, timeout=300)
    table = tmp_path / "killed" / "logs" / "metrics.csv"
    process = subprocess.Popen(
        command(tmp_path / "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    limit = time.monotonic() + 200
    while not (table.exists() and len(rows_of(table)) >= 3):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "metrics.json").exists()
    subprocess.run(command(tmp_path / "killed"), check=True, capture_output=True, timeout=300)
    whole, killed = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    for key in ("test", "validation", "epochs", "best_epoch"):
        assert killed[key] == whole[key]
    assert rows_of(table) == rows_of(tmp_path / "whole" / "logs" / "metrics.csv")
    assert len(rows_of(table)) == 12


def test_finished_run_is_left_alone(cnn_zoo: Path, tmp_path: Path) -> None:
    first = train(generalization(cnn_zoo, tmp_path / "run"))
    stamp = (tmp_path / "run" / "metrics.json").stat().st_mtime_ns
    assert train(generalization(cnn_zoo, tmp_path / "run")) == first
    assert (tmp_path / "run" / "metrics.json").stat().st_mtime_ns == stamp


def test_other_options_in_the_same_folder(cnn_zoo: Path, tmp_path: Path) -> None:
    train(generalization(cnn_zoo, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"seed = 0 .got 1."):
        train(generalization(cnn_zoo, tmp_path / "run", seed=1))
    # The number of networks is the same, and so are the images.
    other = replace(small_zoo(tmp_path / "other"), learning_rate=(1e-3, 2e-2))
    zoo = build_zoo(other, source=IMAGES)
    with pytest.raises(ValueError, match=r"begun with: zoo = ") as caught:
        train(generalization(zoo, tmp_path / "run"))
    was, got = (
        f"'{path}' with the checksum {open_zoo_folder(path).fingerprint[:8]}"
        for path in (cnn_zoo, zoo)
    )
    assert f"zoo = {was}" in str(caught.value) and f"(got {got}" in str(caught.value)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        train(generalization(cnn_zoo, tmp_path / "full"))


def test_early_stopping(cnn_zoo: Path, tmp_path: Path) -> None:
    # At this learning rate nothing changes, so the first epoch remains the best one.
    options = {"epochs": 50, "patience": 2, "learning_rate": 1e-30}
    metrics = train(generalization(cnn_zoo, tmp_path / "run", **options))
    assert (metrics["epochs"], metrics["best_epoch"]) == (3, 0)


def test_a_run_stopped_after_its_training_trains_no_further(cnn_zoo: Path, tmp_path: Path) -> None:
    options = {"epochs": 50, "patience": 2, "learning_rate": 1e-30, "model": "statnn"}
    whole = train(generalization(cnn_zoo, tmp_path / "run", **options))
    table = (tmp_path / "run" / "logs" / "metrics.csv").read_text()
    (tmp_path / "run" / "metrics.json").unlink()
    # As if it had taken an hour so far.
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    assert 0 < checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"] <= whole["seconds"] + 0.1
    checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"] = 3600.0
    torch.save(checkpoint, last)
    again = train(generalization(cnn_zoo, tmp_path / "run", **options))
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}
    assert 3600 <= again["seconds"] < 3700
    assert (tmp_path / "run" / "logs" / "metrics.csv").read_text() == table


class Undefined(PredictGeneralization):
    """Tau is NaN in the first epoch, and then only in the third and later ones."""

    calls = 0

    def metrics(self, predictions: Any, facts: Any) -> dict[str, Any]:
        self.calls += 1
        return {"tau": 0.5 if self.calls == 2 else math.nan, "networks": 1}


def test_a_metric_that_is_no_number(cnn_zoo: Path, tmp_path: Path) -> None:
    """It is not the best value, does not end training, and is null in JSON."""
    run = tmp_path / "run"
    options = generalization(cnn_zoo, run, epochs=9, patience=3, model="statnn").options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Undefined, "draw", lambda *given: None)
        metrics = train(Undefined(options))
    assert (metrics["epochs"], metrics["best_epoch"]) == (5, 1)
    assert metrics["test"]["tau"] is None

    def fail(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((run / "metrics.json").read_text(), parse_constant=fail) == metrics
    assert "nan" in (run / "report.html").read_text()


def test_schedule(cnn_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def recorded(self: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    options = {"learning_rate": 0.01, "epochs": 8, "batch_size": 8}
    train(generalization(cnn_zoo, tmp_path / "falling", schedule="cosine", **options))
    highest, steps = max(rates), len(rates)
    top = rates.index(highest)
    assert 0 < top <= steps // 8 and 0.0095 < highest <= 0.01
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a > b for a, b in pairwise(rates[top:])) and 0 < rates[-1] < 0.02 * highest
    rates.clear()
    train(generalization(cnn_zoo, tmp_path / "constant", **options))
    assert rates == [0.01] * steps


def test_a_compiled_model_trains_to_the_same_numbers(
    cnn_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by Dynamo and AOTAutograd, forward and backward; only the last step, which writes
    C++ code and takes minutes, is left out."""
    asked: list[dict[str, Any]] = []
    compile_ = torch.compile

    def compiled(model: Any, **options: Any) -> Any:
        asked.append(options)
        return compile_(model, **options, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compiled)
    settings = {"model": "nfn-np", "where": ("depth=1",), "precision": "64-true"}
    fast, plain = (
        train(generalization(cnn_zoo, tmp_path / name, compile=name == "fast", **settings))
        for name in ("fast", "plain")
    )
    assert asked == [{"dynamic": True}]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for metric in ("tau", "r2", "mae", "rmse"):
        assert fast["test"][metric] == pytest.approx(plain["test"][metric], abs=1e-6)


@pytest.mark.parametrize("model", ["nfn-np", "nfn-hnp", "statnn"])
def test_widths_never_seen(model: str, cnn_zoo: Path, wide_zoo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(generalization(cnn_zoo, run, model=model, where=("depth=2",)))
    found = evaluate(run, wide_zoo)
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["evaluations"] == {"wide": found}
    assert found["networks"] == sum(r["is_finite"] for r in open_zoo_folder(wide_zoo).rows)
    assert (run / "figures" / "scatter-wide.png").exists()
    assert "wide" in (run / "report.html").read_text()
    # The networks of the test split give the metrics of the training.
    again = evaluate(run, cnn_zoo, name="again", split="test", where=["depth=2"])
    assert again == metrics["test"]


def test_evaluations_do_not_take_the_place_of_others(cnn_zoo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(generalization(cnn_zoo, run, model="statnn"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name in ("test", "validation", "run", "a/b", "../test"):
        with pytest.raises(ValueError, match=f"Expected a --name .*got '{name}'"):
            evaluate(run, cnn_zoo, name=name)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_other_classes(inr_zoo: Path, tmp_path: Path) -> None:
    """In a zoo with other classes, a label has another meaning."""
    train(ClassifyInr(ClassifyInrOptions(inr_zoo, tmp_path / "run", preset="tiny")))
    options = InrZooOptions(tmp_path / "other", widths=(3,), steps=2)
    other = build_zoo(options, source=tiny_images(classes=4))
    with pytest.raises(ValueError, match=r"classes 0, 1, 2, .*other' with 0, 1, 2, 3"):
        evaluate(tmp_path / "run", other)


def test_an_unknown_task(cnn_zoo: Path, tmp_path: Path) -> None:
    train(generalization(cnn_zoo, tmp_path / "run", model="statnn", epochs=1))
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace("predict-generalization", "guess"))
    with pytest.raises(ValueError, match=r"run of regress, .*got 'guess'"):
        evaluate(tmp_path / "run", cnn_zoo)


def test_where(cnn_zoo: Path) -> None:
    zoo = open_zoo_folder(cnn_zoo)
    assert {row["width"] for row in zoo.where("width=3").rows} == {3}
    assert len(zoo.where("width=3,4")) == len(zoo)
    chosen = zoo.where("width=3", "depth=2")
    assert 0 < len(chosen) < len(zoo.where("width=3"))
    assert chosen.rows == zoo.where(width=3, depth=[2]).rows
    # Values have the type of their column, whatever their spelling is.
    fractions = zoo.column("train_fraction").to_pylist()
    for text in ("train_fraction=1.0", "train_fraction=1", "train_fraction=1e0"):
        assert len(zoo.where(text)) == fractions.count(1.0) > 0
    assert len(zoo.where("is_finite=true")) == len(zoo.where(is_finite=True)) > 0


@pytest.mark.parametrize("canonical", [True, False])
def test_classify(canonical: bool, inr_zoo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ClassifyInrOptions(
        inr_zoo, run, preset="tiny", canonical=canonical, rotate=10.0, shift=0.1
    )
    metrics = train(ClassifyInr(options))
    test = metrics["test"]
    rows = [row for row in rows_of(run / "predictions.csv") if row["split"] == "test"]
    right = sum(row["target"] == row["prediction"] for row in rows)
    assert test["accuracy"] == pytest.approx(right / len(rows))
    assert sum(map(sum, test["confusion"])) == len(rows) == test["networks"]
    assert sum(test["confusion"][i][i] for i in range(3)) == right
    for name in ("confusion-test", "inrs-test", "curves"):
        assert (run / "figures" / f"{name}.png").stat().st_size > 1000
    found = evaluate(run, inr_zoo, name="narrow", where=["width=3"])
    assert found["networks"] == len(open_zoo_folder(inr_zoo).where("width=3")) > 0
    assert json.loads((run / "metrics.json").read_text())["evaluations"]["narrow"] == found


def test_overfitting_says_whether_a_model_can_learn(
    inr_zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that learns passes; one that cannot change does not."""
    command = ["train", "classify-inr", "--zoo", str(inr_zoo), "--preset", "tiny"]
    command += ["--overfit", "6", "--model", "nfn-hnp", "--channels", "8", "8"]
    fast = [*command, "--out", str(tmp_path / "fast"), "--learning-rate", "1e-2", "--epochs", "6"]
    assert main(fast) == 0
    metrics = json.loads((tmp_path / "fast" / "metrics.json").read_text())
    assert metrics["overfit"] == {"networks": 6, "steps": 6 * 64 * 6 // 8, "has_learnt": True}
    assert metrics["test"] == metrics["validation"] and metrics["test"]["accuracy"] == 1
    assert "has learnt 6 networks by heart in 288 steps" in capsys.readouterr().out
    rows = rows_of(tmp_path / "fast" / "predictions.csv")
    splits = {s: [r["network"] for r in rows if r["split"] == s] for s in ("test", "validation")}
    train_networks = [r["network"] for r in open_zoo_folder(inr_zoo).where(split="train").rows]
    assert splits["test"] == splits["validation"] == list(map(str, train_networks[:6]))
    slow = [*command, "--out", str(tmp_path / "slow"), "--learning-rate", "1e-12", "--epochs", "1"]
    assert main(slow) == 1
    assert "has not learnt 6 networks by heart" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "x"), "--mixup", "0.2"]) != 0
    assert "no --mixup with --overfit" in capsys.readouterr().err


def test_canonical_forms_make_twins_equal(cnn_zoo: Path, tmp_path: Path) -> None:
    """A ReLU or tanh network and its rescaled twin get the same prediction."""
    task = generalization(cnn_zoo, tmp_path / "run", canonical=True, epochs=1)
    train(task)
    task, model, facts = load_model(tmp_path / "run")
    assert task.options.canonical
    canonical = task.transform(facts)
    plain = generalization(cnn_zoo, tmp_path / "x").transform(facts)
    assert plain is None
    zoo = open_zoo_folder(cnn_zoo).where(depth=2)
    assert {row["activation"] for row in zoo.rows} == {"relu", "tanh"}
    for graph in (zoo[i] for i in range(6)):
        tensors = graph.to_tensors()
        factor = 3.0 if CanonicalForm().moved(graph)["hidden1"].kind == "scale" else -1.0
        for key, power in (("layers.0.weight", 1), ("layers.0.bias", 1), ("layers.1.weight", -1)):
            tensors[key] = tensors[key] * factor**power
        twin = WeightGraph.from_placements(graph.layout, tensors)
        outputs = [model(Batch.from_data_list([g])) for g in (graph, twin)]
        forms = [model(Batch.from_data_list([canonical(g)])) for g in (graph, twin)]
        torch.testing.assert_close(forms[0], forms[1], atol=1e-5, rtol=1e-5)
        assert (outputs[0] - outputs[1]).abs().max() > 1e-4


def test_mixed_networks_train(inr_zoo: Path, tmp_path: Path) -> None:
    """The loss of mixed networks combines the losses of both labels."""
    options = ClassifyInrOptions(inr_zoo, tmp_path / "run", preset="tiny", mixup=0.5)
    task = ClassifyInr(options)
    assert 0 <= train(task)["test"]["accuracy"] <= 1
    outputs = torch.randn(3, 3)
    batch = Batch.from_data_list([open_zoo_folder(inr_zoo)[i] for i in range(3)])
    batch.y = torch.tensor([0, 2, 1])
    plain = task.loss(outputs, batch)
    batch.mixed_with, batch.mixed_share = torch.tensor([1, 0, 2]), torch.tensor([0.25, 1.0, 0.3])
    own = torch.nn.functional.cross_entropy(outputs, batch.y, reduction="none")
    other = torch.nn.functional.cross_entropy(outputs[0], torch.tensor(2))
    expected = (0.25 * own[0] + 0.75 * other + own[1] + own[2]) / 3
    torch.testing.assert_close(task.loss(outputs, batch), expected)
    assert abs(plain - expected) > 1e-4


def test_command_line(
    cnn_zoo: Path, wide_zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in ("0", "1"):
        out = str(tmp_path / "runs" / f"np-{seed}")
        options = ["--zoo", str(cnn_zoo), "--out", out, "--preset", "tiny", "--seed", seed]
        assert main(["train", "predict-generalization", *options, "--where", "depth=2"]) == 0
        assert main(["evaluate", out, "--zoo", str(wide_zoo)]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "compared")]) == 0
    assert "nfn-np" in capsys.readouterr().out
    for name in ("compare.html", "compare.png", "compare.csv"):
        assert (tmp_path / "compared" / name).stat().st_size > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--zoo", "nowhere"], "store.json"),
        (["--epochs", "0"], "--epochs of at least 1 .got 0."),
        (["--drop", "1"], "--drop of at least 0 and below 1 .got 1.0."),
        (["--fourier-features", "-1"], "--fourier-features of at least 0"),
        (["--model", "statnn", "--channels", "7"], "no --channels with --model statnn"),
        (["--model", "gine", "--fourier-features", "2"], "no --fourier-features with --model gine"),
        (["--max-edges", "900", "--batch-size", "3"], "--batch-size or --max-edges, not both"),
        (["--learning-rate", "0"], "--learning-rate above 0"),
        (["--where", "colour=red"], "column of the store: .*got 'colour'"),
        (["--where", "width"], "a condition as NAME=VALUE.*got 'width'"),
        (["--where", "width=wide"], "values of column 'width', which are int64 .got 'wide'"),
        (["--where", "width=77"], "networks with width=77"),
        (["--where", "split=train"], "networks of split 'validation'"),
        (["--head", "0"], "values of --head of at least 1"),
        (["--channels"], "values of --channels of at least 1 each .got none."),
        (["--max-edges", "9"], "at most max_edges = 9 edges each"),
        (["--batch-size", "1", "--devices", "2"], "for each of 2 devices"),
        (["--where", "network=0,1,2,3,4,5,6,7,8,9,10,11", "--devices", "5"], "each of 5 ranks"),
    ],
)
def test_bad_options(
    options: list[str],
    message: str,
    cnn_zoo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--zoo", str(cnn_zoo), "--out", str(tmp_path / "run"), "--preset", "tiny", *options]
    assert main(["train", "predict-generalization", *given]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and re.search(message, lines[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a machine without a GPU lacks one")
def test_a_machine_without_a_gpu(cnn_zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--accelerator, --devices and --precision that this"):
        train(generalization(cnn_zoo, tmp_path / "run", accelerator="gpu"))


def test_wrong_kind_of_zoo(inr_zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--label to name a column .*got 'test_accuracy'"):
        train(generalization(inr_zoo, tmp_path / "run"))
    with pytest.raises(ValueError, match="zoo of kind 'tickets' for winning-tickets"):
        train(WinningTickets(WinningTicketsOptions(inr_zoo, tmp_path / "run", preset="tiny")))


def test_evaluate_needs_a_finished_run(tmp_path: Path, cnn_zoo: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder of a run.*config\.json"):
        evaluate(tmp_path, cnn_zoo)
