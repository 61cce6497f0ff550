"""The command line itself: what it says of words that it does not know, and how it stops."""

from __future__ import annotations

import pytest

from commands import leaves
from nfn_graph.cli import COMMANDS, main


def test_the_table_of_commands_names_their_parts() -> None:
    words = [leaf.words for leaf in leaves().values()]
    found = {name: [w[1] for w in words if w[0] == name and len(w) > 1] for name in COMMANDS}
    assert {name: list(command.parts) for name, command in COMMANDS.items()} == found


TRAIN = ["train", "predict-generalization", "--zoo", "z", "--out", "o"]


@pytest.mark.parametrize(
    ("arguments", "help_", "meant"),
    [
        (["predict-generalisation"], "", "'nfn-graph train predict-generalization'?"),
        (["inspct", "x.pt"], "", "'nfn-graph inspect'?"),
        (["info", "zoo"], "", "'nfn-graph zoo info'?"),
        (["train", "predict-generalisation"], "train", "predict-generalization by predict-"),
        ([*TRAIN, "--lr", "1"], "train predict-generalization", "--learning-rate by --lr?"),
        ([*TRAIN, "--lr=1"], "train predict-generalization", "--learning-rate by --lr?"),
        ([*TRAIN, "--batchsize", "1"], "train predict-generalization", "--batch-size by"),
        (["zoo", "cn", "--out", "x"], "zoo", "cnn by cn?"),
        (["zoo", "inr", "--lr", "3"], "zoo inr", "--learning-rate by --lr?"),
        (["convert", "x.pt", "--ot", "y"], "convert", "--out by --ot?"),
    ],
)
def test_words_that_are_almost_known(
    arguments: list[str], help_: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Did you mean {meant}" in line
    assert f"'nfn-graph {help_} --help'" in line if help_ else "Expected a command" in line


@pytest.mark.parametrize(
    "arguments", [["xylophone"], ["train", "--lr", "1"], ["convert", "x.pt", "--zzzzzz"]]
)
def test_nothing_is_suggested_for_words_that_are_like_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "Did you mean" not in capsys.readouterr().err
