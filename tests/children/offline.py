"""No network: in every Python process of a test that imports this, a connection beyond this machine is an error."""

import socket
import sys

NAMES = {"", "localhost", "::", "::1", "0.0.0.0", socket.gethostname()}


def refuse(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name is not None and name not in NAMES and not name.startswith("127."):
        raise AssertionError(f"a test asked for the network: {event} {name}")


sys.addaudithook(refuse)
