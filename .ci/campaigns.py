"""Writes docs/design/campaigns.md from the results of `make soak`.

    python .ci/campaigns.py FOLDER

FOLDER has the results of one or more runs, as pytest writes them with --junitxml. The newest result of each test counts. A test
that no run reached keeps its line of the page, and is listed as not run if it has none.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/design/campaigns.md"
SECTIONS = {
    "tests/faults/kill": "Kills",
    "tests/faults/races": "Pauses, lost replies, and two processes at once",
    "tests/faults/store": "Damage, power loss and failing stores",
    "tests/end_to_end": "Whole jobs",
    "tests": "Other",
}
"""Folders of tests, and the headings of their tables. The first that matches counts."""
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}

HEAD = """# Fault campaigns

`make soak` runs these tests with their full counts, and writes this page. Each line states what must hold. A case is a kill,
a damaged file, a state after a power loss, a schedule, a seed, a state of a model, or an input of a parser. Where a test does
not count its cases, each of its parameters is one. A failed case prints a seed or a schedule that repeats it. A test that is
"not run" has not been run with its full counts yet; `make test` runs it with fewer.

`make soak CAMPAIGNS=tests/faults/kill` runs a part of them. Then the other lines keep their last result.

"""

COLUMNS = """\
| what must hold | test | cases | failed | duration | run on |
| --- | --- | ---: | ---: | ---: | --- |
"""


@dataclass(frozen=True)
class Result:
    """The result of one test with one set of parameters."""

    test: tuple[str, str]
    """Its file and its function."""
    parameters: str
    outcome: str
    cases: int
    seconds: float
    at: datetime


def read_results(path: Path) -> Iterator[Result]:
    """Yield the results in a file of pytest."""
    for suite in ElementTree.parse(path).iter("testsuite"):
        at = datetime.fromisoformat(suite.attrib["timestamp"])
        for case in suite.iter("testcase"):
            if "name" not in case.attrib:  # it ran when the run was interrupted
                continue
            function, _, parameters = case.attrib["name"].partition("[")
            counts = [int(p.attrib["value"]) for p in case.iter("property") if p.attrib["name"] == "cases"]
            outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
            file = case.attrib["classname"].replace(".", "/") + ".py"
            yield Result((file, function), parameters, outcome, sum(counts) if counts else 1, float(case.attrib["time"]), at)


def soak_tests() -> list[tuple[str, str]]:
    """Return the file and the function of each test that `make soak` runs, in the order of the files."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        marks = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
        for node in body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if any(re.search(r"\bsoak\b|with_make_soak", ast.unparse(mark)) for mark in [*marks, *node.decorator_list]):
                found.append((path.relative_to(ROOT).as_posix(), node.name))
    return found


def row(test: tuple[str, str], results: list[Result], lines_before: list[str]) -> str:
    """Return the line of a test in a table."""
    sentence, name = test[1].removeprefix("test_").replace("_", " ").capitalize(), f"`{test[0]}`"
    ran = [result for result in results if result.outcome != "skipped"]
    if not ran:
        before = (line for line in lines_before if line.startswith(f"| {sentence} | {name} |"))
        return next(before, f"| {sentence} | {name} | | | | not run |")
    failed = sum(result.outcome == "failed" for result in ran)
    minutes, newest = sum(result.seconds for result in ran) / 60, max(result.at for result in ran)
    return f"| {sentence} | {name} | {sum(r.cases for r in ran):,} | {failed} | {minutes:.1f} min | {newest:%Y-%m-%d} |"


def page(results: list[Result], before: str = "") -> str:
    """Return the text of the page. before: its text until now."""
    newest: dict[tuple[str, str], dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.at):
        newest.setdefault(result.test, {})[result.parameters] = result
    lines_before = before.splitlines()
    tables: dict[str, list[str]] = {heading: [] for heading in SECTIONS.values()}
    for test in soak_tests():
        heading = next(heading for folder, heading in SECTIONS.items() if test[0].startswith(folder + "/"))
        tables[heading].append(row(test, list(newest.get(test, {}).values()), lines_before))
    text = HEAD
    for heading, rows in tables.items():
        if rows:
            text += f"## {heading}\n\n{COLUMNS}" + "\n".join(rows) + "\n\n"
    return text.rstrip("\n") + "\n"


def main() -> None:
    """Write the page."""
    found = [result for path in sorted(Path(sys.argv[1]).glob("*.xml")) for result in read_results(path)]
    PAGE.write_text(page(found, PAGE.read_text()))


if __name__ == "__main__":
    main()
