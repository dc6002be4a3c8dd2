"""Server-sent events out of bytes that arrive cut anywhere (WHATWG HTML, section 9.2)."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
"""Of one event's lines, their ends counted."""
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event does not end."""


class EventReader:
    """`feed` it blocks as they come; it gives the data of each event that has ended. Comments and
    fields other than `data` are skipped; lines end with LF, CR or both.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line that has not ended
        self._data: list[bytes] = []
        self._size = 0
        self._is_after_cr = False
        self._is_begun = False

    def feed(self, block: bytes) -> list[bytes]:
        """The events that end in this block. Raises EventTooLarge."""
        if self._is_after_cr and block:
            block = block.removeprefix(b"\n")
            self._is_after_cr = False
        self._rest += block
        goes_on = self._is_begun and b"\n" not in block and b"\r" not in block
        events = [] if goes_on else self._lines()
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _lines(self) -> list[bytes]:
        """Take the lines that have ended; the events that they end."""
        text = bytes(self._rest)
        if not self._is_begun:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                return []
            self._is_begun = True
            text = text.removeprefix(_BOM)
        lines = text.splitlines()
        rest = b"" if text.endswith((b"\n", b"\r")) else lines.pop() if lines else b""
        self._rest = bytearray(rest)
        self._is_after_cr = text.endswith(b"\r")
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> bytes | None:
        """Take a whole line; the event that it ends, if any."""
        if line.startswith(b"data:"):
            value = line[5:].removeprefix(b" ")
            self._data.append(value)
            self._size += len(line) + 1
        elif line == b"data":
            self._data.append(b"")
            self._size += len(line) + 1
        elif not line and self._data:
            event = b"\n".join(self._data)
            self._data, self._size = [], 0
            return event
        return None
