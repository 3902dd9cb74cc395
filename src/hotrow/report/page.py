"""One HTML file of plots that opens anywhere without a network: plotly's script is in it, which makes it 5 MB.
Without plots it has no such script, and is small.

Made for a phone, a dark room, a keyboard and a screen reader alike: headings and landmarks, a link past the
navigation, colours by `prefers-color-scheme` with a contrast of at least 4.5 for text and 3 for lines, and under every
plot the same figures as a table. Without JavaScript the tables are still there.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from hotrow import __version__
from hotrow.errors import SettingsError
from hotrow.files import replacing
from hotrow.report.section import Plot, Section, Table

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Page:
    """A title, lines under it, and sections. `live` is how many seconds lie between two looks at what is new."""

    title: str
    lines: list[str]
    sections: list[Section]
    live: float = 0.0
    now: str = ""
    told: str = ""
    made_by: str = field(default=f"Hotrow {__version__}")

    @property
    def plots(self) -> list[Plot]:
        return [plot for section in self.sections for plot in section.plots]

    @property
    def shape(self) -> str:
        """Changes when plots or sections come or go, so that a live page must be loaded anew."""
        ids = [(s.id, bool(s.missing), [p.id for p in s.plots], s.table is None) for s in self.sections]
        return sha256(json.dumps(ids).encode()).hexdigest()[:16]

    def as_data(self) -> dict[str, Any]:
        """What the script of the page needs, and what a live page asks for again and again."""
        data = {"plots": [plot.as_data() for plot in self.plots], "shape": self.shape, "live": self.live}
        data["version"] = sha256(json.dumps([data, self._parts(), self.now, self.told]).encode()).hexdigest()[:16]
        return data

    def news(self) -> dict[str, Any]:
        """`as_data` with the texts and tables that may have changed."""
        return {**self.as_data(), "parts": self._parts(), "now": self.now, "told": self.told}

    def html(self) -> str:
        """The whole file."""
        body = [
            '<a class="skip" href="#main">Skip to the sections</a>',
            f"<header><h1>{_safe(self.title)}</h1>{_paragraphs(self.lines)}{self._live()}</header>",
            self._navigation(),
            f'<main id="main" tabindex="-1">{"".join(_section(s) for s in self.sections)}</main>',
            f"<footer><p>Made by {_safe(self.made_by)}.</p></footer>",
            f"<script>{plotly_script()}</script>" if self.plots else "",
            f'<script type="application/json" id="page-data">{_json(self.as_data())}</script>',
            f"<script>{_resource('page.js')}</script>",
        ]
        head = [
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<link rel="icon" href="data:,">',
            f"<title>{_safe(self.title)}</title><style>{_resource('page.css')}</style>",
        ]
        return f'<!doctype html><html lang="en"><head>{"".join(head)}</head><body>{"".join(body)}</body></html>\n'

    def write(self, path: Path | str) -> None:
        """Writes the file, whole or not at all."""
        path = Path(path)
        text = self.html()
        with replacing(path, "The page") as beside:
            beside.write_text(text, "utf-8")

    def _navigation(self) -> str:
        links = "".join(f'<li><a href="#{s.id}">{_safe(s.title)}</a></li>' for s in self.sections)
        return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'

    def _live(self) -> str:
        if not self.live:
            return ""
        return (
            f'<div class="live"><button type="button" id="pause">Stop updating</button>'
            f'<span id="now">{_safe(self.now)}</span></div><p role="status" id="told">{_safe(self.told)}</p>'
        )

    def _parts(self) -> dict[str, str]:
        """Texts and tables by the id of their place."""
        parts = {f"lines-{s.id}": _paragraphs(s.lines) for s in self.sections if not s.missing}
        parts |= {f"table-{s.id}": _table(s.table) for s in self.sections if s.table is not None}
        return parts | {f"table-plot-{plot.id}": _table(plot.table) for plot in self.plots}


def plotly_script() -> str:
    """The text of plotly.js; a sentence instead of an ImportError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise SettingsError("Pictures need plotly. Install it with: pip install 'hotrow[report]'") from None
    return str(get_plotlyjs())


def _section(section: Section) -> str:
    head = f'<section aria-labelledby="{section.id}"><h2 id="{section.id}">{_safe(section.title)}</h2>'
    if section.missing:
        return f'{head}<p class="soft">{_safe(section.missing)}</p></section>'
    table = "" if section.table is None else _scrolling(section.id, section.title, section.table)
    plots = "".join(_figure(plot) for plot in section.plots)
    lines = f'<div id="lines-{section.id}">{_paragraphs(section.lines)}</div>'
    return f'{head}{lines}{table}<div class="plots">{plots}</div></section>'


def _figure(plot: Plot) -> str:
    table = _scrolling(f"plot-{plot.id}", plot.title, plot.table)
    return (
        f"<figure><figcaption><h3>{_safe(plot.title)}</h3></figcaption>"
        f'<div class="plot" id="plot-{plot.id}" role="img" aria-label="{_safe(plot.said)}" '
        f'style="height:{plot.height}px"></div>'
        f"<details><summary>Table: {_safe(plot.title)}</summary>{table}</details>"
        f"</figure>"
    )


def _scrolling(id: str, title: str, table: Table) -> str:
    """A table that may be wider than a phone: its own region scrolls, by keyboard too."""
    label = _safe(f"Table: {title}")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}" id="table-{id}">{_table(table)}</div>'


def _table(table: Table) -> str:
    first, *others = table.columns
    corner = f'<th scope="col">{_safe(first)}</th>' if first else "<td></td>"
    head = corner + "".join(f'<th scope="col">{_safe(column)}</th>' for column in others)
    rows = "".join(
        f'<tr><th scope="row">{_safe(name)}</th>{"".join(f"<td>{_safe(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{_safe(line)}</p>" for line in lines)


def _safe(text: str) -> str:
    return html.escape(text, quote=True)


def _json(data: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("hotrow.report").joinpath(name).read_text("utf-8")
