"""One HTML file with figures on it, plotly's own script in it: 5 MB, and it opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from hotrow.errors import DataError, SettingsError

_STYLE = "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"

COLOURS = ("#2f6f9f", "#9cc3dd", "#d98c3f", "#6a9f58", "#8b6aa0", "#777777")


def plotly() -> Any:
    """The module `plotly.graph_objects`; a sentence instead of an ImportError where it is missing."""
    try:
        import plotly.graph_objects as figures
    except ImportError:
        raise SettingsError("Pictures need plotly. Install it with: pip install hotrow[report]") from None
    return figures


def write_page(path: Path | str, title: str, lines: Sequence[str], figures: Sequence[Any]) -> None:
    """Writes the page, whole or not at all; `lines` stand above the figures as text."""
    path = Path(path)
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in lines)]
    for at, figure in enumerate(figures):
        parts.append(figure.to_html(full_html=False, include_plotlyjs=at == 0, div_id=f"figure-{at}"))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    beside = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    try:
        beside.write_text(f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>", "utf-8")
        beside.replace(path)
    except OSError as error:
        raise DataError(f"The picture {path} could not be written: {error.strerror or error}.") from error
    finally:
        beside.unlink(missing_ok=True)
