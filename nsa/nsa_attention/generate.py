"""Text generation from a trained model, as functions and as the command `python -m nsa_attention.generate`.

Dimensions: B batch, T tokens of a prompt, C tokens not yet in the cache, R sequences in progress, V vocabulary.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoints.load import read_weights
from .config import Attention, Implementation
from .decode import new_caches, next_logits
from .kv_cache import KVCache
from .model import TinyLM
from .ops.dispatch import MissingImplementationError
from .options import Option, SettingsError, add_options, parse_values
from .pages import default_page_size, pages_needed
from .values import existing_checkpoint, not_negative, one_of, whole, word
from .world import CannotRunError, join_ranks

# The command supports only models whose tokens are bytes, trained with `--tokenizer bytes`.
BYTES = 256


def generate(
    model: TinyLM,
    prompt_BT: Tensor,
    new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    caches: Sequence[KVCache] | None = None,
) -> Tensor:
    """Return each prompt followed by `new_tokens` generated tokens, shape [B, T + new_tokens].

    At temperature 0, the next token is the most likely one (the first, if several are equally likely). Above 0, it is
    sampled with `generator`, which must be on the model's device. `caches` are empty caches from `new_caches`; if None,
    caches without pages are created. Raises ValueError for an empty prompt or caches that are not empty, CannotRunError
    for a model with attention `stock`, and OutOfPagesError if too few pages are free.
    """
    return torch.cat((prompt_BT, *generate_tokens(model, prompt_BT, new_tokens, temperature, generator, caches)), 1)


def generate_each(
    model: TinyLM,
    prompts: Sequence[Tensor],
    new_tokens: Sequence[int],
    caches: Sequence[KVCache],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Continue prompts of different lengths in one batch, and return each prompt with its generated tokens.

    `new_tokens` is the number of tokens to generate for each prompt. When a sequence is complete, it leaves the batch
    and its pages become free. The first sequences of `caches`, one per prompt, must be empty. Raises the same errors as
    `generate`.
    """
    _check(min(map(len, prompts), default=1), temperature, caches, len(prompts))
    new_tokens_by_sequence, tokens_by_sequence = dict(enumerate(prompts)), [[prompt] for prompt in prompts]
    for position in range(max(new_tokens, default=0)):
        for number in [number for number in new_tokens_by_sequence if new_tokens[number] == position]:
            del new_tokens_by_sequence[number]
            caches[0].end(number)
        picked_R1 = _pick_tokens(next_logits(model, new_tokens_by_sequence, caches), temperature, generator)
        for number, token_1 in zip(new_tokens_by_sequence, picked_R1, strict=True):
            tokens_by_sequence[number].append(token_1)
            new_tokens_by_sequence[number] = token_1
    for number in new_tokens_by_sequence:
        caches[0].end(number)
    return [torch.cat(tokens) for tokens in tokens_by_sequence]


def generate_tokens(
    model: TinyLM,
    prompt_BT: Tensor,
    new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    caches: Sequence[KVCache] | None = None,
) -> Iterator[Tensor]:
    """Generate tokens like `generate`, but yield each token [B, 1] as soon as it is known."""
    caches, unread_BC = new_caches(model, len(prompt_BT)) if caches is None else caches, prompt_BT
    _check(prompt_BT.shape[1], temperature, caches, len(prompt_BT))
    for _ in range(new_tokens):
        unread_BC = _pick_tokens(next_logits(model, unread_BC, caches), temperature, generator)
        yield unread_BC


def _check(prompt_tokens: int, temperature: float, caches: Sequence[KVCache], sequences: int) -> None:
    if prompt_tokens == 0:
        raise ValueError("prompt: expected at least one token, got none: the first token would follow from nothing")
    if temperature < 0.0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    for number, tokens in enumerate(caches[0].lengths[:sequences]):
        if tokens:
            raise ValueError(
                f"caches: sequence {number} has {tokens} tokens; end it first with caches[0].end({number})"
            )


def _pick_tokens(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1, keepdim=True)
    # Logits are taken relative to the highest one: divided by a small temperature they would overflow the exponential.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(torch.softmax(logits_BV, -1), 1, generator=generator)


def non_empty_text(text: str) -> str:
    """Return `text`, or raise ValueError if it is empty."""
    if not text:
        raise ValueError('expected at least one character, got ""')
    return text


