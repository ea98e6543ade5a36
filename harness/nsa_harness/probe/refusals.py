"""Explains an exception of the operating system or of an import. Loaded only after the final exception."""

from __future__ import annotations

import errno
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILES_LIMIT = 3  # kinds of open files that are named
_NOT_A_PACKAGE = re.compile(r"No module named '[\w.]+'; '([\w.]+)' is not a package")


def hints(error: BaseException) -> list[dict[str, Any]]:
    """Return hints with the keys kind and name.

    If the process had no file descriptor left, each hint names an open file and how often it is open. If a module was
    imported from a file that hides an installed package, one hint names this file.
    """
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return [{"kind": "open file", "name": name} for name in _most_open_files()]
    path = _hiding_file(error)
    return [{"kind": "hiding file", "name": path}] if path else []


def _most_open_files() -> list[str]:
    """Return texts like "118 data.bin" for what the process has open most often, with the total at the end."""
    counts: dict[str, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor of the listing itself
        name = target if target.startswith("/") else target.partition(":")[0]
        counts[name] = counts.get(name, 0) + 1
    often = sorted(counts, key=lambda name: (-counts[name], name))[:FILES_LIMIT]
    return [*(f"{counts[name]} {name}" for name in often), f"{sum(counts.values())} "]


def _hiding_file(error: BaseException) -> str:
    """Return the file of a module that hides a package of the same name, or "" if the error is another one."""
    match = _NOT_A_PACKAGE.match(str(error)) if isinstance(error, ModuleNotFoundError) else None
    path = getattr(sys.modules.get(match[1]), "__file__", None) if match else None
    if match is None or not isinstance(path, str):
        return ""
    import importlib.machinery

    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(os.path.abspath(path))]
    package = importlib.machinery.PathFinder.find_spec(match[1], others)
    return path if package is not None and package.submodule_search_locations else ""
