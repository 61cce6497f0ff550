"""Weights stored as [in, out]: refused where shapes allow both, transposed where this is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same
from torch import Tensor, nn

from nfn_graph import cli
from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    load,
    save,
    to_state_dict,
)

S = nn.Sequential
Tensors = dict[str, Tensor]

AUTOENCODER = {"arr_0": (8, 3), "arr_1": (3,), "arr_2": (3, 8), "arr_3": (8,)}
BOTH: dict[str, dict[str, tuple[int, ...]]] = {
    "autoencoder": AUTOENCODER,
    "without biases": {"W_hidden": (7, 4), "W_out": (4, 2)},
    "equal widths": {"W1": (4, 4), "b1": (4,), "W2": (4, 4), "b2": (4,)},
    "Flax": {"Dense_0.kernel": (4, 4), "Dense_1.kernel": (4, 4)},
    "kernels": {"w0": (3, 3, 3, 3), "w1": (3, 3, 3, 3)},
}
ONLY_TURNED: dict[str, dict[str, tuple[int, ...]]] = {
    "biases": {"W1": (7, 4), "b1": (4,), "W2": (4, 2), "b2": (2,)},
    "numbers": {"W1": (7, 4), "W2": (4, 2)},
    "torch's names": {"0.weight": (7, 4), "0.bias": (4,), "2.weight": (4, 2), "2.bias": (2,)},
    "kernels": {"w0": (3, 3, 2, 8), "b0": (8,), "w1": (3, 3, 8, 4), "b1": (4,)},
}


def arrays(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {key: torch.randn(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize("shapes", BOTH.values(), ids=BOTH.keys())
def test_where_both_orientations_chain_the_option_is_named(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    tensors = arrays(shapes)
    pattern = r"both ways\)\. Pass orientation='in_out' or orientation='out_in'$"
    with pytest.raises(ConversionError, match=pattern):
        from_state_dict(tensors)
    for orientation in ("in_out", "out_in"):
        if (shapes, orientation) != (BOTH["without biases"], "out_in"):
            graph = from_state_dict(tensors, orientation=orientation)  # type: ignore[arg-type]
            assert_same(to_state_dict(graph), tensors)


@pytest.mark.parametrize("shapes", ONLY_TURNED.values(), ids=ONLY_TURNED.keys())
def test_transposed_weights_are_called_that(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = arrays(shapes)
    with pytest.raises(ConversionError, match=r"transposed\)\. Pass orientation='in_out'$"):
        from_state_dict(tensors)
    with pytest.raises(ConversionError, match=r"form a chain|transposed|outputs of"):
        from_state_dict(tensors, orientation="out_in")
    assert_same(to_state_dict(from_state_dict(tensors, orientation="in_out")), tensors)


@pytest.mark.parametrize(
    "shapes",
    [
        {"W1": (4, 7), "W2": (2, 4)},
        {"W1": (4, 4), "b1": (4,), "W2": (2, 4), "b2": (2,)},
        {"0.weight": (4, 4), "1.weight": (4, 4)},
        {"a.weight": (4, 7), "b.weight": (2, 4)},
    ],
)
def test_numbers_biases_and_the_names_of_torch_tell_it(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = arrays(shapes)
    graph = from_state_dict(tensors)
    assert_same(to_state_dict(graph), tensors)
    assert torch.equal(
        graph.edge_stores[0].edge_attr.flatten(), next(iter(tensors.values())).view(-1)
    )


NETWORKS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "mlp": (S(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 7)), {}),
    "square": (S(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)), {}),
    "cnn": (
        S(nn.Conv2d(2, 4, (3, 2)), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(24, 5)),
        {"flatten": "channels_first"},
    ),
    "1d": (S(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 3, 3)), {}),
}


@pytest.mark.parametrize("with_arch", [False, True])
@pytest.mark.parametrize(("module", "options"), NETWORKS.values(), ids=NETWORKS.keys())
def test_turned_weights_give_the_same_graph(
    module: nn.Module, options: dict[str, Any], with_arch: bool, tmp_path: Path
) -> None:
    """Kernels `[*window, in, out]` are restored unchanged from the graph."""
    stored = {
        key: x.permute(*range(2, x.dim()), 1, 0).contiguous() if x.dim() > 1 else x
        for key, x in module.state_dict().items()
    }
    options = {"arch": module} if with_arch else options
    graph = from_state_dict(stored, orientation="in_out", **options)
    expected = from_module(module)
    assert graph.spec == expected.spec
    pairs = zip(graph.features().tensors(), expected.features().tensors(), strict=True)
    for (key, x), (other, y) in pairs:
        assert key == other
        assert torch.equal(x, y)
    assert_same(to_state_dict(graph), stored)
    save(graph, tmp_path / "x.npz")
    assert_same(to_state_dict(load(tmp_path / "x.npz", orientation="in_out", **options)), stored)


def test_the_command_line_says_orientation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.npz"
    np.savez(file, *(x.numpy() for x in arrays(AUTOENCODER).values()))
    assert cli.main(["inspect", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.endswith("Pass --orientation in_out or --orientation out_in\n")
    for orientation, hidden in (("in_out", "3"), ("out_in", "8")):
        assert cli.main(["inspect", str(file), "--orientation", orientation]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert next(row for row in rows if row.startswith("  hidden1 ")).split()[1] == hidden
    with pytest.raises(ValueError, match="'out_in' or 'in_out'"):
        load(file, orientation="rows")  # type: ignore[arg-type]
