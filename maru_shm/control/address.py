"""Addresses of servers: which ones Maru listens on and connects to."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from maru_shm.errors import MaruError


class BadUrl(MaruError):
    """The address is none that a server may listen on or a client may connect to."""


def check_url(url: str) -> None:
    """Raises BadUrl for an address that Maru does not use, and says why."""
    parts = urlsplit(url)
    if parts.scheme == "ipc" and url.removeprefix("ipc://").startswith("/"):
        return
    if parts.scheme == "tcp":
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if port is not None and _is_loopback(host):
            return
        if port is not None:
            raise BadUrl(
                f"{url}: only loopback addresses are served, because whoever reaches the server "
                "may read the cache, and keys (CURVE) for other hosts are not supported yet; use "
                "tcp://127.0.0.1:<port> or ipc:///<path>"
            )
    raise BadUrl(f"{url}: expected ipc:///<absolute path> or tcp://127.0.0.1:<port>")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