OPTIONS = (
    Option(name="prompt", parse=non_empty_text, default="\n", about="the text to continue (default: an empty line)"),
    Option(name="tokens", parse=whole(1), default=256, about="number of bytes to generate (default: 256)"),
    Option(name="temperature", parse=not_negative, default=0.8, about="0: always the most likely byte (default: 0.8)"),
    Option(name="seed", parse=whole(0), default=0, about="seed of the random sampling (default: 0)"),
    Option(name="device", parse=word("auto", "cpu", "cuda"), default="auto", about="auto: a GPU if there is one"),
    Option(
        name="impl",
        parse=one_of(Implementation),
        default=Implementation.AUTO,
        about="auto, eager, or triton (fused kernels, which read a paged cache)",
    ),
    Option(
        name="cache",
        parse=word("auto", "contiguous", "paged"),
        default="auto",
        about="memory layout of keys and values: contiguous, or paged (from a pool); auto: paged on a GPU",
    ),
    Option(
        name="page_len",
        parse=whole(1),
        default=None,
        about="with --cache paged: rows per page, a multiple of select_len (default: the smallest that 16 divides too)",
    ),
    Option(
        name="pages",
        parse=whole(1),
        default=None,
        about="with --cache paged: pages in the pool (default: as many as prompt and tokens need)",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The validated arguments of the command `python -m nsa_attention.generate`."""

    checkpoint: Path
    prompt: str
    tokens: int
    temperature: float
    seed: int
    device: str
    impl: Implementation
    cache: str
    page_len: int | None  # rows per page; None: default_page_size()
    pages: int | None  # None: as many as the prompt and the new tokens need


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the text generation command and return its exit status.

    The status is 2 if the arguments, the checkpoint or the machine are unsuitable.
    """
    try:
        request = _read_request(sys.argv[1:] if arguments is None else arguments)
        with join_ranks(request.device, "auto", needs_group=False) as world:
            _write_text(saved_model(request.checkpoint, request.impl).to(world.device), request)
    except (SettingsError, CannotRunError, MissingImplementationError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.generate: error: {line}\n")
        return 2
    return 0


def saved_model(path: Path, implementation: Implementation = Implementation.AUTO) -> TinyLM:
    """Return the model of a checkpoint, in float32 on the CPU.

    Raises CannotRunError if `path` contains no checkpoint or if its weights do not fit its configuration.
    """
    config, weights = read_weights(path)
    model = TinyLM.from_config(config, implementation)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # torch's message has one line for each tensor that does not fit; the last one is enough.
        last = str(error).splitlines()[-1].strip()
        raise CannotRunError(f"{path}: its weights are not those of the shape it names; {last}") from error
    return model


def _write_text(model: TinyLM, request: Request) -> None:
    if model.config.vocab < BYTES:
        raise CannotRunError(
            f"{request.checkpoint}: text needs a vocabulary of {BYTES} bytes, but this model has {model.config.vocab} "
            "tokens; use nsa_attention.generate.generate, which takes tokens"
        )
    device = model.embed.weight.device
    prompt = request.prompt.encode("utf-8", "surrogateescape")
    generator = torch.Generator(device).manual_seed(request.seed)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    prompt_BT = torch.tensor([list(prompt)], device=device)
    sys.stdout.write(prompt.decode("utf-8", "replace"))
    caches = _empty_caches(model, request, len(prompt) + request.tokens)
    for token in generate_tokens(model, prompt_BT, request.tokens, request.temperature, generator, caches):
        # A larger vocabulary has tokens beyond the 256 bytes. They are shown like an invalid UTF-8 byte.
        sys.stdout.write(characters.decode(bytes([min(int(token), BYTES - 1)])))
        sys.stdout.flush()
    sys.stdout.write(characters.decode(b"", final=True) + "\n")


def _empty_caches(model: TinyLM, request: Request, tokens: int) -> list[KVCache]:
    fits_a_gpu = model.embed.weight.is_cuda and model.config.attention is Attention.NSA
    if request.cache == "contiguous" or (request.cache == "auto" and not fits_a_gpu):
        return new_caches(model, 1, max_tokens=tokens)
    page_size = request.page_len or default_page_size(model.config)
    pages = request.pages or pages_needed(model.config, tokens, page_size)
    return new_caches(model, 1, max_tokens=tokens, page_size=page_size, pages=pages)


def _read_request(arguments: Sequence[str]) -> Request:
    arguments_by_name = vars(_parser().parse_args(arguments))
    mistakes: list[str] = []
    try:
        checkpoint = existing_checkpoint(arguments_by_name["checkpoint"])
    except ValueError as error:
        mistakes.append(f"checkpoint: {error}")
    values = parse_values(OPTIONS, arguments_by_name, mistakes)
    for name in ("page_len", "pages"):
        if values[name] is not None and values["cache"] != "paged":
            mistakes.append(f"--{name.replace('_', '-')}: applies only to a paged cache; add --cache paged")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return Request(checkpoint=checkpoint, **values)


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=f"python -m {__package__}.generate", description="Continue a text, byte by byte."
    )
    result.add_argument(
        "checkpoint",
        help="a checkpoint of `nsa.train --data text --checkpoint-every K`, or a directory of checkpoints: the latest "
        "complete one",
    )
    add_options(result, OPTIONS)
    return result


if __name__ == "__main__":
    sys.exit(main())
