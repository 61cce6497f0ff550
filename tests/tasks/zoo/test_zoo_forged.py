"""Zoos with contents that no builder writes, and matching checksums."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resealing
from nfn_graph.converters import ConversionError
from nfn_graph.tasks.zoo import open_zoo_folder
from resealing import edit_json, edit_table, with_column


def says(**values: Any) -> Callable[[Path], None]:
    """Changes values of the description; None deletes one."""

    def change(about: dict[str, Any]) -> None:
        about.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del about[name]

    return lambda zoo: edit_json(zoo / "store.json", change)


def column(name: str, value: Any) -> Callable[[Path], None]:
    """Replaces a value in all rows."""
    return lambda zoo: edit_table(zoo, lambda t: with_column(t, name, [value] * t.num_rows))


FORGED = {
    "kind": says(kind="x"),
    "'cnn'": says(kind=["cnn"]),
    "options": says(options=3),
    "w0": says(options={}),
    "signal": says(signal=None),
    "output_offset": says(output_offset="0.5"),
    "image_shape": says(image_shape=[1, 2]),
    "'image_shape'": says(image_shape=[1, 8, 2**31]),
    "fingerprint": says(fingerprint=None),
    "split": column("split", None),
    "mse": column("mse", "x"),
    "network": lambda zoo: edit_table(zoo, lambda t: t.drop_columns(["network"])),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_zoo_that_lacks_something_is_refused(name: str, world: Path, tmp_path: Path) -> None:
    zoo = Path(shutil.copytree(world / "inr", tmp_path / "zoo"))
    assert len(open_zoo_folder(zoo)) > 0
    FORGED[name](zoo)
    resealing.reseal(zoo)
    with pytest.raises(ConversionError, match=f"Expected.*{name}"):
        open_zoo_folder(zoo)
