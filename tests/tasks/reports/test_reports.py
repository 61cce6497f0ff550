"""Reports are checked by content: figures by their axes, pages by what an HTML parser finds."""

from __future__ import annotations

import base64
import io
import json
import shlex
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tyro
from finished_run import make_run
from matplotlib.collections import PathCollection
from PIL import Image

from nfn_graph.tasks.reports import (
    Section,
    Shown,
    Table,
    confusion,
    curves,
    read_curves,
    repeat_command,
    run_report,
    scatter,
    write_report,
)

HOSTILE = "<script>alert('x')</script> & \"quotes\""


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, tables and texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text("utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.numbers: list[list[bool]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.numbers.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.numbers[-1].append(dict(attrs).get("class") == "number")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and data.strip():
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def pixels(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def embedded(page: Page) -> list[bytes]:
    found = []
    for image in page.all("img"):
        head, _, data = str(image["src"]).partition(",")
        assert head == "data:image/png;base64"
        found.append(base64.b64decode(data, validate=True))
        assert image["alt"]
        height, width, _ = pixels(found[-1]).shape
        assert (image["width"], image["height"]) == (str(width), str(height))
    return found


def assert_self_contained(page: Page) -> None:
    assert page.text.startswith("<!DOCTYPE html>")
    assert not page.open
    assert page.all("html") == [{"lang": "en"}]
    assert not page.all("script") and not page.all("link") and not page.all("iframe")
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "action"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:image/png;base64,"))
    for reference in ("http:", "https:", "url(", "@import", "//cdn"):
        assert reference not in page.text
    metas = page.all("meta")
    assert {"charset": "utf-8"} in metas
    assert any(meta.get("name") == "viewport" for meta in metas)
    (policy,) = [meta["content"] for meta in metas if "http-equiv" in meta]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_scatter_shows_every_point_and_the_diagonal(tmp_path: Path) -> None:
    true, predicted = [0.1, 0.5, 0.9], [0.2, 0.4, 1.3]
    figure = scatter(tmp_path / "a" / "s.png", true, predicted, title="held out", tau=0.5, r2=-0.25)
    (axes,) = figure.axes
    (points,) = [c for c in axes.collections if isinstance(c, PathCollection)]
    assert points.get_offsets().tolist() == [[0.1, 0.2], [0.5, 0.4], [0.9, 1.3]]
    (diagonal,) = axes.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == list(axes.get_xlim())
    assert axes.get_xlim() == axes.get_ylim()
    assert axes.get_xlim()[0] < 0.1 and axes.get_xlim()[1] > 1.3
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("true", "predicted")
    assert axes.get_title() == "held out\ntau 0.500, R² -0.250"
    assert axes.get_legend() is None
    picture = pixels((tmp_path / "a" / "s.png").read_bytes())
    assert 0.005 < (picture < 250).any(-1).mean() < 0.5


def test_groups_of_a_scatter_have_their_own_colours(tmp_path: Path) -> None:
    figure = scatter(
        tmp_path / "s.png", [1, 2, 3], [4, 5, 6], title="", groups=["w 16", "w 8", "w 16"]
    )
    first, second = figure.axes[0].collections
    assert first.get_offsets().tolist() == [[2, 5]]
    assert second.get_offsets().tolist() == [[1, 4], [3, 6]]
    assert first.get_facecolor().tolist() != second.get_facecolor().tolist()
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["w 8", "w 16"]
    many = scatter(tmp_path / "s.png", range(9), range(9), title="", groups=[*"abcdefghi"])
    assert len({tuple(c.get_facecolor()[0]) for c in many.axes[0].collections}) == 9
    with pytest.raises(ValueError, match=r"as many true values .* \(got 2, 1 and none\)"):
        scatter(tmp_path / "s.png", [1, 2], [1], title="")


def test_figures_do_not_depend_on_the_time_or_leave_anything_behind(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        scatter(tmp_path / name, [1, 2, 3], [4, 5, 6], title="$x_")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    with Image.open(tmp_path / "one.png") as image:
        assert set(image.info) == {"dpi"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_curves_are_read_from_sparse_rows(tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text(
        "epoch,step,train/loss,validation/loss,validation/tau\n"
        "0,9,,0.9,0.1\n0,9,0.8,,\n1,19,,0.7,-40\n1,19,0.6,,\n",
        "utf-8",
    )
    columns = read_curves(log)
    assert columns == {
        "validation/loss": ([0, 1], [0.9, 0.7]),
        "validation/tau": ([0, 1], [0.1, -40]),
        "train/loss": ([0, 1], [0.8, 0.6]),
    }
    figure = curves(tmp_path / "c.png", columns, title="Curves")
    losses, metrics = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in losses.lines}
    assert drawn == {
        "train/loss": [[0, 0.8], [1, 0.6]],
        "validation/loss": [[0, 0.9], [1, 0.7]],
    }
    assert [line.get_label() for line in metrics.lines] == ["validation/tau"]
    assert metrics.get_ylim()[0] > -2 and "not shown below -1" in metrics.get_ylabel()
    assert (pixels((tmp_path / "c.png").read_bytes()) < 250).any()
    (only,) = curves(tmp_path / "c.png", {"train/loss": ([0], [1.0])}, title="").axes
    assert only.get_ylabel() == "loss"
    with pytest.raises(ValueError, match="at least one column"):
        curves(tmp_path / "c.png", {}, title="")


def test_confusion_has_true_classes_as_rows(tmp_path: Path) -> None:
    figure = confusion(tmp_path / "m.png", [[3, 1], [0, 0]], ["cat", "$dog_"])
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "3", (1, 0): "1", (0, 1): "0", (1, 1): "0"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "$dog_"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert (pixels((tmp_path / "m.png").read_bytes()) < 250).any()
    with pytest.raises(ValueError, match=r"2 rows and columns.*\[2\]"):
        confusion(tmp_path / "m.png", [[1, 2]], ["a", "b"])


def test_a_page_is_self_contained_and_shows_all(tmp_path: Path) -> None:
    scatter(tmp_path / "s.png", [1], [1], title="")
    curves(tmp_path / "c.png", {"loss": ([1], [1]), "tau": ([1], [1])}, title="")
    table = Table(["name", "n", "x"], [["a", 12345, 0.12349], ["b", 7, None]], "A table")
    shown = [Shown(tmp_path / f"{name}.png", f"caption {name}", f"alt {name}") for name in "sc"]
    sections = [Section("One", "First.\n\nSecond.", [table], shown), Section("Two", code="a <b")]
    page = Page(write_report(tmp_path / "new" / "r.html", "A title", sections))
    assert_self_contained(page)
    assert embedded(page) == [(tmp_path / "s.png").read_bytes(), (tmp_path / "c.png").read_bytes()]
    assert [image["alt"] for image in page.all("img")] == ["alt s", "alt c"]
    assert [figure.get("class") for figure in page.all("figure")] == [None, "wide"]
    assert page.rows == [["name", "n", "x"], ["a", "12,345", "0.123"], ["b", "7", ""]]
    assert page.numbers == [[False, True, True]] * 3
    for text in (
        ("title", "A title"),
        ("h1", "A title"),
        ("caption", "A table"),
        ("p", "First."),
        ("p", "Second."),
        ("figcaption", "caption s"),
        ("code", "a <b"),
    ):
        assert text in page.texts
    assert not page.all("nav")
    page = Page(write_report(tmp_path / "r.html", "", [Section(f"S{i}") for i in range(4)]))
    assert [link["href"] for link in page.all("a")] == [
        f"#{section['id']}" for section in page.all("section")
    ]


def test_hostile_strings_are_only_shown(tmp_path: Path) -> None:
    scatter(tmp_path / "s.png", [1], [1], title=HOSTILE, groups=[HOSTILE])
    confusion(tmp_path / "m.png", [[1]], [HOSTILE])
    section = Section(
        HOSTILE,
        HOSTILE,
        [Table([HOSTILE], [[HOSTILE]], HOSTILE)],
        [Shown(tmp_path / "s.png", HOSTILE, HOSTILE)],
        HOSTILE,
    )
    page = Page(write_report(tmp_path / "r.html", HOSTILE, [section] * 4))
    assert_self_contained(page)
    assert "<script" not in page.text
    assert page.all("img")[0]["alt"] == HOSTILE
    places = {tag for tag, text in page.texts if text == HOSTILE}
    assert places == {"title", "h1", "a", "h2", "p", "caption", "th", "td", "figcaption", "code"}


def test_a_page_refuses_wrong_pictures_and_rows(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"Expected a PNG picture \(got .*x\.png"):
        write_report(
            tmp_path / "r.html", "", [Section("", figures=[Shown(tmp_path / "x.png", "", "")])]
        )
    with pytest.raises(ValueError, match=r"rows of 1 cells"):
        write_report(tmp_path / "r.html", "", [Section("", tables=[Table(["a"], [[1, 2]])])])
    assert not (tmp_path / "r.html").exists()


def test_the_report_of_a_run_has_its_numbers_figures_and_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = Page(run_report(run))
    assert page.text == (run / "report.html").read_text("utf-8")
    assert_self_contained(page)
    head = ["evaluated on", "Kendall tau", "tau ceiling", "R²", "MAE", "networks"]
    assert page.rows[:4] == [
        head,
        ["test", "0.812", "0.990", "0.750", "0.00123", "1,200"],
        ["validation", "0.700", "0.990", "0.750", "0.00123", "1,200"],
        ["wide", "nan", "0.990", "0.750", "0.00123", "1,200"],
    ]
    for row in (["seed", "3"], ["zoo", "zoos/my digits"], ["torch", "2.99"]):
        assert row in page.rows
    assert ["fingerprint", "abc123"] in page.rows
    order = ("scatter-test", "scatter-wide", "scatter-validation", "curves", "zzz")
    files = [(run / "figures" / f"{name}.png").read_bytes() for name in order]
    assert embedded(page) == files
    captions = [text for tag, text in page.texts if tag == "figcaption"]
    assert "the test split" in captions[0] and "on wide" in captions[1]
    assert captions[4] == "Zzz."
    (title,) = [text for tag, text in page.texts if tag == "h1"]
    assert title == "predict-generalization: nfn-np, seed 3"
    texts = " ".join(text for tag, text in page.texts if tag == "p")
    assert texts.startswith(
        "On 1,200 test networks, nfn-np reaches a Kendall tau of 0.812 between predicted and true "
        "values (1 is the same order, 0 is chance; ties limit it to 0.990)."
    )
    for fact in ("nfn-np is a stack of NF-Layers", "never runs the networks", "(NP)"):
        assert fact in texts
    for fact in (
        "Numbers of networks: 900 for training and 100 for validation.",
        "The model has 23,344 parameters. It was trained for 50 epochs.",
        "The best one was epoch 31, counted from 0.",
        "The loss is the binary cross-entropy.",
    ):
        assert fact in texts
    assert captions[3] == "Learning curves by epoch. The loss is the binary cross-entropy."
    (code,) = [text for tag, text in page.texts if tag == "code"]
    assert shlex.split(code.replace("\\\n", "")) == [
        *("nfn-graph", "train", "predict-generalization", "--zoo", "zoos/my digits"),
        *("--model", "nfn-np", "--preset", "paper", "--seed", "3", "--epochs", "50"),
        *("--target", "share"),
    ]


def test_the_report_of_a_classifier(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    test = {"accuracy": 0.5, "loss": 1.25, "networks": 4, "classes": [HOSTILE, "b"]}
    test["confusion"] = [[1, 2], [0, 1]]
    (run / "metrics.json").write_text(json.dumps({"test": test}), "utf-8")
    page = Page(run_report(run))
    texts = [text for tag, text in page.texts if tag == "p"]
    assert texts[0] == (
        "On 4 test networks, nfn-np reaches an accuracy of 0.500; always choosing the most "
        "frequent class gives 0.750."
    )
    assert_self_contained(page)
    assert page.rows[:2] == [
        ["evaluated on", "accuracy", "loss", "networks"],
        ["test", "0.500", "1.250", "4"],
    ]


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ({"mse": 0.1, "relative": 0.3}, "leaves 0.300 of the squared error of unedited networks."),
        ({"mse": 0.1}, "reaches a MSE of 0.100."),
        (
            {"overlap": 0.5, "overlap_magnitude": 0.4},
            "share 0.500 of their weights with the true masks; masks by magnitude share 0.400.",
        ),
        ({"other": 1.0}, "nfn-np was evaluated on the test split."),
    ],
)
def test_conclusions_are_made_from_the_numbers(
    test: dict[str, float], sentence: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.json").write_text(json.dumps({"test": test}), "utf-8")
    first = next(text for tag, text in Page(run_report(run)).texts if tag == "p")
    assert first.endswith(sentence)


def test_plots_are_inverted_on_dark_pages_and_pictures_are_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    scatter(run / "figures" / "edits-test.png", [0.0], [1.0], title="")
    page = Page(run_report(run))
    kinds = [image.get("class") for image in page.all("img")]
    assert kinds == ["plot", "plot", "plot", "plot", None, "plot"]
    assert "figure img.plot { filter: invert" in page.text


@dataclass(frozen=True)
class Options:
    zoo: str = ""
    learning_rate: float = 1.0
    channels: tuple[int, ...] | None = (1,)
    where: tuple[str, ...] = ("x",)
    canonical: bool = False
    log_images: bool = True
    patience: int | None = 5
    batch_size: int = 8


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options("a'b; rm -rf $HOME", 1e-3, (16, 5), (), True, False, None, 4),
        Options("\n", -2.5, None, ("a b", "width=8,16"), False, True, 0, 1),
    ],
)
def test_the_command_gives_back_the_options(options: Options) -> None:
    saved = json.loads(json.dumps(asdict(options)))
    words = shlex.split(repeat_command("a task", saved).replace("\\\n", ""))
    assert words[:3] == ["nfn-graph", "train", "a task"]
    assert tyro.cli(Options, args=words[3:]) == options


def test_an_unfinished_run_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.json").unlink()
    expected = rf"Expected a finished run in '{run}' \(got no metrics.json\)"
    with pytest.raises(FileNotFoundError, match=expected):
        run_report(run)
    (run / "metrics.json").write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"Expected JSON in .*metrics\.json"):
        run_report(run)
    (run / "metrics.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"Expected 'test' in .*metrics\.json"):
        run_report(run)
    with pytest.raises(FileNotFoundError, match=r"got no config\.json"):
        run_report(tmp_path)
    assert not (run / "report.html").exists()
