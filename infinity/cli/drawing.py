"""The look of figures: colors, style, and SVG text for HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_WIDTH = 10.0  # inches; the page scales it
INK, FAINT, GRID = "#1f2933", "#66727f", "#e4e8ec"
BLUE, RED, TEAL, ORANGE, PURPLE, GREY, BROWN = (
    "#2f6db5", "#d1495b", "#2a9d8f", "#e08e2b", "#7b5ea7", "#8a949e", "#8c6d4f",
)  # fmt: skip

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Draw inside in the style of the pages. Equal `salt` and content give equal text."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        yield


def new_figure(height: float) -> Any:
    """A figure of `height` inches that needs no window system. Its canvas writes SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasSVG(figure)
    return figure


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Give bar number `n`, at the height `n` from the top, the name `names[n]`."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def svg(figure: Any, label: str) -> str:
    """`figure` as an `<svg>` element for HTML, without XML prologue, metadata, namespaces and group
    ids."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    head, body = text.split(">", 1)
    head = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{body.strip()}'
