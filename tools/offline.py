"""Refuse a built site that asks other machines for what its pages are made of.

    python tools/offline.py [FOLDER]

It looks at scripts, styles, fonts, icons and pictures of all pages in FOLDER, `site` by default; links that a
reader may follow are left alone. The exit status says whether there is anything.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# What a browser loads by itself, and by which attribute.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
# Relations of a <link> that load nothing.
SILENT = {"canonical", "next", "prev", "alternate", "license"}
IN_STYLES = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Loads(HTMLParser):
    """Collects addresses on other machines that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADED.get(tag, "")) or ""
        if address.startswith(("http://", "https://", "//")) and given.get("rel") not in SILENT:
            self.found.append(address)
        self.found += IN_STYLES.findall(given.get("style") or "")


def loads(path: Path) -> list[str]:
    """Addresses on other machines that a page or a style sheet loads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return IN_STYLES.findall(text)
    page = Loads()
    page.feed(text)
    return page.found


def main(folder: Path) -> int:
    """Print what is asked of other machines; 1 if there is anything, or no page at all."""
    pages = sorted(path for suffix in ("html", "css") for path in folder.rglob(f"*.{suffix}"))
    found = [(path, address) for path in pages for address in loads(path)]
    for path, address in found:
        print(f"{path} asks another machine for {address}")
    if not pages:
        print(f"There is no page in {folder}.")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
