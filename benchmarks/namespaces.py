"""Machines made of network namespaces, whose links the kernel limits. For scripts that run as root, with ip and tc."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def machines(across: float, inside: float, count: int = 2) -> Iterator[list[str]]:
    """Names of the namespaces, removed at the end. Each has the address 10.77.0.(number + 1), and sends so many Mbit/s
    to the others, and over its loopback."""
    names = [f"stow{number}" for number in range(count)]
    try:
        run("ip", "link", "add", "stowbr", "type", "bridge")
        run("ip", "link", "set", "stowbr", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"out{number}", "type", "veth", "peer", "name", "stow", "netns", name)
            run("ip", "link", "set", f"out{number}", "master", "stowbr", "up")
            within = ("ip", "netns", "exec", name)
            run(*within, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "stow")
            for link, megabits in (("lo", inside), ("stow", across)):
                run(*within, "ip", "link", "set", link, "up")
                limits = ("rate", f"{megabits}mbit", "burst", "256kb", "latency", "500ms")
                run(*within, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limits)
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
        subprocess.run(("ip", "link", "del", "stowbr"), capture_output=True, check=False)
