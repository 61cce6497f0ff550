"""Writes networks of a store to files: checkpoints, or graph files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.io import save
from nfn_graph.converters.store.dataset import WeightDataset
from nfn_graph.converters.store.table import arrow, parquet
from nfn_graph.messages import UserError

ExportFormat = Literal["pt", "safetensors", "npz", "graph"]


def export_networks(
    dataset: WeightDataset,
    out: Path,
    format_: ExportFormat,
    *,
    channel: str | None = None,
    overwrite: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> Path:
    """Writes every network to its own file, and their table beside them.

    Args:
        dataset: The networks.
        out: The output folder. Files have the same paths below it as the converted ones, or
            numbers.
        format_: The format of the checkpoints; `graph` for files with the layout and all channels.
        channel: The channel to write, for networks that have several.
        overwrite: Whether to replace existing files.
        on_done: A function that is called after every network.

    Returns:
        The path of the table, in which the column `file` names the files.
    """
    names = _names(dataset, format_)
    table = out / "metadata.parquet"
    paths = [out / name for name in names]
    taken = [path for path in (table, *paths) if path.exists()]
    if taken and not overwrite:
        raise FileExistsError(
            f"Expected a folder without these files (got '{taken[0]}' and {len(taken) - 1} more). "
            f"Choose another --out, or replace them with --overwrite."
        )
    out.mkdir(parents=True, exist_ok=True)
    for position, path in zip(dataset.indices(), paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        save(dataset.store.graph(position), path, channel=channel, as_graph=format_ == "graph")
        on_done()
    columns = dataset.table.drop_columns(
        [name for name in ("file", "notes") if name in dataset.table.column_names]
    )
    with replacing(table) as temporary:
        parquet().write_table(columns.append_column("file", arrow().array(names)), temporary)
    return table


def _names(dataset: WeightDataset, format_: ExportFormat) -> list[str]:
    """Returns the files below the folder; a suffix is added to names that do not have it."""
    suffix = ".safetensors" if format_ == "graph" else f".{format_}"
    found: Sequence[Any]
    if "file" in dataset.table.column_names:
        found = dataset.table.column("file").to_pylist()
    else:
        found = [f"{position:06d}" for position in dataset.indices()]
    for name in found:
        if not isinstance(name, str) or Path(name).anchor or ".." in Path(name).parts:
            raise UserError(f"Expected files below '{dataset.folder}' (got '{name}')")
    networks: dict[str, str] = {}
    for name in found:
        has_suffix = format_ != "graph" and name.lower().endswith(suffix)
        file = name if has_suffix else f"{name}{suffix}"
        if file in networks:
            raise UserError(
                f"Expected a file for each network (got '{file}' for '{networks[file]}' and "
                f"'{name}'). Choose another --format, or export one of them with --where."
            )
        networks[file] = name
    return list(networks)
