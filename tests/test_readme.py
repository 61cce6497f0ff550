"""The documentation runs: its Python blocks as they are, and its `make` commands by name."""

import re
import runpy
from pathlib import Path

import pytest
from matplotlib.image import imread

from nfn_graph.tasks.train import TASKS
from pages import FENCE, PAGES, README, ROOT, blocks

INLINE_CODE = re.compile(r"`([^`\n]+)`")
COMMENT = re.compile(r"(?:^|\s)#.*")
MAKE_CALL = re.compile(r"(?:^|[\s;&|(])make((?:[ \t]+[^\s;&|)]+)+)", re.MULTILINE)
TARGET = re.compile(r"^([a-z][\w-]*)[ \t]*:(?!=)", re.MULTILINE)


def make_targets(text: str) -> set[str]:
    """Targets of the `make` commands in shell blocks and inline code."""
    code = [source for _, source in blocks(text, "bash", "sh", "shell", "console")]
    code += INLINE_CODE.findall(FENCE.sub("", text))
    calls = [call for source in code for call in MAKE_CALL.findall(COMMENT.sub("", source))]
    words = {word for call in calls for word in call.split()}
    return {word for word in words if not word.startswith("-") and "=" not in word}


def test_readme_shows_python() -> None:
    assert blocks(README.read_text("utf-8"), "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(TASKS)
    namespace: dict[str, object] = {"__name__": page.stem}
    for lines_before, source in blocks(page.read_text("utf-8"), "python"):
        # Empty lines before the code make a traceback name the line of the page.
        exec(compile("\n" * lines_before + source, str(page), "exec"), namespace)
    for name in set(TASKS) - set(before):
        del TASKS[name]  # A page that registers a task registers it for itself only.
    assert list(TASKS) == before


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_make_targets_exist(page: Path) -> None:
    existing = set(TARGET.findall((ROOT / "Makefile").read_text("utf-8")))
    assert make_targets(page.read_text("utf-8")) <= existing


def test_make_targets_are_explained() -> None:
    """`make help` and the guide list every target except the file that marks the set-up as done."""
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    phony = set(re.search(r"^\.PHONY:(.+)$", makefile, re.MULTILINE)[1].split())
    assert phony == set(TARGET.findall(makefile))
    helped = set(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))
    assert phony - helped == {"wheel"}  # A target that is a step of others.
    assert make_targets((ROOT / "CONTRIBUTING.md").read_text("utf-8")) >= helped


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    script = ROOT / "docs" / "figures" / "three_levels.py"
    drawn = tmp_path / "picture.png"
    runpy.run_path(str(script))["three_levels"]().savefig(drawn, dpi=170)
    found, expected = (imread(path) for path in (drawn, script.with_suffix(".png")))
    assert found.shape == expected.shape
    assert abs(found - expected).mean() < 1e-3


def test_blocks_are_found_with_their_lines() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n```bash\nmake test\n```\n```python\ny = 2\nz = 3\n```\n"
    assert blocks(text, "python") == [(3, "x = 1\n"), (10, "y = 2\nz = 3\n")]


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("```bash\nmake test  # make sure\n```\n", {"test"}),
        (
            "```sh\n$ cd x && make lint unit WORKERS=4\nmake -j bench\n```\n",
            {"lint", "unit", "bench"},
        ),
        ("run `make demo` or `PYTHON=python3.12 make setup`", {"demo", "setup"}),
        ("make sure that it works; `remake all`; `make`", set()),
        ("```python\nmake = 1\n```\n", set()),
    ],
)
def test_make_commands_are_found(text: str, targets: set[str]) -> None:
    assert make_targets(text) == targets
