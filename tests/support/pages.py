"""Pages of HTML taken apart: whether each element is closed where it should be, which texts stand where, their SVGs."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

_VOID = frozenset({"meta", "input", "br", "hr", "img", "link"})
#: What makes a browser ask for something, or go somewhere.
_ASKING_ELEMENTS = frozenset({"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "use"})
_ASKING_ATTRIBUTES = frozenset({"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"})


class StrictPage(HTMLParser):
    """Reads a page and refuses what a browser would mend in silence.

    Args:
        text: The page.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{name}> is not closed" for name in self.open]
        ids = [about["id"] for _, about in self.elements if "id" in about]
        self.faults += [f"id {each} twice" for each in set(ids) if ids.count(each) > 1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser: only inside of an SVG."""
        self.elements.append((tag, dict(attrs)))
        if "svg" not in self.open:
            self.faults.append(f"<{tag}/> outside of an SVG")

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)
        elif "style" in self.open:
            self.styles.append(data)

    def names(self, tag: str) -> list[dict[str, str | None]]:
        """Returns the attributes of all elements of a tag."""
        return [about for name, about in self.elements if name == tag]

    @property
    def requests(self) -> list[str]:
        """What a browser would ask for, or from where."""
        asking = [name for name, about in self.elements if name in _ASKING_ELEMENTS or _ASKING_ATTRIBUTES & set(about)]
        inline = [style for _, about in self.elements if (style := about.get("style"))]
        return asking + [word for word in ("@import", "url(") for style in (*self.styles, *inline) if word in style]

    @property
    def text(self) -> str:
        """All that a reader sees."""
        return " ".join(" ".join(self.texts).split())


def svgs_of(page: str) -> list[ElementTree.Element]:
    """Returns the SVGs of a page, read as XML.

    Raises:
        ElementTree.ParseError: One is not well-formed.
    """
    parts = page.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part[: part.index("</svg>")] + "</svg>") for part in parts]
