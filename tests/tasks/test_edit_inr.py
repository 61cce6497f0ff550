"""Editing INRs: models that return weights, training from end to end, and the command."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from siren_data import blobs, sirens
from torch import nn

from nfn_graph import Batch, WeightGraph
from nfn_graph.cli import main
from nfn_graph.converters import from_state_dict, save
from nfn_graph.symmetry import sample
from nfn_graph.tasks.edit import joined_networks
from nfn_graph.tasks.edit_inr import EditInr, EditInrOptions, pictures
from nfn_graph.tasks.models import ModelSettings, fit_inputs, sizes_of
from nfn_graph.tasks.models.editors import Editor, EditorName, build_editor
from nfn_graph.tasks.training import evaluate, train
from nfn_graph.tasks.user_networks import check_sines
from nfn_graph.tasks.zoo import InrZooOptions, build_zoo, open_zoo_folder
from nfn_graph.tasks.zoo.render import render_graphs
from nfn_graph.tasks.zoo.siren import SirenShape, initialise_siren, pixel_grid
from nfn_graph.testing import assert_equivariant

SETTINGS = ModelSettings((6, 6), (16,), io_encoding=True, probes=0)
EQUIVARIANT = ("nfn-np", "nfn-hnp", "nfn-pointwise")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoos") / "inr"
    return build_zoo(InrZooOptions(out, widths=(6, 8), steps=150), source=blobs(40))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoos") / "wide"
    return build_zoo(InrZooOptions(out, widths=(10,), steps=150, seed=1), source=blobs(20))


@pytest.fixture(scope="module")
def dilated(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose model has learned something."""
    run = tmp_path_factory.mktemp("runs") / "dilate"
    train(editing(zoo, run, model="nfn-hnp", channels=(8,), epochs=40, learning_rate=1e-2))
    return run


def editing(zoo: Path, out: Path, **options: Any) -> EditInr:
    chosen = EditInrOptions(zoo, out, **{"preset": "tiny", **options})
    return EditInr(chosen)


def fitted(
    name: str, graphs: list[WeightGraph], scale: float = 0.01, probes: int = 0, **options: Any
) -> Editor:
    spec = Batch.from_data_list(graphs).spec
    settings = replace(SETTINGS, probes=probes)
    model = build_editor(name, settings, spec, sizes_of(graphs), scale=scale, **options).double()
    fit_inputs(model, graphs)
    return model.eval()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize(
    ("name", "probes"), [*((name, 0) for name in EQUIVARIANT), ("nfn-np", 5), ("nfn-hnp", 5)]
)
def test_edits_follow_the_neurons(name: str, probes: int, canonical: bool, tmp_path: Path) -> None:
    """From the stored network to the edited image, in double precision."""
    task = editing(tmp_path, tmp_path, model=name, canonical=canonical)
    facts = {"image_shape": [1, 8, 8]}
    graphs = sirens((5, 4), (7, 3), (5, 4))

    def prepared(graph: WeightGraph) -> WeightGraph:
        return task.placed(graph, 30.0, 0.5, facts)

    batch = Batch.from_data_list([prepared(g) for g in graphs])
    model = fitted(name, batch.to_data_list(), 0.2, probes)
    assert_equivariant(lambda f: model(f.to_graph()), batch, "hnp", folded=False)
    moved = [sample(g, "hnp").apply(g) for g in sirens((5, 4), (7, 3), (5, 4))]
    other = Batch.from_data_list([prepared(g) for g in moved])
    with torch.no_grad():
        before, after, same = pictures(batch), pictures(model(batch)), pictures(model(other))
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(same, after, atol=1e-9, rtol=0)


def test_an_mlp_does_not_follow_them() -> None:
    graphs = sirens((5, 4), (7, 3))
    model = fitted("mlp", graphs)
    with pytest.raises(AssertionError, match="to agree"):
        assert_equivariant(
            lambda f: model(f.to_graph()), Batch.from_data_list(graphs), "hnp", folded=False
        )


