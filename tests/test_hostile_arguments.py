"""Commands with wrong, missing or hostile arguments end with one line, code 2, no traceback.

The commands and their options are read from the parser's own types, so none is forgotten.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import Leaf, Option, leaves
from nfn_graph import cli

LEAVES = leaves()
# One call of every command. The first group does its work; the others would take long and lack
# their data, which they may only look for after they have checked their options.
WORKING = {
    "inspect": ["net.pt"],
    "convert": ["net.pt", "--out", "out"],
    "store": ["store"],
    "export": ["store", "--out", "out"],
    "draw": ["net.pt", "--output", "out.png"],
    "run": ["net.pt", "--activation", "relu", "--input", "x.npy"],
    "zoo render": ["inr", "--output", "out.png"],
    "zoo info": ["cnn"],
    "edit": ["siren.pt", "--w0", "30", "--run", "edits", "--out", "out.pt"],
    "prune": ["initial.pt", "--run", "masks", "--out", "out.pt"],
    "predict": ["labels", "net.pt", "--out", "out.csv"],
    "compare": ["edits"],
}
WAITING = {
    "zoo cnn": ["--out", "out", "--data", "missing"],
    "zoo inr": ["--out", "out", "--data", "missing"],
    "zoo tickets": ["--out", "out", "--data", "missing"],
    "zoo transformer": ["--out", "out", "--data", "missing"],
    "train regress": ["--zoo", "missing", "--out", "out"],
    "train classify": ["--zoo", "missing", "--out", "out"],
    "train predict-generalization": ["--zoo", "missing", "--out", "out"],
    "train classify-inr": ["--zoo", "missing", "--out", "out"],
    "train edit-inr": ["--zoo", "missing", "--out", "out"],
    "train winning-tickets": ["--zoo", "missing", "--out", "out"],
    "zoo import": ["missing", "--out", "out"],
    "evaluate": ["edits", "--zoo", "missing"],
    "retrain": ["masks", "--zoo", "missing"],
    "demo": ["--out", "net.pt/inside"],
}
CALLS = {**WORKING, **WAITING}
OUTPUTS = ("--out", "--output")
# Options for which a number below 0 has a meaning.
SIGNED = {"--seed", "--amount", "--edit-scale"}
# Values that no option of the type can have, and the reasons for which options may be refused.
NO_NUMBERS = {int: ["x", "", "1.5", "nan", "0x10"], float: ["x", "", "1,5", "--"]}
WILD_NUMBERS = {int: [str(10**30), str(-(10**30))], float: ["nan", "inf", "-inf", "1e400"]}
NO_INPUTS = ["missing", "empty", "folder", "loop", "fifo", "text", "a\0b", "a\nb", "\x1b[2J\u202e"]
NO_INPUTS += ["x" * 5000, "/dev/null", "net.pt/inside"]
NO_OUTPUTS = ["net.pt/inside", "/proc/none/inside", "a\0b", "x" * 5000]
# Kinds of entries in the world that an input may be; all others have the wrong kind for it.
GOOD = {
    "inspect": {"net.pt", "siren.pt", "initial.pt"},
    "convert": {"net.pt", "siren.pt", "initial.pt"},
    "draw": {"net.pt", "siren.pt", "initial.pt"},
    "run": {"net.pt"},
    "store": {"store", "cnn", "inr", "tickets"},
    "export": {"store", "cnn", "inr"},
    "zoo render": {"inr"},
    "zoo info": {"store", "cnn", "inr", "tickets"},
    "edit": {"siren.pt", "edits"},
    "prune": {"net.pt", "siren.pt", "initial.pt", "masks"},
    "predict": {"labels", "net.pt", "store"},
    "compare": {"edits", "masks", "labels"},
    # Without a label there is nothing to predict.
    "train regress": set(),
    "train classify": set(),
    "train predict-generalization": {"cnn"},
    "train classify-inr": {"inr"},
    "train edit-inr": {"inr"},
    "train winning-tickets": {"tickets"},
    "evaluate": {"edits", "inr"},
    "retrain": {"masks", "tickets"},
}
# The names of options in errors that do not use the option's own name.
CALLED = {"--workers": "processes", "--shard-size": "per shard"}
RUNS = {"edits", "masks", "labels"}
THINGS = ("net.pt", "siren.pt", "store", "cnn", "inr", "tickets", "edits", "masks", "labels")


@pytest.fixture
def folder(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the world and some unusual entries, in which commands are called."""
    for thing in world.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello " * 50)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], codes: int = 2) -> str:
    """Returns the one line with which a command ends."""
    shown = [argument[:60] for argument in arguments]
    capsys.readouterr()
    assert cli.main(arguments) == codes, shown
    return only_line(shown, capsys)


