"""Comparison of the dimensions of a saved model with those that a run requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..config import Attention, Compression, NSAConfig
from ..values import branches

# Fields of NSAConfig that do not affect the weights. A run may change them and still load the weights. No option sets
# the last two, so they are the same in every run.
_IGNORED = (
    "name",
    "seq_len",
    "dtype",
    "batch",
    "checkpointed",
    "stop_gradient_gates",
    "rope_base",
    "softmax_scale",
)


def dimensions(config: NSAConfig) -> dict[str, str]:
    """Return, as strings, the dimensions that determine the names and shapes of a model's weights."""
    fields = {key: value for key, value in asdict(config).items() if key not in _IGNORED}
    fields["phi"] = fields.pop("compression")
    return {key: "+".join(value) if isinstance(value, tuple) else str(value) for key, value in fields.items()}


def config_of(saved: Mapping[str, str]) -> NSAConfig:
    """Return a model configuration with the dimensions in `saved` and defaults for all other fields."""
    kinds = {"attention": Attention, "branches": branches, "phi": Compression}
    fields: dict[str, Any] = {key: kinds.get(key, int)(text) for key, text in saved.items()}
    return NSAConfig(name="saved", compression=fields.pop("phi"), **fields)


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield one phrase for each key of `wanted` whose value is missing or different in `saved`."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            yield f"saved with {key} {saved.get(key)}, this run has {value}"


def dimension_differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield one phrase for each dimension in which the saved and wanted models differ."""
    for mistake in differences(saved, wanted):
        is_phi = mistake.startswith("saved with phi ")
        yield f"{mistake}; give --compression {saved.get('phi')}" if is_phi else mistake
