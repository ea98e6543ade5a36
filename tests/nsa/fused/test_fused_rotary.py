"""The kernel for rotary embeddings: the plain formula in float64, for any strides, positions and sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa_attention.attention import NSAttention
from nsa_attention.config import Attention, Branch, Implementation, NSAConfig
from nsa_attention.model import TinyLM
from nsa_attention.ops import rotary
from nsa_attention.ops.fused.launch import CannotLaunchError, launches
from nsa_attention.ops.rotary import cos_sin_at, rotary_cos_sin, rotary_frequencies, rotate, rotate_queries_and_keys

TOLERANCE = 1e-12
TRITON = Implementation.TRITON
# Batch, heads of queries, heads of keys, tokens, width.
CASES = [(1, 1, 1, 1, 2), (2, 3, 1, 33, 6), (2, 5, 5, 17, 16), (1, 4, 2, 50, 130), (3, 8, 2, 9, 80), (1, 2, 1, 70, 256)]


def plain(x_BHTD: Tensor, cos_sin: Tensor) -> Tensor:
    """The pairs as complex numbers, multiplied by e^(i angle)."""
    cosine, sine = cos_sin.double() if cos_sin.dim() == 3 else cos_sin.double().unsqueeze(2)
    first, second = x_BHTD.double().chunk(2, -1)
    product = torch.complex(first, second) * torch.complex(cosine, sine)
    return torch.cat((product.real, product.imag), -1)


def table(positions: Tensor, width: int) -> Tensor:
    return cos_sin_at(rotary_frequencies(width).double(), positions)


def projected(batch: int, tokens: int, width: int, *heads: int) -> tuple[Tensor, list[Tensor]]:
    """A joint projection with columns that are not rotated, and the views of it that are."""
    joint = torch.randn(batch, tokens, (sum(heads) + 1) * width + 3, dtype=torch.float64, requires_grad=True)
    columns = joint[..., 3:].split([width * count for count in (*heads, 1)], -1)
    return joint, [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in columns[: len(heads)]]


def assert_same(joint: Tensor, ours: list[Tensor], theirs: list[Tensor]) -> None:
    upstream = [torch.randn_like(each) for each in theirs]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    gradients = [torch.autograd.grad(results, joint, upstream, retain_graph=True)[0] for results in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["the same positions", "positions of each row"])
def test_values_and_gradients_are_those_of_the_formula(case: tuple[int, ...], per_row: bool) -> None:
    batch, heads, groups, tokens, width = case
    joint, (q, k_selected, k_sliding, k_tokens) = projected(batch, tokens, width, heads, groups, groups, groups)
    k_blocks = k_tokens[:, :, ::2].mul(1.5)  # fewer keys, with the positions of every second token
    positions = torch.randint(99, (batch, tokens) if per_row else (tokens,))
    angles = table(positions, width)
    tensors, tables = [q, k_selected, k_sliding, k_blocks], [angles] * 3 + [angles[..., ::2, :]]
    before = launches["rotated"]
    ours = rotate_queries_and_keys(q, tensors[1:], tables, TRITON)
    assert launches["rotated"] == before + 1
    assert ours[0].transpose(1, 2).is_contiguous()
    assert all(keys.is_contiguous() for keys in ours[1:])
    assert_same(joint, ours, [plain(*pair) for pair in zip(tensors, tables, strict=True)])
    assert launches["rotated"] == before + 2


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_any_number_of_tensors(count: int) -> None:
    joint, tensors = projected(2, 7, 6, *range(1, count + 1))
    angles = table(torch.arange(7), 6)
    before = launches["rotated"]
    ours = rotate_queries_and_keys(tensors[0], tensors[1:], [angles] * count, TRITON)
    assert launches["rotated"] == before + -(-count // 4)
    assert_same(joint, ours, [plain(tensor, angles) for tensor in tensors])


def test_any_strides_of_tensors_and_tables() -> None:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    angles = table(torch.randint(50, (2, 9)), 8)
    rows = [x, x.mT.contiguous().mT, x.transpose(0, 2).contiguous().transpose(0, 2), x.flip(2)[:, :, ::2]]
    tables = [
        angles.mT.contiguous().mT,
        torch.cat((angles, angles[..., :1]), -1)[..., :4],
        angles[:, :1],
        angles[:, :, :5],
    ]
    theirs = [plain(*pair) for pair in zip(rows, tables, strict=True)]
    assert_same(x, [rotate(*pair, TRITON) for pair in zip(rows, tables, strict=True)], theirs)
    # An upstream gradient that is one number for all elements has strides of 0.
    ours, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (rotate(x, angles, TRITON), plain(x, angles)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def test_torch_finds_the_operator_sound() -> None:
    _, tensors = projected(2, 9, 6, 2, 1)
    tables = [table(torch.arange(9), 6)] * 2
    for sign, by_token in ((1.0, [True, False]), (-1.0, [True, True])):
        torch.library.opcheck(rotary._rotate, (tensors, tables, sign, by_token, "triton"))
    double = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    angles = table(torch.arange(3), 4)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles, TRITON), double)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, angles, TRITON), double)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float16),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("half_table", [False, True], ids=["float32 table", "half table"])
def test_half_precision_is_rounded_once(device: str, dtype: torch.dtype, half_table: bool) -> None:
    x = torch.randn(1, 4, 300, 64, device=device, dtype=dtype)
    angles = rotary_cos_sin(rotary_frequencies(64), 300).to(device, dtype if half_table else torch.float32)
    exact = plain(x, angles.to(dtype))
    ours = rotate(x, angles, TRITON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "is_eager_on_cpu", lambda _: False)
        products = rotate(x, angles, Implementation.EAGER)
    assert ours.dtype is products.dtype is dtype
    # The nearest number of the dtype, except where the sum in float32 lies halfway between two of them.
    assert (ours != exact.to(dtype)).double().mean() < 1e-3 < (products != exact.to(dtype)).double().mean()
    assert (ours.double() - exact).abs().max() <= (products.double() - exact).abs().max()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)], ids=str)
def test_an_empty_tensor_is_no_launch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    before = launches["rotated"]
    y = rotate(x, table(torch.arange(shape[2]), 4), TRITON)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == gradient.shape == shape
    assert launches["rotated"] == before


def test_a_tensor_without_tokens_may_stand_beside_others() -> None:
    """As the compressed keys of a sequence that is shorter than a block."""
    joint, (q, k) = projected(2, 5, 6, 3, 2)
    angles = table(torch.arange(5), 6)
    ours = rotate_queries_and_keys(q, [k[:, :, :0], k], [angles, angles[:, :0], angles], TRITON)
    assert_same(joint, ours, [plain(q, angles), k[:, :, :0], plain(k, angles)])


def test_a_table_that_is_too_short_is_not_read_beyond_its_end() -> None:
    x = torch.randn(1, 2, 5, 4)
    for wrong in (rotary_cos_sin(rotary_frequencies(4), 4), rotary_cos_sin(rotary_frequencies(6), 5)):
        with pytest.raises(CannotLaunchError, match="expected 2 for each of 5 tokens of width 4"):
            rotate(x, wrong, TRITON)


@torch.inference_mode()
def test_inference_mode() -> None:
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    angles = table(torch.arange(5), 4)
    torch.testing.assert_close(rotate(x, angles, TRITON), plain(x, angles), rtol=0, atol=TOLERANCE)


def compiled(x: Tensor, angles: Tensor) -> Tensor:
    run = torch.compile(lambda x, angles: rotate(x, angles, TRITON), backend="aot_eager", fullgraph=True)
    result: Tensor = run(x, angles)
    return result


@pytest.mark.parametrize(
    "run",
    [
        rotate,
        lambda x, angles: rotate(x, angles, Implementation.EAGER),
        lambda x, angles: rotate(x, angles, Implementation.DENSE),
        lambda x, angles: rotate(x.bfloat16(), angles, TRITON),
        compiled,
    ],
    ids=["auto", "eager", "dense", "bfloat16", "compiled"],
)
def test_the_interpreter_runs_only_where_it_can_and_if_it_is_requested(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compiled code fuses the products itself; the interpreter cannot compute in bfloat16."""
    x, angles = torch.randn(1, 2, 5, 4, dtype=torch.float64), table(torch.arange(5), 4)
    rotate(x, angles, TRITON)
    before = launches["rotated"]
    result = run(x, angles)
    assert launches["rotated"] == before
    atol = 0.1 if result.dtype is torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(result.double(), plain(x, angles), rtol=0, atol=atol)


