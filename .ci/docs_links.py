"""A hook of MkDocs: links from the docs to other files of the repository.

They work where the Markdown is read in the repository. On the site these files do not exist, so the link becomes their
path; one that leads nowhere is a warning, with which ``mkdocs build --strict`` fails.
"""

import logging
import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with each link out of the docs as text and path."""
    docs = Path(config.docs_dir).resolve()
    here = docs / Path(page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, link[2])
        path = target.relative_to(docs.parent).as_posix()
        return f"`{path}`" if link[1] == path else f"{link[1]} (`{path}`)"

    return OUTSIDE.sub(shown, markdown)
