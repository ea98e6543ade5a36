"""The layer in a model of one's own: positions, packed rows, errors, and what the training program builds it from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import nsa_attention
from nsa_attention.attention import NSAttention
from nsa_attention.config import Attention, Branch, NSAConfig
from nsa_attention.model import TinyLM
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies
from nsa_attention.projections import TokenContext

TOLERANCE = 1e-10
SIZES = {"block_size": 6, "block_count": 4, "compress_size": 6, "compress_stride": 3, "window": 7}
WIDTH = 24


def layer(**options: object) -> NSAttention:
    """Heads of width 6 in groups of two."""
    return NSAttention(WIDTH, 4, 2, **(SIZES | options)).double()  # type: ignore[arg-type]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def test_takes_tokens_and_nothing_else_and_is_trained_by_any_loss() -> None:
    model = nn.Sequential(nn.Linear(3, WIDTH), nsa_attention.NSAttention(WIDTH, 4, 2, **SIZES), nn.Linear(WIDTH, 1))
    model(torch.randn(2, 40, 3)).square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_the_defaults_are_those_of_the_paper() -> None:
    config = NSAttention(512, 8, 2).config
    assert (config.block_len, config.block_stride, config.select_len, config.select_count) == (32, 16, 64, 16)
    assert (config.window, config.d_k, config.d_v, config.scale) == (512, 64, 64, 64**-0.5)


def test_is_the_layer_of_a_model_of_these_sizes() -> None:
    """The same weights from the same seed, under the same names, and the same output bit for bit."""
    torch.manual_seed(3)
    own = NSAttention(WIDTH, 4, 2, head_dim=6, v_head_dim=5, **SIZES)
    torch.manual_seed(3)
    config = NSAConfig(
        dim=WIDTH, heads=4, groups=2, d_k=6, d_v=5, block_len=6, block_stride=3, select_len=6, select_count=4, window=7
    )
    of_model = NSAttention.from_config(config)
    assert own.state_dict().keys() == of_model.state_dict().keys()
    assert all(torch.equal(one, of_model.state_dict()[name]) for name, one in own.state_dict().items())
    x = tokens(2, 40).float()
    context = TokenContext(rotary_cos_sin(rotary_frequencies(6), 40))
    assert torch.equal(own(x), of_model(x, context=context))


def test_a_model_names_its_weights_as_ever(tiny: NSAConfig) -> None:
    """Checkpoints are loaded by these names."""
    names = [name.removeprefix("blocks.0.attn.") for name, _ in TinyLM.from_config(tiny).named_parameters()]
    phi = [f"{one}_blocks.{name}" for one in "kv" for name in ("position", *linear("hidden"), *linear("out"))]
    own = [
        "q_proj.weight",
        *(f"cmp.{name}" for name in ("k_proj.weight", "v_proj.weight", *phi)),
        *("sel.k_proj.weight", "sel.v_proj.weight", "win.k_proj.weight", "win.v_proj.weight"),
        *("gate_mlp.weight", "gate_mlp.bias", "gate_mlp.hidden.weight", "gate_mlp.hidden.bias", "out_proj.weight"),
    ]
    assert names[2 : 2 + len(own)] == own


def linear(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


class TestPositions:
    def test_count_from_0_by_default(self) -> None:
        attention, x = layer(), tokens(2, 40)
        assert torch.equal(attention(x), attention(x, positions=torch.arange(40)))

    @pytest.mark.parametrize("shift", [17, -5])
    def test_matter_by_their_differences_only(self, shift: int) -> None:
        attention, x = layer(), tokens(2, 40)
        shifted = attention(x, positions=torch.arange(40) + shift)
        torch.testing.assert_close(shifted, attention(x), rtol=0, atol=TOLERANCE)
        assert not torch.allclose(attention(x, positions=2 * torch.arange(40)), attention(x))

    def test_may_differ_between_sequences(self) -> None:
        attention, x = layer(), tokens(2, 40).requires_grad_()
        positions = torch.stack((torch.arange(40), 3 * torch.arange(40)))
        together = attention(x, positions=positions)
        apart = torch.cat([attention(x[row : row + 1], positions=positions[row]) for row in range(2)])
        torch.testing.assert_close(together, apart, rtol=0, atol=TOLERANCE)
        ours, theirs = (torch.autograd.grad(output.square().sum(), x)[0] for output in (together, apart))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)

    def test_turn_by_the_base_that_was_given(self) -> None:
        x, attention, other = tokens(1, 40), layer(), layer(rope_base=500.0)
        other.load_state_dict(attention.state_dict())
        context = TokenContext(rotary_cos_sin(rotary_frequencies(6, 500.0).double(), 40))
        assert torch.equal(other(x), attention(x, context=context))
        assert not torch.allclose(other(x), attention(x))


def test_scores_are_scaled_by_the_factor_that_was_given() -> None:
    x, attention, other = tokens(1, 40), layer(), layer(scale=0.25 * 6**-0.5)
    other.load_state_dict(attention.state_dict())
    assert not torch.allclose(other(x), attention(x))
    other.q_proj.weight.data *= 4
    torch.testing.assert_close(other(x), attention(x), rtol=0, atol=TOLERANCE)


class TestPackedRows:
    lengths = (17, 0, 5, 11)

    def starts(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    def test_are_the_sequences_each_by_itself(self) -> None:
        attention, x = layer(), tokens(1, sum(self.lengths))
        apart = torch.cat([attention(one) for one in x.split(self.lengths, 1)], 1)
        torch.testing.assert_close(attention(x, cu_seqlens=self.starts()), apart, rtol=0, atol=TOLERANCE)

    def test_take_positions_of_their_own(self) -> None:
        attention, x = layer(), tokens(1, sum(self.lengths))
        positions = torch.cat([torch.arange(length) for length in self.lengths])
        default = attention(x, cu_seqlens=self.starts())
        assert torch.equal(attention(x, positions, self.starts()), default)
        assert not torch.allclose(attention(x, 2 * positions, self.starts()), default)

    def test_that_change_in_place_are_read_again(self) -> None:
        attention, x, starts = layer(), tokens(1, 20), torch.tensor([0, 8, 20], dtype=torch.int32)
        attention(x, cu_seqlens=starts)
        starts[1] = 12
        expected = attention(x, cu_seqlens=torch.tensor([0, 12, 20], dtype=torch.int32))
        assert torch.equal(attention(x, cu_seqlens=starts), expected)


def test_no_token_depends_on_later_ones() -> None:
    attention, x = layer(), tokens(1, 40)
    before = attention(x)
    for cut in (1, 9, 20, 39):
        changed = torch.cat((x[:, :cut], tokens(1, 40 - cut)), 1)
        torch.testing.assert_close(attention(changed)[:, :cut], before[:, :cut], rtol=0, atol=1e-12)


def test_weights_are_made_where_and_as_they_are_wanted() -> None:
    made = NSAttention(WIDTH, 4, 2, device="meta", dtype=torch.bfloat16, **SIZES)
    assert {(str(one.device), one.dtype) for one in made.parameters()} == {("meta", torch.bfloat16)}
    half = NSAttention(WIDTH, 4, 2, dtype=torch.bfloat16, **SIZES)
    assert half(torch.randn(1, 20, WIDTH, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_implementations_are_asked_for_by_name() -> None:
    with pytest.raises(nsa_attention.MissingImplementationError, match="--impl flash: flash-attn runs on CUDA only"):
        layer(implementation="flash")(tokens(1, 9))
    plain, fast = layer(implementation="eager"), layer()
    plain.load_state_dict(fast.state_dict())
    x = tokens(2, 40)
    torch.testing.assert_close(plain(x), fast(x), rtol=0, atol=TOLERANCE)


class TestErrors:
    def test_of_a_layer_are_listed_in_one(self) -> None:
        options = {"head_dim": 5, "compress_size": 20, "compress_stride": 8, "block_count": 2, "window": 0}
        with pytest.raises(ValueError, match=r"^NSAttention: ") as raised:
            NSAttention(WIDTH, 4, 3, **options, compression="max", implementation="fast", dtype=torch.int32)
        assert str(raised.value).removeprefix("NSAttention: ").split("; ") == [
            "compression: expected mlp, mean, mean_mlp, got 'max'",
            "implementation: expected auto, eager, triton, torch, flash, per_token, dense, got 'fast'",
            "window: expected at least 1, got 0",
            "head_dim: expected an even number (rotary positions turn pairs), got 5",
            "heads: expected a multiple of kv_heads (3), got 4",
            "block_count: expected at least 3 (block 0, the current and the previous one are always chosen), got 2",
            "compress_size: expected a multiple of compress_stride (8), got 20",
            "dtype: expected a floating-point dtype, got torch.int32",
        ]

    @pytest.mark.parametrize(
        ("numbers", "said"),
        [
            ((24, 5, 1), "head_dim: must be given, because heads (5) do not divide dim (24)"),
            ((24, 0, 1), "heads: expected at least 1, got 0"),
            (
                (0, 4, 2),
                "dim: expected at least 1, got 0; v_head_dim: expected at least 1, got 0; head_dim: expected an",
            ),
            ((24, 4, 0), "kv_heads: expected at least 1, got 0"),
        ],
    )
    def test_of_its_numbers_name_the_arguments(self, numbers: tuple[int, int, int], said: str) -> None:
        with pytest.raises(ValueError, match=r"^NSAttention: ") as raised:
            NSAttention(*numbers)
        assert said in str(raised.value)

    @pytest.mark.parametrize(
        ("x", "arguments", "said"),
        [
            (torch.randn(40, WIDTH), {}, "x: expected floats [B, T, 24], got torch.float32 [40, 24]"),
            (torch.randn(1, 40, 23), {}, "x: expected floats [B, T, 24], got torch.float32 [1, 40, 23]"),
            (
                torch.randn(2, 40, WIDTH),
                {"positions": torch.zeros(3, 40), "cu_seqlens": torch.tensor([0, 40])},
                "positions: expected [40] or [2, 40], got [3, 40]; positions: expected integers, got torch.float32; "
                "cu_seqlens: expected a batch of 1, all sequences in one row, got 2; cu_seqlens: expected torch.int32 "
                "(cu_seqlens.int()), got torch.int64",
            ),
            (
                torch.randn(1, 40, WIDTH),
                {"cu_seqlens": torch.tensor([1, 30, 20, 39], dtype=torch.int32)},
                "cu_seqlens: expected it from 0 to T = 40, got 1 to 39; cu_seqlens: expected it ascending, got 30 "
                "before 20 at place 1",
            ),
        ],
    )
    def test_of_a_call_are_listed_in_one(self, x: Tensor, arguments: dict[str, Tensor], said: str) -> None:
        with pytest.raises(ValueError, match=r"^NSAttention: ") as raised:
            NSAttention(WIDTH, 4, 2, **SIZES)(x, **arguments)
        assert str(raised.value) == f"NSAttention: {said}"


def test_a_layer_of_some_branches_takes_the_same_arguments(tiny: NSAConfig) -> None:
    for branches in ((Branch.WIN,), (Branch.CMP, Branch.SEL)):
        attention = NSAttention.from_config(replace(tiny, branches=branches)).double()
        x, starts = tokens(1, 30), torch.tensor([0, 12, 30], dtype=torch.int32)
        apart = torch.cat([attention(one) for one in x.split([12, 18], 1)], 1)
        torch.testing.assert_close(attention(x, cu_seqlens=starts), apart, rtol=0, atol=TOLERANCE)


def test_the_training_program_uses_the_same_class(tiny: NSAConfig) -> None:
    assert type(TinyLM.from_config(replace(tiny, attention=Attention.NSA)).blocks[0].attn) is nsa_attention.NSAttention


class LowRank(nn.Module):
    """A projection with a low-rank correction, written without any knowledge of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        corrected: Tensor = self.base(x) + self.up(self.down(x))
        return corrected


