"""Hooks of the documentation's site (mkdocs.yml): its navigation, its first page, links that leave docs/, the API's
reference. A site that would load something from elsewhere is not built.

On a code host, links lead from docs/ to other files of the repository. The site gets a copy of each file that a page
links to, in repository/. The operations and types of the API are made from the code, and are in no file of docs/.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from services import describe_api
from services.api.description.reference import markdown as as_markdown
from services.api.description.reference import reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIES = "repository"
DECISIONS = "decisions/index.md"
API, OPENAPI = "reference/http-api.md", "reference/openapi.json"
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\]\(([^()\s#]+)(#[^()\s]*)?\)")
# What a browser loads by itself, from another site: not links that a reader may follow.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//[^">]+|url\(["']?(?:https?:)?//[^)]+|"""
    r"""<link(?![^>]*rel="?canonical)[^>]*\shref="?(?:https?:)?//[^">]+"""
)
_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'  # for a search in pages that no server serves
_ENTRY = re.compile(r"\]\(([\w/-]+\.md)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/index.md: a tab per heading, a page per link."""
    nav: list[dict[str, Any]] = [{"Start": "index.md"}]
    for section in (DOCS / "index.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0].partition(":")[0]
        nav.append({title: list(dict.fromkeys(_ENTRY.findall(section)))})
    decisions = sorted(f"decisions/{path.name}" for path in (DOCS / "decisions").glob("*.md"))
    nav.append({"Decisions": [DECISIONS, *decisions]})
    nav.append({"Repository": [f"{COPIES}/{name}" for name in PAGES.values()]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, the list of decisions, openapi.json, and every file that a page links to."""
    for name, copy in PAGES.items():
        files.append(File.generated(config, f"{COPIES}/{copy}", content=(ROOT / name).read_text()))
    files.append(File.generated(config, DECISIONS, content=_decisions()))
    files.append(File.generated(config, OPENAPI, content=describe_api.json_text(_api())))
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)]
    for target in sorted({found for page in pages for found in _targets(page)}):
        path = ROOT / target
        if path.is_file() and target not in PAGES and not path.is_relative_to(DOCS):
            files.append(File.generated(config, f"{COPIES}/{target}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the copies, and links to a folder to its list. Add the API's operations."""
    here = page.file.src_uri
    if here == "index.md":  # with what the README begins with: what this is, and its picture
        pitch = (ROOT / "README.md").read_text().partition("\n")[2].partition("\nType `flyball run`")[0]
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n{pitch.replace('](docs/', '](')}\n{rest}"
    if here == API:
        link = f"For client generators: [openapi.json]({Path(OPENAPI).name})."
        markdown = f"{markdown}\n{link}\n\n{as_markdown(reference(_api()))}"
    source = next((name for name, copy in PAGES.items() if here == f"{COPIES}/{copy}"), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if re.match(r"[a-z][a-z+.-]*:", target):
            return link[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))  # noqa: PTH118, PTH120
        if path == "docs/decisions":
            place = DECISIONS
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        else:
            place = f"{COPIES}/{PAGES.get(path, path)}"
        return f"]({os.path.relpath(place, os.path.dirname(here) or '.')}{anchor})"  # noqa: PTH120

    return _LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Replace the one script that the theme loads from another site; fail if there is more: pages are read offline."""
    found = set()
    for path in (path for path in Path(config.site_dir).rglob("*") if path.suffix in (".html", ".css")):
        own = os.path.relpath(Path(config.site_dir) / "site.js", path.parent)
        text = path.read_text().replace(_SHIM, f'<script src="{own}"></script>')
        path.write_text(text)
        found |= {f"{path.name}: {loaded}" for loaded in _LOADED.findall(text)}
    if found:
        raise PluginError("Loaded from another site: " + "; ".join(sorted(found)[:10]))


def _targets(page: Path) -> set[str]:
    """The repository's files that a page links to."""
    links = (link for link, _ in _LINK.findall(page.read_text()) if not re.match(r"[a-z][a-z+.-]*:", link))
    paths = (Path(os.path.normpath(page.parent / link)) for link in links)
    return {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}


@cache
def _api() -> dict[str, Any]:
    return describe_api.document()


def _decisions() -> str:
    lines = ["# Decisions", "", "What was chosen, and why. One page each.", ""]
    for path in sorted((DOCS / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
