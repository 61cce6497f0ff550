"""Winning tickets: the model of masks, training, retraining, and the commands."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ticket_data import COLOURS, IMAGES, build_cnns, build_mlps, small
from torch import Tensor, nn
from zoo_data import tiny_images

from nfn_graph import Batch, NFLinear, WeightGraph
from nfn_graph.cli import main
from nfn_graph.converters import from_module, from_state_dict
from nfn_graph.symmetry import sample
from nfn_graph.tasks.masks import TicketScope, on_no_path
from nfn_graph.tasks.models import fit_inputs
from nfn_graph.tasks.models.autoencoder import TicketAutoencoder
from nfn_graph.tasks.models.build import slow_aggregates
from nfn_graph.tasks.prune import mask_network
from nfn_graph.tasks.retraining import Masks, compare_masks, options_of
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.training import train
from nfn_graph.tasks.winning_tickets import WinningTickets, WinningTicketsOptions
from nfn_graph.tasks.zoo import build_zoo, open_zoo_folder
from nfn_graph.tasks.zoo.classifiers import initialise
from nfn_graph.tasks.zoo.tickets import ticket_architecture
from nfn_graph.testing import assert_equivariant

MODELS = ("nfn-np", "nfn-pointwise")
SCOPES: tuple[TicketScope, ...] = ("expected", "global", "layer")
BASELINES = [
    *("Dense", "IMP", "Random", "Magnitude"),
    *("IMP, on paths", "Random, on paths", "Magnitude, on paths"),
]


def own_maps(layer: NFLinear) -> list[nn.Parameter]:
    """The maps of the weights to themselves."""
    return [layer.maps[site.name] for site in layer.spec.sites if not isinstance(site.key, str)]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlps(tmp_path_factory.mktemp("zoos") / "mlps")


@pytest.fixture(scope="module")
def cnns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cnns(tmp_path_factory.mktemp("zoos") / "cnns")


@pytest.fixture(scope="module")
def runs(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of every model."""
    folder = tmp_path_factory.mktemp("runs")
    for model in MODELS:
        train(tickets(zoo, folder / model, model=model, epochs=15, learning_rate=1e-2))
    return {model: folder / model for model in MODELS}


def tickets(zoo: Path, out: Path, **options: Any) -> WinningTickets:
    chosen = WinningTicketsOptions(zoo, out, **{"preset": "tiny", **options})
    return WinningTickets(chosen.resolved())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def in_double(graph: WeightGraph) -> WeightGraph:
    return graph.features().to(torch.float64).to_graph()


def fitted(graph: WeightGraph, *options: Any) -> TicketAutoencoder:
    """A model that standardizes by one network, whose mask is zero if it has none."""
    model = TicketAutoencoder(graph.spec, *options)
    raw = graph.features()
    if raw.channels == 1:
        raw = raw.map(lambda x: torch.cat([x, torch.zeros_like(x)], -1))
    model.standardize.fit(raw.to_graph())
    return model


@pytest.mark.parametrize("pointwise", [False, True])
@pytest.mark.parametrize("kind", ["zoo", "cnns"])
def test_masks_follow_the_neurons(
    kind: str, pointwise: bool, request: pytest.FixtureRequest
) -> None:
    zoo = open_zoo_folder(request.getfixturevalue(kind))
    graphs = [in_double(zoo[i]) for i in range(3)]
    batch = Batch.from_data_list(graphs)
    model = TicketAutoencoder(batch.spec, (6, 6), 3, 2, pointwise)
    fit_inputs(model.double().eval(), graphs)
    assert_equivariant(lambda f: model(f.to_graph()).scores, batch, "hnp", folded=False)
    single = graphs[0].features().map(lambda x: x[..., :1]).to_graph()
    single.layout = single.layout.noting(channels={})
    move = sample(single, "hnp")
    assert not move.is_identity
    for scope in SCOPES:
        expected = move.apply(mask_network(model, single, 0.8, scope))
        found = mask_network(model, move.apply(single), 0.8, scope)
        for key, x in found.features().tensors():
            assert torch.equal(x, dict(expected.features().tensors())[key])
        assert sum(int((x == 0).sum()) for _, x in found.features().tensors()) > 0


def test_inputs_are_told_apart(zoo: Path) -> None:
    """Two inputs with the same weights get different scores if positions are learned."""
    graph = open_zoo_folder(zoo)[0].features().map(lambda x: x[..., :1]).to_graph()
    key = ("input", "weight", "hidden1")
    raw = graph.features()
    weights = raw.weights[key].view(-1, 64, 1, 1).clone()
    weights[:, 1] = weights[:, 0]
    graph = raw.replace({key: weights.flatten(0, 1)}).to_graph()
    for positions, is_same in ((0, True), (3, False)):
        # With enough channels, some activation is not zero for all weights.
        model = fitted(graph, (16,), 2, positions).eval()
        scores = model(graph).scores.weights[key].view(-1, 64)
        assert torch.allclose(scores[:, 0], scores[:, 1], atol=1e-6) is is_same


