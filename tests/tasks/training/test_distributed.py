"""Two processes train like one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_data import tiny_images

from nfn_graph import Batch, EdgeBatchSampler
from nfn_graph.tasks.regress import (
    PredictGeneralization,
    PredictGeneralizationOptions,
)
from nfn_graph.tasks.training import train
from nfn_graph.tasks.training.data import fitted, load_data
from nfn_graph.tasks.training.run_batches import EpochSampler, RunBatches
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo
from nfn_graph.tasks.zoo.seeds import seed_of

# The last of three steps has one network, and so nothing for the second process.
BY_NUMBER = {"batch_size": 7}
BY_EDGES = {"max_edges": 700}
EPOCHS = 2
NETWORKS = 15
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def task_of(zoo: Path, out: Path, **options: Any) -> PredictGeneralization:
    chosen = PredictGeneralizationOptions(
        zoo,
        out,
        **{"preset": "tiny", "train_networks": NETWORKS, "precision": "64-true", **options},
    )
    return PredictGeneralization(chosen)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CnnZooOptions(
        tmp_path_factory.mktemp("zoos") / "cnn",
        networks=44,
        widths=(2, 4, 7),
        depths=(1, 2),
        epochs=(1, 4),
        batch_size=16,
        validation_share=0.25,
    )
    return build_zoo(options, source=tiny_images())


def run_commands(*commands: list[str]) -> None:
    """Runs commands one after another in the same two processes, which start slowly."""
    words = " , ".join(" ".join(command) for command in commands).split()
    script = Path(__file__).with_name("recorded_run.py")
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, one for each kind of batches."""
    out = tmp_path_factory.mktemp("runs")
    commands = []
    # One reads batches from the store; the oracles below keep the networks in memory.
    kinds = {"number": {**BY_NUMBER, "in_memory": "no"}, "edges": {**BY_EDGES, "in_memory": "yes"}}
    for name, options in kinds.items():
        commands.append(
            f"train predict-generalization --zoo {zoo} --out {out / name} --preset tiny "
            f"--epochs {EPOCHS} --train-networks {NETWORKS} --precision 64-true --devices 2 "
            "--accelerator cpu "
            + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items())
        )
    run_commands(*(command.split() for command in commands))
    return out


def history(run: Path) -> list[dict[str, float]]:
    with (run / "logs" / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", ["number", "edges"])
def test_gradients_are_those_of_the_union(kind: str, zoo: Path, runs: Path) -> None:
    """The oracle is one batch of all networks of a step, without Lightning."""
    task = task_of(zoo, runs / kind)
    data = load_data(task)
    graphs = data.graphs["train"]
    steps: list[list[int]] = []
    for epoch in range(EPOCHS):
        if kind == "number":
            order = EpochSampler(graphs, task.options.seed)
            order.set_epoch(epoch)
            indices = list(order)
            steps += [indices[i : i + 7] for i in range(0, NETWORKS, 7)]
        else:
            seed = seed_of(task.options.seed, "batches")
            sampler = EdgeBatchSampler(graphs, seed=seed, world_size=2, **BY_EDGES)
            sampler.set_epoch(epoch)
            steps += [first + second for first, second in sampler.steps()]
            assert any(len(first) != len(second) for first, second in sampler.steps())
    model = fitted(task, data)[0].double()
    recorded = torch.load(runs / kind / "steps.pt", weights_only=True)
    assert len(recorded) == len(steps) >= 4
    for step, found in zip(steps, recorded, strict=True):
        model.load_state_dict(found["parameters"], strict=False)
        batch = Batch.from_data_list([graphs[i] for i in step])
        loss = task.loss(model(batch), batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert max(float(g.abs().max()) for g in gradients) > 1e-3
        for (name, _), wanted in zip(model.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(found["gradients"][name], wanted, atol=1e-10, rtol=0)


def test_metrics_are_those_of_one_process(zoo: Path, runs: Path, tmp_path: Path) -> None:
    alone = train(task_of(zoo, tmp_path / "alone", epochs=EPOCHS, **BY_NUMBER))
    together = json.loads((runs / "number" / "metrics.json").read_text())
    # The networks do not divide evenly, so padding would show.
    assert alone["validation"]["networks"] % 2 == 1
    for split in ("validation", "test"):
        assert together[split] == pytest.approx(alone[split], rel=1e-9)
    for row, wanted in zip(history(runs / "number"), history(tmp_path / "alone"), strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


def test_epoch_by_edges_is_complete(zoo: Path, runs: Path) -> None:
    """The loss of the epoch is the mean over all networks, each as it was in its step."""
    task = task_of(zoo, runs / "edges")
    sampler = EdgeBatchSampler(load_data(task).graphs["train"], world_size=2, **BY_EDGES)
    assert sorted(i for step in sampler.steps() for b in step for i in b) == list(range(NETWORKS))
    together = json.loads((runs / "edges" / "metrics.json").read_text())
    assert together["validation"]["networks"] % 2 == 1
    # The metrics of the best model, once with two processes and once with one.
    best = history(runs / "edges")[together["best_epoch"]]
    for name in ("tau", "r2", "mae"):
        assert best[f"validation/{name}"] == pytest.approx(together["validation"][name], rel=1e-6)


def test_by_edges_in_one_process(zoo: Path, tmp_path: Path) -> None:
    task = task_of(zoo, tmp_path / "run", epochs=1, **BY_EDGES)
    assert train(task)["test"]["networks"] > 0
    loader = RunBatches(task.options, load_data(task).graphs).train_dataloader()
    counts = [batch.num_graphs for batch in loader]
    assert sum(counts) == NETWORKS and len(set(counts)) > 1
    # The number of devices determines the networks of a step.
    with pytest.raises(ValueError, match=r"devices = 1 .got 2."):
        train(task_of(zoo, tmp_path / "run", epochs=1, devices=2, **BY_EDGES))


def test_fewer_networks_than_devices(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"each of 8 devices .got 7."):
        train(task_of(zoo, tmp_path / "run", devices=4, nodes=2, **BY_NUMBER))


def test_two_killed_processes_go_on(zoo: Path, tmp_path: Path) -> None:
    """Both processes, which read from the store, are killed; then the command runs again."""

    def arguments(name: str) -> list[str]:
        words = f"train predict-generalization --zoo {zoo} --out {tmp_path / name} --preset tiny"
        words += " --epochs 6 --noise 0.1 --devices 2 --accelerator cpu --in-memory no"
        return words.split()

    table = tmp_path / "killed" / "logs" / "metrics.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "nfn_graph.cli", *arguments("killed")],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = time.monotonic() + 200
    while not (table.exists() and len(history(tmp_path / "killed")) >= 2):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "metrics.json").exists()
    run_commands(arguments("killed"), arguments("whole"))
    whole, killed = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    assert {**whole, "seconds": 0} == {**killed, "seconds": 0}
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
