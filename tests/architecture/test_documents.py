"""Documents point at things that exist, and the repository stays small enough to clone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

MAX_FILE_BYTES = 1 << 20
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SKIPPED_FOLDERS = {".venv", ".git", "node_modules"}

# `folder/`, `folder/file.py` and the like, in backticks.
NAMED_FILE = re.compile(r"`([a-z_0-9]+/(?:[a-z_0-9/]*|[a-z_0-9/-]+\.(?:py|json|md|toml)))`")

DOCUMENTS = [path for path in sorted(ROOT.rglob("*.md")) if not SKIPPED_FOLDERS & set(path.parts)]
GUIDES = [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "traps.md")]


def slug(heading: str) -> str:
    """The anchor that a Markdown heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {slug(line.lstrip("#")) for line in lines if line.startswith("#")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_resolve(document: Path) -> None:
    broken = []
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        is_known = target.exists() and (
            not anchor or target.suffix != ".md" or anchor in anchors(target)
        )
        if not is_known:
            broken.append(link)
    assert not broken, f"{document.relative_to(ROOT)}: {broken}"


@pytest.mark.parametrize("document", GUIDES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_guide_names_exists(document: Path) -> None:
    named = set(NAMED_FILE.findall(document.read_text(encoding="utf-8")))
    folders = (ROOT / "paceline", ROOT, document.parent)
    missing = sorted(n for n in named if not any((folder / n).exists() for folder in folders))
    assert not missing, f"{document.relative_to(ROOT)} names {missing}"


def test_the_glossary_names_the_files_of_its_words() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(set(NAMED_FILE.findall(text))) > 20


def test_no_file_of_the_repository_is_large() -> None:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    large = [p.name for p in paths if p.is_file() and p.stat().st_size > MAX_FILE_BYTES]
    assert not large, f"over 1 MiB: {large}"
