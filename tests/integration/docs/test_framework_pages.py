"""The blocks of pages that need a framework run in the environment of that framework (make test-frameworks)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, ROOT, blocks
from helpers.docs_snippets import UNBUFFERED, Runner, differences

FRAMEWORK = os.environ.get("CKPT_TEST_FRAMEWORK")
NEEDS = [(page, block) for page in sorted(DOCS.rglob("*.md")) for block in blocks(page) if block.framework is not None]

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1", **UNBUFFERED,
}  # fmt: skip
"""Without these, frameworks print messages that differ from version to version."""
PAGES = sorted({page for page, block in NEEDS if block.framework == FRAMEWORK})


@pytest.mark.essential
@pytest.mark.skipif(FRAMEWORK is None, reason="by make test-frameworks")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_with_its_framework(page: Path, tmp_path: Path) -> None:
    with Runner(tmp_path / "me", QUIET, FRAMEWORK) as runner:
        found = differences(runner, [page])
    assert not found, "\n\n".join(found)


def test_each_framework_that_a_page_needs_has_an_environment() -> None:
    environments = {file.parent.name for file in (ROOT / "tests" / "integration").glob("*/requirements.txt")}
    assert NEEDS
    assert [block.where for _, block in NEEDS if block.framework not in environments] == []
