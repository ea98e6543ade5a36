"""The members of each process group of this rank, and this rank's coordinates in a DeviceMesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .. import protocol
from .patches import TroubleLog, compiling_test, patch
from .status_file import StatusFileWriter

AXIS_LIMIT = 40  # characters
ATTEMPTS = 3  # to read a table that another thread changes meanwhile


class Groups:
    """Writes each group's members to the status file once, and again if the name is reused for other ranks."""

    def __init__(self, c10d: Any, status_file: StatusFileWriter) -> None:
        self._c10d = c10d
        self._status_file = status_file
        self._written: dict[str, str] = {}

    def write(self) -> None:
        """Write the groups in torch's table, which has the groups that this rank is a member of."""
        for name, ranks in self._members():
            value = ranges(ranks)
            if self._written.get(name) == value:
                continue
            self._written[name] = value
            fact = protocol.FACT_GROUP + name
            if fits(fact) and fits(value):
                self._status_file.fact(fact, value)

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


class MeshPlace:
    """This rank's coordinates in the largest mesh with named axes. Slices and flattened meshes do not count."""

    def __init__(self, status_file: StatusFileWriter) -> None:
        self._status_file = status_file
        self._best = (0, 0)  # ranks and axes of the mesh in the status file

    def consider(self, mesh: Any) -> None:
        names = getattr(mesh, "mesh_dim_names", None)
        if not names or getattr(mesh, "_root_mesh", None) is not None:
            return
        coordinate = mesh.get_coordinate()
        size = (int(mesh.mesh.numel()), len(names))
        if coordinate is None or size <= self._best:
            return
        value = " ".join(map(_on_axis, names, coordinate))
        if fits(value):
            self._best = size
            self._status_file.fact(protocol.FACT_MESH, value)


def watch_meshes(torch: Any, place: MeshPlace, trouble: TroubleLog) -> None:
    """Patch the constructor, which init_device_mesh calls, too. Raises if this torch has no DeviceMesh."""
    mesh_type = sys.modules["torch.distributed.device_mesh"].DeviceMesh

    def made(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            place.consider(arguments[0])

    patch(mesh_type, "__init__", "mesh", trouble, after=made, unless=compiling_test(torch))


def fits(text: str) -> bool:
    """Whether the status file stores the text whole. It cuts a longer one, and a cut number is another rank."""
    return len(text.encode("utf-8", "replace")) <= protocol.STRING_LIMIT


def ranges(ranks: Iterable[int]) -> str:
    """Return ascending ranks as text, with evenly spaced runs joined: "0-3,6", "0-12/4"."""
    left, parts = list(ranks), []
    while left:
        size = _run(left)
        first, last, stride = left[0], left[size - 1], left[1] - left[0] if size > 1 else 1
        parts.append(str(first) if size == 1 else f"{first}-{last}" if stride == 1 else f"{first}-{last}/{stride}")
        del left[:size]
    return ",".join(parts)


def _run(ranks: list[int]) -> int:
    """Return how many of the first ranks are evenly spaced. Two ranks are a run only if they are neighbours."""
    size = min(2, len(ranks))
    while size < len(ranks) and ranks[size] - ranks[size - 1] == ranks[1] - ranks[0]:
        size += 1
    return size if size != 2 or ranks[1] - ranks[0] == 1 else 1


def _on_axis(name: object, coordinate: object) -> str:
    """Return "axis=coordinate" with an axis name that the reader accepts: short, no space, no equals sign."""
    axis = str(name).replace(" ", "_").replace("=", "_")[:AXIS_LIMIT] or "_"
    return f"{axis}={coordinate}"
