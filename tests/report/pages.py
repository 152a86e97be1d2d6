"""What tests read an HTML page with."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"br", "meta", "wbr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects tags, attributes, text, ids and what scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.text).append(data)

    def named(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        """Attributes of every `tag`, of class `kind` if given."""
        return [a for name, a in self.tags if name == tag and (kind is None or kind in (a.get("class") or "").split())]
