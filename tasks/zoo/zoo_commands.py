"""The commands `nfn-graph zoo ...`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from nfn_graph.converters import WeightDataset, open_zoo
from nfn_graph.converters.commands import unset
from nfn_graph.converters.conversion.jobs import counting
from nfn_graph.converters.zoos.importing import import_zoo
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import choices
from nfn_graph.tasks.zoo import (
    CnnZooOptions,
    InrZooOptions,
    TicketZooOptions,
    TransformerZooOptions,
    build_zoo,
    open_zoo_folder,
    render_zoo,
)
from nfn_graph.tasks.zoo.builder import BuildOptions, Split
from nfn_graph.tasks.zoo.folder import accuracy_line, as_json, as_text, zoo_facts
from nfn_graph.tasks.zoo.recipes import expanded


@dataclass(frozen=True)
class RenderOptions:
    """Render the images that the networks of an INR zoo store, as one sheet.

    Attributes:
        zoo: The zoo's folder.
        output: The picture, a PNG.
        count: The number of networks, from the first of the table on.
        zoom: The width of a pixel, in pixels of the file.
        split: The split to draw; by default all networks.
    """

    zoo: Positional[Path]
    output: Annotated[Path, arg(aliases=("-o",))] = Path("zoo.png")
    count: int = 64
    zoom: int = 3
    split: Annotated[Split | None, unset(choices(Split, "{}"))] = None


@dataclass(frozen=True)
class InfoOptions:
    """Show what is in a folder: a zoo of ours, or one that others published.

    Attributes:
        zoo: The zoo's folder.
        split_file: The file with the published splits, if it is not in the folder.
        json: Whether to print one JSON object instead of lines.
    """

    zoo: Positional[Path]
    split_file: Annotated[Path | None, unset("PATH")] = None
    json: bool = False


@dataclass(frozen=True)
class ImportOptions:
    """Put a zoo that others published into a store, with its labels and splits.

    Attributes:
        zoo: The zoo's folder, in any layout that nfn-graph zoo info recognises.
        out: The folder of the store. An import that was interrupted resumes.
        split_file: The file with the published splits, if it is not in the folder.
        train_split: The published split to train on, such as train_augmented.
        all: Whether to import networks that are in none of the splits, too.
    """

    zoo: Positional[Path]
    out: Path
    split_file: Annotated[Path | None, unset("PATH")] = None
    train_split: str = "train"
    all: bool = False


def _import(options: ImportOptions) -> str:
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
    return f"{options.out}: {done.networks} networks of {found.description.layout}{left}"


def _render(options: RenderOptions) -> str:
    found = open_zoo_folder(options.zoo)
    if options.split is not None:
        found = found.where(split=options.split)
        if not len(found):
            raise UserError(
                f"Expected networks of --split {options.split} in '{options.zoo}' (got none)"
            )
    return str(render_zoo(found, options.output, count=options.count, zoom=options.zoom))


def _info(options: InfoOptions) -> str:
    facts = zoo_facts(options.zoo, options.split_file)
    return (as_json if options.json else as_text)(options.zoo, facts)


def _errors(zoo: WeightDataset) -> str:
    mean = sum(zoo.column("psnr").to_pylist()) / len(zoo)
    return f"{zoo.folder}: {len(zoo)} networks, mean PSNR {mean:.1f} dB"


def _tickets(zoo: WeightDataset) -> str:
    mean = sum(zoo.column("dense_accuracy").to_pylist()) / len(zoo)
    return f"{zoo.folder}: {len(zoo)} tickets, mean test accuracy before pruning {mean:.3f}"


def _built(describe: Callable[[WeightDataset], str]) -> Callable[[BuildOptions], str]:
    """A function that builds a zoo and describes it in one line."""
    return lambda options: describe(open_zoo_folder(build_zoo(options, progress=True)))


# The options of every subcommand, and what it does: it returns what is to be printed.
COMMANDS: dict[str, tuple[type, Callable[[Any], str]]] = {
    "cnn": (CnnZooOptions, _built(accuracy_line)),
    "inr": (InrZooOptions, _built(_errors)),
    "tickets": (TicketZooOptions, _built(_tickets)),
    "transformer": (TransformerZooOptions, _built(accuracy_line)),
    "render": (RenderOptions, _render),
    "info": (InfoOptions, _info),
    "import": (ImportOptions, _import),
}
if TYPE_CHECKING:
    Command = BuildOptions | RenderOptions | InfoOptions | ImportOptions
else:
    Command = reduce(
        or_, (Annotated[options, subcommand(name)] for name, (options, _) in COMMANDS.items())
    )


def zoo(command: OmitArgPrefixes[OmitSubcommandPrefixes[Command]]) -> int:
    """Build collections of trained networks, and look at them.

    A build that was interrupted resumes when the same command is run again. With --recipe,
    networks are trained like those of a published zoo: dws, nfn or inr2vec for zoo inr, and
    small-cnn-zoo or wild-park for zoo cnn. Options that are given as well replace those of the
    recipe.

    Examples:
      nfn-graph zoo cnn --out zoos/digits --networks 1000
      nfn-graph zoo cnn --out zoos/mixed --widths 8 16 32 --depths 2 3
      nfn-graph zoo inr --out zoos/fashion --data fashion-mnist/ --fits 10
      nfn-graph zoo inr --out zoos/shapes --data modelnet10.npz --kind cloud
      nfn-graph zoo inr --recipe dws --out zoos/dws --data mnist/ --images 20000
      nfn-graph zoo cnn --recipe small-cnn-zoo --out zoos/grey --data cifar10.npz --networks 5000
      nfn-graph zoo cnn --recipe wild-park --out zoos/park --data cifar10.npz --networks 500
      nfn-graph zoo tickets --out zoos/tickets --widths 64 --networks 500
      nfn-graph zoo transformer --out zoos/transformers --networks 500
      nfn-graph zoo render zoos/fashion -o fashion.png
      nfn-graph zoo info siren_mnist_wts/
      nfn-graph zoo import siren_mnist_wts/ --out zoos/siren-mnist --train-split train_augmented

    Args:
        command: The subcommand and its options.
    """
    print(next(run for options, run in COMMANDS.values() if options is type(command))(command))
    return 0


# `--recipe NAME` of `zoo inr` and `zoo cnn` stands for the options of that recipe.
zoo.expanded = expanded  # type: ignore[attr-defined]
