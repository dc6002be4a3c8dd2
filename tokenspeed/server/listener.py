"""The listening socket, bound before anything is loaded. Light: it comes before other imports."""

from __future__ import annotations

import socket
from typing import Any

BACKLOG = 4096


def listen(host: str, port: int, stall_timeout_s: float) -> socket.socket:
    """A listening socket; raises OSError at once if the port is taken or the host is none.

    Connections whose peer takes nothing for `stall_timeout_s` are dropped by the kernel: closing
    them alone would wait for a reader that never comes.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except UnicodeError as error:  # a label is empty, or longer than 63 characters
        raise OSError(f"not a host name: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        return _bound(listener, address, stall_timeout_s)
    except OSError:
        listener.close()
        raise


def share(listener: socket.socket) -> None:
    """Let other processes of this user join. The port was taken alone: who else listens there, or
    binds it like that from now on, is refused.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def join(family: int, address: tuple[Any, ...], stall_timeout_s: float) -> socket.socket:
    """One more listening socket on the address of one that is shared. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        share(listener)
        return _bound(listener, address, stall_timeout_s)
    except OSError:
        listener.close()
        raise


def _bound(
    listener: socket.socket, address: tuple[Any, ...], stall_timeout_s: float
) -> socket.socket:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
    listener.bind(address)
    # Bound alone, the port could still be bound by another that also does not listen yet.
    listener.listen(BACKLOG)
    return listener


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
