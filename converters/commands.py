"""The commands of `nfn-graph` that read checkpoint files and stores."""

from __future__ import annotations

import json as json_format
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import OmitArgPrefixes, Positional, arg

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.conversion import (
    Options,
    Report,
    convert_files,
    find_files,
    load_file,
    report_file,
)
from nfn_graph.converters.conversion.jobs import JobPart, counting
from nfn_graph.converters.conversion.labels import Fractions, read_labels
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.converters.layout_changes import Orientation
from nfn_graph.converters.store.dataset import WeightDataset, choose
from nfn_graph.converters.store.export import ExportFormat, export_networks
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.summary import COLUMNS, Summary, summary
from nfn_graph.messages import UserError, exit_code, located, one_line, printable, reason_of


def unset(metavar: str, **more: Any) -> object:
    """How the help shows an option or argument that is not set by default: without its default."""
    return arg(metavar=metavar, help_behavior_hint="", **more)


Files = Annotated[Positional[tuple[Path, ...]], unset("FILE ...")]
Patterns = Annotated[tuple[str, ...] | None, unset("PATTERN ...")]
_MOST_FAILURES = 20
_MOST_PRINTED = 1000


@dataclass(frozen=True)
class ReadingOptions(Options):
    """The options of commands that read checkpoint files."""

    arch: Annotated[str | None, unset("MODULE:NAME")] = None
    flatten: Annotated[FlattenOrder | None, unset("{channels_first,channels_last}")] = None
    input_shape: Annotated[tuple[int, ...] | None, unset("N ...")] = None
    orientation: Annotated[Orientation | None, unset("{out_in,in_out}")] = None
    key: Annotated[str | None, unset("NAME")] = None
    safe_globals: Annotated[tuple[str, ...] | None, unset("PACKAGE.NAME ...")] = None
    activation: Annotated[str | None, unset("FUNCTION")] = None
    only: Patterns = None
    exclude: Patterns = None
    heads: Annotated[int | None, unset("INT")] = None


Reading = OmitArgPrefixes[ReadingOptions]
_DEFAULTS = ReadingOptions()


def inspect(files: Files, /, *, reading: Reading = _DEFAULTS, json: bool = False) -> int:
    """Show what checkpoint files contain: a table of the layers and weights of the network.

    The table counts NaN and infinite entries, and lists tensors that are not in the graph with the
    reason. The exit code is 1 if some of the files cannot be read, and 2 if none can.

    Examples:
      nfn-graph inspect model.pt
      nfn-graph inspect cnn.npz --flatten channels_first
      nfn-graph inspect weights.safetensors --arch my_package.models:make_resnet
      nfn-graph inspect mnist.pt --input-shape 1 1 28 28 --flatten channels_first
      nfn-graph inspect agent.pth --key actor
      nfn-graph inspect arrays.npz --orientation in_out
      nfn-graph inspect language_model.pt --arch my_package.models:make_lm --exclude "*embed*"
      nfn-graph inspect runs/ --json

    Args:
        files: Checkpoint files, or folders of them.
        reading: The options for reading files.
        json: Whether to print one JSON object per line instead of tables.
    """
    # Tables are written in full to a file or a pipe.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    done = failed = 0
    for path in _found(files):
        try:
            table = summary(load_file(path, reading))
        except Exception as error:
            failed += 1
            print(f"nfn-graph: {located(path, reason_of(error))}", file=sys.stderr)
            continue
        done += 1
        if json:
            types, left_out = _plain_rows(table), dict(table.left_out)
            print(json_format.dumps({"file": str(path), "types": types, "left_out": left_out}))
        else:
            _print_summary(console, path, table)
    return exit_code(done, failed)


