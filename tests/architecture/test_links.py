"""Links in the documentation lead somewhere, and files that messages and comments name exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_NAMED = re.compile(r"(?<![\w/.-])docs/[\w./-]*\w")


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@cache
def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them, and those that it writes itself."""
    found: dict[str, int] = {}
    names = set(re.findall(r'<a id="([^"]+)">', page.read_text()))
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = found.get(name, 0)
        found[name] = again + 1
        names.add(f"{name}-{again}" if again else name)
    return frozenset(names)


def broken(page: Path) -> list[str]:
    wrong = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{page.relative_to(ROOT)}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    return wrong


def test_every_link_of_every_page_leads_somewhere() -> None:
    pages = [ROOT / name for name in tracked() if name.endswith(".md")]
    assert len(pages) > 50, "the test looks at the pages"
    assert [line for page in pages for line in broken(page)] == []


def test_the_index_lists_every_page() -> None:
    """The site takes its navigation from it."""
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in _LINK.findall(prose(index))}
    pages = [ROOT / name for name in tracked() if name.startswith("docs/") and name.endswith(".md")]
    decisions = index.parent / "decisions"
    assert [str(page) for page in pages if page not in listed | {index} and page.parent != decisions] == []


def test_every_page_that_a_file_names_exists() -> None:
    """In comments, messages, hints, alerts and units: `docs/...` is a file, a folder, or the start of one's name."""
    missing = []
    for name in tracked():
        if name.startswith(("docs/", "tests/")) or name.endswith((".png", ".jpg")):
            continue
        for named in set(_NAMED.findall((ROOT / name).read_text(errors="ignore"))):
            path = ROOT / named
            if not path.exists() and not list(path.parent.glob(f"{path.name}-*")):
                missing.append(f"{name}: {named}")
    assert missing == []


def test_a_link_that_shows_a_files_name_leads_to_that_file() -> None:
    pages = [ROOT / name for name in tracked() if name.endswith(".md")]
    shown = [(page, *found) for page in pages for found in re.findall(r"\[([\w/-]+\.md)\]\(([^)#]+)", prose(page))]
    assert [f"{page.name}: {text}" for page, text, link in shown if Path(text).name != Path(link).name] == []


def test_the_site_has_both_colours_and_nothing_from_elsewhere() -> None:
    """`make docs` also looks for the latter in what it has built."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "  font: false" in settings and "  - offline" in settings and "://" not in settings
    assert "scheme: default" in settings and "scheme: slate" in settings
    assert "//" not in (ROOT / "docs" / "site.css").read_text()
    pages = [ROOT / name for name in tracked() if name.endswith(".md")]
    assert [page.name for page in pages if re.search(r"!\[[^\]]*\]\(https?:|<(img|script)[^>]*src=", prose(page))] == []