def only_line(shown: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what a refused command has written."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, (shown, lines)
    assert lines[0].startswith("nfn-graph: ") and lines[0].isprintable(), (shown, lines)
    assert "a bug in nfn-graph" not in lines[0], (shown, lines)
    return lines[0]


def replaced(name: str, option: Option, *values: str) -> list[str]:
    """Returns the call of a command with other values of an option."""
    call = CALLS[name]
    if not option.name.startswith("-"):
        changed = [*values, *call[1:]]
    elif option.name in call:
        at = call.index(option.name)
        changed = [*call[: at + 1], *values, *call[at + 2 :]]
    else:
        changed = [*call, option.name, *values]
    return [*LEAVES[name].words, *changed]


def options_of(leaf: Leaf, *kinds: type) -> Iterator[tuple[Option, type]]:
    for option in leaf.options:
        for kind in kinds:
            if kind in option.kinds:
                yield option, kind


def shared(name: str) -> set[Option]:
    """Returns the options that a command shares with an earlier one, such as `train ...`."""
    earlier = list(LEAVES)[: list(LEAVES).index(name)]
    first = LEAVES[name].words[0]
    return {
        o for other in earlier if LEAVES[other].words[0] == first for o in LEAVES[other].options
    }


def words(text: str) -> str:
    """Normalises the names of options in a text, however an error spells them."""
    return text.replace("--", "").replace("-", " ").replace("_", " ")


def test_every_command_has_a_call() -> None:
    assert set(CALLS) == set(LEAVES)


@pytest.mark.parametrize("name", WORKING)
def test_the_calls_work(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LEAVES[name].words, *CALLS[name]]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", LEAVES)
def test_unknown_and_missing(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaf, call = LEAVES[name], CALLS[name]
    for unknown in (["--nothing"], ["--nothing", "1"], ["-9"], ["--out.out", "x"]):
        # To `inspect`, -9 is one file of two.
        is_file = name == "inspect" and unknown == ["-9"]
        refused([*leaf.words, *call, *unknown], capsys, 1 if is_file else 2)
    for option in leaf.options:
        if option.is_required:
            without = replaced(name, option)
            if option.name in without:
                without.remove(option.name)
            refused(without, capsys)
        if option.count and option.name not in ("--where", "--widths", "--depths"):
            refused(replaced(name, option), capsys)


@pytest.mark.parametrize("name", LEAVES)
def test_numbers(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = set()
    for option, kind in options_of(LEAVES[name], int, float):
        count = max(option.count, 1)
        # The parser treats shared options of commands alike; a command may not.
        is_new = option not in shared(name)
        wild = WILD_NUMBERS[kind] if is_new else WILD_NUMBERS[kind][:1]
        for value in (*wild, *([] if option.name in SIGNED else ["-1"])):
            line = words(refused(replaced(name, option, *[value] * count), capsys))
            assert words(option.name) in line or CALLED.get(option.name, "--") in line, line
        # Values that are not numbers are refused by the parser, which only knows the types.
        for value in NO_NUMBERS[kind][: 1 if option[1:3] in parsed else None] if is_new else ():
            refused(replaced(name, option, *[value] * count), capsys)
        parsed.add(option[1:3])
        for value in ("0", "1000000000000") if is_new and name in WAITING else ():
            refused(replaced(name, option, *[value] * count), capsys)


@pytest.mark.parametrize("name", LEAVES)
def test_paths(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, _ in options_of(LEAVES[name], Path):
        if option.name in OUTPUTS:
            for path in NO_OUTPUTS:
                refused(replaced(name, option, path), capsys)
            continue
        for path in (*NO_INPUTS, *sorted(set(THINGS) - GOOD.get(name, set()) - RUNS)):
            refused(replaced(name, option, path), capsys)


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.filterwarnings("ignore")
def test_text(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text may be valid; if it is not, it is refused like everything else."""
    hostile = ("", "=", "a=b", "\0", "../x", "x" * 3000, "1/0", "-1/2", "x\n\x1b[2J")
    for option, _ in options_of(LEAVES[name], str):
        # All commands share the options for reading files, of which `inspect` tries everything.
        is_reading = name != "inspect" and option in LEAVES["inspect"].options
        for text in hostile[-1:] if is_reading else hostile if option not in shared(name) else ():
            arguments = replaced(name, option, text)
            capsys.readouterr()
            code = cli.main(arguments)
            assert code in (0, 2), arguments
            if code:
                only_line([argument[:60] for argument in arguments], capsys)
            for made in (folder.parent / "x", folder / "out", folder / "out.png"):
                shutil.rmtree(made, ignore_errors=True)
            (folder / "out.csv").unlink(missing_ok=True)
            assert not (folder.parent / "x").exists()


@pytest.mark.parametrize(
    "call",
    [
        ["zoo", "render", "inr", "-o", "out.png"],
        ["edit", "siren.pt", "--w0", "30", "--run", "edits", "--out", "x.pt"],
    ],
)
def test_more_than_fits_into_memory(
    call: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "fits into memory" in refused([*call, "--zoom", "1000000000000"], capsys)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def without(path: Path, key: str) -> None:
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no configuration": lambda run: (run / "config.json").unlink(),
    "empty configuration": lambda run: (run / "config.json").write_text(""),
    "list as configuration": lambda run: (run / "config.json").write_text("[]"),
    "nested configuration": lambda run: (run / "config.json").write_text("[" * 100_000),
    "no options": lambda run: without(run / "config.json", "options"),
    "no task": lambda run: without(run / "config.json", "task"),
    "no types": lambda run: without(run / "config.json", "made_for"),
    "truncated checkpoint": lambda run: cut(run / "checkpoints" / "best.ckpt"),
    "no checkpoint": lambda run: (run / "checkpoints" / "best.ckpt").unlink(),
    "checkpoint of text": lambda run: (run / "checkpoints" / "best.ckpt").write_text("x" * 99),
    "checkpoint of another model": lambda run: shutil.copy(
        "net.pt", run / "checkpoints" / "best.ckpt"
    ),
}
USES = {
    "edits": (
        ["edit", "siren.pt", "--w0", "30", "--run", "run", "--out", "out.pt"],
        ["evaluate", "run"],
    ),
    "masks": (["prune", "initial.pt", "--run", "run", "--out", "out.pt"], ["retrain", "run"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_runs(damage: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (first, second) in USES.items():
        shutil.copytree(name, "run")
        DAMAGES[damage](folder / "run")
        zoo = "inr" if name == "edits" else "tickets"
        for command in (first, [*second, "--zoo", zoo]):
            refused(command, capsys)
        shutil.rmtree("run")


def test_training_does_not_go_on_from_a_damaged_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("edits", "run")
    (folder / "run" / "metrics.json").unlink()  # As if it had been stopped.
    cut(folder / "run" / "checkpoints" / "last.ckpt")
    config = json.loads((folder / "run" / "config.json").read_text())
    options = [config["options"][name] for name in ("zoo", "preset", "epochs")]
    call = ["--zoo", options[0], "--preset", options[1], "--epochs", str(options[2])]
    line = refused(["train", "edit-inr", "--out", "run", *call], capsys)
    assert "last.ckpt" in line
