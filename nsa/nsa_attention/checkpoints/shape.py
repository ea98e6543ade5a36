"""The shape of a saved model, as text: what its weights depend on, and what may change and still use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..config import Attention, Compression, NSAConfig
from ..values import branches

# What a run may change and still use the weights.
_IGNORED = ("name", "seq_len", "dtype", "batch", "checkpointed", "stop_gradient_gates")
# Checkpoints without the field `phi` have `compression`, whose `mlp` was an MLP around the mean.
_PHI_OF_COMPRESSION = {"mlp": "mean_mlp", "mean": "mean"}


def dimensions(config: NSAConfig) -> dict[str, str]:
    """What the weights depend on, as text, so that it loads without trusting the file."""
    named = {key: value for key, value in asdict(config).items() if key not in _IGNORED}
    named["phi"] = named.pop("compression")
    return {key: "+".join(value) if isinstance(value, tuple) else str(value) for key, value in named.items()}


def shape_of(saved: Mapping[str, str]) -> NSAConfig:
    """The shape whose `dimensions` these are; fields that the weights do not depend on have their defaults."""
    kinds = {"attention": Attention, "branches": branches, "phi": Compression}
    fields: dict[str, Any] = {key: kinds.get(key, int)(text) for key, text in _told_of_phi(saved).items()}
    return NSAConfig(name="saved", compression=fields.pop("phi"), **fields)


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """What differs, each as a phrase."""
    for key, value in wanted.items():
        if saved.get(key) != value:
            yield f"saved with {key} {saved.get(key)}, this run has {value}"


def dimensions_differ(saved: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """What keeps the weights from being loaded, each as a phrase that names the option where there is one."""
    saved = _told_of_phi(saved)
    for mistake in differences(saved, wanted):
        of_phi = mistake.startswith("saved with phi ")
        yield f"{mistake}; give --compression {saved['phi']}" if of_phi else mistake


def _told_of_phi(saved: Mapping[str, str]) -> dict[str, str]:
    told = dict(saved)
    if (of_older := told.pop("compression", None)) is not None:
        told["phi"] = _PHI_OF_COMPRESSION.get(of_older, of_older)
    return told
