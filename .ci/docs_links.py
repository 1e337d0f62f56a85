"""A hook of MkDocs: links that the site needs and the Markdown has otherwise.

Links from the docs to other files of the repository work where the Markdown is read in the repository. On the site
these files do not exist, so the link becomes their path; one that leads nowhere is a warning, with which ``mkdocs build
--strict`` fails. And ``deepstow docs NAME``, as messages and generated tables say it, becomes a link to the page.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.S | re.M)
SAID = re.compile(r"(?<!\[)`?\bdeepstow docs ([a-z][a-z_-]*)`?")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with each link out of the docs as text and path, and each page that is named as a link."""
    docs = Path(config.docs_dir).resolve()
    here = docs / Path(page.file.src_uri).parent
    pages = {path.stem: path for path in docs.rglob("*.md")}

    def shown(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, link[2])
        path = target.relative_to(docs.parent).as_posix()
        return f"`{path}`" if link[1] == path else f"{link[1]} (`{path}`)"

    def linked(said: re.Match[str]) -> str:
        if said[1] not in pages:
            log.warning("%s says deepstow docs %s, which is no page", page.file.src_uri, said[1])
            return said[0]
        return f"[`deepstow docs {said[1]}`]({Path(os.path.relpath(pages[said[1]], here)).as_posix()})"

    parts, done = [], 0
    for code in FENCED.finditer(markdown):
        parts += [SAID.sub(linked, markdown[done : code.start()]), code[0]]
        done = code.end()
    return OUTSIDE.sub(shown, "".join([*parts, SAID.sub(linked, markdown[done:])]))