def test_losses_of_parts_add_up(zoo: Path, tmp_path: Path) -> None:
    """If devices have networks of different widths, the sum over devices equals one batch."""
    task, found = tickets(zoo, tmp_path), open_zoo_folder(zoo)
    graphs, widths = list(found), found.column("width").to_pylist()
    parts = [[g for g, w in zip(graphs, widths, strict=True) if w == width] for width in (5, 7)]
    assert all(parts) and sum(map(len, parts)) == len(graphs)
    model = fitted(graphs[0], (4,), 2).double().eval()

    def total(part: list[WeightGraph]) -> Tensor:
        batch = Batch.from_data_list(part)
        features = batch.features().map(lambda x: x.double())
        batch = features.to_graph()
        return task.loss(model(batch), batch) * task.loss_terms(batch)

    torch.testing.assert_close(total(parts[0]) + total(parts[1]), total(graphs))


def test_the_mask_is_read_in_training_only(zoo: Path) -> None:
    graph = open_zoo_folder(zoo)[0]
    model = fitted(graph, (4,), 2)
    raw = graph.features()
    other = raw.map(lambda x: torch.cat([x[..., :1], 1 - x[..., 1:]], -1)).to_graph()

    def found(network: WeightGraph) -> Tensor:
        torch.manual_seed(0)
        return torch.cat([x.flatten() for _, x in model(network).scores.tensors()])

    # The posterior starts as the prior and learns to differ from it.
    assert float(model(graph).divergence.detach()) == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(graph).scores.weights["input", "weight", "hidden1"].mean()).backward()
        optimizer.step()
    assert not torch.equal(found(graph), found(other))
    assert float(model(graph).divergence.detach()) > 0
    model.eval()
    assert torch.equal(found(graph), found(other))
    assert float(model(graph).divergence) == 0