@pytest.mark.parametrize("name", get_args(EditorName))
def test_nothing_changes_without_a_scale(name: str) -> None:
    graphs = sirens((5, 4), (7, 3))
    batch = Batch.from_data_list(graphs)
    for graph, scale, is_same in ((batch, 0.0, True), (batch, 0.01, False)):
        edited = fitted(name, graphs, scale)(graph)
        pairs = zip(edited.features().tensors(), graph.features().tensors(), strict=True)
        assert all(torch.equal(x, y) for (_, x), (_, y) in pairs) is is_same
    assert fitted(name, graphs).scale.shape == (1,)
    model = fitted(name, graphs, per_tensor=True)
    with torch.no_grad():
        model.scale.zero_()
        model.scale[model.places["hidden1"]] = 1.0
    edited, raw = model(batch).features(), batch.features()
    changed = [key for key, x in edited.tensors() if not torch.equal(x, dict(raw.tensors())[key])]
    assert changed == ["hidden1"]


def test_a_network_in_a_batch_is_edited_as_alone() -> None:
    graphs = sirens((5, 4), (7, 3), (5,))
    for name in get_args(EditorName):
        model = fitted(name, graphs)
        batch = model(Batch.from_data_list(graphs))
        for i, graph in enumerate(graphs):
            alone = model(graph).to_tensors()
            for key, x in batch[i].to_tensors().items():
                torch.testing.assert_close(x, alone[key], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("model", get_args(EditorName))
def test_every_model_trains(model: str, zoo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    test = train(editing(zoo, run, model=model))["test"]
    rows = [row for row in rows_of(run / "predictions.csv") if row["split"] == "test"]
    means = {key: np.mean([float(r[key]) for r in rows]) for key in ("mse", "mse_unedited")}
    assert test["mse"] == pytest.approx(means["mse"])
    assert test["relative"] == pytest.approx(means["mse"] / means["mse_unedited"])
    fits = [row["mse"] for row in open_zoo_folder(zoo).where(split="test").rows]
    assert test["relative_to_fit"] == pytest.approx(test["mse"] / np.mean(fits), rel=1e-5)
    assert test["networks"] == len(fits) == len(rows)
    assert (run / "figures" / "edits-test.png").stat().st_size > 1000
    assert "what they showed" in (run / "report.html").read_text()


def test_probes_tell_an_editor_what_neurons_do(zoo: Path, wide: Path, tmp_path: Path) -> None:
    """Models learn with it, and networks of users, of which only --w0 is known, run as well."""
    run = tmp_path / "run"
    options = {"model": "nfn-hnp", "probes": 6, "epochs": 3, "learning_rate": 1e-2}
    train(editing(zoo, run, **options))
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["probes"] == 6
    state = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    inputs = state["model.encoding.probe.inputs"]
    assert inputs.shape == (6, 2)
    assert math.isfinite(evaluate(run, wide)["mse"])
    network = {k: x.T if x.dim() == 2 else x for k, x in siren_state().items()}
    torch.save(network, tmp_path / "digit.pt")
    command = ["edit", str(tmp_path / "digit.pt"), "--w0", "30", "--run", str(run)]
    turned = ["--orientation", "in_out", "--out", str(tmp_path / "turned.pt")]
    assert main([*command, *turned]) == 0
    torch.save(siren_state(), tmp_path / "digit.pt")
    assert main([*command, "--out", str(tmp_path / "edited.pt")]) == 0
    edited = torch.load(tmp_path / "edited.pt", weights_only=True)
    for key, x in torch.load(tmp_path / "turned.pt", weights_only=True).items():
        torch.testing.assert_close(x.T if x.dim() == 2 else x, edited[key])
        assert not torch.equal(edited[key], siren_state()[key])


def test_probes_are_of_editors_made_of_nf_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no --probes with --model mlp"):
        editing(tmp_path, tmp_path, model="mlp", probes=6)


@pytest.mark.parametrize("probes", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ensemble_is_one_wider_network(probes: int, dtype: torch.dtype) -> None:
    """Its image is the mean of the images of the networks that the editor creates."""
    graphs = [g.to(dtype) for g in sirens((6, 5), (7, 8), (4, 4), offset=(0.5, 0.0, 0.25))]
    spec = Batch.from_data_list(graphs).spec
    settings = replace(SETTINGS, probes=probes)
    model = build_editor("nfn-hnp", settings, spec, sizes_of(graphs), scale=0.3, ensemble=3)
    fit_inputs(model.to(dtype), graphs)
    edited = model(Batch.from_data_list(graphs))
    size = (9, 8)
    images = render_graphs(edited, size)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for i, graph in enumerate(graphs):
        own = edited[i]
        channels = [
            own.with_features({key: x[..., c : c + 1] for key, x in own.features().tensors()})
            for c in range(3)
        ]
        alone = [render_graphs(g, size) for g in channels]
        assert (alone[0] - alone[1]).abs().max() > 1e-3
        joined = joined_networks(own)
        assert list(joined.to_tensors()) == list(graph.to_tensors())
        widths = [3 * graph.layout.num_rows(n) for n in ("hidden1", "hidden2")]
        assert [joined.layout.num_rows(n) for n in ("hidden1", "hidden2")] == widths
        image = render_graphs(joined, size)
        assert (image - torch.stack(alone).mean(0)).abs().max() < bound
        assert (image[0] - images[i]).abs().max() < bound
        points = pixel_grid(*size, dtype).T
        assert (joined.run(points).T.reshape(image[0].shape) - image[0]).abs().max() < bound


def test_an_ensemble_trains_and_gives_a_checkpoint(zoo: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.pt"
    test = train(editing(zoo, run, ensemble=2, probes=4, epochs=3))["test"]
    assert math.isfinite(test["mse"])
    path = siren_file(tmp_path / "in.pt", (7, 9), torch.float32)
    assert main(["edit", str(path), "--w0", "30", "--run", str(run), "--out", str(out)]) == 0
    before, after = (torch.load(p, weights_only=True) for p in (path, out))
    assert list(after) == list(before)
    shapes = [tuple(x.shape) for x in after.values() if x.dim() == 2]
    assert shapes == [(14, 2), (18, 14), (1, 18)]
    again = tmp_path / "again.pt"  # It is an ordinary SIREN, which can be edited again.
    assert main(["edit", str(out), "--w0", "30", "--run", str(run), "--out", str(again)]) == 0


def test_an_mlp_makes_one_network(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ensemble 1 with --model mlp"):
        editing(tmp_path, tmp_path, model="mlp", ensemble=2)
    with pytest.raises(ValueError, match="--ensemble"):
        editing(tmp_path, tmp_path, ensemble=0)


def siren_state() -> dict[str, torch.Tensor]:
    return initialise_siren(SirenShape(2, (7, 7), 1), 30.0, torch.Generator().manual_seed(4))


def test_mixed_widths_and_a_width_never_seen(zoo: Path, wide: Path, tmp_path: Path) -> None:
    assert {row["width"] for row in open_zoo_folder(zoo).rows} == {6, 8}
    options = {"operation": "invert", "channels": (8,), "epochs": 40, "learning_rate": 1e-2}
    run = tmp_path / "run"
    metrics = train(editing(zoo, run, model="nfn-np", **options))
    assert metrics["test"]["relative"] < 0.5
    assert evaluate(run, wide)["relative"] < 0.5
    # The best epoch is the one with the smallest error.
    errors = [float(row["validation/mse"]) for row in rows_of(run / "logs" / "metrics.csv")]
    assert metrics["best_epoch"] == int(np.argmin(errors))
    assert metrics["validation"]["mse"] == pytest.approx(min(errors), rel=1e-4)


class Stopped(EditInr):
    """Stops in the third epoch."""

    steps = 0

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        self.steps += 1
        if self.steps > 10:
            raise InterruptedError
        return super().loss(outputs, batch)


@pytest.mark.parametrize("model", ["nfn-np", "mlp-aug"])
def test_a_stopped_run_ends_as_an_uninterrupted_one(model: str, zoo: Path, tmp_path: Path) -> None:
    options = {"model": model, "epochs": 4, "noise": 0.05, "schedule": "cosine"}
    whole = train(editing(zoo, tmp_path / "whole", **options))
    with pytest.raises(InterruptedError):
        train(Stopped(editing(zoo, tmp_path / "stopped", **options).options))
    assert not (tmp_path / "stopped" / "metrics.json").exists()
    assert (tmp_path / "stopped" / "checkpoints" / "last.ckpt").exists()
    stopped = train(editing(zoo, tmp_path / "stopped", **options))
    assert all(stopped[key] == whole[key] for key in ("test", "validation", "best_epoch"))


def siren_file(path: Path, hidden: tuple[int, ...], dtype: torch.dtype, outputs: int = 1) -> Path:
    """A checkpoint of a SIREN with the keys of its authors' code."""
    shape = SirenShape(2, hidden, outputs)
    state = initialise_siren(shape, 30.0, torch.Generator().manual_seed(3))
    names = {key: key.replace("layers", "net").replace(".w", ".linear.w") for key in state}
    names = {key: name.replace(".b", ".linear.b") for key, name in names.items()}
    torch.save({names[key]: x.to(dtype) for key, x in state.items()}, path)
    return path


def test_one_of_several_networks_is_edited(
    dilated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option of the command, and the option works."""
    state = torch.load(siren_file(tmp_path / "in.pt", (7, 9), torch.float32), weights_only=True)
    several, out = tmp_path / "both.pt", tmp_path / "out.pt"
    torch.save({"first": state, "second": {k: 2 * x for k, x in state.items()}}, several)
    command = ["edit", str(several), "--w0", "30", "--run", str(dilated), "--out", str(out)]
    assert main(command) != 0
    assert "--key first" in capsys.readouterr().err
    assert main([*command, "--key", "second"]) == 0
    assert out.exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_edited_checkpoint(dtype: torch.dtype, dilated: Path, tmp_path: Path) -> None:
    path, out = siren_file(tmp_path / "in.pt", (7, 9), dtype), tmp_path / "out.pt"
    assert main(["edit", str(path), "--w0", "30", "--run", str(dilated), "--out", str(out)]) == 0
    before = torch.load(path, weights_only=True)
    after = torch.load(out, weights_only=True)
    assert list(after) == list(before)
    for key, x in before.items():
        assert (after[key].dtype, after[key].shape) == (dtype, x.shape)
        assert after[key].isfinite().all()
    assert any(not torch.equal(after[key], before[key]) for key in before)


def test_more_ink_after_dilation(zoo: Path, dilated: Path, tmp_path: Path) -> None:
    metrics = json.loads((dilated / "metrics.json").read_text())
    assert metrics["test"]["relative"] < 1
    for i, row in enumerate(open_zoo_folder(zoo).where(split="test").rows[:3]):
        path, out = tmp_path / f"{i}.safetensors", tmp_path / f"thick{i}.safetensors"
        save(open_zoo_folder(zoo).where(network=row["network"])[0], path)
        command = ["edit", str(path), "--w0", "30", "--run", str(dilated), "--out", str(out)]
        assert main([*command, "--zoom", "4"]) == 0
        with Image.open(out.with_suffix(".png")) as image:
            pixels = np.array(image, dtype=np.float64)
        # Two pictures of 8 x 8, four times as large, with lines of two pixels around them.
        assert pixels.shape == (36, 70)
        assert pixels[2:34, 36:68].mean() > pixels[2:34, 2:34].mean() + 5


@pytest.mark.parametrize(
    ("hidden", "outputs", "message"),
    [
        ((7, 9, 5), 1, "'hidden2', 'weight', 'hidden3'|'hidden3'"),
        ((7,), 1, "'hidden1', 'weight', 'output'"),
        ((7, 9), 3, r"1 neuron\(s\) of type 'output'"),
    ],
)
def test_wrong_networks(
    hidden: tuple[int, ...],
    outputs: int,
    message: str,
    dilated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = siren_file(tmp_path / "in.pt", hidden, torch.float32, outputs)
    out = tmp_path / "out.pt"
    assert main(["edit", str(path), "--w0", "30", "--run", str(dilated), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(message, error)
    assert list(tmp_path.iterdir()) == [path]


class Waves(nn.Module):
    """Activation functions without a module of their own."""

    def __init__(self, w0: float) -> None:
        super().__init__()
        self.w0 = w0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sine, with the factor of a SIREN or without one."""
        return torch.sin(self.w0 * x) if self.w0 else x


def onnx_file(path: Path, activation: nn.Module) -> Path:
    layers = [nn.Linear(2, 7), activation, nn.Linear(7, 9), activation, nn.Linear(9, 1)]
    model = nn.Sequential(*layers)
    torch.onnx.export(model, (torch.rand(3, 2),), path, dynamo=False)
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("activation", "code", "got"),
    [
        (Waves(30.0), 0, ""),
        (nn.Tanh(), 2, "got Tanh"),
        (nn.ReLU(), 2, "got Relu"),
        (Waves(0), 2, "got no sines"),
    ],
)
def test_a_file_that_names_its_activations_is_asked(
    activation: nn.Module,
    code: int,
    got: str,
    dilated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = onnx_file(tmp_path / "in.onnx", activation), tmp_path / "out.pt"
    command = ["edit", str(path), "--w0", "30", "--run", str(dilated), "--out", str(out)]
    assert main(command) == code
    assert got in capsys.readouterr().err
    assert out.exists() == (code == 0)


@pytest.mark.parametrize("activation", ["tanh", "sin"])
def test_a_keras_configuration_is_asked(activation: str, tmp_path: Path) -> None:
    path = tmp_path / "in.h5"
    siren = torch.load(siren_file(tmp_path / "in.pt", (7, 9), torch.float32), weights_only=True)
    save(from_state_dict(siren), path)
    dense = [{"class_name": "Dense", "config": {"activation": activation}}]
    with h5py.File(path, "r+") as file:
        model = {"class_name": "Sequential", "config": {"layers": dense}}
        file.attrs["model_config"] = json.dumps(model)
    if activation == "sin":
        check_sines(path)
    else:
        with pytest.raises(ValueError, match=r"Expected a SIREN.*got tanh"):
            check_sines(path)


def test_weights_alone_do_not_say_that_they_are_of_a_siren(
    dilated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint does not contain the factor of its sines, on which the picture depends."""
    path, out = siren_file(tmp_path / "in.pt", (7, 9), torch.float32), tmp_path / "out.pt"
    command = ["edit", str(path), "--run", str(dilated), "--out", str(out)]
    assert main(command) == 2
    assert "--w0" in capsys.readouterr().err
    assert main([*command, "--w0", "-1"]) == 2
    assert "--w0" in capsys.readouterr().err
    pictures = []
    for w0 in ("30", "10"):
        assert main([*command, "--w0", w0]) == 0
        with Image.open(out.with_suffix(".png")) as image:
            pictures.append(np.array(image))
    assert (pictures[0] != pictures[1]).any()


def test_bad_options(zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "edit-inr", "--zoo", str(zoo), "--out", str(tmp_path / "run")]
    for options, message in (
        (["--operation", "shear"], "dilate"),
        (["--operation", "blur", "--amount", "-1"], "--amount of --operation blur above 0"),
        (["--model", "statnn"], "nfn-np"),
        (["--head", "8"], "no --head with --model nfn-np"),
    ):
        assert main([*given, *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="model that returns weights"):
        train(EditInr(replace(editing(zoo, tmp_path / "run").options, model="gine")))  # type: ignore[arg-type]