def convert(
    files: Files,
    /,
    *,
    out: Path,
    reading: Reading = _DEFAULTS,
    labels: Annotated[Path | None, unset("PATH")] = None,
    file_column: Annotated[str | None, unset("NAME")] = None,
    split: Annotated[tuple[float, float, float] | None, unset("TRAIN VALIDATION TEST")] = None,
    seed: int = 0,
    workers: int = 0,
    overwrite: bool = False,
    shard: Annotated[str, arg(metavar="I/N")] = "1/1",
    shard_size: int = 1024,
    engine: Literal["local", "ray"] = "local",
) -> int:
    """Convert checkpoint files to graphs in a store, which keeps many networks in few files.

    Files that were converted before are skipped, so an interrupted conversion resumes when the
    command is run again. A network is named by the path of its file below the given folder, and
    keeps this name. Networks of other files, and of files that can no longer be read, are not
    replaced. Failures are listed with their reasons at the end and in OUT/report.json. The exit
    code is 1 if some of the files failed, and 2 if all did. OUT may be inside a folder of
    checkpoints, because stores are skipped.

    With --labels, every network gets the values of its row: one column names the file, and every
    other column becomes a column of the store. Files without a row fail, and rows without a file
    are listed. A column 'split' assigns networks to train, validation or test.

    Examples:
      nfn-graph convert checkpoints/ --out graphs/
      nfn-graph convert a.pt b.npz --out graphs/ --flatten channels_first
      nfn-graph convert zoo/ --out graphs/ --workers 8 --arch my_package.models:make_cnn
      nfn-graph convert zoo/ --out graphs/ --shard 2/4
      nfn-graph convert zoo/ --out labelled/ --labels labels.csv --split 0.7 0.1 0.2

    Args:
        files: Checkpoint files, or folders of them.
        out: The folder of the store. It is created if it does not exist.
        reading: The options for reading files.
        labels: A table with one row per file: .csv, .parquet, or .jsonl with one object per line.
        file_column: The column of the labels that names the files; by default it is detected.
        split: The shares of train, validation and test if the labels have no column 'split';
            by default 0.8 0.1 0.1. Networks that are already in the store keep their split.
        seed: The seed of the random split.
        workers: The number of processes; 0 for one per core.
        overwrite: Whether to convert files again, and to replace networks of other files.
        shard: The part of the files to convert, such as 2/4 on the second of four machines.
        shard_size: The largest number of networks per file of the store.
        engine: Where to convert: on this machine, or on a Ray cluster whose machines share the
            folders; every task converts --shard-size files.
    """
    if engine != "local" and (shard != "1/1" or workers):
        raise UserError(
            f"Expected neither --shard nor --workers with --engine {engine}, which divides the "
            f"files itself (got --shard {shard} --workers {workers})"
        )
    if labels is None and (file_column is not None or split is not None):
        given = f"--file-column {file_column}" if split is None else "--split"
        raise UserError(f"Expected --labels, a table with a row per file, with {given} (got none)")
    table = None
    if labels is not None:
        table = read_labels(labels, file_column, Fractions(split, seed))
    paths = _found(files, out)
    with counting("Converting", len(paths)) as count_on:
        report = convert_files(
            paths,
            out,
            reading,
            given=files,
            labels=table,
            workers=workers,
            overwrite=overwrite,
            shard=shard,
            shard_size=shard_size,
            engine=engine,
            on_done=count_on,
        )
    _print_report(report, report_file(out, JobPart.parse(shard)))
    return exit_code(report.converted + report.skipped, len(report.failed))


def draw(
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    /,
    *,
    output: Annotated[Path, arg(aliases=["-o"])],
    reading: Reading = _DEFAULTS,
    max_neurons: int = 16,
) -> int:
    """Draw the network of a checkpoint file: neurons, weights by colour, kernels.

    Examples:
      nfn-graph draw model.pt -o model.png
      nfn-graph draw cnn.onnx -o cnn.pdf --max-neurons 24

    Args:
        file: A checkpoint file.
        output: The picture file; its suffix decides the format (png, pdf, svg).
        reading: The options for reading files.
        max_neurons: The largest number of neurons of a layer to draw.
    """
    from nfn_graph.converters.draw import draw as draw_graph

    if output.is_dir():
        raise IsADirectoryError(f"Expected a file to draw to (got the folder '{output}')")
    graph: WeightGraph = load_file(file, reading)
    figure = draw_graph(graph, max_neurons=max_neurons)
    formats = figure.canvas.get_supported_filetypes()
    if output.suffix.lower().lstrip(".") not in formats:
        raise UserError(f"Expected a picture in one of {', '.join(formats)} (got '{output}')")
    figure.savefig(output)
    print(output)
    return 0


def run(
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    /,
    *,
    input: Annotated[tuple[Path, ...], arg(metavar="NPY ...")],
    output: Annotated[Path | None, unset("PATH", aliases=["-o"])] = None,
    reading: Reading = _DEFAULTS,
) -> int:
    """Run the network of a checkpoint file on inputs, from its graph.

    The file or --arch must determine what the network computes. For a chain of linear layers,
    --activation is enough.

    Examples:
      nfn-graph run model.safetensors --input x.npy
      nfn-graph run mlp.pt --activation relu --input x.npy -o y.npy

    Args:
        file: A checkpoint file, or a graph.
        input: One .npy array for each input of the network, with a batch axis.
        output: The .npy file for the outputs, or .npz for several; by default they are printed.
        reading: The options for reading files.
    """
    import numpy as np
    import torch

    if not input:
        raise UserError("Expected an .npy file for every input of the network (got none)")
    inputs = [_read_array(path) for path in input]
    if reading.arch is not None and reading.input_shape is None:
        reading = replace(reading, input_shape=tuple(inputs[0].shape))
    graph: WeightGraph = load_file(file, reading)
    with torch.no_grad():
        outputs = graph.run(inputs)
    arrays = [x.numpy() for x in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)]
    if output is None:
        for array in arrays:
            print(np.array2string(array, threshold=_MOST_PRINTED))
    elif output.suffix == ".npz" or (len(arrays) == 1 and output.suffix == ".npy"):
        with replacing(output) as partial, partial.open("wb") as file_:
            if output.suffix == ".npz":
                np.savez(file_, *arrays)
            else:
                np.save(file_, arrays[0])
        print(output)
    else:
        raise UserError(
            f"Expected an .npz file for {len(arrays)} outputs, or .npy for one (got '{output}')"
        )
    return 0


