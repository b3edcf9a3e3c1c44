from __future__ import annotations

import html
import re

from watch_picture import OUT, made_up_rows


def shown(text: str) -> str:
    """Text without blanks, which a picture has in other places."""
    return re.sub(r"\s+", "", text.replace("\xa0", " "))


def test_the_picture_of_the_guide_shows_the_page_as_it_is() -> None:
    svg = OUT.read_text(encoding="utf-8")
    texts = "".join(html.unescape(found) for found in re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    rows = [shown(row.plain) for row in made_up_rows()]
    assert [row for row in rows if row not in shown(texts)] == [], "scripts/watch_picture.py draws it again"
