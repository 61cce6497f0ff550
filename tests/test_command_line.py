"""The command line itself: unknown words, and interruptions."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import nfn_graph
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


@pytest.mark.parametrize("command", ["train", "zoo"])
def test_help_lists_the_options_of_subcommands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.partition("options of the subcommands")[2].splitlines()[1:]
    shown: dict[str, set[str]] = {}
    for line in lines:
        if not line.startswith("   "):
            part = line.split()[0]
        shown.setdefault(part, set()).update(word for word in line.split() if word[:2] == "--")
    common = shown.pop("all", set())
    expected = {
        leaf.words[1]: leaf.options for leaf in leaves().values() if leaf.words[0] == command
    }
    assert {part: names | common for part, names in shown.items()} == {
        part: {option.name for option in options if option.name.startswith("--")}
        for part, options in expected.items()
    }


def test_help_shows_ranges_as_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "cnn", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--learning-rate LOW HIGH" in text and "(default: 0.0005 to 0.05)" in text
    assert "--epochs LOW HIGH" in text and "(default: 4 to 40)" in text
    assert "--test-share 0..1" in text and "--train-fractions 0..1 ..." in text


@pytest.mark.parametrize("name", leaves())
def test_help_shows_no_value_that_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option without a default is shown without one, and several values with an ellipsis."""
    assert main([*name.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    for odd in ("{None}", "None,", "(default: None)", "(default: )", "[["):
        assert odd not in text


@pytest.mark.parametrize("arguments", [["--help"], ["--version", "-v"], ["inspct"], []])
def test_nothing_heavy_is_imported_to_say_little(arguments: list[str]) -> None:
    script = (
        "import sys; from nfn_graph.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'torch_geometric', 'numpy', 'tyro') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_command_and_shows_versions_for_bug_reports() -> None:
    def shown(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "nfn_graph", *arguments]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return found.stdout.splitlines()

    assert shown("--version") == [f"nfn-graph {nfn_graph.__version__}"]
    package, python, _, *others = shown("--version", "-v")
    assert package == f"nfn-graph {nfn_graph.__version__}"
    assert python == f"Python {platform.python_version()}"
    assert f"torch {version('torch')}" in others
    assert f"torch-geometric {version('torch-geometric')}" in others


def test_every_public_name_is_found() -> None:
    script = (
        "import nfn_graph; assert set(nfn_graph.__all__) <= set(dir(nfn_graph)); "
        "assert nfn_graph.nn.NFN is nfn_graph.NFN; "
        "print(all(getattr(nfn_graph, name) is not None for name in nfn_graph.__all__))"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        nfn_graph.Nothing  # noqa: B018


# Background jobs of a shell ignore Ctrl-C, and so do the processes that they start.
LISTEN = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_an_interruption_while_libraries_are_imported_is_one_line(tmp_path: Path) -> None:
    code = f"{LISTEN}from nfn_graph import cli\nraise SystemExit(cli.main())\n"
    command = [sys.executable, "-c", code, "zoo", "cnn", "--out", str(tmp_path / "zoo")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        limit = time.monotonic() + 60
        while "torch" not in maps.read_text():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert error == "nfn-graph: Interrupted\n"
    assert process.returncode == 130


def test_an_interruption_that_an_import_swallows_still_ends_the_command(tmp_path: Path) -> None:
    """Some libraries catch every exception of their optional imports."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "def run() -> int:\n    print('went on')\n    return 0\n"
    )
    code = (
        f"{LISTEN}from nfn_graph import cli\n"
        "cli.COMMANDS['swallows'] = cli.Command('swallows:run', 'Runs.')\n"
        "raise SystemExit(cli.main(['swallows']))\n"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (130, "")
    assert found.stderr == "nfn-graph: Interrupted\n"
