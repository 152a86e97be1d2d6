"""What every page of a report shares: how a template is filled, and how text from a record is shown."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gated_attn.errors import MissingExtraError

T = TypeVar("T")


def fill(template: str, context: Mapping[str, Any]) -> str:
    """The template's text, with everything escaped that is not marked as safe; the same context gives the same text.

    MissingExtraError without jinja2, of the extra `lab`.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", "lab", "the HTML report") from error

    loader = PackageLoader("gated_attn.report")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["breakable"] = breakable
    return env.get_template(template).render(context).encode("utf-8", "replace").decode()


def breakable(text: str) -> Any:
    """`text` escaped, with places to break a line after each colon and comma, where a gate's text may be cut."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[:,])(?=\S)", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


def script_json(data: Any) -> str:
    """JSON for a script element: nothing in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def visible(token: str) -> tuple[str, bool]:
    """`token` as something that can be seen, and whether a line ends after it.

    A space becomes a middle dot, a newline and a tab their arrows, other control, format, private and unassigned
    characters their code point, and a combining mark gets a circle to sit on.
    """
    shown = "".join(_VISIBLE.get(char) or _visible_char(char) for char in token)
    if token and unicodedata.combining(token[0]):
        shown = "\u25cc" + shown
    return shown or "\u2205", token.endswith("\n")


_VISIBLE = {" ": "\u00b7", "\n": "\u23ce", "\t": "\u21e5"}


def _visible_char(char: str) -> str:
    category = unicodedata.category(char)
    if category[0] == "C" or category in ("Zl", "Zp", "Zs"):
        return f"\u27e8{ord(char):04X}\u27e9"
    return char


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def capped(what: str, count: int, most: int, first: bool = False) -> str:
    """A sentence that says that not all are drawn, or nothing."""
    if count <= most:
        return ""
    return f"{'The first ' if first else ''}{most} of {count} {what} are drawn{'' if first else ', evenly spaced'}."


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, JSON value) of every leaf of nested mappings."""
    rows = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows
