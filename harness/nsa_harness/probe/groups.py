"""Records the members of this rank's process groups and the rank's coordinates in a DeviceMesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .. import protocol
from .patches import TroubleLog, compiling_test, patch
from .status_file import StatusFileWriter

AXIS_LIMIT = 40  # characters of the name of an axis
ATTEMPTS = 3  # attempts to read a table that another thread may be changing


class Groups:
    """A recorder that writes the ranks of each process group to the status file."""

    def __init__(self, c10d: Any, status_file: StatusFileWriter) -> None:
        self._c10d = c10d
        self._status_file = status_file
        self._written_members: dict[str, str] = {}

    def write(self) -> None:
        """Write the ranks of each process group that is not in the status file yet."""
        for name, ranks in self._members():
            value = ranges(ranks)
            if self._written_members.get(name) == value:
                continue
            self._written_members[name] = value
            fact = protocol.FACT_GROUP + name
            if fits(fact) and fits(value):
                self._status_file.write_fact(fact, value)

    def _members(self) -> list[tuple[str, list[int]]]:
        world = self._c10d._world
        for attempt in range(ATTEMPTS):
            try:
                groups = list(world.pg_group_ranks.items())
                break
            except RuntimeError:  # "dictionary changed size during iteration"
                if attempt + 1 == ATTEMPTS:
                    raise
        names = world.pg_names
        return [(str(names[group]), sorted(map(int, dict(members)))) for group, members in groups if group in names]


class MeshCoordinates:
    """A recorder of this rank's coordinates in the largest DeviceMesh that has names and is no slice of another."""

    def __init__(self, status_file: StatusFileWriter) -> None:
        self._status_file = status_file
        self._largest_size = (0, 0)  # ranks and axes of the mesh in the status file

    def write_if_larger(self, mesh: Any) -> None:
        """Write this rank's coordinates in `mesh` if it is the largest mesh seen so far."""
        names = getattr(mesh, "mesh_dim_names", None)
        if not names or getattr(mesh, "_root_mesh", None) is not None:
            return
        coordinate = mesh.get_coordinate()
        size = (int(mesh.mesh.numel()), len(names))
        if coordinate is None or size <= self._largest_size:
            return
        value = " ".join(map(_on_axis, names, coordinate))
        if fits(value):
            self._largest_size = size
            self._status_file.write_fact(protocol.FACT_MESH, value)


def watch_meshes(torch: Any, coordinates: MeshCoordinates, trouble: TroubleLog) -> None:
    """Pass each new DeviceMesh of the program to `coordinates`. Raise an exception if this torch has no DeviceMesh."""
    mesh_type = sys.modules["torch.distributed.device_mesh"].DeviceMesh

    def mesh_constructed(
        _state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None
    ) -> None:
        if error is None:
            coordinates.write_if_larger(arguments[0])

    patch(mesh_type, "__init__", "mesh", trouble, after=mesh_constructed, unless=compiling_test(torch))


def fits(text: str) -> bool:
    """Return whether `text` fits into one string of the status file."""
    return len(text.encode("utf-8", "replace")) <= protocol.STRING_LIMIT


def ranges(ranks: Iterable[int]) -> str:
    """Return a short string for sorted ranks, such as "0-3,6" or "0-12/4"."""
    remaining, parts = list(ranks), []
    while remaining:
        size = _run(remaining)
        first, last, stride = remaining[0], remaining[size - 1], remaining[1] - remaining[0] if size > 1 else 1
        parts.append(str(first) if size == 1 else f"{first}-{last}" if stride == 1 else f"{first}-{last}/{stride}")
        del remaining[:size]
    return ",".join(parts)


def _run(ranks: list[int]) -> int:
    """Return the number of evenly spaced ranks at the start. Only two must be consecutive, or else 1 is returned."""
    size = min(2, len(ranks))
    while size < len(ranks) and ranks[size] - ranks[size - 1] == ranks[1] - ranks[0]:
        size += 1
    return size if size != 2 or ranks[1] - ranks[0] == 1 else 1


def _on_axis(name: object, coordinate: object) -> str:
    """Return the coordinate on the mesh axis `name` as a string such as "dp=0"."""
    axis = str(name).replace(" ", "_").replace("=", "_")[:AXIS_LIMIT] or "_"
    return f"{axis}={coordinate}"
