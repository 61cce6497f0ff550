"""The commands of `nfn-graph` that read stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from nfn_graph.converters.jobs import counting
from nfn_graph.converters.store.dataset import WeightDataset, choose
from nfn_graph.converters.store.export import ExportFormat, export_networks
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.messages import one_line, printable

StorePath = Annotated[Positional[Path], arg(metavar="STORE")]
Where = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")]


def store(path: StorePath, /, *, where: Where = (), verify: bool = False) -> int:
    """Show what a store holds, and check that it is as it was written.

    Sizes of files and the checksums of the table are always compared; a store that is damaged
    there is not opened. With --verify everything is read and compared, every damaged file is named
    in a line, and the exit code is 1 if there is one.

    Examples:
      nfn-graph store graphs/
      nfn-graph store zoos/digits --where split=test width=8,16
      nfn-graph store zoos/digits --verify

    Args:
        path: The folder of a store.
        where: Only networks whose columns have these values: width=8 or width=8,16.
        verify: Read everything and compare it with its checksums.
    """
    damage = list(find_damage(path)) if verify else []
    for file, got in damage:
        print(f"damaged: {one_line(str(file))} (got {got})")
    if damage:
        print(f"{path}: {len(damage)} files are damaged")
        return 1
    _print_contents(choose(WeightDataset(path), where))
    if verify:
        print("  checksums: all right")
    return 0


def _print_contents(found: WeightDataset) -> None:
    size = sum(sum(shard.sizes.values()) for shard in found.store.shards)
    numbers, counts = np.unique(found.architectures, return_counts=True)
    of_all = "" if len(found) == len(found.store) else f" of {len(found.store)}"
    print(
        f"{found.folder}: {len(found)}{of_all} networks of {len(counts)} architectures in "
        f"{len(found.store.shards)} shards, {size / 1e6:.1f} MB"
    )
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        layout = found.store.architecture(number).layout
        sizes = ", ".join(
            f"{neuron} {'+'.join(map(str, layers))}"
            for neuron, layers in zip(layout.spec.neuron, layout.shape.sizes, strict=True)
        )
        print(f"  {count} x {found.store.architecture_names[number]}: {sizes}")
    names = found.table.column_names
    print(f"  columns: {printable(', '.join(names))}")
    if "split" in names:
        splits = sorted(Counter(found.column("split").to_pylist()).items(), key=str)
        print(f"  splits: {printable(', '.join(f'{n} {split}' for split, n in splits))}")


def export(
    path: StorePath,
    /,
    *,
    out: Path,
    format: ExportFormat = "pt",
    channel: str | None = None,
    where: Where = (),
    overwrite: bool = False,
) -> int:
    """Write the networks of a store into files of their own: checkpoints, or graph files.

    Checkpoints have the keys, types and bits of the files that were converted. A table with the
    metadata of all of them is written beside them, OUT/metadata.parquet.

    Examples:
      nfn-graph export graphs/ --out checkpoints/
      nfn-graph export graphs/ --out files/ --format graph
      nfn-graph export zoos/digits --out best/ --format safetensors --where split=test width=16

    Args:
        path: The folder of a store.
        out: The folder to write to; made if it does not exist.
        format: Of the checkpoints; graph for files with the layout and all channels.
        channel: Which channel to write, of networks that have several, such as weights or mask.
        where: Only networks whose columns have these values: width=8 or width=8,16.
        overwrite: Replace files that are there.
    """
    dataset = choose(WeightDataset(path), where)
    with counting("Writing", len(dataset)) as count_on:
        table = export_networks(
            dataset,
            out,
            format,
            channel=channel,
            overwrite=overwrite,
            on_done=lambda: count_on(1),
        )
    print(f"{out}: {len(dataset)} networks ({table})")
    return 0