@pytest.mark.parametrize("kind", ["zoo", "cnns"])
def test_a_step_moves_constants_alike(kind: str, request: pytest.FixtureRequest) -> None:
    """One step of Adam moves the sum over all taps of an aggregate by the learning rate, however
    many taps a kernel has; and every parameter learns."""
    graph = open_zoo_folder(request.getfixturevalue(kind))[0]
    model = fitted(graph, (4,), 2)
    groups = slow_aggregates(model, 0.01)
    assert {p for group in groups for p in group["params"]} == set(model.parameters())
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    layers = [layer for layer in model.modules() if isinstance(layer, NFLinear)]
    assert len(layers) == 4
    before = [layer.maps["network"].detach().clone() for layer in layers]
    own = [x.detach().clone() for layer in layers for x in own_maps(layer)]
    optimizer = torch.optim.Adam(groups)
    sum(x.sum() for x in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    for layer, x in zip(layers, before, strict=True):
        moved = (layer.maps["network"] - x).view(len(x), -1, layer.in_channels).sum(1)
        torch.testing.assert_close(moved, torch.full_like(moved, -0.01), atol=1e-6, rtol=1e-4)
    for x, y in zip(own, (x for layer in layers for x in own_maps(layer)), strict=True):
        torch.testing.assert_close(y - x, torch.full_like(x, -0.01), atol=1e-6, rtol=1e-4)


def test_training_finds_tickets(runs: dict[str, Path], zoo: Path) -> None:
    for model, run in runs.items():
        rows = rows_of(run / "logs" / "metrics.csv")
        assert float(rows[-1]["train/loss"]) < float(rows[0]["train/loss"])
        predictions = rows_of(run / "predictions.csv")
        overlaps = [float(r["overlap"]) for r in predictions if r["split"] == "test"]
        # A random mask keeps a fifth of the ticket.
        assert sum(overlaps) / len(overlaps) > 0.35, model
        assert (run / "figures" / "scores-test.png").stat().st_size > 1000
        assert "score of every weight" in (run / "report.html").read_text()


class Stopped(WinningTickets):
    """Stops in the third epoch."""

    steps = 0

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        self.steps += 1
        if self.steps > 10:
            raise InterruptedError
        return super().loss(outputs, batch)


def test_a_stopped_run_ends_as_an_uninterrupted_one(zoo: Path, tmp_path: Path) -> None:
    whole = train(tickets(zoo, tmp_path / "whole", epochs=4))
    with pytest.raises(InterruptedError):
        train(Stopped(tickets(zoo, tmp_path / "stopped", epochs=4).options))
    assert (tmp_path / "stopped" / "checkpoints" / "last.ckpt").exists()
    stopped = train(tickets(zoo, tmp_path / "stopped", epochs=4))
    assert all(stopped[key] == whole[key] for key in ("test", "validation", "best_epoch"))


def test_convolutional_tickets(cnns: Path, tmp_path: Path) -> None:
    metrics = train(
        tickets(cnns, tmp_path / "run", where=("arch=cnn",), epochs=15, learning_rate=1e-2)
    )
    # A random mask keeps a fifth of the ticket.
    assert metrics["test"]["overlap"] > 0.3
    zoo = open_zoo_folder(cnns)[:2]
    results = compare_masks([tmp_path / "run"], zoo, images=COLOURS)
    assert [r.name for r in results] == [*BASELINES, "nfn-np", "nfn-np, scores alone"]


def test_retraining(runs: dict[str, Path], zoo: Path) -> None:
    chosen = open_zoo_folder(zoo).where(split="test")[:4]
    results = compare_masks(list(runs.values()), chosen, images=IMAGES)
    found = {result.name: result for result in results}
    both = [name for model in MODELS for name in (model, f"{model}, scores alone")]
    assert list(found) == [*BASELINES, *both]
    # Without a mask, training repeats that of the zoo.
    assert found["Dense"].accuracies == pytest.approx([r["dense_accuracy"] for r in chosen.rows])
    mean = torch.tensor(found["IMP"].accuracies, dtype=torch.float64)
    assert found["IMP"].mean == pytest.approx(float(mean.mean()))
    assert found["IMP"].standard_error == pytest.approx(float(mean.std()) / 2)
    with pytest.raises(ValueError, match="images that the zoo"):
        compare_masks([], chosen, images=tiny_images(90))


@pytest.mark.parametrize(
    ("arch", "width", "images"), [("mlp", 16, IMAGES), ("cnn", 4, COLOURS)], ids=["mlp", "cnn"]
)
def test_pruned_weights_on_no_path_are_replaced(
    arch: str, width: int, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of "IMP, on paths" keep IMP's weights on paths and fill the other places with
    weights of large initial magnitude."""
    trained: list[tuple[int, Masks]] = []

    def note(options: object, images: object, zoo: object, jobs: list[Any]) -> list[float]:
        trained.extend(jobs)
        return [0.0] * len(jobs)

    monkeypatch.setattr("nfn_graph.tasks.retraining.retrain", note)
    options = small(tmp_path / "zoo", arch=arch, widths=(width,), networks=6, sparsity=0.92)
    zoo = open_zoo_folder(build_zoo(options, source=images))
    compare_masks([], zoo, images=images)
    first = BASELINES.index("IMP, on paths") * len(zoo)
    replaced = 0
    for i, mask in trained[first : first + len(zoo)]:
        assert mask is not None
        state = zoo.state_dict(i)
        given = {key: x > 0 for key, x in zoo.state_dict(i, "mask").items() if key in mask}
        found = {key: x > 0 for key, x in mask.items()}
        network = WeightGraph.from_placements(zoo[i].layout, state)
        dead = on_no_path(given, network)
        replaced += sum(int(x.sum()) for x in dead.values())
        assert sum(int(x.sum()) for x in found.values()) == zoo.rows[i]["num_kept"]
        assert all(bool(found[key][x & ~dead[key]].all()) for key, x in given.items())
        assert not any(bool(x.any()) for x in on_no_path(found, network).values())
        new = torch.cat([state[key][x & ~given[key]] for key, x in found.items()]).abs()
        never = torch.cat([state[key][~x & ~given[key]] for key, x in found.items()]).abs()
        assert not len(new) or float(new.mean()) > float(never.mean())
    assert replaced > 0


def checkpoint(path: Path, zoo: Path, dtype: torch.dtype, width: int = 9) -> Path:
    """An initialisation of a width that no network of the zoo has, with unusual names."""
    architecture = ticket_architecture(options_of(open_zoo_folder(zoo)), IMAGES, width)
    state = initialise(architecture, "he_normal", 1.0, torch.Generator().manual_seed(5))
    names = {key: key.replace("layers", "classifier.fc") for key in state}
    torch.save({names[key]: (x + 0.01).to(dtype) for key, x in state.items()}, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_of_half_precision_follow_the_neurons(dtype: torch.dtype) -> None:
    """Scores keep the precision in which they were computed; rounded, many would be equal."""
    torch.manual_seed(0)
    sizes = [(32, 32), (32, 32), (10, 32)]
    graph = WeightGraph.from_tensors(
        [torch.randn(shape).to(dtype) for shape in sizes],
        [torch.randn(shape[0]).to(dtype) for shape in sizes],
    )
    model = fitted(graph, (6, 6), 3).eval()
    move = sample(graph, "hnp")
    expected = move.apply(mask_network(model, graph, 0.9)).to_tensors()
    found = mask_network(model, move.apply(graph), 0.9).to_tensors()
    assert all(torch.equal(x, expected[key]) for key, x in found.items())
    assert {x.dtype for x in found.values()} == {dtype}


def test_biases_are_pruned_by_size_and_statistics_never() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    graph = from_module(network, example_input=torch.randn(2, 8))
    model = fitted(graph, (4,), 2).eval()
    kept = mask_network(model, graph, 0.5).to_tensors()
    assert all(bool((x == 1).all()) for x in kept.values() if x.dim() == 1)
    masks = mask_network(model, graph, 0.5, biases=True).to_tensors()
    for key, x in network.state_dict().items():
        if key in ("0.bias", "3.bias"):
            largest = x.abs().argsort(descending=True)[: len(x) // 2]
            assert masks[key].nonzero().flatten().tolist() == sorted(largest.tolist())
        elif x.dim() == 1 and key != "1.bias":
            assert bool((masks[key] == 1).all()), key
        elif x.dim() == 2:
            assert torch.equal(masks[key], kept[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_prune(dtype: torch.dtype, runs: dict[str, Path], zoo: Path, tmp_path: Path) -> None:
    path, out = checkpoint(tmp_path / "in.pt", zoo, dtype), tmp_path / "out.pt"
    command = ["prune", str(path), "--run", str(runs["nfn-np"]), "--out", str(out)]
    assert main([*command, "--sparsity", "0.9"]) == 0
    before, after, mask = (
        torch.load(p, weights_only=True) for p in (path, out, tmp_path / "out.mask.pt")
    )
    assert list(after) == list(mask) == list(before)
    count = sum(x.numel() for x in before.values() if x.dim() == 2)
    kept = sum(int(x.sum()) for x in mask.values() if x.dim() == 2)
    assert kept == round(0.1 * count)
    for key, x in before.items():
        assert after[key].dtype == dtype
        assert torch.equal(after[key], x * mask[key])
        assert x.dim() == 2 or bool((mask[key] == 1).all())


def test_prune_by_layer_with_biases(runs: dict[str, Path], zoo: Path, tmp_path: Path) -> None:
    path, out = checkpoint(tmp_path / "in.pt", zoo, torch.float32), tmp_path / "out.pt"
    command = ["prune", str(path), "--run", str(runs["nfn-pointwise"]), "--out", str(out)]
    assert main([*command, "--scope", "layer", "--biases"]) == 0
    mask = torch.load(tmp_path / "out.mask.pt", weights_only=True)
    for x in mask.values():
        assert int(x.sum()) == max(1, round(0.2 * x.numel()))


def test_wrong_network(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = WeightGraph.from_tensors(
        [torch.rand(4, 64), torch.rand(3, 4)], [torch.rand(4), torch.rand(3)]
    )
    path = tmp_path / "shallow.pt"
    torch.save(graph.to_tensors(), path)
    command = ["prune", str(path), "--run", str(runs["nfn-np"]), "--out"]
    assert main([*command, str(tmp_path / "out.pt")]) == 2
    assert re.search(r"'hidden1', 'weight', 'output'", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [path]
    assert from_state_dict(torch.load(path, weights_only=True)).spec == graph.spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0.1"], "no --noise and no --drop"),
        (["--latent", "0"], "--latent of at least 1"),
        (["--divergence-weight", "-1"], "--divergence-weight of at least 0"),
        (["--model", "mlp"], "nfn-pointwise"),
        (["--head", "8"], "no --head"),
        (["--fourier-features", "4"], "no --fourier-features"),
    ],
)
def test_bad_options(
    options: list[str],
    message: str,
    zoo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--zoo", str(zoo), "--out", str(tmp_path / "run"), "--preset", "tiny"]
    assert main(["train", "winning-tickets", *given, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo, run = str(tmp_path / "zoo"), str(tmp_path / "run")
    build = ["--networks", "20", "--widths", "4", "--epochs", "1", "--test-share", "0.2"]
    assert main(["zoo", "tickets", "--out", zoo, *build, "--validation-share", "0.2"]) == 0
    assert "20 tickets" in capsys.readouterr().out
    assert main(["train", "winning-tickets", "--zoo", zoo, "--out", run, "--preset", "tiny"]) == 0
    table = tmp_path / "table.csv"
    command = ["retrain", run, "--zoo", zoo, "--networks", "2", "--out", str(table)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for name in ("Dense", "IMP", "Random", "Magnitude", "nfn-np"):
        assert name in shown
    assert len(rows_of(table)) == 18
