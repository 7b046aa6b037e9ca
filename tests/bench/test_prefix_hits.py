"""The benchmark of prefix hits runs, and the how-to shows what it recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.prefix_hits import KINDS, hit_rate
from tests.architecture.source_tree import ROOT


def test_every_kind_finds_earlier_turns_and_none_more_than_all_pages(tmp_path: Path) -> None:
    questions = [["What is a page? " * 20, "And a slot?", "Why?"] for _ in range(2)]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"turns": turns}) for turns in questions))
    found = {kind: hit_rate(path, kind, 16, 20, 100) for kind in KINDS}
    assert 0.3 < found["alone"] <= found["pages"]
    assert 0.3 < found["mtp"] <= found["pages"]


def test_the_how_to_shows_the_record() -> None:
    record = json.loads((ROOT / "bench/results/cpu/prefix_hits.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs/howto/recurrent.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.count("%") == 3]
    shown = [[float(x) for x in re.findall(r"(\d+\.\d) %", row)] for row in rows]
    by_file = record["percent_by_interval"].values()
    assert shown == [list(by_kind.values()) for of in by_file for by_kind in of.values()]
