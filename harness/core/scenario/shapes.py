"""The headline numbers of nsa's named shapes, for the plan and its one line for people.

The harness never imports nsa; a test compares this table with nsa.config.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocab: int
    layers: int
    dim: int
    seq_len: int
    batch: int
    dtype: str


SHAPES = {
    "ci": Shape(vocab=256, layers=4, dim=128, seq_len=256, batch=2, dtype="float32"),
    "minimal": Shape(vocab=256, layers=2, dim=768, seq_len=512, batch=2, dtype="bfloat16"),
    "repro": Shape(vocab=256, layers=5, dim=128, seq_len=128, batch=1, dtype="float32"),
    "showcase": Shape(vocab=256, layers=1, dim=128, seq_len=128, batch=8, dtype="float32"),
    "shake": Shape(vocab=50257, layers=12, dim=768, seq_len=1024, batch=1, dtype="bfloat16"),
    "production": Shape(vocab=50257, layers=12, dim=768, seq_len=2048, batch=2, dtype="bfloat16"),
}
DTYPE_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
