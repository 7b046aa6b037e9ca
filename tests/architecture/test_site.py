"""The documentation as a site and as files: every page in the menu, links that both can follow,
names that exist, a short README."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.site_links import outside_links_changed, repository
from paceline import __version__
from tests.architecture.source_tree import FROZEN, ROOT
from tests.architecture.test_documents import NAMED_FILE

DOCS = ROOT / "docs"
TOURS = ("architecture.md", "tour_request.md", "tour_step.md", "tour_ranks.md", "howto/extend.md")
OPERATION = ("deployment.md", "troubleshooting.md")
MOST_README_WORDS = 700
MOST_FILES = 6  # of the package, for one extension
# Flags of other programs.
FOREIGN_FLAGS = {"--index-url", "--gpus", "--shm-size"}


def listed() -> list[str]:
    return re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)


def test_every_page_is_in_the_menu_once() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    in_menu = listed()
    assert len(in_menu) == len(set(in_menu))
    assert {page for page in pages if not re.match(r"adr/0", page)} == set(in_menu)


def test_links_out_of_docs_lead_to_the_repository() -> None:
    text = "[a](../README.md#x) [b](../paceline/server) [c](tour_step.md#y) [d](https://e.f)"
    changed = outside_links_changed(text, "architecture.md", "https://host/us")
    assert changed == (
        "[a](https://host/us/blob/main/README.md#x) [b](https://host/us/tree/main/paceline/server) "
        "[c](tour_step.md#y) [d](https://e.f)"
    )
    assert (
        outside_links_changed("[a](supported.py)", "x.md", "u")
        == "[a](u/blob/main/docs/supported.py)"
    )
    assert outside_links_changed("[a](../../b.py)", "howto/x.md", "u") == "[a](u/blob/main/b.py)"


def test_the_repository_has_one_address() -> None:
    """In pyproject.toml, and nowhere else: it is changed in one place."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = repository()
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= project["urls"].keys()
    assert all(url.startswith(address) for url in project["urls"].values())
    for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        assert address not in page.read_text(encoding="utf-8"), page


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_links_the_files_that_it_names(name: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / name).read_text(encoding="utf-8"), flags=re.S)
    linked = set(re.findall(r"\[`([^`]+)`\]\(", text))
    known = {file for file in NAMED_FILE.findall(text) if (ROOT / "paceline" / file).exists()}
    assert known
    assert not known - linked


def test_an_extension_touches_at_most_six_files() -> None:
    """The table counts the files that it names: a name, "a file in", or "(3)" of a kernel."""
    text = (DOCS / "howto" / "extend.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(.*? \| (\d+) \| (.*) \|$", text, re.M)
    assert len(rows) >= 9
    for name, count, which in rows:
        in_kernel = re.findall(r"\[kernel\]\(#a-kernel\).*\((\d)\)", which)
        own = which.split("and a [kernel]")[0]
        num_own = 0 if count == "0" else len(re.findall(r"`(?:[\w/<>]+\.\w+|\w+/(?:\w+/)?)`", own))
        assert num_own + sum(map(int, in_kernel)) == int(count) <= MOST_FILES, name


def test_metrics_in_the_docs_exist() -> None:
    metrics = (FROZEN / "metrics.txt").read_text(encoding="utf-8").splitlines()
    for page in DOCS.rglob("*.md"):
        named = set(re.findall(r"`(paceline:[a-z_]+)`", page.read_text(encoding="utf-8")))
        assert not named - set(metrics), page


@pytest.mark.parametrize("name", OPERATION)
def test_flags_in_the_docs_exist(name: str) -> None:
    flags = {line.split()[-1] for line in (FROZEN / "cli_flags.txt").read_text().splitlines()}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / name).read_text(encoding="utf-8")))
    positive = {flag.replace("--no-", "--", 1) for flag in named - FOREIGN_FLAGS}
    assert not positive - flags


def test_the_readme_is_short_and_says_what_a_newcomer_needs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_README_WORDS
    assert len(re.findall(r"!\[", text)) == 1
    assert len(re.findall(r"^\|---", text, re.M)) == 1
    for needed in ("make serve", "make test", "whl/cpu", "from paceline import LLM", "**Missing**"):
        assert needed in text


def test_the_changelog_has_a_section_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", text, re.M)
    assert text.index("## Unreleased") < text.index(f"## {__version__}")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_lists_are_written_so_that_the_site_reads_them(page: Path) -> None:
    """GitHub is lenient: there a list needs no empty line before it, and two spaces indent."""
    before, is_code = "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_item = re.match(r"([-*]|\d+\.) ", line) and not is_code
        assert not is_item or not before or re.match(r"\s*([-*]|\d+\.) |\s", before), number
        assert is_code or not re.match(r" {1,3}([-*] |\d+\. |```)", line), number
        is_code ^= line.lstrip().startswith("```")
        before = line
