"""Reports: one HTML file with its figures inside, which needs no network access, and the same
tables on the terminal.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from nfn_graph.converters.errors import require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.messages import UserError
from nfn_graph.tasks.reports.runs import format_value

_PNG = b"\x89PNG\r\n\x1a\n"
# A figure wider than this, or in relation to its height, gets a row of its own.
_WIDE_PIXELS, _WIDE_RATIO = 1200, 1.6


@dataclass(frozen=True)
class Table:
    """A table. Numbers are formatted and right-aligned, and None is left blank.

    Example:
        >>> from nfn_graph.tasks.reports import Table
        >>> Table(["model", "tau"], [["nfn-np", 0.8], ["statnn", None]], "Test networks").rows[0]
        ['nfn-np', 0.8]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True)
class Shown:
    """A figure with its caption and a text for readers who cannot see it.

    Attributes:
        png_path: The PNG file.
        caption: The text below the figure.
        alt: The text for screen readers.
        is_plot: Whether the figure is a plot on white, whose brightness is inverted on a dark page;
            pictures stay as they are.

    Example:
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import Shown
        >>> Shown(Path("scatter.png"), "Predicted against true values.", "A scatter plot.").is_plot
        True
    """

    png_path: Path
    caption: str
    alt: str
    is_plot: bool = True


@dataclass(frozen=True)
class Section:
    """A section of a report. Blank lines separate the paragraphs of its text.

    Example:
        >>> from nfn_graph.tasks.reports import Section, Table
        >>> Section("Results", "A sentence.", [Table(["tau"], [[0.8]])]).heading
        'Results'
    """

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Shown] = ()
    code: str = ""


def write_report(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Writes a report as one HTML file, with a list of its sections if they are more than three.

    Every string is shown as plain text and cannot become markup.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.reports import Section, write_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sections = [Section("Results", "1 < 2")]
        ...     page = write_report(Path(folder, "report.html"), "Title", sections)
        ...     print("1 &lt; 2" in page.read_text("utf-8"))
        True
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("page.html.j2").render(
        title=title, sections=[_section(section) for section in sections]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(page, "utf-8")
    return path


def _section(section: Section) -> dict[str, object]:
    return {
        "heading": section.heading,
        "paragraphs": [p for p in section.text.split("\n\n") if p.strip()],
        "tables": [_table(table) for table in section.tables],
        "figures": [_figure(shown) for shown in section.figures],
        "code": section.code,
    }


def _table(table: Table) -> dict[str, object]:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise UserError(
                f"Expected rows of {len(table.columns)} cells: {list(table.columns)} (got {row})"
            )
    cells = [
        [row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))
    ]
    numeric = [bool(column) and all(map(is_number, column)) for column in cells]
    return {
        "caption": table.caption,
        "columns": list(zip(table.columns, numeric, strict=True)),
        "rows": [
            [(format_value(x), n or is_number(x)) for x, n in zip(row, numeric, strict=True)]
            for row in table.rows
        ],
    }


def is_number(value: object) -> bool:
    """Whether a cell is a number, or the text of a mean with its error."""
    if isinstance(value, str):
        return " ± " in value
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(shown: Shown) -> dict[str, object]:
    data = shown.png_path.read_bytes()
    if not data.startswith(_PNG) or len(data) < 24:
        raise UserError(f"Expected a PNG picture (got '{shown.png_path}')")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    return {
        "data": base64.b64encode(data).decode("ascii"),
        "caption": shown.caption,
        "alt": shown.alt,
        "width": width,
        "height": height,
        "plot": shown.is_plot,
        "wide": width > min(_WIDE_PIXELS, _WIDE_RATIO * height),
    }


def print_rows(table: Table) -> None:
    """Prints a table. Names in it are shown as they are and cannot become markup."""
    rich, box = require("rich.table", "to print tables"), require("rich.box", "to print tables")
    text = require("rich.text", "to print tables").Text
    shown = rich.Table(
        title=text(table.caption) if table.caption else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for i, name in enumerate(table.columns):
        is_right = any(is_number(row[i]) for row in table.rows)
        shown.add_column(text(name), justify="right" if is_right else "left")
    for row in table.rows:
        shown.add_row(*(text(format_value(x)) for x in row))
    require("rich.console", "to print tables").Console().print(shown)
