"""Objects that are not networks, graphs or channels are refused with their type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest

import nfn_graph
from nfn_graph.converters import (
    draw,
    from_module,
    from_state_dict,
    load,
    save,
    to_module,
    to_state_dict,
)

MLP = checkpoints.mlp()
GRAPH = from_state_dict(MLP.state_dict())
BATCH = nfn_graph.Batch.from_data_list([GRAPH, GRAPH])
TAKES_ONE: dict[str, Callable[[Any], Any]] = {
    "draw": draw,
    "save": lambda graph: save(graph, "x.pt"),
    "save as graph": lambda graph: save(graph, "x.safetensors", as_graph=True),
    "to_module": lambda graph: to_module(graph, checkpoints.mlp()),
    "to_state_dict": to_state_dict,
}


@pytest.mark.parametrize("name", TAKES_ONE)
def test_one_network_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = TAKES_ONE[name]
    for batch in (BATCH, nfn_graph.Batch.from_data_list([GRAPH])):
        with pytest.raises(ValueError, match=r"one network \(got a batch; take batch\[i\]"):
            function(batch)
    with pytest.raises(ValueError, match="without a layout"):
        function(nfn_graph.WeightGraph())
    with pytest.raises(TypeError, match=r"a WeightGraph \(got dict\)"):
        function({})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "function",
    [
        from_module,
        lambda module: from_state_dict(MLP.state_dict(), arch=module),
        lambda module: to_module(GRAPH, module),
    ],
)
def test_modules_are_modules(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module as .* \(got str\)"):
        function("my_package.models:make")


def test_arch_of_a_file_is_a_module(tmp_path: Path) -> None:
    save(GRAPH, tmp_path / "x.pt")
    with pytest.raises(TypeError, match="arch"):
        load(tmp_path / "x.pt", arch={})  # type: ignore[arg-type]


@pytest.mark.parametrize("channel", [-1, 1])
def test_a_channel_that_is_drawn_is_there(channel: int) -> None:
    with pytest.raises(ValueError, match=rf"channel from 0 to 0 \(got {channel}\)"):
        draw(GRAPH, channel=channel)
