"""Networks of zoos that run from their graphs give the outputs of the code that trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from zoo_data import tiny_images

from nfn_graph import UserError
from nfn_graph.converters import from_module, from_state_dict
from nfn_graph.tasks.classify_inr import ClassifyInr, ClassifyInrOptions
from nfn_graph.tasks.regress import (
    PredictGeneralization,
    PredictGeneralizationOptions,
)
from nfn_graph.tasks.training.run import load_model, train
from nfn_graph.tasks.zoo import CnnZooOptions, InrZooOptions, build_zoo
from nfn_graph.tasks.zoo.classifiers import (
    Activation,
    Architecture,
    build_module,
    forward,
    initialise,
)
from nfn_graph.tasks.zoo.siren import (
    Siren,
    SirenShape,
    initialise_siren,
    siren_computation,
    siren_forward,
)


@pytest.mark.parametrize("hidden", [(), (5,), (4, 6)])
def test_sirens_run_as_they_were_fitted(hidden: tuple[int, ...]) -> None:
    parameters = initialise_siren(SirenShape(2, hidden, 3), 20.0, torch.Generator().manual_seed(0))
    parameters = {key: x.double() for key, x in parameters.items()}
    graph = from_state_dict(parameters)
    graph.layout = graph.layout.noting(computation=siren_computation(graph.layout, 20.0, 0.5))
    x = torch.rand(2, 7, dtype=torch.float64)
    stacked = {key: tensor.unsqueeze(0) for key, tensor in parameters.items()}
    expected = siren_forward(stacked, x, 20.0, 0.5)[0].t()
    outputs, activations = graph.run(x.t(), return_activations=True)
    assert torch.allclose(outputs, expected, atol=1e-12)
    network = Siren(SirenShape(2, hidden, 3), 20.0, 0.5).double()
    network.load_state_dict(parameters)
    known = from_module(network, x.t())
    assert known.layout == graph.layout and torch.equal(known.run(x.t()), outputs)
    assert known.layout.computation == graph.layout.computation
    assert [rows.shape[0] for rows in activations.values()] == [*hidden, 3]


@pytest.mark.parametrize("pool", ["mean", "flatten"])
@pytest.mark.parametrize("convolutions", [(), (3, 4)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_classifiers_run_as_they_were_trained(
    convolutions: tuple[int, ...], pool: Literal["mean", "flatten"], activation: Activation
) -> None:
    architecture = Architecture((2, 9, 9), convolutions, (5,), 4, 1, pool)
    generator = torch.Generator().manual_seed(0)
    found = initialise(architecture, "he_normal", 1.0, generator)
    parameters = {key: x.double() + 0.1 for key, x in found.items()}
    images = torch.randn(6, 2, 9, 9, dtype=torch.float64)
    network = build_module(architecture, activation).double()
    network.load_state_dict(parameters)
    graph = from_module(network, images)
    guessed = from_state_dict(parameters, flatten="channels_first", example_input=images)
    assert graph.layout == guessed.layout
    stacked = {key: tensor.unsqueeze(0) for key, tensor in parameters.items()}
    expected = forward(architecture, stacked, activation, images.unsqueeze(1))[0].t()
    assert torch.allclose(graph.run(images), expected, atol=1e-12)


@pytest.mark.parametrize("model", ["probe", "probe-grid"])
def test_probes_read_what_sirens_of_all_sizes_show(
    model: Literal["probe", "probe-grid"], tmp_path: Path
) -> None:
    """The class is the brightness of an image, which the weights do not show."""
    sizes = {"widths": (4, 6), "depths": (1, 2)}
    zoo = InrZooOptions(tmp_path / "zoo", steps=100, learning_rate=1e-2, **sizes)
    build_zoo(zoo, source=tiny_images(120))
    chosen = {"epochs": 20, "probes": 16, "learning_rate": 1e-2, "head": (16,)}
    run = tmp_path / "run"
    found = train(ClassifyInr(ClassifyInrOptions(tmp_path / "zoo", run, model, "tiny", **chosen)))
    assert found["test"]["accuracy"] > 0.8
    assert found["test"]["networks"] == 24
    assert (run / "figures" / "probes.png").is_file()
    page = (run / "report.html").read_text()
    assert "evaluates every network on 16 inputs" in page
    # Networks of shapes read three coordinates.
    graph = from_state_dict(
        {"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4),
         "1.weight": torch.zeros(1, 4), "1.bias": torch.zeros(1)},
        activation="sin",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"with 2 neurons of type 'input'.*\(got 3\)"):
        load_model(run)[1](graph)


def test_probes_are_images_for_classifiers(tmp_path: Path) -> None:
    zoo = CnnZooOptions(tmp_path / "zoo", networks=12, widths=(4, 5), depths=(2,), epochs=(1, 2))
    build_zoo(zoo, source=tiny_images())
    options = PredictGeneralizationOptions(
        tmp_path / "zoo", tmp_path / "run", "probe", "tiny", probes=5, epochs=1
    )
    assert "tau" in train(PredictGeneralization(options))["test"]