def _read_array(path: Path) -> Any:
    import numpy as np
    import torch

    path = check_regular(path)
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            raise UserError("it does not hold an array of numbers")
    except (ValueError, EOFError) as error:
        raise UserError(
            f"Expected an .npy file with an array in '{path}' (got: {error})"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(array))


def _print_report(report: Report, path: Path) -> None:
    failures = [located(file, reason) for file, reason in report.failed.items()]
    unused = [f"No file belongs to {row} of the labels" for row in report.rows_without_file]
    for lines in (failures, unused):
        for line in lines[:_MOST_FAILURES]:
            print(f"nfn-graph: {one_line(line)}", file=sys.stderr)
        if len(lines) > _MOST_FAILURES:
            more = len(lines) - _MOST_FAILURES
            print(f"nfn-graph: and {more} more, see {path}", file=sys.stderr)
    rows = f", {len(unused)} rows without a file" if unused else ""
    print(
        f"{report.converted} converted, {report.skipped} skipped, {len(failures)} failed{rows} "
        f"({path})"
    )


def _found(paths: tuple[Path, ...], out: Path | None = None) -> list[Path]:
    """Finds the checkpoint files, and prints a message for every store among them."""
    found = find_files(paths)
    for store in found.stores:
        if out is None or store.resolve() != out.resolve():
            print(f"nfn-graph: skipped the store {one_line(str(store))}", file=sys.stderr)
    return found.files


def _plain_rows(table: Summary) -> list[dict[str, Any]]:
    """Returns rows for JSON, which has no NaN."""
    return [{k: None if v != v else v for k, v in vars(row).items()} for row in table.rows]


def _print_summary(console: Console, path: Path, table: Summary) -> None:
    rows = Table(title=Text(printable(str(path))), title_justify="left", box=SIMPLE_HEAD)
    for i, column in enumerate(COLUMNS):
        rows.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in table.rows:
        bad = bool(row.nan or row.inf)
        rows.add_row(*(Text(cell) for cell in row.cells), style="red" if bad else "")
    console.print(rows)
    for note in table.notes:
        console.print(Text(printable(note)))
    if table.nan or table.inf:
        console.print(Text(f"{table.nan:,} entries are NaN and {table.inf:,} infinite", "red"))


StorePath = Annotated[Positional[Path], arg(metavar="STORE")]
Where = Annotated[tuple[str, ...], unset("NAME=VALUE ...")]


def store(path: StorePath, /, *, where: Where = (), verify: bool = False) -> int:
    """Show what a store contains, and check that its files are intact.

    File sizes and the checksum of the table are always compared, and a damaged store is not
    opened. With --verify, everything is read and compared. Every damaged file is named on a
    separate line, and the exit code is 1 if there is one.

    Examples:
      nfn-graph store graphs/
      nfn-graph store zoos/digits --where split=test width=8,16
      nfn-graph store zoos/digits --verify

    Args:
        path: The folder of a store.
        where: The networks to use, by the values of columns: width=8 or width=8,16.
        verify: Whether to read everything and compare all checksums.
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
    channel: Annotated[str | None, unset("NAME")] = None,
    where: Where = (),
    overwrite: bool = False,
) -> int:
    """Write each network of a store to a separate file: a checkpoint or a graph file.

    Checkpoints have the keys, dtypes and bits of the converted files. The metadata of all networks
    is written to OUT/metadata.parquet.

    Examples:
      nfn-graph export graphs/ --out checkpoints/
      nfn-graph export graphs/ --out files/ --format graph
      nfn-graph export zoos/digits --out best/ --format safetensors --where split=test width=16

    Args:
        path: The folder of a store.
        out: The output folder. It is created if it does not exist.
        format: The file format; graph for files with the layout and all channels.
        channel: The channel to write if networks have several, such as weights or mask.
        where: The networks to use, by the values of columns: width=8 or width=8,16.
        overwrite: Whether to replace existing files.
    """
    dataset = choose(WeightDataset(path), where)
    with counting("Writing", len(dataset)) as count_on:
        table = export_networks(
            dataset, out, format, channel=channel, overwrite=overwrite, on_done=lambda: count_on(1)
        )
    print(f"{out}: {len(dataset)} networks ({table})")
    return 0
