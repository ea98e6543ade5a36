"""Text from a model: greedy and drawn, as a function and as a command on a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Alone
from torch import Tensor, nn

from nsa_attention import generate as command
from nsa_attention.checkpoints.load import read_weights
from nsa_attention.checkpoints.shape import config_of, dimensions
from nsa_attention.config import SHAPES, Attention, Branch, Compression, NSAConfig
from nsa_attention.decode import new_caches, next_logits
from nsa_attention.generate import generate, generate_each, generate_tokens, main, saved_model
from nsa_attention.model import TinyLM
from nsa_attention.world import CannotRunError

Trained = Callable[..., Path]
Told = pytest.CaptureFixture[str]


def drawn(model: TinyLM, prompt: Tensor, seed: int, temperature: float = 1.0) -> Tensor:
    return generate(model, prompt, 20, temperature, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", [Attention.NSA, Attention.VANILLA])
def test_greedy_is_the_likeliest_token_of_repeated_parallel_forwards(tiny: NSAConfig, attention: Attention) -> None:
    model = TinyLM.from_config(replace(tiny, attention=attention)).double()
    # With the embedding as its head, a fresh model repeats its last token.
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    nn.init.normal_(model.embed.weight)
    prompt = torch.randint(tiny.vocab, (2, 4))
    expected = prompt
    for _ in range(30):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(generate(model, prompt, 30), expected)
    assert expected[:, 4:].unique().numel() > 5


def test_a_seed_decides_what_is_drawn_and_nothing_else_does(tiny: NSAConfig) -> None:
    model, prompt = TinyLM.from_config(tiny), torch.randint(tiny.vocab, (2, 3))
    before = torch.get_rng_state()
    first = drawn(model, prompt, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(drawn(model, prompt, seed=1), first)
    assert not torch.equal(drawn(model, prompt, seed=2), first)
    assert torch.equal(first[:, :3], prompt)
    assert first.shape == (2, 23)


def test_a_low_temperature_is_greedy_and_a_high_one_draws_evenly(tiny: NSAConfig) -> None:
    model, prompt = TinyLM.from_config(tiny).double(), torch.randint(tiny.vocab, (2, 3))
    assert torch.equal(drawn(model, prompt, seed=1, temperature=1e-300), generate(model, prompt, 20))
    counts = generate(model, prompt[:1].expand(400, -1), 1, 1e6, torch.Generator().manual_seed(0))[:, -1].bincount()
    assert counts.numel() == tiny.vocab
    assert 5 <= counts.min() <= counts.max() <= 50  # 23.5 are expected


def test_tokens_come_one_by_one_and_none_is_asked_for_in_vain(tiny: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = TinyLM.from_config(tiny), torch.randint(tiny.vocab, (2, 3))
    read: list[int] = []
    original = command.next_logits

    def spy(model: TinyLM, tokens: Tensor, cache: object) -> Tensor:
        read.append(tokens.shape[1])
        return original(model, tokens, cache)

    monkeypatch.setattr(command, "next_logits", spy)
    fresh = generate_tokens(model, prompt, 4)
    assert next(fresh).shape == (2, 1)
    assert read == [3]
    assert len(list(fresh)) == 3
    assert read == [3, 1, 1, 1]
    assert torch.equal(generate(model, prompt, 0), prompt)


def test_what_cannot_be_continued_is_said(tiny: NSAConfig) -> None:
    model, prompt = TinyLM.from_config(tiny), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
        generate(model, prompt[:, :0], 1)
    with pytest.raises(ValueError, match=r"temperature: expected at least 0, got -0\.5"):
        generate(model, prompt, 1, -0.5)
    with pytest.raises(CannotRunError, match="attention stock is torch's own layer"):
        generate(TinyLM.from_config(replace(tiny, attention=Attention.STOCK)), prompt, 1)


def test_caches_with_tokens_are_refused(tiny: NSAConfig) -> None:
    model, prompt = TinyLM.from_config(tiny), torch.tensor([1, 2, 3])
    caches = new_caches(model, 3)
    next_logits(model, {0: prompt, 2: prompt}, caches)
    for wanted in (
        lambda: generate_each(model, [prompt], [2], caches),
        lambda: generate(model, prompt.expand(3, -1), 2, caches=caches),
    ):
        with pytest.raises(ValueError, match=r"sequence 0 has 3 tokens; end it first with caches\[0\].end\(0\)"):
            wanted()
    caches[0].end(0)
    (text,) = generate_each(model, [prompt], [2], caches)  # sequence 2 is that of somebody else
    torch.testing.assert_close(text, generate(model, prompt[None], 2)[0])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_shape_of_a_checkpoint_is_the_one_that_was_saved(shape: NSAConfig) -> None:
    for changes in (
        {"attention": Attention.VANILLA},
        {"branches": (Branch.CMP, Branch.WIN), "compression": Compression.MEAN},
    ):
        saved = dimensions(replace(shape, **changes))
        assert dimensions(config_of(saved)) == saved


@pytest.mark.parametrize("phi", list(Compression))
def test_weights_of_one_phi_do_not_load_into_another(tiny: NSAConfig, phi: Compression) -> None:
    weights = TinyLM.from_config(replace(tiny, compression=phi)).state_dict()
    TinyLM.from_config(replace(tiny, compression=phi)).load_state_dict(weights)
    for other in set(Compression) - {phi}:
        with pytest.raises(RuntimeError, match=r"k_blocks\.(position|hidden|inner)"):
            TinyLM.from_config(replace(tiny, compression=other)).load_state_dict(weights)


@pytest.fixture
def trained(alone: Alone, tmp_path: Path, capsys: Told) -> Trained:
    """A checkpoint of one step, under the training options given."""

    def run(*options: str) -> Path:
        common = ("--layers", "1", "--seq-len", "32", "--data", "text", "--checkpoint-every", "1")
        assert alone(*common, *options)[0] == 0
        capsys.readouterr()
        return tmp_path / "out" / "checkpoint" / "step-1"

    return run


@pytest.mark.parametrize("options", [("--branch", "cmp+sel", "--compression", "mean"), ("--attention", "vanilla")])
def test_the_command_goes_on_with_a_prompt(trained: Trained, capsys: Told, options: tuple[str, ...]) -> None:
    path = trained(*options)
    prompt = "Die Tür "
    assert main([str(path), "--prompt", prompt, "--tokens", "12", "--temperature", "0"]) == 0
    tokens = generate(saved_model(path), torch.tensor([list(prompt.encode())]), 12)
    assert capsys.readouterr().out == bytes(tokens[0].tolist()).decode("utf-8", "replace") + "\n"


def test_the_command_goes_on_from_pages_with_the_same_text(trained: Trained, capsys: Told) -> None:
    path = str(trained())
    written = []
    for options in ((), ("--cache", "paged"), ("--cache", "paged", "--page-len", "64", "--impl", "eager")):
        assert main([path, "--tokens", "70", *options]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pages", "2"), "pages: 8 more are needed for 200 tokens of 1 sequences, and 2 of 2 are free, of 32 rows"),
        (("--page-len", "40"), "page size: expected a multiple of 32, the length of a selected block, got 40"),
        (("--impl", "dense"), "--impl dense: pages are read by plain torch or by the fused kernels; use --impl auto"),
    ],
    ids=["too few", "too short", "dense"],
)
def test_pages_that_cannot_be_are_one_line_and_exit_status_2(
    trained: Trained, capsys: Told, options: tuple[str, ...], message: str
) -> None:
    prompt = ("--prompt", "a" if options[1] == "dense" else "a" * 200)
    assert main([str(trained("--branch", "sel")), *prompt, "--tokens", "1", "--cache", "paged", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa.generate: error: {message}")


def test_the_command_draws_by_its_seed(trained: Trained, capsys: Told) -> None:
    path = str(trained())
    texts = []
    for seed in ("3", "3", "4"):
        assert main([path, "--tokens", "30", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_character_is_written_when_it_is_whole(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    """A token beyond the bytes, and a character that is cut off, are shown as what is no text."""
    pieces = [torch.tensor([[token]]) for token in (*"ü".encode(), 300, *"€".encode()[:2])]
    monkeypatch.setattr(command, "generate_tokens", lambda *_: iter(pieces))
    assert main([str(trained()), "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "aü\ufffd\ufffd\n"


def test_help_names_every_option(capsys: Told) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    names = ("prompt", "tokens", "temperature", "seed", "device", "impl", "cache", "page-len", "pages")
    assert all(name in shown for name in ("checkpoint", *(f"--{name}" for name in names)))


def test_all_mistakes_of_a_command_come_at_once(tmp_path: Path, capsys: Told) -> None:
    given = [str(tmp_path / "none.pt"), "--prompt", "", "--tokens", "0", "--temperature", "-1", "--device", "tpu"]
    given += ["--cache", "ring", "--pages", "8"]
    assert main(given) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nsa.generate: error: checkpoint: expected the path of a checkpoint or of a folder of them, "
        f'got "{tmp_path / "none.pt"}"',
        'nsa.generate: error: --prompt: expected at least one character, got ""',
        'nsa.generate: error: --tokens: expected a whole number of at least 1, got "0"',
        'nsa.generate: error: --temperature: expected a number of at least 0, got "-1"',
        'nsa.generate: error: --device: expected auto, cpu or cuda, got "tpu"',
        'nsa.generate: error: --cache: expected auto, contiguous or paged, got "ring"',
        "nsa.generate: error: --pages: applies only to a paged cache; add --cache paged",
    ]


def test_a_file_is_no_checkpoint(tmp_path: Path, capsys: Told) -> None:
    (tmp_path / "weights.pt").write_bytes(b"some bytes")
    assert main([str(tmp_path / "weights.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa.generate: error: checkpoint: expected the path of a checkpoint or of a folder of them")


def test_weights_of_another_shape_are_named(trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: Told) -> None:
    path = trained()
    config, weights = read_weights(path)
    monkeypatch.setattr(command, "read_weights", lambda _: (replace(config, dim=64), weights))
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: its weights are not those of the shape it names; size mismatch for " in line


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {"vocab": 100},
            "text needs a vocabulary of 256 bytes, but this model has 100 tokens; use nsa_attention.generate.generate",
        ),
        ({"attention": Attention.STOCK}, "attention stock is torch's own layer, which gives no keys to decode from"),
    ],
    ids=["vocab", "stock"],
)
def test_a_model_that_gives_no_text_says_why(
    tiny: NSAConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Told,
    saved: dict[str, object],
    message: str,
) -> None:
    config = replace(tiny, vocab=256, **saved) if "vocab" not in saved else replace(tiny, **saved)
    weights = TinyLM.from_config(config).state_dict()
    monkeypatch.setattr(command, "read_weights", lambda _: (config, weights))
    assert main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
