"""The user at the other end of a TCP connection on the loopback, of this process's network namespace."""

from __future__ import annotations

import ipaddress
import sys
from typing import Any

_READINGS = 3
"""Readings of the tables. One may skip an entry while the table changes."""

_Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def peer_uid(local: Any, peer: Any) -> int | None:
    """The uid of the socket at `peer` that is connected to `local`; None: no process has it open."""
    wanted = (_plain(peer), _plain(local))
    for _ in range(_READINGS):
        for table in ("tcp", "tcp6"):
            try:
                with open(f"/proc/self/net/{table}", encoding="ascii") as file:
                    text = file.read()
            except FileNotFoundError:
                # A host without IPv6.
                if table == "tcp":
                    raise
                continue
            for line in text.splitlines()[1:]:
                fields = line.split()
                # The kernel shows a socket that its process has closed as one of root.
                if fields[9] != "0" and (_address(fields[1]), _address(fields[2])) == wanted:
                    return int(fields[7])
    return None


def _plain(address: Any) -> _Address:
    # The scope of a link-local address is not part of it.
    return _canonical(ipaddress.ip_address(address[0].partition("%")[0])), address[1]


def _canonical(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _address(text: str) -> _Address:
    """An address of a table: words in the host's byte order, and a port."""
    digits, _, port = text.partition(":")
    words = (int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    return _canonical(ipaddress.ip_address(b"".join(words))), int(port, 16)
