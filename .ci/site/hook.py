"""Hooks of mkdocs: adds the generated pages of the reference, and makes links to files outside docs/ lead to their pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    from mkdocs.structure.files import File

    for name, text in pages.all_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages name SECURITY.md and CHANGELOG.md as they lie in the repository."""
    up = "../" * page.file.src_uri.count("/")
    for file, target in pages.OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}", f"]({up}{target}", markdown)
    return markdown
