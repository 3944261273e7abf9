"""The command line of OpenSSH's client, for all uses here.

Decision: it reads no configuration and knows only the host keys that it is given, so what it refuses does not depend on
the user who runs it.
"""

from collections.abc import Mapping
from pathlib import Path

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 5
SILENCE_SECONDS = 20.0
"""A connection whose other end acknowledges nothing for this long is dead."""
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
CIPHERS = (*FAST_CIPHERS, "chacha20-poly1305@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")


def client_command(
    port: int, user: str | None, known_hosts: Path, key: Path | None, further: Mapping[str, str] | None = None
) -> list[str]:
    """The client with all its options; a target, and perhaps a command, follow. Without `key`: ~/.ssh's."""
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": f'"{kept(str(known_hosts))}"',
        "GlobalKnownHostsFile": "none",
        "ConnectTimeout": f"{CONNECT_SECONDS:.0f}",
        "ServerAliveInterval": str(KEEPALIVE_SECONDS),
        "ServerAliveCountMax": f"{SILENCE_SECONDS / KEEPALIVE_SECONDS:.0f}",
        "ForwardAgent": "no",
        "Compression": "no",
        "Ciphers": ",".join(CIPHERS),
        "LogLevel": "ERROR",
    }
    if key is not None:
        options |= {"IdentityFile": f'"{kept(str(key))}"', "IdentitiesOnly": "yes", "IdentityAgent": "none"}
    options |= further or {}
    named = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", "-T", "-p", str(port), *(["-l", user] if user else []), *named]


def server_name(host: str, port: int) -> str:
    """The server's name as known-hosts files write it."""
    return host if port == 22 else f"[{host}]:{port}"


def kept(text: str) -> str:
    """The text, escaped so that the client does not replace %h and the like."""
    return text.replace("%", "%%")
