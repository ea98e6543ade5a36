"""A program: what Triton would compile for tokens from pages, of many lengths and sequences; a line of JSON each.

    python tests/nsa/fused/variants_paged.py WIDTH DTYPE

Nothing is launched, and no GPU is needed: as variants.py does, it asks Triton whether a launch is a new one.
"""

from __future__ import annotations

import json
import sys

from variants import LENGTHS, look, new

import torch  # isort: skip
from triton.runtime.jit import JITFunction

from nsa_attention.config import ALL_BRANCHES
from nsa_attention.ops.cached_attention import CachedAttentionConfig, CachedRows, Kind
from nsa_attention.ops.fused.cached import attend_pages
from nsa_attention.ops.selection import Selection

SEQUENCES = (1, 2, 3, 16, 17)
HEADS, GROUPS, PAGE_LEN = 4, 2, 16


def step(sequences: int, longest: int, width: int, dtype: torch.dtype) -> None:
    """Of projections as a layer makes them: the heads of a token side by side."""
    selection = Selection(block_len=6, block_stride=3, select_len=8, select_count=32, scale=0.25)
    columns = -(-longest // PAGE_LEN)
    keys = torch.zeros(3 * columns, GROUPS, PAGE_LEN, width, dtype=dtype)
    tables = torch.zeros(sequences, 3, columns, dtype=torch.int32)
    lengths = torch.full((sequences,), longest, dtype=torch.int32)
    memory = dict.fromkeys(Kind, (keys, keys.clone()))
    rows = CachedRows(memory=memory, tables=tables, lengths=lengths, longest=longest)
    q = torch.zeros(1, HEADS, sequences, width, dtype=dtype)
    gates = torch.zeros(1, sequences, 3, HEADS, dtype=dtype).permute(2, 0, 3, 1)
    attend_pages(q, gates, rows, CachedAttentionConfig(selection=selection, window=20, branches=ALL_BRANCHES))


def main(words: list[str]) -> None:
    width, dtype = int(words[0]), getattr(torch, words[1])
    JITFunction.run = look
    for longest in LENGTHS:
        for sequences in SEQUENCES:
            new.clear()
            step(sequences, longest, width, dtype)
            print(json.dumps({"longest": longest, "sequences": sequences, "new": sorted(new)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
