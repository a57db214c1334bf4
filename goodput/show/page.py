"""What all HTML pages of reports have in common: self-contained, printable, readable without colour.

plotly's script is included once, which makes a page about 5 MB. Names in logs are untrusted: templates escape
everything, figures get escaped labels, and a page's content security policy forbids loading anything.
"""

from __future__ import annotations

from datetime import UTC, datetime

import plotly.graph_objects as go
import plotly.io
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from goodput.wording import percent, seconds, words


def environment(*packages: str) -> Environment:
    """Templates of these packages, which may extend page.html."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "goodput.show")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["plotly_js"] = Markup(get_plotlyjs())  # plotly's own script
    made.filters |= {
        "duration": seconds,
        "percent": percent,
        "words": words,
        "moment": moment,
        "gpu_hours": lambda value: "-" if value is None else f"{value:,.1f}",
        "money": lambda value: "-" if value is None else f"{value:,.2f}",
    }
    return made


def embedded(name: str, figure: go.Figure) -> Markup:
    """A div and the call that fills it; plotly writes no character in it that could end the script."""
    text = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config={"displaylogo": False, "displayModeBar": False, "responsive": True},
    )
    return Markup(text)


def moment(at: float | None) -> str:
    """A wall clock as text."""
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
