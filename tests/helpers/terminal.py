"""A pseudo terminal, and what a person would see on it: the few sequences that DeepStow uses, as a VT100 has them."""

import codecs
import fcntl
import os
import re
import select
import struct
import termios

PIECE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\x1b([78D])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """``end``: the file descriptor that programs write into. ``screen`` and ``above`` (scrolled out) are lines."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self._master, self.end = os.openpty()
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self.screen, self.above = [""] * rows, list[str]()
        self.row = self.column = 0
        self._kept, self.region, self._wraps, self._rest = (0, 0), (0, rows - 1), True, ""
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        """As xterm does: rows come or go at the end, lines leave at the top if the cursor's would go."""
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        while self.row >= rows:
            self.above.append(self.screen.pop(0))
            self.row -= 1
        self.screen = [*self.screen, *[""] * rows][:rows]
        self.columns, self.region = columns, (0, rows - 1)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, wait_s: float = 0.0) -> str:
        """Take what was written, waiting so long for the first of it; empty if there was none, or nobody writes."""
        new = ""
        while select.select([self._master], [], [], 0.0 if new else wait_s)[0]:
            try:
                new += self._text.decode(os.read(self._master, 65536))
            except OSError:
                break
        self._rest, at = self._rest + new, 0
        while found := PIECE.match(self._rest, at):
            self._take(*found.groups())
            at = found.end()
        self._rest = self._rest[at:]
        return new

    def shown(self) -> list[str]:
        """All lines, those that have scrolled out first, without the empty ones at the end."""
        return "\n".join(line.rstrip() for line in [*self.above, *self.screen]).rstrip("\n").split("\n")

    def _take(self, private: str, numbers: str, final: str, short: str, end: str, text: str) -> None:
        given = [int(number) for number in (numbers or "").split(";") if number]
        match final or short or end or "text":
            case "r":
                self.region = (given[0] - 1, given[1] - 1) if given else (0, len(self.screen) - 1)
                self.row = self.column = 0
            case "H":
                self.row, self.column = (given[0] - 1, given[1] - 1) if given else (0, 0)
            case "A":
                self.row = max(self.row - given[0], self.region[0] if self.row >= self.region[0] else 0)
            case "J":
                self._put("", cut=True)
                self.screen[self.row + 1 :] = [""] * (len(self.screen) - self.row - 1)
            case "K":
                assert given == [2]
                self.screen[self.row] = ""
            case "h" | "l":
                assert (private, given) == ("?", [7])
                self._wraps = final == "h"
            case "7":
                self._kept = self.row, self.column
            case "8":
                self.row, self.column = self._kept
            case "\n" | "D":
                self._down()
            case "\r":
                self.column = 0
            case "text":
                self._print(text)
            case other:
                raise AssertionError(f"no such sequence here: {other}")

    def _print(self, text: str) -> None:
        while text:
            room = self.columns - self.column
            self._put(text[:room])
            text = text[room:] if self._wraps else ""
            if text:
                self.column = 0
                self._down()

    def _put(self, text: str, *, cut: bool = False) -> None:
        line = self.screen[self.row].ljust(self.column)
        self.screen[self.row] = line[: self.column] + text + ("" if cut else line[self.column + len(text) :])
        self.column += len(text)

    def _down(self) -> None:
        first, last = self.region
        if self.row != last:
            self.row = min(self.row + 1, len(self.screen) - 1)
            return
        gone = self.screen.pop(first)
        self.screen.insert(last, "")
        if first == 0:
            self.above.append(gone)
