"""Which tensors the hardware copies by tiles, and how they are described to it."""

from __future__ import annotations

import pytest
import torch

from nsa_attention.ops.fused import descriptors
from nsa_attention.ops.fused.descriptors import can_describe, make_descriptor


@pytest.fixture
def _hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "supports_descriptors", lambda _tensor: True)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def test_on_a_cpu_nothing_is_copied_by_tiles() -> None:
    assert not can_describe(halves(1, 2, 8, 16))


@pytest.mark.usefixtures("_hardware")
def test_dense_rows_on_multiples_of_16_bytes_are_describable() -> None:
    by_token = halves(2, 8, 3, 16)
    assert can_describe(by_token, by_token.transpose(1, 2), by_token[:, 2:], by_token[..., 8:])
    # One sequence, whose stride may be any number.
    assert can_describe(by_token[:1].as_strided((1, 8, 3, 16), (7, 48, 16, 1)))
    assert can_describe(halves(2, 3, 0, 16))


@pytest.mark.usefixtures("_hardware")
@pytest.mark.parametrize(
    "tensor",
    [
        halves(1, 2, 8, 4),
        halves(1, 2, 8, 16).mT,
        halves(1, 2, 8, 17)[..., :16],
        halves(1, 2, 8, 32)[..., 1:17],
        halves(1, 2, 8, 32)[..., ::2],
        halves(1, 1, 1, 1).expand(1, 2, 8, 16),
        halves(1, 2, 1, 16).expand(1, 2, 8, 16),
        halves(1, 2, 0, 4),
    ],
    ids=[
        "rows of 8 bytes",
        "turned around",
        "odd strides",
        "odd address",
        "every other",
        "one value",
        "one row",
        "empty, odd rows",
    ],
)
def test_all_others_go_by_pointers(tensor: torch.Tensor) -> None:
    assert not can_describe(tensor)
    assert not can_describe(halves(1, 2, 8, 16), tensor)


def test_a_tensor_is_described_with_strides_that_the_hardware_takes() -> None:
    tensor = halves(1, 8, 3, 16).as_strided((1, 8, 3, 16), (7, 48, 16, 1))
    found = make_descriptor(tensor, (1, 2, 2, 16))
    assert (found.shape, found.strides, found.block_shape) == ([1, 8, 3, 16], [16, 48, 16, 1], [1, 2, 2, 16])


def test_of_an_empty_tensor_a_row_of_zeros_is_described() -> None:
    found = make_descriptor(halves(1, 2, 0, 16), (1, 1, 16, 16))
    assert found.shape == [1, 2, 1, 16]
    assert not found.base.any()
