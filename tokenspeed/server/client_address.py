"""Whose request it is: the address at the other end, or the one that trusted proxies name.

Each proxy appends the address that it was called from to X-Forwarded-For. Read from the right, the
first that is no trusted proxy is the client; what stands before it is anybody's word.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import Scope

MAX_HOPS = 32


class TrustedProxies:
    """Of addresses and networks (10.0.0.0/8), which `ServerConfig` has checked."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(each, strict=False) for each in networks]

    def client_of(self, scope: Scope) -> str:
        """An address, or "-" where none is known (a Unix socket)."""
        peer = scope.get("client")
        client: str = peer[0] if peer else "-"
        for hop in self._hops(scope):
            if not self._trusts(client):
                break
            try:
                client = str(ipaddress.ip_address(hop))
            except ValueError:
                break
        return client

    def _hops(self, scope: Scope) -> list[str]:
        """From the nearest on."""
        if not self._networks:
            return []
        lines = [value for name, value in scope["headers"] if name.lower() == b"x-forwarded-for"]
        hops = b",".join(lines).decode("latin-1").rsplit(",", MAX_HOPS)
        return [hop.strip() for hop in reversed(hops)][:MAX_HOPS]

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)
