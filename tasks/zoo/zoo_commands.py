"""The commands `nfn-graph zoo ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from nfn_graph.converters import open_zoo
from nfn_graph.converters.conversion.jobs import counting
from nfn_graph.converters.zoos.importing import import_zoo
from nfn_graph.messages import UserError
from nfn_graph.tasks.zoo.builder import Split
from nfn_graph.tasks.zoo.cnn import CnnZooOptions, build_cnn_zoo
from nfn_graph.tasks.zoo.folder import accuracy_line, as_json, as_text, open_zoo_folder, zoo_facts
from nfn_graph.tasks.zoo.inr import InrZooOptions, build_inr_zoo
from nfn_graph.tasks.zoo.render import render_zoo
from nfn_graph.tasks.zoo.tickets import TicketZooOptions, build_ticket_zoo
from nfn_graph.tasks.zoo.transformer import TransformerZooOptions, build_transformer_zoo


@dataclass(frozen=True)
class RenderOptions:
    """Draw the networks of an INR zoo back, as one sheet.

    Attributes:
        zoo: The zoo's folder.
        output: The picture, a PNG.
        count: How many networks, the first of the table.
        zoom: How many pixels wide each pixel is drawn.
        split: Only networks of this split; all of them if not given.
    """

    zoo: Positional[Path]
    output: Annotated[Path, arg(aliases=("-o",))] = Path("zoo.png")
    count: int = 64
    zoom: int = 3
    split: Split | None = None


@dataclass(frozen=True)
class InfoOptions:
    """Show what is in a folder: a zoo of ours, or one that others published.

    Attributes:
        zoo: The zoo's folder.
        split_file: The published splits, if they lie elsewhere.
        json: Print one JSON object instead of lines.
    """

    zoo: Positional[Path]
    split_file: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class ImportOptions:
    """Put a zoo that others published into a store, with its labels and splits.

    Attributes:
        zoo: The zoo's folder, in any layout that nfn-graph zoo info recognises.
        out: The store to write to; an import that was stopped goes on where it was.
        split_file: The published splits, if they lie elsewhere.
        train_split: The published split to train on, such as train_augmented.
        all: Import networks that are in none of the splits, too.
    """

    zoo: Positional[Path]
    out: Path
    split_file: Path | None = None
    train_split: str = "train"
    all: bool = False


Command = (
    Annotated[CnnZooOptions, subcommand("cnn")]
    | Annotated[InrZooOptions, subcommand("inr")]
    | Annotated[TicketZooOptions, subcommand("tickets")]
    | Annotated[TransformerZooOptions, subcommand("transformer")]
    | Annotated[RenderOptions, subcommand("render")]
    | Annotated[InfoOptions, subcommand("info")]
    | Annotated[ImportOptions, subcommand("import")]
)


def zoo(command: OmitArgPrefixes[OmitSubcommandPrefixes[Command]]) -> int:
    """Build collections of trained networks, and look at them.

    A build that was stopped goes on where it was when the same command is given again.

    Examples:
      nfn-graph zoo cnn --out zoos/digits --networks 1000
      nfn-graph zoo cnn --out zoos/mixed --widths 8 16 32 --depths 2 3
      nfn-graph zoo inr --out zoos/fashion --data fashion-mnist/ --fits 10
      nfn-graph zoo inr --out zoos/shapes --data modelnet10.npz --kind cloud
      nfn-graph zoo tickets --out zoos/tickets --widths 64 --networks 500
      nfn-graph zoo transformer --out zoos/transformers --networks 500
      nfn-graph zoo render zoos/fashion -o fashion.png
      nfn-graph zoo info siren_mnist_wts/
      nfn-graph zoo import siren_mnist_wts/ --out zoos/siren-mnist --train-split train_augmented

    Args:
        command: What to do.
    """
    if isinstance(command, RenderOptions):
        return _render(command)
    if isinstance(command, ImportOptions):
        return _import(command)
    if isinstance(command, InfoOptions):
        facts = zoo_facts(command.zoo, command.split_file)
        print((as_json if command.json else as_text)(command.zoo, facts))
        return 0
    if isinstance(command, CnnZooOptions):
        print(accuracy_line(open_zoo_folder(build_cnn_zoo(command, progress=True))))
        return 0
    if isinstance(command, TransformerZooOptions):
        print(accuracy_line(open_zoo_folder(build_transformer_zoo(command, progress=True))))
        return 0
    if isinstance(command, TicketZooOptions):
        path = build_ticket_zoo(command, progress=True)
        built = open_zoo_folder(path)
        mean = sum(row["dense_accuracy"] for row in built.rows) / len(built)
        print(f"{path}: {len(built)} tickets, mean test accuracy before pruning {mean:.3f}")
        return 0
    path = build_inr_zoo(command, progress=True)
    built = open_zoo_folder(path)
    values = [row["psnr"] for row in built.rows]
    print(f"{path}: {len(built)} networks, mean PSNR {sum(values) / len(values):.1f} dB")
    return 0


def _import(options: ImportOptions) -> int:
    found = open_zoo(options.zoo, split_file=options.split_file)
    with counting("Importing", len(found)) as count_on:
        done = import_zoo(
            found,
            options.out,
            train_split=options.train_split,
            everything=options.all,
            on_done=count_on,
        )
    left = f"; {done.left_out} are in no split and left out (see --all)" if done.left_out else ""
    print(f"{options.out}: {done.networks} networks of {found.description.layout}{left}")
    return 0


def _render(options: RenderOptions) -> int:
    found = open_zoo_folder(options.zoo)
    if options.split is not None:
        found = found.where(split=options.split)
        if not len(found):
            raise UserError(
                f"Expected networks of --split {options.split} in '{options.zoo}' (got none)"
            )
    print(render_zoo(found, options.output, count=options.count, zoom=options.zoom))
    return 0
