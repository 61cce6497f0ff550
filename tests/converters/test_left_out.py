"""Tensors that are left out of a graph on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from architectures import One
from torch import Tensor, nn

from nfn_graph import Batch, symmetry
from nfn_graph.cli import main
from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    load,
    save,
    summary,
    to_state_dict,
)
from nfn_graph.converters.store import WeightDataset


def language_model() -> nn.Module:
    """Words, two layers with an addition around them, and words again."""
    return One(
        lambda m, x: m.head(m.norm((h := m.embed(x)) + m.down(m.up(h).relu()))),
        embed=nn.Embedding(11, 4), up=nn.Linear(4, 6), down=nn.Linear(6, 4), norm=nn.LayerNorm(4),
        head=nn.Linear(4, 11),
    ).double()  # fmt: skip


WORDS = torch.tensor([[1, 5, 7], [0, 10, 2]])
WITHOUT_WORDS: dict[str, Any] = {"exclude": ["embed.*", "head.*"]}


def assert_back(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_rest_of_the_network_keeps_its_layers() -> None:
    module = language_model()
    graph = from_module(module, WORDS, **WITHOUT_WORDS)
    assert [(n.name, n.size, n.taps) for n in graph.spec.neurons] == [
        ("hidden1", None, 3),
        ("hidden2", None, 1),
    ]
    assert len(graph.spec.weights) == 2
    assert_back(to_state_dict(graph), module.state_dict())
    assert torch.equal(graph["hidden1"].x[:, 0, 0], module.state_dict()["down.bias"])


def test_what_is_left_out_is_permuted_with_the_rest() -> None:
    """Otherwise, a permuted graph would be restored as another network."""
    torch.manual_seed(0)
    module = language_model()
    expected = module(WORDS).detach()
    graph = from_module(module, WORDS, **WITHOUT_WORDS)
    before = module.state_dict()["embed.weight"].clone()
    moved = symmetry.sample(graph, "hnp").apply(graph)
    found = to_state_dict(moved)
    assert not torch.equal(found["embed.weight"], before)
    module.load_state_dict(found)
    assert (module(WORDS) - expected).abs().max() < 1e-9
    # Without this, the result is as if only the values inside the graph had moved.
    module.load_state_dict({**found, "embed.weight": before})
    assert (module(WORDS) - expected).abs().max() > 1e-3


def test_in_batches_every_network_has_its_own() -> None:
    torch.manual_seed(0)
    modules = [language_model() for _ in range(3)]
    graphs = [from_module(module, WORDS, **WITHOUT_WORDS) for module in modules]
    batch = Batch.from_data_list(graphs)
    moved = symmetry.sample(batch, "hnp").apply(batch)
    for i, module in enumerate(modules):
        expected = module(WORDS).detach()
        module.load_state_dict(to_state_dict(moved[i]))
        assert (module(WORDS) - expected).abs().max() < 1e-9


def test_only_is_the_reverse() -> None:
    module = language_model()
    graph = from_module(module, WORDS, only=["up.*", "down.*", "norm.*"])
    assert graph.spec == from_module(module, WORDS, **WITHOUT_WORDS).spec
    both = from_module(module, WORDS, only=["*p.*", "down.weight"], exclude=["*bias"])
    assert sorted(both.layout.placed) == ["down.weight", "up.weight"]


def test_summaries_list_them() -> None:
    table = summary(from_module(language_model(), WORDS, **WITHOUT_WORDS))
    assert set(table.left_out) == {"embed.weight", "head.weight", "head.bias"}
    assert set(table.left_out.values()) == {"on purpose"}
    assert "Left out, on purpose: embed.weight, head.weight, head.bias" in str(table)


def test_such_a_graph_does_not_run() -> None:
    graph = from_module(language_model(), WORDS, **WITHOUT_WORDS)
    with pytest.raises(ValueError, match=r"'embed.weight' was left out"):
        graph.run(WORDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["embedding.*"]}, r"exclude that match a key \(got 'embedding\.\*'"),
        ({"only": ["nothing"]}, r"only that match a key"),
        ({"exclude": ["*weight"]}, r"leave a weight between two layers"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        from_module(language_model(), WORDS, **options)


def test_tied_keys_go_together() -> None:
    module = language_model()
    module.head.weight = module.embed.weight  # type: ignore[union-attr]
    with pytest.raises(ConversionError, match=r"match all keys of a tensor.*embed.*head"):
        from_module(module, WORDS, exclude=["embed.*"])
    graph = from_module(module, WORDS, **WITHOUT_WORDS)
    assert_back(to_state_dict(graph), module.state_dict())
    found = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
    assert torch.equal(found["embed.weight"], found["head.weight"])


def test_state_dicts_and_files(tmp_path: Path) -> None:
    module = checkpoints.mlp()
    tensors = module.state_dict()
    expected = from_state_dict(tensors, exclude=["4.*"])
    assert [n.name for n in expected.spec.neurons] == ["input", "hidden1", "hidden2"]
    save(from_state_dict(tensors), tmp_path / "a.safetensors")
    save(from_state_dict(tensors), tmp_path / "b.safetensors", as_graph=True)
    checkpoints.write_keras(tmp_path / "c.h5", checkpoints.keras_mlp(module))
    (tmp_path / "d.onnx").write_bytes(checkpoints.onnx_mlp(module).SerializeToString())
    patterns = {"a.safetensors": "4.*", "b.safetensors": "4.*", "c.h5": "dense_2/*", "d.onnx": "?2"}
    for name, pattern in patterns.items():
        graph = load(tmp_path / name, exclude=[pattern])
        assert graph.spec == expected.spec, name
        assert_back(to_state_dict(graph), to_state_dict(load(tmp_path / name)))


def test_graph_files_and_stores_keep_them(tmp_path: Path) -> None:
    graph = from_module(language_model(), WORDS, **WITHOUT_WORDS)
    save(graph, tmp_path / "graph.safetensors", as_graph=True)
    again = load(tmp_path / "graph.safetensors")
    assert again.layout.aside == graph.layout.aside
    assert_back(to_state_dict(again), to_state_dict(graph))
    with pytest.raises(ConversionError, match=r"with tensors already left out"):
        load(tmp_path / "graph.safetensors", exclude=["up.*"])


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(checkpoints.mlp().state_dict(), tmp_path / "x.pt")
    assert main(["inspect", str(tmp_path / "x.pt"), "--exclude", "4.*", "0.bias", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["left_out"]) == ["0.bias", "4.weight", "4.bias"]
    store = tmp_path / "store"
    command = ["convert", str(tmp_path / "x.pt"), "--out", str(store), "--only", "0.*", "2.*"]
    assert main([*command, "--workers", "1"]) == 0
    graph = WeightDataset(store)[0]
    assert list(graph.layout.aside) == ["4.weight", "4.bias"]
    moved = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
    assert list(moved) == list(checkpoints.mlp().state_dict())
