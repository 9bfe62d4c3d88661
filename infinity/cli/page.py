"""The frame of every HTML page of `infinity`: one file, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1f2933;
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: #52606d; max-width: 100ch; }
header p { margin: 4px 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px;
  margin-bottom: 12px; }
.card, section { background: #fff; border: 1px solid #e4e8ec; border-radius: 8px; }
.card { padding: 12px 14px; } .card b { display: block; font-size: 22px; line-height: 1.3; }
.card span, .card small { color: #52606d; font-size: 13px; }
section { padding: 18px 20px; margin-bottom: 12px; }
svg { width: 100%; height: auto; display: block; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 12px; }
.pair section { margin-bottom: 12px; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: 4px 8px 4px 0; text-align: left; font-weight: 400; }
th { color: #52606d; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 45%; }
td.bar div { height: 10px; border-radius: 2px; background: #2f6db5; min-width: 1px; }
.warn { color: #a61b2b; }
"""


def card(name: str, value: str, note: str = "") -> str:
    """A box with one value in large type. The arguments are plain text, the result is HTML."""
    text = f"<span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small>"
    return f'<div class="card">{text}</div>'


def section(title: str, note: str, body: str) -> str:
    """A titled box around the HTML `body`. Empty if `body` is. `title` and `note` are plain
    text."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(note)}</p>{body}</section>" if body else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a column of names, and columns of numbers at its right. The texts are plain."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page around HTML `parts`. `title` is plain text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
