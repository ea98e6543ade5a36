"""The random generator states and data position of a rank, as stored in a checkpoint."""

from __future__ import annotations

import json
import random
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..world import CannotRunError, World


@runtime_checkable
class HasPosition(Protocol):
    """Protocol for a data loader that can save and restore its position.

    The state consists of plain JSON values. If all ranks read the data in one common order, their states are equal, and
    a run with a different number of ranks can resume from the state.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def rank_file(rank: int) -> str:
    """Return the name of the file that stores the state of `rank` in a checkpoint."""
    return f"rank{rank}.json"


def rank_state_text(world: World, data: object) -> str:
    """Return this rank's data position and random generator states as JSON text."""
    position = data.state_dict() if isinstance(data, HasPosition) else None
    return json.dumps({"data": position, "random": _generators(world.device)}, indent=1) + "\n"


def restore_rank_state(checkpoint: Path, saved_by: int, world: World, data: object) -> list[str]:
    """Restore this rank's data position and random generators, and return messages about what could not be restored.

    `saved_by` is the number of ranks that wrote the checkpoint. If this number has changed, the random generators are
    not restored. Raises CannotRunError if it has changed and the saved ranks had different positions in the data.
    """
    ranks = [json.loads((checkpoint / rank_file(rank)).read_text(encoding="utf-8")) for rank in range(saved_by)]
    mine, same = ranks[world.rank % saved_by], saved_by == world.size
    if isinstance(data, HasPosition) and mine["data"] is not None:
        if not same and any(other["data"] != mine["data"] for other in ranks):
            raise CannotRunError(
                f"--resume {checkpoint}: each of {saved_by} ranks had its own position in the data, and this run "
                f"has {world.size}; start {saved_by} ranks"
            )
        data.load_state_dict(mine["data"])
    if same:
        _restore(mine["random"], world.device)
        return []
    return [
        f"saved by {saved_by} ranks, this run has {world.size}: the random number generators start again from the seed"
    ]


def _generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of PyTorch, Python and NumPy as JSON values."""
    states: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    if "numpy" in sys.modules:
        kind, numbers, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, numbers.tolist(), *rest]
    return states


def _restore(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    # A checkpoint that was saved on a CPU has no state of a CUDA generator.
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


def _text(state: Tensor) -> str:
    return b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
