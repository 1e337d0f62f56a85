"""Print a page of the documentation, which comes with the package; without a name, the list of pages."""

from __future__ import annotations

import argparse
import pydoc
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import deepstow
from deepstow.launch import cli
from deepstow.trainer.errors import ConfigError, nearest, write_line

PACKAGE = Path(deepstow.__file__).parent
PAGES, SITE = PACKAGE / "docs", PACKAGE / "mkdocs.yml"  # the site's navigation has the parts
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]*)(?:#[^)]*)?\)")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
NAMES_OF_PYTHON = re.compile(r"!!python/\S+")  # in the settings of its extensions
OTHERS = "More"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = cli.explained(cli.Parser(), "docs", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the page, as the list has it")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    arguments = parse(argv)
    return cli.answered(lambda: show(arguments.name))


def show(name: str | None) -> None:
    """Print a page, by pages where somebody reads on a terminal, or the list. Raise ConfigError for an unknown name."""
    pages = {path.stem: path for path in sorted(PAGES.rglob("*.md"))}
    if name is None:
        write_line("\n".join(listed(pages)))
        return
    stem = Path(name).stem
    if stem not in pages:
        raise ConfigError(f"deepstow docs {name}: no such page; all of them: deepstow docs{nearest(stem, pages)}")
    text = plain(pages[stem].read_text(encoding="utf-8"))
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        write_line(text)


def listed(pages: dict[str, Path]) -> Iterator[str]:
    """Each page by part of the site, with its first heading."""
    settings = yaml.safe_load(NAMES_OF_PYTHON.sub("", SITE.read_text(encoding="utf-8")))
    parts = dict(parts_of(settings["nav"]))
    placed = {name for names in parts.values() for name in names}
    if unplaced := [name for name in pages if name not in placed]:
        parts[OTHERS] = unplaced
    width = max(map(len, pages))
    for part, names in parts.items():
        yield f"{part}:"
        for name in names:
            title = next(line for line in pages[name].read_text(encoding="utf-8").splitlines() if line.startswith("# "))
            yield f"  {name:<{width}}  {title.removeprefix('# ')}"
        yield ""
    yield "deepstow docs NAME prints a page."


def parts_of(navigation: Sequence[Any]) -> Iterator[tuple[str, list[str]]]:
    """The title and the pages of each part."""
    for entry in navigation:
        for title, inside in entry.items():
            yield title, list(_names(inside))


def _names(inside: Any) -> Iterator[str]:
    if isinstance(inside, str):
        yield Path(inside).stem
    else:
        for entry in inside.values() if isinstance(inside, dict) else inside:
            yield from _names(entry)


def plain(text: str) -> str:
    """A page as one reads it on a terminal: a link to another page is the command that prints it."""

    def shown(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if picture:
            return f"(picture: {words})"
        name = Path(path).stem
        return f"{words} (deepstow docs {name})" if path.endswith(".md") and words.strip("`") != name else words

    return LINK.sub(shown, COMMENT.sub("", text)).strip()


if __name__ == "__main__":
    sys.exit(main())