@pytest.fixture
def small(tiny: NSAConfig) -> NSAConfig:
    return replace(tiny, layers=1, heads=2, groups=1, seq_len=21)


@pytest.mark.parametrize("branches", [(Branch.CMP, Branch.SEL, Branch.WIN), (Branch.SEL, Branch.WIN)], ids=len)
@pytest.mark.parametrize("kind", ["positions", "positions of each row", "documents"])
def test_a_layer_rotates_by_the_positions_that_it_is_given(
    small: NSAConfig, kind: str, branches: tuple[Branch, ...]
) -> None:
    config = replace(small, branches=branches)
    fused, eager = (NSAttention.from_config(config, name).double() for name in (TRITON, Implementation.EAGER))
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(1 if kind == "documents" else 2, 21, config.dim, dtype=torch.float64)
    options = {
        "positions": {"positions": torch.arange(21) + 5},
        "positions of each row": {"positions": torch.stack((torch.arange(21), 3 * torch.arange(21)))},
        "documents": {"cu_seqlens": torch.tensor([0, 9, 21], dtype=torch.int32)},
    }[kind]
    before, results = launches["rotated"], []
    for layer in (fused, eager):
        output = layer(x, **options)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    assert launches["rotated"] > before
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    # Only differences of positions matter, so those of each row are what changes the output.
    same_output = torch.allclose(results[0][0], fused(x))
    assert same_output == (kind == "positions")


def test_the_dense_layer_of_a_model_rotates_as_well(small: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLM.from_config(replace(small, attention=Attention.VANILLA)).double()
    tokens, before = torch.arange(21)[None] % small.vocab, launches["rotated"]
    expected = model(tokens)
    assert launches["rotated"] == before  # on a CPU, auto means tiles
    monkeypatch.setattr(model.blocks[0].attn, "implementation", TRITON)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)
    assert launches["rotated"] == before + 1


@pytest.mark.parametrize("implementation", [TRITON, Implementation.AUTO])
def test_no_tensor_of_the_joint_projection_outlives_the_rotation(
    small: NSAConfig, implementation: Implementation
) -> None:
    """It has the size of all queries, keys and values, and nothing reads it during attention."""
    layer = NSAttention.from_config(small, implementation).double()
    joint: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    layer.q_proj.register_forward_hook(lambda _, __, output: joint.append(weakref.ref(output._base)))
    layer.gate_mlp.register_forward_hook(lambda *_: alive.append(joint[0]() is not None))
    layer(torch.randn(1, 21, small.dim, dtype=torch.float64)).sum().backward()
    assert alive == [False]
