"""Hooks of the documentation site: where the repository is, and links to files that it lacks.

Pages link to files of the repository by relative paths, which GitHub follows. The site has only the
pages and pictures of docs/, so there other links lead to the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
IN_SITE = (".md", ".svg", ".png")  # what the site has of docs/
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")


def repository() -> str:
    """The address in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def outside_links_changed(text: str, page: str, address: str) -> str:
    """The Markdown of a page (a path in docs/) with links to what the site lacks made absolute."""
    folder = (ROOT / "docs" / page).parent

    def changed(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        target = (folder / path).resolve()
        is_in_site = target.is_relative_to(ROOT / "docs") and target.suffix in IN_SITE
        if is_in_site or not target.is_relative_to(ROOT):
            return match[1]
        kind = "tree" if target.is_dir() else "blob"
        return f"{address}/{kind}/main/{PurePosixPath(target.relative_to(ROOT))}{mark}{anchor}"

    return _LINK.sub(changed, text)


def on_config(config: Any) -> Any:
    config.repo_url = repository()
    config.repo_name = config.repo_url.removeprefix("https://github.com/")
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return outside_links_changed(markdown, page.file.src_uri, config.repo_url)
