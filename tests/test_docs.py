"""The tools that build the documentation site, and pages that must agree with the code."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from mkdocs.exceptions import PluginError

from nfn_graph import cli
from nfn_graph.converters import formats
from nfn_graph.converters.keras import handlers
from nfn_graph.converters.onnx import node_recorder
from pages import DOCS, blocks, hook, reference

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"`([\w./-]+\.py)(?:::([\w.]+))?`")


docstrings, mathml, pages, checks = map(hook, ("docstrings", "mathml", "pages", "checks"))


# ---- Docstrings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sphinx", "markdown"),
    [
        (r"the law :math:`f(\sigma U)`.", r"the law $f(\sigma U)$."),
        ("the `Paper\n<https://x.org/1>`_ (Eq. 1)", "the [Paper](https://x.org/1) (Eq. 1)"),
        (".. math:: a = b\n\nText", "\n$$\na = b\n$$\n\nText"),
        (
            "    .. math::\n        a &= b \\\\\n        c &= d\n\n    Text",
            "\n    $$\n    \\begin{split}\n    a &= b \\\\\n    c &= d\n    \\end{split}\n"
            "    $$\n\n    Text",
        ),
        (
            ".. code-block:: python\n\n    x = 1\n\n    y = 2\nText",
            "\n```py\nx = 1\n\ny = 2\n```\n\nText",
        ),
        ("See :class:`Pool`, :func:`~a.b`.", "See `Pool`, `a.b`."),
        ("plain `code` and *words*", "plain `code` and *words*"),
    ],
)
def test_sphinx_markup_becomes_markdown(sphinx: str, markdown: str) -> None:
    assert docstrings.to_markdown(sphinx) == markdown


def test_sections_of_docstrings_become_lists_and_code() -> None:
    text = "First.\n\nArgs:\n    a: One\n        more.\n    b: Two.\n\nExample:\n    >>> 1\n    1"
    assert reference.prose(text).split("\n\n") == [
        "First.", "**Arguments**", "- `a`: One\n  more.\n- `b`: Two.",
        "**Example**", "```pycon\n>>> 1\n1\n```",
    ]  # fmt: skip


def test_simple_tables_with_and_without_a_head() -> None:
    headed = "====  =====\nname  value\n====  =====\na     one\n      more\nb     two\n====  ====="
    assert docstrings.to_markdown(headed).split("\n") == [
        "", "| name | value |", "| --- | --- |", "| a | one more |", "| b | two |",
    ]  # fmt: skip
    bare = "    ==  ==\n    a   b\n    ==  ==\n\n    Text"
    assert docstrings.to_markdown(bare).split("\n") == [
        "", "    |  |  |", "    | --- | --- |", "    | a | b |", "", "    Text",
    ]  # fmt: skip


# ---- Mathematics -----------------------------------------------------------------------------


def test_mathematics_becomes_mathml() -> None:
    marked = r'<p>a <span class="arithmatex">\(x &lt; \sigma\)</span>, code \(y\)</p>'
    rendered = mathml.on_page_content(marked)
    assert "<mo>&#x0003C;</mo><mi>&#x003C3;</mi>" in rendered and "arithmatex" not in rendered
    assert r"code \(y\)" in rendered  # The check of the site reports this.
    block = mathml.on_page_content('<div class="arithmatex">\\[\nx\n\\]</div>')
    assert block.startswith('<div class="formula"><math') and 'display="block"' in block


@pytest.mark.parametrize("tex", [r"\unknowncommand{x}", r"\begin{aligned} a &= b \end{aligned}"])
def test_tex_that_would_be_shown_raw_is_refused(tex: str) -> None:
    with pytest.raises(PluginError, match="Expected TeX"):
        mathml.to_mathml(tex, "inline")


# ---- The check of the built site -------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#there">b</a> <a href="https://x.org">x</a> <a href="#here">h</a>', None),
        ("<code>:class:`X` \\(x\\)</code>", None),
        ('<img src="figure.png">', "figure.png, which is not there"),
        ('<a href="c.html">c</a>', "c.html, which is not there"),
        ('<a href="b.html#where">b</a>', "no such place"),
        ('<a href="#where">a</a>', "no such place"),
        ('<script src="https://x.org/a.js"></script>', "loads https://x.org/a.js"),
        ('<img src="//x.org/a.png">', "loads //x.org/a.png"),
        ('<link rel="stylesheet" href="http://x.org/a.css">', "loads http://x.org/a.css"),
        ("see :class:<code>X</code>", "raw markup"),
        ("\\(x\\)", "raw markup"),
        (".. math:: x", "raw markup"),
        ("\\sigma", "raw markup"),
    ],
)
def test_faults_of_a_site_are_found(body: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f'<h1 id="here">a</h1>{body}')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    found = list(checks.faults(tmp_path))
    assert bool(found) == (fault is not None)
    assert all(fault in line for line in found)


def test_styles_that_load_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("a { src: url(fonts/a.woff) }")
    assert list(checks.faults(tmp_path)) == []
    (tmp_path / "a.css").write_text("@import 'https://x.org/a.css'")
    assert list(checks.faults(tmp_path)) == ["a.css loads from another host"]


# ---- Search ----------------------------------------------------------------------------------


@pytest.mark.skipif(
    shutil.which("chromium") is None,
    reason="search is not tried in a browser: install Debian's chromium",
)
def test_workers_run_on_pages_of_the_file_system(tmp_path: Path) -> None:
    shim = (DOCS / "javascripts" / "iframe-worker.js").read_text("utf-8")
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "more.js").write_text("var more = 2;")
    (tmp_path / "worker" / "worker.js").write_text(
        "addEventListener('message', async ({data}) => {"
        " await importScripts('more.js'); postMessage(data * more); });"
    )
    (tmp_path / "page.html").write_text(
        f"<body><script>{shim}</script><script>"
        "const worker = new Worker('worker/worker.js');"
        "worker.addEventListener('message', ({data}) => { document.title = `got ${data}`; });"
        "worker.postMessage(21);</script></body>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "page.html").as_uri()
    shown = subprocess.run(
        ["chromium", *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert "<title>got 42</title>" in shown.stdout


@pytest.mark.parametrize(
    "question",
    (
        *("GPU", "Small CNN Zoo", "cite", "Python versions", "P-tilde", "ResNet-18"),
        *("transformers", "probes", "million networks"),
    ),
)
def test_common_questions_are_headings(question: str) -> None:
    """The search of the site and that of a code host find headings first."""
    headings = re.findall("^## (.+)$", (DOCS / "faq.md").read_text("utf-8"), re.MULTILINE)
    words = question.lower().split()
    assert any(all(word in heading.lower() for word in words) for heading in headings)


# ---- Pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("store.md", "[b](../benchmarks/README.md)", "[b](benchmarks/README.md)"),
        ("store.md", "[s](scale.md#x)", "[s](scale.md#x)"),
        ("tasks/README.md", "[s](../docs/store.md)", "[s](../store.md)"),
        ("tasks/README.md", "![d](../docs/figures/d.png)", "![d](../figures/d.png)"),
        ("benchmarks/README.md", "![d](figures/d.png)", "![d](figures/d.png)"),
    ],
)
def test_links_fit_the_site(page: str, link: str, expected: str) -> None:
    class File:
        src_uri = page

    class Page:
        file = File()

    assert pages.on_page_markdown(link, Page()) == expected


def test_every_command_has_a_section_with_its_help() -> None:
    sections = re.findall(r"^###? nfn-graph (.*)$", "\n".join(reference.commands()), re.MULTILINE)
    assert [name for name in sections if " " not in name] == list(cli.COMMANDS)
    parts = {name for name in sections if " " in name}
    assert {"zoo cnn", "zoo tickets", "train edit-inr", "train winning-tickets"} <= parts
    assert "--input-shape" in reference.help_of("convert")
    assert "--operation" in reference.help_of("train", "edit-inr")


def test_shared_options_are_listed_once() -> None:
    page = "\n".join(reference.commands())
    words = " ".join(page.split())
    for command in (("predict",), ("zoo", "cnn"), ("train", "regress"), ("train", "edit-inr")):
        for option in reference.options_of(reference.help_of(*command)):
            assert option in words  # No option is lost.
    assert page.count("\n  --max-edges ") == 1 and page.count("\n  --arch MODULE:NAME ") == 1
    assert "options options" not in page and "reading options" not in page


def test_places_in_the_code_are_there() -> None:
    texts = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    places = {match for text in texts for match in PLACE.findall(text) if "/" in match[0]}
    assert len(places) > 20
    missing = [f"{path}::{name}" for path, name in places if not _is_there(ROOT / path, name)]
    assert not missing


def _is_there(path: Path, name: str) -> bool:
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for part in name.split(".") if name else []:
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_the_reference_has_every_public_module() -> None:
    rooms = {f"nfn_graph.{name}" for name in ("nn", "transforms", "testing", "converters")}
    tasks = {
        f"nfn_graph.tasks.{path.parent.name}"
        for path in (ROOT / "tasks").glob("*/__init__.py")
        if "__all__" in path.read_text("utf-8")
    }
    shown = {name for _, modules in reference.PAGES.values() for name in modules}
    assert rooms | tasks | {"nfn_graph", "nfn_graph.interop.nfn", "nfn_graph.symmetry"} <= shown


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_reference_is_current(page: str) -> None:
    check_is_current(DOCS / "api" / page, reference.api_page(*reference.PAGES[page]))


def test_the_page_of_the_command_line_is_current() -> None:
    page = DOCS / "cli.md"
    check_is_current(page, reference.cli_page(page.read_text("utf-8")))


def check_is_current(page: Path, text: str) -> None:
    changes = difflib.unified_diff(page.read_text("utf-8").splitlines(), text.splitlines(), n=0)
    assert not (found := list(changes)), "\n".join(["Run: make reference", *found])


# ---- The page of the converters --------------------------------------------------------------


def _table(text: str, head: str) -> list[list[str]]:
    """Returns the rows of the table whose header starts with these words."""
    rows = text.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_lists_of_networks_are_those_that_run() -> None:
    text = (DOCS / "converters.md").read_text("utf-8")
    for head, name in (("| architecture |", "UNDERSTOOD"), ("| network |", "REFUSED")):
        (code,) = [source for _, source in blocks(text, "python") if f"{name} = {{" in source]
        values = [
            node.value
            for node in ast.parse(code).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        ]
        assert isinstance(values[0], ast.Dict)
        keys = [ast.literal_eval(key) for key in values[0].keys if key is not None]
        assert keys == [row[0] for row in _table(text, head)]


def test_formats_are_those_of_the_converters() -> None:
    rows = _table((DOCS / "converters.md").read_text("utf-8"), "| suffix |")
    suffixes = [suffix for row in rows for suffix in re.findall(r"`(\.\w+)`", row[0])]
    assert sorted(suffixes) == sorted(formats.SUFFIXES)


def test_the_operators_that_run_are_listed() -> None:
    """The page about running networks lists exactly the operators that can run."""
    _, onnx, keras = re.split("^### .*$", (DOCS / "running.md").read_text("utf-8"), flags=re.M)
    recorded = [node_recorder._FUNCTIONS, node_recorder._HANDLERS, node_recorder._NUMBERS]
    expected = {name for names in [*recorded, node_recorder._SAME] for name in names}
    assert set(re.findall(r"`(\w+)`", onnx)) == expected
    summed_up = {*handlers.AS_LAYERS, *handlers._NOTHING.split()}
    running = {name for name, handler in handlers.LAYERS.items() if handler.record is not None}
    layers = {re.sub("[123]D", "", name) for name in running - summed_up}
    examples = {"Relu", "Gelu", "Dropout"}
    assert examples <= summed_up
    assert set(re.findall(r"`(\w+)`", keras)) == layers | examples
