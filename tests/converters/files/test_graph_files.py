"""Graph files: manipulated ones are refused, and no channel is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from comparing import assert_same
from safetensors.torch import save_file
from torch import nn

from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    load,
    save,
    to_state_dict,
)
from nfn_graph.converters.files import safetensors
from nfn_graph.converters.files.graph import MARK, write_graph
from nfn_graph.converters.io import read_tensors
from nfn_graph.transforms import FillBiases


def documents(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Returns the path of every value in a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from documents(value, (*path, key))


def doctored(document: Any, path: tuple[Any, ...], change: Any) -> Any:
    """Returns the document with another value at a path."""
    document = json.loads(json.dumps(document))
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = change(node[path[-1]]) if callable(change) else change
    return document


def grow(value: Any) -> Any:
    """A value of the same type, a little off."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [*value, *value[-1:]] if isinstance(value, list) else {**value, "x": 1}


def shrink(value: Any) -> Any:
    """A value of the same type, a little off the other way."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value - 1
    return value[:-1] if isinstance(value, str | list) else -1


@pytest.mark.parametrize("change", [grow, shrink, None, 0, 10**12, 1.0, "x", [], {}])
def test_a_doctored_graph_is_refused_or_whole(tmp_path: Path, change: Any) -> None:
    """Checks that every loaded graph returns its tensors in the shapes that it declares."""
    network = nn.Sequential(nn.Conv2d(2, 3, (1, 2)), nn.Flatten(), nn.Linear(6, 2))
    state_dict = {**network.state_dict(), "count": torch.tensor(3)}
    graph = from_state_dict(
        state_dict, flatten="channels_last", channels={"grad": {"0.bias": torch.ones(3)}}
    )
    write_graph(tmp_path / "g.safetensors", graph)
    tensors, metadata = safetensors.read_file(tmp_path / "g.safetensors")
    document = json.loads(metadata[MARK])
    refused = 0
    for place in documents(document):
        changed = {MARK: json.dumps(doctored(document, place, change))}
        save_file(tensors, tmp_path / "x.safetensors", changed)
        try:
            again = load(tmp_path / "x.safetensors")
            back = to_state_dict(again)
        except ConversionError:
            refused += 1
            continue
        shapes = {key: p.shape for p in again.layout.placements for key in p.keys}
        for key, tensor in back.items():
            assert tuple(tensor.shape) == shapes.get(key, tuple(tensor.shape)), place
        again.features()
        repr(again)
    assert refused > 100


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("placements", 0, "start"), [-1, 0], "neurons|at least 0"),
        (("placements", 0, "keys"), ["1.weight"], "placed once"),
        (("placements", 0, "tap"), -1, "taps"),
        (("placements", 0, "keys"), ["0.weight", "1.weight"], "distinct texts"),
        (("placements", 0, "dtype"), "torch.int64", "floating-point"),
        (("placements", 0, "view"), [6], "axes"),
        (("placements", 0, "block"), -1, "below 1"),
        (("placements", 0, "axes"), ["target", "target"], "axes"),
        (("keys",), ["0.weight", "missing"], "missing"),
        (("keys",), ["0.weight", "0.weight"], "distinct texts"),
        (("channels",), {"grad": {"missing": "torch.float32"}}, "missing"),
    ],
)
def test_doctored_placements_are_refused(
    tmp_path: Path, place: tuple[Any, ...], value: Any, reason: str
) -> None:
    graph = from_state_dict({"0.weight": torch.randn(4, 3), "1.weight": torch.randn(2, 4)})
    write_graph(tmp_path / "g.safetensors", graph)
    tensors, metadata = safetensors.read_file(tmp_path / "g.safetensors")
    document = doctored(json.loads(metadata[MARK]), ("layout", *place), value)
    safetensors.write(tmp_path / "g.safetensors", tensors, {MARK: json.dumps(document)})
    with pytest.raises(ConversionError, match=f"g.safetensors.*({reason}).*damaged"):
        load(tmp_path / "g.safetensors")


def test_a_part_beyond_its_tensor_is_refused(tmp_path: Path) -> None:
    """The number of indices is that of the neurons, but they are not those of the tensor."""
    graph = from_state_dict({"0.weight": torch.randn(4, 3), "1.weight": torch.randn(2, 4)})
    write_graph(tmp_path / "g.safetensors", graph)
    tensors, metadata = safetensors.read_file(tmp_path / "g.safetensors")
    document = json.loads(metadata[MARK])
    for start, stop in (([0, 1], [2, 5]), ([-1, 0], [1, 4])):
        document["layout"]["placements"][1] |= {"start": start, "stop": stop}
        safetensors.write(tmp_path / "x.safetensors", tensors, {MARK: json.dumps(document)})
        with pytest.raises(ConversionError, match=r"within 4|at least 0"):
            load(tmp_path / "x.safetensors")


def test_parts_of_a_tensor_must_not_overlap(tmp_path: Path) -> None:
    """Two halves of a concatenation both claim to be the first."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.cat([self.a(x), self.b(x)], 1))

    write_graph(tmp_path / "g.safetensors", from_module(Joined(), torch.empty(1, 2)))
    tensors, metadata = safetensors.read_file(tmp_path / "g.safetensors")
    document = json.loads(metadata[MARK])
    halves = [p for p in document["layout"]["placements"] if p["keys"] == ["c.weight"]]
    assert [(p["start"], p["stop"]) for p in halves] == [([0, 0], [1, 3]), ([0, 3], [1, 6])]
    halves[1]["start"], halves[1]["stop"] = [0, 0], [1, 3]
    safetensors.write(tmp_path / "g.safetensors", tensors, {MARK: json.dumps(document)})
    with pytest.raises(ConversionError, match=r"every entry of 'c\.weight' to be placed once"):
        load(tmp_path / "g.safetensors")


