"""Tokenizers that are loaded from local files, and a tokenizer whose tokens are the bytes of a text."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..world import CannotRunError

Tokens = NDArray[np.unsignedinteger[Any]]

BYTES = "bytes"
# The zero byte ends a document, because it does not occur in normal text.
END_OF_BYTES = 0
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

# A .tiktoken file contains only token ranks. Its name determines the split pattern and the end token.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RANKS = {"gpt2": (_GPT2, 50256), "r50k_base": (_GPT2, 50256), "cl100k_base": (_CL100K, 100257)}


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer with the size of its vocabulary and its end token."""

    name: str
    vocab: int
    end: int | None  # the token after each document; None if the vocabulary has no such token
    encode: Callable[[str], Tokens]

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Return the smallest integer dtype that can store every token, uint16 or uint32."""
        return np.uint16 if self.vocab <= 1 << 16 else np.uint32

    def document(self, text: str) -> Tokens:
        """Return the tokens of `text`, followed by the end token if the vocabulary has one."""
        tokens = self.encode(text)
        return tokens if self.end is None else np.append(tokens, np.array([self.end], tokens.dtype))


def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer for `name`, a value of the option `--tokenizer`.

    `name` is "bytes", the path of a tokenizer.json, or the path of a .tiktoken file such as r50k_base.tiktoken. Raises
    CannotRunError if the file is not a tokenizer, or if the package that reads it is not installed.
    """
    if name == BYTES:
        return Tokenizer(name=BYTES, vocab=256, end=END_OF_BYTES, encode=_bytes)
    path = Path(name)
    try:
        return _from_ranks(path) if path.suffix == ".tiktoken" else _from_json(path)
    except ImportError as error:
        raise CannotRunError(
            f"--tokenizer {name}: {error.name or error} is not installed; pip install 'nsa-harness[data]'"
        ) from error


def _bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def _from_json(path: Path) -> Tokenizer:
    library = importlib.import_module("tokenizers")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for an invalid file
        raise CannotRunError(f"--tokenizer {path}: not a tokenizer.json ({error})") from error
    vocab = int(tokenizer.get_vocab_size())
    end = next((number for word in _ENDS if (number := tokenizer.token_to_id(word)) is not None), None)
    return Tokenizer(
        name=path.name,
        vocab=vocab,
        end=end,
        encode=lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32),
    )


def _from_ranks(path: Path) -> Tokenizer:
    if path.stem not in _RANKS:
        names = ", ".join(f"{name}.tiktoken" for name in sorted(_RANKS))
        raise CannotRunError(f"--tokenizer {path}: the file name determines how text is split; known names are {names}")
    pattern, end = _RANKS[path.stem]
    library = importlib.import_module("tiktoken")
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise CannotRunError(f"--tokenizer {path}: not a file of token ranks ({error})") from error
    encoding = library.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={_ENDS[0]: end})
    return Tokenizer(
        name=path.name,
        vocab=int(encoding.n_vocab),
        end=end,
        encode=lambda text: np.array(encoding.encode_ordinary(text), np.uint32),
    )
