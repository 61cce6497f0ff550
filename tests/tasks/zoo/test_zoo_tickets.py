"""Masks of an exact sparsity, and zoos of winning tickets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ticket_data import IMAGES, build_cnns, build_mlps, small
from torch import Tensor
from zoo_data import tiny_images

from nfn_graph.tasks.masks import masks_from_scores
from nfn_graph.tasks.retraining import options_of
from nfn_graph.tasks.zoo import build_zoo, open_zoo_folder
from nfn_graph.tasks.zoo.classifiers import TrainingData, initialise
from nfn_graph.tasks.zoo.seeds import generator_of
from nfn_graph.tasks.zoo.tickets import ticket_architecture, ticket_run
from nfn_graph.tasks.zoo.training import train_classifiers


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlps(tmp_path_factory.mktemp("zoos") / "mlps")


def scores(*shapes: tuple[int, ...], networks: int = 3) -> dict[str, Tensor]:
    return {f"{i}.weight": torch.randn(networks, *shape) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95, 0.999])
def test_exact_sparsity(sparsity: float) -> None:
    given = scores((8, 5), (4, 8, 3, 3), (2, 4))
    masks = masks_from_scores(given, sparsity)
    total = 40 + 288 + 8
    for i in range(3):
        kept = torch.cat([masks[key][i].flatten() for key in given])
        values = torch.cat([given[key][i].flatten() for key in given])
        assert int(kept.sum()) == max(1, round((1 - sparsity) * total))
        assert kept.all() or values[kept].min() > values[~kept].max()
    by_layer = masks_from_scores(given, sparsity, "layer")
    for key, size in zip(given, (40, 288, 8), strict=True):
        assert by_layer[key].shape == given[key].shape
        wanted = max(1, round((1 - sparsity) * size))
        assert by_layer[key].flatten(1).sum(1).tolist() == [wanted] * 3


def test_ties_keep_the_number() -> None:
    masks = masks_from_scores({"a": torch.ones(2, 10), "b": torch.ones(2, 10)}, 0.75)
    assert masks["a"].sum(1).tolist() == [5, 5] and not masks["b"].any()


def test_bad_masks() -> None:
    for sparsity in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="--sparsity of at least 0 and below 1"):
            masks_from_scores(scores((2, 2)), sparsity)
    with pytest.raises(ValueError, match=r"finite scores of '0\.weight'"):
        masks_from_scores({"0.weight": torch.full((1, 2), math.nan)}, 0.5)
    with pytest.raises(ValueError, match="--scope"):
        masks_from_scores(scores((2, 2)), 0.5, "rows")  # type: ignore[arg-type]


def test_pairs_are_one_step_of_pruning(zoo: Path) -> None:
    """Compares with each network trained alone and pruned by sorting its weights."""
    found = open_zoo_folder(zoo)
    options = options_of(found)
    data = TrainingData.of(IMAGES, torch.device("cpu"), torch.float32)
    assert {row["width"] for row in found.rows} == {5, 7}
    for i in (0, 21):
        run = ticket_run(options, IMAGES, found.rows[i]["network"])
        fresh = initialise(run.architecture, "he_normal", 1.0, generator_of(run.seed, "initial"))
        last = list(train_classifiers([run], data, options.batch_size))[-1]
        weights = {k: x for k, x in last.parameters.items() if x.dim() > 1}
        flat = torch.cat([x.abs().flatten() for x in weights.values()])
        kept = round(0.2 * len(flat))
        limit = flat.sort(descending=True).values[kept - 1]
        masks = found.state_dict(i, "mask")
        for key, x in found.state_dict(i).items():
            assert torch.equal(x, fresh[key])
            expected = (weights[key].abs() >= limit) if key in weights else torch.ones_like(x)
            assert torch.equal(masks[key], expected.to(x.dtype))
        assert found.rows[i]["num_kept"] == kept
        assert found.rows[i]["dense_accuracy"] == pytest.approx(last.metrics.test_accuracy)
        graph = found[i]
        assert list(graph.layout.channels) == ["mask"]
        assert float(graph["output"].x[..., 1].min()) == 1


def test_l2_shrinks_what_is_pruned_by(tmp_path: Path) -> None:
    """The penalty affects training: the same initial weights get other tickets."""
    zoos = [
        open_zoo_folder(build_zoo(small(tmp_path / f"{l2}", networks=2, l2=l2), source=IMAGES))
        for l2 in (0.0, 1e-2)
    ]
    key = "layers.0.weight"
    assert torch.equal(*(zoo.state_dict(0)[key] for zoo in zoos))
    assert not torch.equal(*(zoo.state_dict(0, "mask")[key] for zoo in zoos))
    with pytest.raises(ValueError, match="--l2 of at least 0"):
        small(tmp_path, l2=-1.0).check()


def test_convolutions_keep_their_positions(tmp_path: Path) -> None:
    zoo = open_zoo_folder(build_cnns(tmp_path / "cnns"))
    spec = zoo[0].spec
    taps = {key: weight.taps for key, weight in spec.weight.items()}
    assert list(taps.values()) == [9, 9, 9, 4, 1]
    state = zoo.state_dict(0)
    assert [tuple(x.shape) for x in state.values() if x.dim() == 4] == [(3, 3, 3, 3)] * 3
    assert state["layers.3.weight"].shape == (3, 12)
    with pytest.raises(ValueError, match=r"at most 16 positions .got 25"):
        ticket_architecture(small(tmp_path, arch="cnn"), tiny_images(count=9, size=40), 3)


def test_a_stopped_zoo_goes_on(zoo: Path, tmp_path: Path) -> None:
    for part in ("2/2", "1/1"):
        options = small(tmp_path / "zoo", widths=(5, 7), shard=part)
        again = open_zoo_folder(build_zoo(options, source=IMAGES))
        assert len(again) == (10 if part == "2/2" else 30)
    first = open_zoo_folder(zoo)
    for i in (0, 29):
        for a, b in (
            (first.state_dict(i), again.state_dict(i)),
            (first.state_dict(i, "mask"), again.state_dict(i, "mask")),
        ):
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_images_of_one_split_are_refused(tmp_path: Path) -> None:
    images = replace(IMAGES, is_test=torch.zeros_like(IMAGES.is_test))
    with pytest.raises(ValueError, match="training and test data"):
        build_zoo(small(tmp_path / "zoo"), source=images)
    assert not (tmp_path / "zoo").exists()