def test_the_sizes_before_a_transform_are_bounded(tmp_path: Path) -> None:
    """The graph's own sizes are those of its tensors; these sizes are made up."""
    network = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))
    write_graph(tmp_path / "g.safetensors", FillBiases()(from_state_dict(network.state_dict())))
    assert FillBiases().inverse(load(tmp_path / "g.safetensors")).layout.placements
    tensors, metadata = safetensors.read_file(tmp_path / "g.safetensors")
    document = json.loads(metadata[MARK])
    before, huge = document["layout"]["before"][1], 10**13
    before["sizes"][-1] = [huge]
    before["spec"]["neurons"][-1]["size"] = huge
    for placement in before["placements"][1:]:
        assert placement["keys"][0].startswith("1.")
        for name in ("shape", "view", "stop"):
            placement[name][0] = huge
    safetensors.write(tmp_path / "x.safetensors", tensors, {MARK: json.dumps(document)})
    with pytest.raises(ConversionError, match=r"at most 13 entries before .*FillBiases"):
        load(tmp_path / "x.safetensors")


def test_a_graph_of_several_channels_is_saved_whole_or_by_name(tmp_path: Path) -> None:
    state_dict = checkpoints.mlp().state_dict()
    twin = {key: tensor + 1 for key, tensor in state_dict.items()}
    graph = from_state_dict(state_dict, channels={"twin": twin})
    with pytest.raises(ConversionError, match=r"channel=.*\['weights', 'twin'\].*as_graph=True"):
        save(graph, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())
    for name, expected in (("weights", state_dict), ("twin", twin)):
        for suffix in (".pt", ".safetensors", ".npz"):
            save(graph, tmp_path / f"x{suffix}", channel=name)
            assert_same(read_tensors(tmp_path / f"x{suffix}"), expected)
    save(graph, tmp_path / "g.safetensors", as_graph=True)
    again = load(tmp_path / "g.safetensors")
    assert_same(to_state_dict(again, "twin"), twin)
    assert_same(to_state_dict(again), state_dict)
    with pytest.raises(ConversionError, match=r"'\.safetensors' file for a graph"):
        save(graph, tmp_path / "g.pt", as_graph=True)
    with pytest.raises(ValueError, match="name other than"):
        from_state_dict(state_dict, channels={"weights": twin})
