"""The glossary names files that exist, and each term once."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/design/glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]


def test_each_term_has_one_sentence_and_a_file() -> None:
    assert 40 <= len(ROWS) <= 60
    for term, meaning, lives_in, _ in ROWS:
        assert meaning.count(". ") == 0, term
        assert meaning.endswith("."), term
        assert (ROOT / lives_in.strip("`")).is_file(), f"{term}: {lives_in} does not exist"


def test_each_term_occurs_once_and_is_not_avoided_elsewhere() -> None:
    terms = [row[0] for row in ROWS]
    assert len(set(terms)) == len(terms)
    avoided = {word.strip() for row in ROWS for word in row[3].split(",")}
    assert sorted(avoided & set(terms)) == []
