"""Are README.md, CONTRIBUTING.md and docs/ short, and are their sentences?   python .ci/prose.py [--all]

Counted are words outside of what a program writes between its markers, and sentences outside of code, tables and
headings. Prints the pages over a bar, all pages with ``--all``, and the sum; exits with 1 if a bar is missed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 29_000
README_WORDS = 1_000
AVERAGE, LONGEST = 18, 30  # words of a sentence
GENERATED = re.compile(r"<!-- keys: written by.*?<!-- end of keys -->", re.S)
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.S | re.M)


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence of Markdown ``text``, ended by . ! ? or the end of its paragraph or list entry."""
    text = re.sub(r"<!--.*?-->|^---\n.*?^---$", "", CODE.sub("\n\n", text), flags=re.S | re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    paragraphs: list[str] = [""]
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("|", "#", "!!!", "<", "???")):
            paragraphs.append("")
        elif re.match(r"([-*+]|\d+[.)])\s", bare):
            paragraphs.append(re.sub(r"^([-*+]|\d+[.)])\s+", "", bare))
        else:
            paragraphs[-1] += f" {bare}"
    said = (one for paragraph in paragraphs for one in re.split(r"(?<=[.!?])[\"')*_]*\s+", paragraph))
    return [words for one in said if len(words := re.findall(r"\S*\w\S*", one)) > 0]


def main() -> int:
    """Exit code 1 if a bar is missed."""
    total = missed = 0
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = GENERATED.sub("", path.read_text())
        words = len(text.split())
        lengths = [len(one) for one in sentences(text)] or [0]
        average = sum(lengths) / len(lengths)
        total += words
        over = average > AVERAGE or max(lengths) > LONGEST or (path.name == "README.md" and words > README_WORDS)
        missed += over
        if over or "--all" in sys.argv:
            name = path.relative_to(ROOT)
            print(f"{name!s:<34}{words:6,} words, a sentence {average:4.1f} on average, {max(lengths)} at most")
            for one in (one for one in sentences(text) if len(one) > LONGEST):
                print(f"    {len(one)}: {' '.join(one[:12])} ...")
    print(f"{total:,} words of {MOST_WORDS:,}; {missed} pages over a bar")
    return int(missed > 0 or total > MOST_WORDS)


if __name__ == "__main__":
    sys.exit(main())
