"""Checks that a browser which shows the built site fetches nothing from another host."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {
    "link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
    "object": "data", "embed": "src", "image": "href", "use": "href",
}  # fmt: skip
"""Tags and the attribute with a URL that a browser fetches by itself. It fetches that of `a` only on a click."""


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        if (url := values.get(FETCHED.get(tag, ""))) is not None:
            self.found.append(url)
        self.found += re.findall(r"url\(([^)]+)\)", values.get("style") or "")


def external_urls(site: Path) -> Iterator[str]:
    """Yield each file of the site with a URL of another host that a browser would fetch for it."""
    for page in sorted(site.rglob("*.html")):
        parser = _Fetched()
        parser.feed(page.read_text())
        yield from (f"{page}: {url}" for url in parser.found if _is_external(url))
    for sheet in sorted(site.rglob("*.css")):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^)\"']+)", sheet.read_text())
        yield from (f"{sheet}: {url}" for url in urls if _is_external(url))


def _is_external(url: str) -> bool:
    return url.startswith(("http:", "https:", "//"))


def main() -> None:
    """Print the external URLs of the site in a folder; exit with status 1 if there are any."""
    found = list(external_urls(Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(f"{len(found)} URLs would be fetched from another host; use files of the site instead" if found else 0)


if __name__ == "__main__":
    main()
