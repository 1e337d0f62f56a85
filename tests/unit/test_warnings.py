"""A warning begins with WARNING:, and stands out on a terminal only."""

import io

import pytest

from deepstow.trainer.errors import warning, write_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_only_a_terminal_gets_colours_and_only_for_warnings(stream: io.StringIO) -> None:
    write_line(f"rows are read\n{warning('52 of 60 rows are dropped')}", stream)
    said = "WARNING: 52 of 60 rows are dropped"
    shown = f"\x1b[1;33m{said}\x1b[0m" if stream.isatty() else said
    assert stream.getvalue() == f"rows are read\n{shown}\n"


def test_what_others_wrote_colours_nothing() -> None:
    stream = Terminal()
    write_line(warning("no \x1b[31mred"), stream)
    assert stream.getvalue() == "\x1b[1;33mWARNING: no \\x1b[31mred\x1b[0m\n"
