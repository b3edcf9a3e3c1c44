"""Pages of docs/ and README.md: how long guides are, and that what they name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
COLUMNS = 120
#: Code of this project, by its beginning; in backquotes, as a whole word.
OWN_PATH = re.compile(r"`((?:launcher|runtime|src|docs|scripts|tests)/[\w./-]+)`")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def written(page: Path) -> str:
    """A page without its blocks, which are what programs read and print."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", written(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the heading of each link of a page into this project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", written(page)):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            yield (page.parent / path if path else page), heading


def test_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.stem for guide in GUIDES])
def test_a_guide_is_short(guide: Path) -> None:
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 150
    assert [line for line in written(guide).splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.stem for guide in GUIDES])
def test_a_guide_shows_something_and_ends_with_limits(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    example = text.find("```")
    sections = [found.start() for found in re.finditer(r"^## ", text, re.MULTILINE)]
    assert 0 < example < sections[0], "an example comes before the first section"
    order = [text.find(heading) for heading in ("\n## How it works\n", "\n## Limits\n")]
    assert -1 not in order
    assert order == sorted(order)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in OWN_PATH.findall(written(page)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target, heading in links(page):
        assert target.exists(), target
        if heading and target.suffix == ".md":
            assert heading in anchors(target), f"{target}#{heading}"


@pytest.mark.parametrize("half", ["launcher", "runtime"])
def test_architecture_has_a_row_for_each_package(half: str) -> None:
    _, _, table = ARCHITECTURE.read_text(encoding="utf-8").partition(f"| `{half}/` | knows |\n")
    rows = table.partition("\n\n")[0].splitlines()[1:]
    packages = sorted(path.parent.name for path in (ROOT / half).glob("*/__init__.py"))
    assert sorted(re.findall(r"^\| `(\w+)` \| \S", "\n".join(rows), re.MULTILINE)) == packages
    assert len(rows) == len(packages)
