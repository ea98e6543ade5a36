"""Which fault, on which rank, in which layer, at which step: the JSON of the environment, checked once."""

from __future__ import annotations

import json
from typing import Any

FORWARD = ("raise", "sigkill", "sigstop", "exit0", "slow_step")
BACKWARD = ("deadlock", "endless_loop")
COLLECTIVE = ("skip_collective",)
KINDS = (*FORWARD, *BACKWARD, *COLLECTIVE)


class Spec:
    """Raises ValueError with the reason. `layer` is 0-based and not needed for collectives, `step` is 1-based."""

    def __init__(self, text: str) -> None:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a fault is a JSON object, got {text[:80]!r}")
        self.kind = str(fields.get("kind"))
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is none of {', '.join(KINDS)}")
        self.rank = _whole("rank", fields.get("rank"), at_least=0)
        self.step = _whole("step", fields.get("step") or 1, at_least=1)
        self.when = When(fields.get("when") or {})
        nowhere = self.kind in COLLECTIVE or self.when.in_recomputation
        self.layer = -1 if nowhere else _whole("layer", fields.get("layer"), at_least=0)
        heals_s = fields.get("heals_s")
        if heals_s is not None and (isinstance(heals_s, bool) or not isinstance(heals_s, (int, float)) or heals_s < 0):
            raise ValueError(f"fault heals_s is a number of seconds, got {heals_s!r}")
        self.heals_s: float | None = heals_s

    def __str__(self) -> str:
        where = "" if self.layer < 0 else f", layer {self.layer}"
        return f"{self.kind} on rank {self.rank}{where}, step {self.step}"


class When:
    """On what a fault depends besides its rank and step; a key that is missing or null asks nothing."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"fault when is a JSON object, got {fields!r}")
        self.recomputed = {_whole("layer", layer, at_least=0) for layer in fields.get("recomputed") or ()}
        self.any_recomputed = {_whole("layer", layer, at_least=0) for layer in fields.get("any_recomputed") or ()}
        self.recomputed_layers = _whole("recomputed_layers", fields.get("recomputed_layers") or 0, at_least=0)
        self.seq_len = _whole("seq_len", fields.get("seq_len") or 0, at_least=0)
        chance = fields.get("chance")
        self.chance = 1.0 if chance is None else float(chance)

    @property
    def in_recomputation(self) -> bool:
        """It comes true where a layer is computed again."""
        return bool(self.recomputed or self.any_recomputed or self.recomputed_layers)

    @property
    def depends(self) -> bool:
        """A run in which it does not happen is what was asked for."""
        return self.in_recomputation or self.seq_len > 0 or self.chance < 1.0

    def met_by(self, again: set[int]) -> bool:
        """`again`: the layers that this backward pass has computed again so far."""
        some = not self.any_recomputed or bool(self.any_recomputed & again)
        return some and self.recomputed <= again and len(again) >= self.recomputed_layers


def _whole(name: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"fault {name} is a whole number from {at_least}, got {value!r}")
    return value
