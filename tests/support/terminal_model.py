"""Model of the part of a terminal that progress bars use, with an endless scrollback, for inspection by tests."""

from __future__ import annotations

import codecs
import re

_TOKEN = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<final>[@-~])|(?P<text>[^\x1b])", re.DOTALL)


class Terminal:
    """Rows of text and a cursor."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.cursor_visible = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, data: bytes) -> None:
        """Process the output of a program."""
        for match in _TOKEN.finditer(self._decoder.decode(data)):
            if match["text"] is not None:
                self._put(match["text"])
                continue
            final, arguments = match["final"], match["arguments"]
            if final == "A":
                self._row = max(0, self._row - int(arguments or 1))
            elif final == "J":
                del self._rows[self._row + 1 :]
                del self._rows[self._row][self._column :]
            elif final == "K":
                del self._rows[self._row][0 if arguments == "2" else self._column :]
            elif arguments == "?25":
                self.cursor_visible = final == "h"

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._go(self._row + 1)
        else:
            if self._column == self.columns:
                self._go(self._row + 1)
            row = self._rows[self._row]
            row.extend(" " * (self._column - len(row)))
            row[self._column : self._column + 1] = char
            self._column += 1

    def _go(self, row: int) -> None:
        self._row, self._column = row, 0
        if row == len(self._rows):
            self._rows.append([])

    @property
    def rows(self) -> list[str]:
        """The visible rows, without empty rows at the end."""
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip("\n").split("\n")
