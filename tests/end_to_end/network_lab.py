"""Two or more hosts as network namespaces that are joined by a switch, with faults that a test can cause and heal."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_HOST = 'hostname "$1"; shift; exec "$@"'


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Network:
    """Hosts 1 to `count`. Host N has the address 10.77.0.N on its interface e0, and is named hostN."""

    name: str
    count: int

    def namespace(self, host: int) -> str:
        return f"{self.name}h{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host}"

    def start(
        self, host: int, command: Sequence[str], output: Path, environment: Mapping[str, str], cwd: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with its standard output and error in a file."""
        inside = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c", _HOST, "sh"]
        with output.open("wb") as file:
            return subprocess.Popen(
                [*inside, f"host{host}", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=dict(environment), cwd=cwd,
            )  # fmt: skip

    def cut(self, host: int) -> None:
        """Unplug a host's cable at the switch. The host sees no change, and its packets are lost."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def heal(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def slow_down(self, host: int, rate: str) -> None:
        """Limit what the switch sends to a host to `rate`, such as 2mbit."""
        limit = ["rate", rate, "burst", "16kbit", "latency", "400ms"]
        for namespace, device in ((self._switch, f"p{host}"), (self.namespace(host), "e0")):
            words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit]
            subprocess.run(words, check=True, capture_output=True)

    def drop_large_packets(self, host: int, most: int) -> None:
        """Make the switch drop packets to a host that are larger than `most` bytes, without telling the sender."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "mtu", str(most))
        _ip("-n", self.namespace(host), "link", "set", "e0", "mtu", "1500")

    def block_port(self, host: int, ports: str) -> None:
        """Drop packets to a port, or to a range such as 1024-65534, of a host, as a firewall does."""
        _ip("-n", self.namespace(host), "rule", "add", "pref", "1", "iif", "e0", "ipproto", "tcp", "dport", ports,
            "blackhole")  # fmt: skip

    def unblock(self, host: int) -> None:
        _ip("-n", self.namespace(host), "rule", "del", "pref", "1")

    @property
    def _switch(self) -> str:
        return f"{self.name}sw"

    def _up(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in range(1, self.count + 1):
            space = self.namespace(host)
            _ip("netns", "add", space)
            _ip("link", "add", "e0", "netns", space, "type", "veth", "peer", "name", f"p{host}", "netns", self._switch)
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "e0")
            for device in ("e0", "lo"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", self._switch, "link", "set", f"p{host}", "master", "br0")
            _ip("-n", self._switch, "link", "set", f"p{host}", "up")
            # A rule that drops packets must come before the rule for local addresses, which cannot be preceded.
            _ip("-n", space, "rule", "add", "pref", "100", "lookup", "local")
            _ip("-n", space, "rule", "del", "pref", "0")

    def _down(self) -> None:
        for space in (*(self.namespace(host) for host in range(1, self.count + 1)), self._switch):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextmanager
def network(count: int = 2) -> Iterator[Network]:
    """Create the hosts, and remove them at the end. Skip the test where namespaces cannot be created."""
    hosts = Network(name=f"nsa{secrets.token_hex(3)}", count=count)
    try:
        hosts._up()
    except (OSError, subprocess.CalledProcessError) as error:
        hosts._down()
        pytest.skip(f"no network namespaces: {getattr(error, 'stderr', '') or error}".strip())
    try:
        yield hosts
    finally:
        hosts._down()
