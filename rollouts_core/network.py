"""The network that leads to another machine. IPv4. Standard library only: it is part of what is sent to hosts."""

import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915


def own_address(towards: str) -> str:
    """This machine's address on the network that leads to another's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
        return address


def interface_variables(towards: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use that network; by default they use the one of the host's name."""
    own = own_address(towards)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def use_interface_towards(address: str) -> None:
    """Set these variables for this process, where they are not set."""
    for name, value in interface_variables(address).items():
        os.environ.setdefault(name, value)
