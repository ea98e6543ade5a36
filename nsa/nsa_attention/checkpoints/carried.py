"""What a rank carries from step to step besides tensors: its generators of random numbers, its position in the data."""

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
class Positioned(Protocol):
    """Data that knows how far it was read, as torch's stateful loaders do. The state is of plain JSON values.

    Where the order of the data is one for all ranks, so is the state, and another number of ranks may go on from it.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def rank_file(rank: int) -> str:
    return f"rank{rank}.json"


def carried_text(world: World, data: object) -> str:
    """Of this rank, now. It is text, so that a person can read how far the data was."""
    position = data.state_dict() if isinstance(data, Positioned) else None
    return json.dumps({"data": position, "random": _generators(world.device)}, indent=1) + "\n"


def take_up(checkpoint: Path, saved_by: int, world: World, data: object) -> list[str]:
    """Let this rank go on from where it was; `saved_by` ranks were there. Returns what is not as it was, for people.

    Raises CannotRunError for positions in the data that another number of ranks cannot take up.
    """
    ranks = [json.loads((checkpoint / rank_file(rank)).read_text(encoding="utf-8")) for rank in range(saved_by)]
    mine, same = ranks[world.rank % saved_by], saved_by == world.size
    if isinstance(data, Positioned) and mine["data"] is not None:
        if not same and any(one["data"] != mine["data"] for one in ranks):
            raise CannotRunError(
                f"--resume {checkpoint}: each of {saved_by} ranks was at a place of its own in the data and this run "
                f"has {world.size}; start {saved_by} ranks"
            )
        data.load_state_dict(mine["data"])
    if same:
        _restore(mine["random"], world.device)
        return []
    return [f"saved by {saved_by} ranks, this run has {world.size}: their generators of random numbers begin anew"]


def _generators(device: torch.device) -> dict[str, Any]:
    """As JSON: torch's own as text, those of Python and numpy as their numbers."""
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
    # Saved on another kind of device there is none for this one.
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


def _text(state: Tensor) -> str:
    return b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
