"""A pseudo terminal, and the lines that programs wrote onto it."""

import codecs
import fcntl
import os
import select
import struct
import termios


class Terminal:
    """``end``: the file descriptor that programs write into."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self._master, self.end = os.openpty()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, wait_s: float = 0.0) -> str:
        """Take what was written, waiting so long for the first of it; empty if there was none, or nobody writes."""
        new = ""
        while select.select([self._master], [], [], 0.0 if new else wait_s)[0]:
            try:
                new += self._decoder.decode(os.read(self._master, 65536))
            except OSError:
                break
        self._text += new
        return new

    def shown(self) -> list[str]:
        """All lines that were read."""
        return self._text.replace("\r", "").rstrip("\n").split("\n")
