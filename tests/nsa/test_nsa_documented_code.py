"""The code of the pages about the layer and about decoding runs, from the first block of a page to the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from documents import blocks

from nsa_attention import NSAConfig, NSAttention, TinyLM

PAGES = ["docs/internals/nsa/layer-and-function.md", "docs/internals/nsa/decoding.md"]


def names_that_the_pages_leave_to_the_reader() -> dict[str, Any]:
    """Return a small model, prompts and tokens, by the names that the pages have for them."""
    sizes = {"block_size": 16, "block_count": 4, "window": 32}
    return {
        "torch": torch,
        "NSAttention": NSAttention,
        "model": TinyLM.from_config(NSAConfig(layers=2, vocab=256)),
        "prompt_BT": torch.randint(256, (2, 50)),
        "token_B1": torch.randint(256, (2, 1)),
        "prompt_T": torch.randint(256, (30,)),
        "another_T": torch.randint(256, (40,)),
        "x": torch.randn(8, 20, 1024),
        "x_2": torch.randn(2, 3, 1024),
        "attention_layers": [NSAttention(64, 4, 2, **sizes) for _ in range(3)],
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str) -> None:
    program = "\n".join(blocks(page, "python"))
    assert "assert" in program
    exec(compile(program, page, "exec"), names_that_the_pages_leave_to_the_reader())
