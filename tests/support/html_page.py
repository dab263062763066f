"""A page as its tags and its text; complains where tags do not close in order."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = frozenset({"meta", "br", "img", "input", "link"})


class Page(HTMLParser):
    """The tags, in order, closed as they must be; and the text outside of the style and the script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        """The text in one piece."""
        return "".join(self.words)

    def of(self, tag: str, css: str = "") -> list[dict[str, str | None]]:
        """The attributes of the tags of this name whose class holds `css`."""
        return [found for name, found in self.seen if name == tag and css in (found.get("class") or "")]
