"""Write into docs/commands.md what each command is for, and two examples:   python .ci/commands.py"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- keys: written by `python .ci/commands.py` -->\n", "<!-- end of keys -->\n"
PAGE = ROOT / "docs" / "commands.md"


def text() -> str:
    """The page as it should be."""
    from deepstow.launch.cli import COMMANDS, EXAMPLES

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    parts = []
    for name, purpose in COMMANDS.items():
        examples = "\n".join(f"deepstow {name} {each}".rstrip() for each in EXAMPLES[name])
        parts.append(f"## {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```bash\n{examples}\n```\n")
    return "".join((before, BEGIN, "\n", "\n".join(parts), "\n", END, rest.partition(END)[2]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")
