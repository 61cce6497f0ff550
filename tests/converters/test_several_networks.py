"""Checkpoints that hold a list or several networks, and how one of them is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same
from torch import nn

from nfn_graph import cli
from nfn_graph.converters import ConversionError, from_state_dict, load, to_module, to_state_dict

S = nn.Sequential


def actor() -> nn.Sequential:
    return S(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def critic() -> nn.Sequential:
    return S(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("place", ["state_dict", "weights"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_the_one_entry_of_a_list_is_the_state_dict(place: str, kind: type) -> None:
    state_dict = actor().state_dict()
    checkpoint = {place: kind([state_dict]), "epoch": 3, "indices": []}
    assert_same(to_state_dict(from_state_dict(checkpoint)), state_dict)


def test_a_file_that_is_a_list_of_one_state_dict(tmp_path: Path) -> None:
    torch.save([actor().state_dict()], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt").layout.shape.sizes == ((3,), (5,), (2,))


def two() -> dict[str, Any]:
    return {"actor": actor().state_dict(), "critic": critic().state_dict(), "step": 7}


def flat() -> dict[str, Any]:
    return {
        f"{name}.{key}": tensor
        for name, network in two().items()
        if name != "step"
        for key, tensor in network.items()
    }


@pytest.mark.parametrize(
    ("checkpoint", "prefix"),
    [
        (two(), ""),
        (flat(), ""),
        ({"state_dict": flat()}, ""),
        ({"model": two(), "epoch": 1, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}, "model."),
    ],
)
def test_a_key_chooses_one_of_several_networks(checkpoint: dict[str, Any], prefix: str) -> None:
    with pytest.raises(ConversionError, match=r"'actor.*'.*'critic.*'|'model\.critic'"):
        from_state_dict(checkpoint)
    for key, sizes in (("actor", ((3,), (5,), (2,))), ("critic", ((5,), (4,), (1,)))):
        graph = from_state_dict(checkpoint, key=prefix + key)
        assert graph.layout.shape.sizes == sizes
    with pytest.raises(
        ConversionError, match=rf"'act'; available: .*'{prefix}actor', '{prefix}critic'"
    ):
        from_state_dict(checkpoint, key="act")


def test_a_key_chooses_one_of_a_list() -> None:
    checkpoint = {"nets": [actor().state_dict(), critic().state_dict()]}
    with pytest.raises(ConversionError, match=r"\['nets\.0', 'nets\.1'\].*key='nets\.0'"):
        from_state_dict(checkpoint)
    assert from_state_dict(checkpoint, key="nets.1").layout.shape.sizes == ((5,), (4,), (1,))


def test_an_architecture_that_fits_one_network_chooses_it() -> None:
    """Both have the same keys."""
    for name, network in (("actor", actor()), ("critic", critic())):
        checkpoint = two()
        graph = from_state_dict(checkpoint, arch=network)
        assert_same(to_state_dict(graph), checkpoint[name])
    with pytest.raises(ConversionError, match=r"several.*'critic'"):
        from_state_dict({**two(), "target": actor().state_dict()}, arch=actor())
    with pytest.raises(ConversionError, match=r"several.*'critic'"):
        from_state_dict(two(), arch=S(nn.Linear(9, 9)))


def test_the_usual_place_comes_before_others_that_fit_as_well() -> None:
    checkpoint = {"ema": actor().state_dict(), "model": actor().state_dict()}
    assert_same(to_state_dict(from_state_dict(checkpoint, arch=actor())), checkpoint["model"])
    assert_same(to_state_dict(from_state_dict(checkpoint, key="ema")), checkpoint["ema"])


def test_the_command_line_says_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.pt"
    torch.save(two(), file)
    assert cli.main(["inspect", str(file)]) == 2
    assert "Choose one with --key actor" in capsys.readouterr().err
    assert cli.main(["inspect", str(file), "--key", "critic"]) == 0


def test_a_counter_may_be_a_vector_of_one_entry() -> None:
    """As tinygrad saves it."""
    module = S(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    state_dict = {k: x.reshape(1) if not x.dim() else x for k, x in module.state_dict().items()}
    graph = from_state_dict(state_dict, arch=module)
    assert_same(to_state_dict(graph), state_dict)
    other = S(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    other[1].num_batches_tracked += 9
    assert_same(to_module(graph, other).state_dict(), module.state_dict())
    state_dict["1.num_batches_tracked"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConversionError, match=r"'1\.num_batches_tracked' of shape \(\)"):
        from_state_dict(state_dict, arch=module)


SCALARS = ["numpy._core.multiarray.scalar", "numpy.dtype"]


@pytest.mark.parametrize("zipped", [True, False])
def test_harmless_globals_can_be_allowed(zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    state_dict = actor().state_dict()
    torch.save(
        {"state_dict": state_dict, "accuracy": np.float64(0.5)},
        file,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(ConversionError, match=r"scalar.*safe_globals=\['numpy") as error:
        load(file)
    assert "model" not in str(error.value)
    assert_same(to_state_dict(load(file, safe_globals=SCALARS)), state_dict)
    with pytest.raises(ConversionError, match="scalar"):  # The option works there, and only there.
        load(file)


def test_all_globals_of_a_file_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.pt"
    torch.save({"w": actor().state_dict(), "at": Path("x"), "best": np.float32(1)}, file)
    assert cli.main(["inspect", str(file)]) == 2
    message = capsys.readouterr().err
    advice = message.partition("pass --safe-globals ")[2].partition(",")[0].split()
    assert {*SCALARS} < {*advice}
    assert message.count("\n") == 1
    assert cli.main(["inspect", str(file), "--safe-globals", *advice]) == 0


def test_a_saved_module_is_called_one(tmp_path: Path) -> None:
    torch.save(actor(), tmp_path / "x.pt")
    with pytest.raises(ConversionError, match=r"Save model\.state_dict\(\) instead"):
        load(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["no_package.thing", "numpy.no_such_name", "dtype", ""])
def test_globals_must_exist(name: str, tmp_path: Path) -> None:
    torch.save(actor().state_dict(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match=f"can be imported .got '{name}'"):
        load(tmp_path / "x.pt", safe_globals=[name])
