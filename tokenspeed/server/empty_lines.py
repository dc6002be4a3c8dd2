"""Empty lines around requests, which some clients send after a body: a server should pass over
those that come before a request (RFC 9112, 2.2), and after the last one they are nothing to
complain of. h11 takes them for a broken request, so that the request before them, or the one after,
would be answered with 400.
"""

from __future__ import annotations

import h11

_BETWEEN = frozenset({h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED})
"""States of a client from whom no part of a request is expected but its first line."""


class PatientConnection(h11.Connection):
    """A server's side of a connection. What is no empty line is what it always was to h11."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state in _BETWEEN:
            data = bytes(self._receive_buffer)
            if num_empty := len(data) - len(data.lstrip(b"\r\n")):
                self._receive_buffer.maybe_extract_at_most(num_empty)
        return super().next_event()
