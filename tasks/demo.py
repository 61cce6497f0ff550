"""The demonstration: a zoo of small networks, four models that read them, a report.

It needs no other data than the images of handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import arg

from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.metrics import regression_metrics
from nfn_graph.tasks.models import ModelName
from nfn_graph.tasks.option_checks import check_at_least, check_networks
from nfn_graph.tasks.regress import PredictGeneralization, PredictGeneralizationOptions
from nfn_graph.tasks.reports.page import Section, Shown, Table, print_rows, write_report
from nfn_graph.tasks.reports.runs import WEIGHTS, describe_model, reads
from nfn_graph.tasks.training.run import evaluate, train
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder
from nfn_graph.tasks.zoo.folder import accuracy_line

MODELS: tuple[ModelName, ...] = ("statnn", "nfn-np", "nfn-hnp", "probe")
SEEN, UNSEEN = (4, 8, 12), (6, 10, 16)
_UNSEEN = "unseen-widths"


@dataclass(frozen=True)
class DemoOptions:
    """Run the demonstration.

    Attributes:
        out: The output folder. Finished parts are kept.
        seed: The random seed of the zoos and of the models.
        networks: The number of networks to train for the models to learn from.
        unseen: The number of networks of unseen widths to train.
        epochs: The number of epochs of the models.
    """

    out: Path = Path("demo")
    seed: int = 0
    networks: int = 2400
    unseen: int = 240
    epochs: int = 10


def demo(options: Annotated[DemoOptions, arg(name="")]) -> int:
    """Predict the accuracy of small CNNs from their weights: build, train, evaluate, report.

    Examples:
      nfn-graph demo
      nfn-graph demo --out demo-1 --seed 1

    Args:
        options: The options of the command.
    """
    for name in ("networks", "unseen"):
        check_networks(name, getattr(options, name))
    check_at_least("epochs", options.epochs, 1)
    started = time.perf_counter()
    with _step(f"1. Train {options.networks} CNNs on digits, widths {_list(SEEN)}"):
        zoo = _zoo(options, "zoo", options.networks, SEEN, options.seed)
    with _step(f"2. Train {options.unseen} CNNs of widths {_list(UNSEEN)}, kept for the test"):
        unseen = _zoo(options, _UNSEEN, options.unseen, UNSEEN, options.seed + 1_000_000)
    for built in (zoo, unseen):
        print(f"   {accuracy_line(built)}")
    rows: list[list[Any]] = []
    for number, model in enumerate(MODELS, 3):
        with _step(f"{number}. Train {model} to predict test accuracy"):
            run = options.out / "runs" / model
            task = PredictGeneralization(
                PredictGeneralizationOptions(
                    zoo.folder,
                    run,
                    model=model,
                    preset="small",
                    seed=options.seed,
                    epochs=options.epochs,
                    batch_size=32,
                    learning_rate=3e-3,
                    schedule="cosine",
                    head_dropout=0.1,
                    noise=0.05,
                )
            )
            metrics = train(task, progress=True)
            other = evaluate(run, unseen.folder, name=_UNSEEN)
        seconds = round(metrics["seconds"])
        looks_at = reads({"model": model})
        rows.append([model, looks_at, *_numbers(metrics["test"]), *_numbers(other), seconds])
    known = [_by_training_accuracy(part) for part in (zoo.where(split="test"), unseen)]
    rows.append(["training accuracy", "training images", *known[0], *known[1], None])
    table = Table(_COLUMNS, rows, f"Seed {options.seed}; one run per model.")
    print_rows(table)
    path = _report(options, zoo, unseen, table)
    print(f"Seed {options.seed}, {time.perf_counter() - started:.0f} s. Open {path}")
    return 0


_COLUMNS = (
    "model",
    "reads",
    "tau, held out",
    "R², held out",
    "tau, unseen widths",
    "R², unseen widths",
    "seconds",
)


def _zoo(
    options: DemoOptions, name: str, networks: int, widths: tuple[int, ...], seed: int
) -> WeightDataset:
    chosen = CnnZooOptions(
        options.out / name,
        seed=seed,
        # Small shards let several processes share the work.
        shard_size=120,
        engine="processes",
        networks=networks,
        widths=widths,
        depths=(2,),
        activations=("relu",),
        train_fractions=(0.25, 0.5, 1.0),
        epochs=(2, 12),
        learning_rate=(1e-3, 3e-2),
        l2=(1e-7, 3e-3),
        dropout=(0.0, 0.4),
        batch_size=32,
        # Early checkpoints widen the range of accuracies, from chance to the best.
        checkpoints=(0.3, 1.0),
    )
    return open_zoo_folder(build_zoo(chosen, progress=True))


def _by_training_accuracy(networks: WeightDataset) -> list[float]:
    """Returns how well the networks are ranked by the accuracy on their own training images."""
    finite = networks.where(is_finite=True)
    names = ("train_accuracy", "test_accuracy")
    train, test = (torch.tensor(finite.column(name).to_pylist()) for name in names)
    return _numbers(regression_metrics(train, test))


def _numbers(metrics: dict[str, Any]) -> list[float]:
    return [metrics["tau"], metrics["r2"]]


def _report(options: DemoOptions, zoo: WeightDataset, unseen: WeightDataset, table: Table) -> Path:
    command = ["nfn-graph", "demo", "--out", str(options.out), "--seed", str(options.seed)]
    command += ["--networks", str(options.networks), "--unseen", str(options.unseen)]
    command += ["--epochs", str(options.epochs)]
    sections = [
        Section(
            "Results",
            f"{_conclusion(table.rows)}\n\n"
            f"Four models learn to predict the test accuracy of a network from {len(zoo):,} "
            f"checkpoints of {options.networks:,} small CNNs of widths {_list(SEEN)}, which were "
            f"trained on scikit-learn's digits with random hyperparameters. The models are tested "
            f"on held-out networks and on {len(unseen):,} checkpoints of the unseen widths "
            f"{_list(UNSEEN)}. Tau is Kendall's rank correlation: 1 is the same order, 0 is "
            f"chance. The loss is the binary cross-entropy. The last row ranks the networks by "
            f"their accuracy on the images that they were trained on. This requires those images "
            f"and their labels, and serves as a ceiling for the models.\n\n"
            + " ".join(f"{m} is {describe_model('regress', {'model': m})}." for m in MODELS),
            [table],
        ),
        *(Section(model, figures=_figures(options.out / "runs" / model)) for model in MODELS),
        Section("Repeat", code=shlex.join(command)),
    ]
    return write_report(
        options.out / "report.html",
        "Predicting the accuracy of networks from their weights",
        sections,
    )


def _conclusion(rows: Sequence[Sequence[Any]]) -> str:
    """Returns one sentence about the numbers of the table."""
    taus = {str(row[0]): (float(row[2]), float(row[4])) for row in rows}
    readers = [str(row[0]) for row in rows if row[1] == WEIGHTS]
    best = max(readers, key=lambda name: taus[name])
    shown = {name: f"{held_out:.3f} and {unseen:.3f}" for name, (held_out, unseen) in taus.items()}
    return (
        f"Of the models that read weights, {best} ranks held-out networks best: its tau on "
        f"held-out networks and on unseen widths is {shown[best]}. probe, which runs the networks, "
        f"reaches {shown['probe']}, and ranking by the training accuracy reaches "
        f"{shown['training accuracy']}."
    )


def _figures(run: Path) -> list[Shown]:
    captions = {
        "scatter-test": "Predicted against true accuracy of held-out networks.",
        f"scatter-{_UNSEEN}": "Predicted against true accuracy of networks of unseen widths.",
        "curves": "Learning curves. The loss is the binary cross-entropy.",
        "probes": "The learned images that the networks are run on.",
    }
    paths = {run / "figures" / f"{name}.png": caption for name, caption in captions.items()}
    return [
        Shown(path, caption, f"{run.name}: {caption}", is_plot=path.stem != "probes")
        for path, caption in paths.items()
        if path.is_file()
    ]


@contextmanager
def _step(title: str) -> Iterator[None]:
    print(title, flush=True)
    started = time.perf_counter()
    yield
    print(f"   done in {time.perf_counter() - started:.0f} s", flush=True)


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
