"""A trace as one HTML page, which reads nothing from anywhere else.

The page holds the very lines of the JSON form, and its script draws from them what is looked at.
"""

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .records import Trace, lines

_SCRIPTS = ("data.js", "tree.js", "charts.js", "page.js")


def page(trace: Trace) -> str:
    """The whole page; everything in it that was not written for it is escaped."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_part("page.html"))
    return template.render(
        trace=trace,
        style=Markup(_part("page.css")),
        script=Markup("\n".join(map(_part, _SCRIPTS))),
        lines=Markup("\n".join(lines(trace))),
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
