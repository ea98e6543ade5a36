"""Who belongs together: the members of each process group of this rank, and its place in a DeviceMesh."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .. import protocol
from .hooks import compiling_test
from .status_file import StatusFileWriter
from .trouble import TroubleLog

AXIS_LIMIT = 40  # characters
ATTEMPTS = 3  # at a table that another thread changes while it is read


class Groups:
    """Tells each group once, and again when its name has come to mean other ranks."""

    def __init__(self, c10d: Any, board: StatusFileWriter) -> None:
        self._c10d = c10d
        self._board = board
        self._written: dict[str, str] = {}

    def tell(self) -> None:
        """Look through torch's table of groups. It has those that this rank is a member of."""
        for name, ranks in self._members():
            value = ranges(ranks)
            if self._written.get(name) == value:
                continue
            self._written[name] = value
            fact = protocol.FACT_GROUP + name
            if fits(fact) and fits(value):
                self._board.fact(fact, value)

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
    """This rank's coordinates in the largest mesh with named axes; slices and flattened meshes are parts of one."""

    def __init__(self, board: StatusFileWriter) -> None:
        self._board = board
        self._best = (0, 0)  # ranks and axes of the mesh that is on the board

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
            self._board.fact(protocol.FACT_MESH, value)


def watch_meshes(torch: Any, place: MeshPlace, trouble: TroubleLog) -> None:
    """Every mesh goes through its constructor, also those of init_device_mesh. Raises where this torch has none."""
    mesh_type = sys.modules["torch.distributed.device_mesh"].DeviceMesh
    construct: Callable[..., None] = mesh_type.__init__
    is_compiling = compiling_test(torch)

    @functools.wraps(construct)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        if not is_compiling():
            trouble.attempt("mesh", lambda: place.consider(self))

    mesh_type.__init__ = init


def fits(text: str) -> bool:
    """The board would cut what does not, and a cut number is another rank."""
    return len(text.encode("utf-8", "replace")) <= protocol.STRING_LIMIT


def ranges(ranks: Iterable[int]) -> str:
    """Ascending ranks, runs of three and more of one stride together: "0-3,6", "0-12/4"."""
    left, parts = list(ranks), []
    while left:
        size = _run(left)
        first, last, stride = left[0], left[size - 1], left[1] - left[0] if size > 1 else 1
        parts.append(str(first) if size == 1 else f"{first}-{last}" if stride == 1 else f"{first}-{last}/{stride}")
        del left[:size]
    return ",".join(parts)


def _run(ranks: list[int]) -> int:
    """How many of the first ranks are evenly spaced; two that are no neighbours are no run."""
    size = min(2, len(ranks))
    while size < len(ranks) and ranks[size] - ranks[size - 1] == ranks[1] - ranks[0]:
        size += 1
    return size if size != 2 or ranks[1] - ranks[0] == 1 else 1


def _on_axis(name: object, coordinate: object) -> str:
    """With the axis as the board's reader knows one: no space, no equals sign, not long."""
    axis = str(name).replace(" ", "_").replace("=", "_")[:AXIS_LIMIT] or "_"
    return f"{axis}={coordinate}"