@pytest.mark.parametrize("length", [8, 40])
def test_any_module_may_take_the_place_of_a_projection(length: int) -> None:
    """Also with few tokens, whose projections are computed one by one, and with a cache."""
    model, x = layer(), tokens(1, length)
    expected = layer()
    expected.load_state_dict(model.state_dict())
    for module in (model, expected):
        torch.manual_seed(3)
        replaced = [(module, "q_proj"), (module.cmp, "k_proj"), (module.win, "v_proj")]
        for parent, name in replaced:
            correction = LowRank(getattr(parent, name))
            if module is model:
                setattr(parent, name, correction)
            else:
                with torch.no_grad():
                    correction.base.weight += correction.up.weight @ correction.down.weight
    torch.testing.assert_close(model(x), expected(x), rtol=0, atol=1e-12)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        parts = [model(part, cache=cache) for cache in [model.new_cache(1)] for part in x.split(3, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected(x), rtol=0, atol=1e-12)


def test_a_layer_from_the_meta_device_can_be_initialized() -> None:
    model = NSAttention(WIDTH, 4, 2, **SIZES, device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_its_text_has_the_sizes() -> None:
    text = repr(NSAttention(64, 4, 2, window=100))
    assert (
        "(\n  dim=64, heads=4, kv_heads=2, head_dim=16, v_head_dim=16, compress_size=32, compress_stride=16, " in text
    )
    assert "block_size=64, block_count=16, window=100\n" in text


def test_numbers_of_another_type_are_mistakes() -> None:
    with pytest.raises(
        ValueError, match=r"NSAttention: block_count: expected an integer, got '4'; window: expected an"
    ):
        NSAttention(64, 4, 2, window=32.0, block_count="4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: expected a floating-point dtype, got bfloat16"):
        NSAttention(64, 4, 2, dtype="bfloat16")  # type: ignore[arg-type]
