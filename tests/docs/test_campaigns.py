"""The page of the fault campaigns lists the tests that `make soak` runs, and counts their results."""

from __future__ import annotations

import runpy
from pathlib import Path

from helpers.folders import TESTS

ROOT = TESTS.parent
PROGRAM = runpy.run_path(str(ROOT / ".ci/campaigns.py"))
page, read_results, soak_tests = PROGRAM["page"], PROGRAM["read_results"], PROGRAM["soak_tests"]
RESULTS = """<testsuites><testsuite timestamp="{day}T10:00:00+00:00">
<testcase classname="tests.faults.kill.test_killed_saves"
  name="test_a_save_killed_at_a_random_moment_leaves_complete_steps[async]" time="90">
  <properties><property name="cases" value="1200" /><property name="cases" value="1" /></properties>{child}</testcase>
<testcase classname="tests.faults.kill.test_killed_saves" time="30"
  name="test_a_save_killed_at_a_random_moment_leaves_complete_steps[blocking]" />
<testcase classname="tests.faults.races.test_two_writers" name="test_of_two_writers_that_start_together_one_saves" time="1">
  <skipped /></testcase>
<testcase time="0.003" />
</testsuite></testsuites>"""


def first_cells(text: str) -> list[list[str]]:
    """Return the first two cells of each line of the tables."""
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("what must hold", "---")]


def test_the_page_lists_the_tests_of_make_soak() -> None:
    assert len(soak_tests()) > 50
    assert first_cells((ROOT / "docs/design/campaigns.md").read_text()) == first_cells(page([])), "run `make soak`"


def test_the_newest_result_of_each_test_counts(tmp_path: Path) -> None:
    results = []
    for day, child in (("2026-01-02", ""), ("2026-01-01", "<failure />")):
        (tmp_path / f"{day}.xml").write_text(RESULTS.format(day=day, child=child))
        results += read_results(tmp_path / f"{day}.xml")
    lines = page(results).splitlines()
    name = "A save killed at a random moment leaves complete steps | `tests/faults/kill/test_killed_saves.py`"
    assert f"| {name} | 1,202 | 0 | 2.0 min | 2026-01-02 |" in lines
    assert (
        "| Of two writers that start together one saves | `tests/faults/races/test_two_writers.py` | | | | not run |" in lines
    )


def test_a_failure_is_counted(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS.format(day="2026-01-02", child="<failure />"))
    assert "| 1,202 | 1 | 2.0 min |" in page(list(read_results(tmp_path / "results.xml")))


def test_a_test_that_did_not_run_keeps_its_line(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS.format(day="2026-01-02", child=""))
    before = page(list(read_results(tmp_path / "results.xml")))
    assert before.count("2026-01-02") == 1
    assert page([], before) == before
