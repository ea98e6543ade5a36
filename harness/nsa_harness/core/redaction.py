"""Secrets in texts: which values are some, by the shapes of tokens and by the names they are given, and texts without
them.

A value that was found once is one wherever it occurs: each has a number, and `$SECRET_1` stands in its place.
Everything here is linear in the text: hints are searched for, and what follows them is matched within a bound.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar, cast
from urllib.parse import quote

T = TypeVar("T")

VARIABLE = "SECRET_"
SPREADS_FROM = 6  # characters: a shorter value is taken from its own place alone, as it may be part of any word
VALUES_LIMIT = 400  # of one run; what is found beyond is taken from its place alone
_MOST = 4096  # characters of one value
_MOST_PEM = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Found:
    """A value, and whether it is one wherever it occurs."""

    value: str
    everywhere: bool


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """The values that are known of one run. Those with a number keep it."""

    numbered: tuple[Found, ...] = ()  # the first is $SECRET_1
    suspected: tuple[str, ...] = ()  # of an environment: they get a number once a text holds them

    def placeholder(self, value: str) -> str:
        number = next((at for at, one in enumerate(self.numbered, 1) if one.value == value), None)
        return f"${VARIABLE}{'MORE' if number is None else number}"

    def with_found(self, found: Iterable[Found]) -> Secrets:
        known = {one.value: one for one in self.numbered}
        for one in found:
            if one.value in known:
                known[one.value] = replace(one, everywhere=one.everywhere or known[one.value].everywhere)
            elif len(known) < VALUES_LIMIT:
                known[one.value] = one
        numbered = tuple(known.values())
        return self if numbered == self.numbered else replace(self, numbered=numbered)

    def with_suspected(self, values: Iterable[str]) -> Secrets:
        new = [one for one in dict.fromkeys(values) if one not in self.suspected]
        return replace(self, suspected=(*self.suspected, *new)) if new else self

    def learned(self, text: str, *, code: bool = False) -> Secrets:
        """With every value that this text gives away. `code`: it is source, where a name may stand for a value."""
        printed = [
            Found(value=one, everywhere=True)
            for one in self.suspected
            if any(form in text for form in _forms(one)) and not any(one == known.value for known in self.numbered)
        ]
        return self.with_found([*printed, *(one for _, one in _told(text, code=code))])


def of_words(words: Sequence[str]) -> list[Found]:
    """What a command line holds: `--api-key X`, `--api-key=X`, `name=X`, and all that a text may hold."""
    found: list[Found] = []
    name = ""
    for word in words:
        told = _named(name, word, typed=True) if name and not word.startswith("-") else None
        name = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
        left, equals, right = word.partition("=")
        if told is None and equals and " " not in left:
            told = _named(left.lstrip("-"), right, typed=True)
        found += [told] if told else []
        found += [one for _, one in _told(word, code=False)]
    return found


def of_environment(environment: Iterable[tuple[str, str]]) -> list[Found]:
    """The values of variables whose names say what they hold, and what the others hold of tokens and addresses."""
    found: list[Found] = []
    for name, value in environment:
        told = _named(name, value, typed=True)
        found += [told] if told else []
        found += [one for _, one in _told(value, code=False)]
    return found


def redacted(text: str, secrets: Secrets, *, code: bool = False) -> str:
    """The text with a placeholder for every secret in it. Applied twice it changes nothing more.

    A placeholder has at most 15 characters and takes the place of at least one.
    """
    changed = _once(text, secrets, code=code)
    while changed != text:
        text, changed = changed, _once(changed, secrets, code=code)
    return changed


def redacted_value(value: T, secrets: Secrets) -> T:
    """The value with every text in it redacted, however deep it lies."""
    texts: dict[str, str] = {}
    _gather(value, texts)
    changes = {text: clean for text in texts if (clean := redacted(text, secrets)) != text}
    return cast(T, _walk(value, changes)) if changes else value


def texts_of(value: object) -> str:
    """Every text of a value once, parted by what no secret holds: to learn from all of them, or to look at, at once."""
    texts: dict[str, str] = {}
    _gather(value, texts)
    return "\0\n".join(texts)


def masked(data: bytes, secrets: Secrets) -> bytes:
    """Bytes that are no text: every known value becomes as many stars, and everything keeps its place."""
    values = (one.value.encode("utf-8", "surrogateescape") for one in secrets.numbered if one.everywhere)
    for value in sorted(values, key=len, reverse=True):
        data = data.replace(value, b"*" * len(value))
    return data


def redacted_json(text: str, secrets: Secrets) -> str:
    """A JSON document, or lines of them, which stays one; whatever is none is redacted as a text."""
    ending = "\n" if text.endswith("\n") else ""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        lines = text.splitlines(keepends=True)
        return redacted(text, secrets) if len(lines) < 2 else "".join(redacted_json(line, secrets) for line in lines)
    clean = redacted_value(document, secrets)
    if clean == document:
        return text
    indent = 1 if "\n" in text.strip() else None
    return json.dumps(clean, indent=indent, separators=None if indent else (",", ":")) + ending


def redacted_words(words: Sequence[str], secrets: Secrets) -> tuple[str, ...]:
    """A command line, in which a value of two letters is known by its option."""
    short = {one.value for one in of_words(words) if not one.everywhere}
    clean, name = [], ""
    for word in words:
        left, equals, right = word.partition("=")
        if word in short and name and _named(name, word, typed=True):
            clean.append(secrets.placeholder(word))
        elif right in short and _named(left.lstrip("-"), right, typed=True):
            clean.append(f"{left}={secrets.placeholder(right)}")
        else:
            clean.append(redacted(word, secrets))
        name = word.lstrip("-") if word.startswith("-") and not equals else ""
    return tuple(clean)


def redacted_environment(environment: Iterable[tuple[str, str]], secrets: Secrets) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, secrets.placeholder(value) if _named(name, value, typed=True) else redacted(value, secrets))
        for name, value in environment
    )


def shell_line(words: Iterable[str], environment: Iterable[tuple[str, str]] = ()) -> str:
    """Redacted words as a shell takes them: it fills in what was taken out, from variables of these names."""
    return " ".join([*(f"{name}={_shell_word(value)}" for name, value in environment), *map(_shell_word, words)])


def where_to_set(text: str, where: str) -> tuple[str, ...]:
    """A line for each placeholder of a printed command. `where`: the file that holds the values."""
    return tuple(f"# export {name}=...: the value is in {where}" for name in placeholders([text]))


def placeholders(texts: Iterable[str]) -> tuple[str, ...]:
    """The variables that stand for values in the texts; of two with one beginning the longer one is first."""
    found = {name.removeprefix("$") for text in texts for name in _PLACEHOLDER.findall(text)}
    return tuple(sorted(found, key=lambda name: (-len(name), name)))


def _shell_word(word: str) -> str:
    parts = _PLACEHOLDER.split(word)
    if len(parts) == 1:
        return _typed_word(word)
    return "".join(f'"{part}"' if at % 2 else _typed_word(part) if part else "" for at, part in enumerate(parts))


def typed(words: Sequence[str]) -> str:
    """Words as they are typed into a shell. A character that a terminal would act on is written, not sent to it."""
    return " ".join(map(_typed_word, words))


def _typed_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # ANSI-C quotes: bash, zsh and ksh read them.
    return "$'" + "".join(_SPELLED.get(one) or _spelled(one) for one in word) + "'"


_SPELLED = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\x1b": "\\e"}


def _spelled(character: str) -> str:
    """What is not printable by its bytes, each for itself, as no locale can then read it otherwise."""
    if character.isprintable():
        return character
    escaped = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", escaped))


# Where a text tells a value.

Span = tuple[int, int]
_PLACEHOLDER = re.compile(rf"(\${VARIABLE}(?:\d+|MORE))")
# Its own placeholders hold no secret, and no value may occur in one.
_IN_PLACEHOLDER = re.compile(r"\$?S?E?C?R?E?T?_?(?:\d{0,4}|M?O?R?E?)")


def _once(text: str, secrets: Secrets, *, code: bool) -> str:
    spans: list[tuple[int, int, str]] = []
    for (start, end), one in _told(text, code=code):
        spans.append((start, end, one.value))
    for one in secrets.numbered:
        if one.everywhere:
            for form in _forms(one.value):
                at = text.find(form)
                while at >= 0:
                    spans.append((at, at + len(form), one.value))
                    at = text.find(form, at + len(form))
    return _without(text, spans, secrets) if spans else text


def _without(text: str, spans: list[tuple[int, int, str]], secrets: Secrets) -> str:
    """What overlaps is one, and has the number of the first and longest of it."""
    spans.sort(key=lambda span: (span[0], -span[1]))
    kept, at = [], 0
    begin, end, value = spans[0]
    for start, stop, other in [*spans[1:], (len(text) + 1, len(text) + 1, "")]:
        if start < end:
            value = other if stop - start > end - begin else value
            end = max(end, stop)
            continue
        kept += [text[at:begin], secrets.placeholder(value)]
        at, begin, end, value = end, start, stop, other
    return "".join([*kept, text[at:]])


def _forms(value: str) -> tuple[str, ...]:
    """How a value is written: as it is, and in JSON, in Python, in a shell, in HTML and in an address."""
    if value.isalnum() and value.isascii():
        return (value,)
    written = (
        value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1],
        value.replace("'", "'\"'\"'"), html.escape(value), quote(value, safe=""), quote(value),
    )  # fmt: skip
    return tuple(dict.fromkeys(written))


def _told(text: str, *, code: bool) -> Iterator[tuple[Span, Found]]:
    for span in _shapes(text):
        yield from _given(text, span)
    for (start, end), everywhere in _pairs(text, code=code):
        value = text[start:end]
        if _may_be_one(value):
            yield (start, end), Found(value=value, everywhere=everywhere)
            if "\\" in value and (plain := _unescaped(value)) != value and everywhere:
                yield (start, end), Found(value=plain, everywhere=True)


def _given(text: str, span: Span) -> Iterator[tuple[Span, Found]]:
    value = text[slice(*span)]
    if not _may_be_one(value):
        return
    yield span, Found(value=value, everywhere=True)
    if _PEM in value:  # each of its lines, as a log may part them
        for line in _PEM_LINE.finditer(value):
            yield (span[0] + line.start(), span[0] + line.end()), Found(value=line[0], everywhere=True)


def _may_be_one(value: str) -> bool:
    return (
        bool(value) and f"${VARIABLE}" not in value and not (_IN_PLACEHOLDER.fullmatch(value) and not value.isdigit())
    )


def _unescaped(value: str) -> str:
    try:
        return str(json.loads(f'"{value}"'))
    except ValueError:
        return value


# Tokens by their shapes.

_PEM = "PRIVATE KEY-----"
_PEM_BLOCK = re.compile(
    rf"-----BEGIN [A-Z0-9 ]{{0,32}}{_PEM}(?:[A-Za-z0-9+/=:, \t\r\n]|\\[nr]|-(?!----)){{0,{_MOST_PEM}}}"
    rf"(?:-----END [A-Z0-9 ]{{0,32}}{_PEM})?"
)
_PEM_LINE = re.compile(
    r"(?<![A-Za-z0-9+/])(?:(?<=\\n)|(?<!\\))[A-Za-z0-9+/]{32,}={0,2}|(?<=\\n)[A-Za-z0-9+/]{32,}={0,2}"
)
_DENSE = r"(?=[A-Za-z_-]{0,64}[0-9])"  # a word of letters alone is none
# What it begins with, and the whole of it. No end is asked for: what is longer is one as well.
_SHAPES = tuple(
    (hint, re.compile(pattern))
    for hint, pattern in (
        ("AKIA", r"AKIA[A-Z0-9]{12,64}"),
        ("ASIA", r"ASIA[A-Z0-9]{12,64}"),
        *((f"gh{kind}_", rf"gh{kind}_[A-Za-z0-9]{{20,255}}") for kind in "pousr"),
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{20,255}"),
        ("glpat-", r"glpat-[A-Za-z0-9_.-]{16,255}"),
        ("hf_", rf"hf_{_DENSE}[A-Za-z0-9]{{20,255}}|hf_[A-Za-z]{{30,255}}"),
        ("sk-", rf"sk-{_DENSE}[A-Za-z0-9_-]{{16,255}}"),
        ("sk_live_", r"sk_live_[A-Za-z0-9]{16,255}"),
        ("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,255}"),
        ("AIza", r"AIza[A-Za-z0-9_-]{30,64}"),
        ("ya29.", r"ya29\.[A-Za-z0-9_-]{20,1024}"),
        ("npm_", rf"npm_{_DENSE}[A-Za-z0-9]{{30,64}}"),
        ("pypi-", r"pypi-[A-Za-z0-9_-]{40,1024}"),
        ("eyJ", r"eyJ[A-Za-z0-9_-]{8,2048}\.[A-Za-z0-9_-]{8,4096}(?:\.[A-Za-z0-9_-]{0,2048})?"),
        ("-----BEGIN ", _PEM_BLOCK.pattern),
    )
)
_USER = re.compile(r"://[^\s/?#:@\"'<>\0]{0,256}:([^\s/\"'<>\0]{1,256})@|://([^\s/?#:@\"'<>\0]{16,256})@")
_SIGNED = re.compile(r"[?&]sig=([A-Za-z0-9%+/=_-]{20,512})")
_SCHEMES = tuple(  # of a header
    (hint, re.compile(hint + r"\s{1,4}([A-Za-z0-9._~+/=-]{8,4096})")) for hint in ("Bearer", "bearer", "Basic", "basic")
)
_WANDB = re.compile(r"(?:wandb[ \t]{1,4}login|api_key|[Pp]assword)[ \t]{1,4}([0-9a-f]{40})")
_BEARER = re.compile(r"[Bb]earer[ \t]{1,4}((?=[A-Za-z._~+/=-]{0,64}[0-9])[A-Za-z0-9._~+/=-]{8,4096})")
_HEADER = re.compile(
    r"uthorization(?:\\{0,3}[\"'])?[ \t]{0,4}[:=,][ \t]{0,4}(?:\\{0,3}[\"'])?(?:[A-Za-z]{1,12}[ \t]{1,4})?"
    r"([A-Za-z0-9._~+/=-]{8,4096})"
)
# Values behind what they are given by; a search for the hint is quicker than one for the pattern.
_GIVEN_BY = (
    ("://", _USER), ("sig=", _SIGNED), ("wandb", _WANDB), ("assword", _WANDB), ("api_key", _WANDB),
    ("earer ", _BEARER), ("uthorization", _HEADER),
)  # fmt: skip


def _shapes(text: str) -> Iterator[Span]:
    for hint, shape in _SHAPES:
        at = text.find(hint)
        while at >= 0:
            match = shape.match(text, at) if _begins(text, at) else None
            if match:
                yield match.span()
            at = text.find(hint, match.end() if match else at + len(hint))
    for hint, shape in _GIVEN_BY:
        if hint in text:
            for match in shape.finditer(text):
                yield match.span(match.lastindex or 0)


def _begins(text: str, at: int) -> bool:
    """No letter or digit stands before; that of an escaped line end is none."""
    return at == 0 or not text[at - 1].isalnum() or text[max(0, at - 2) : at] in ("\\n", "\\t", "\\r")


# Values by the names they are given.

_STRONG = frozenset({"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "passcode"})
_GLUED = ("password", "passwd", "passphrase", "apikey", "secretkey", "accesskey", "privatekey", "authtoken", "apitoken")
# What makes a key or a token one that opens something, where a text speaks of it.
_OPENING = frozenset({
    "api", "access", "private", "secret", "auth", "account", "encryption", "signing", "service", "license", "ssh",
    "master", "subscription", "app", "client", "admin", "deploy", "deployment", "user", "rsa", "aes", "hmac", "jwt",
    "ssl", "tls", "wandb", "openai", "anthropic", "azure", "aws", "gcp", "hf", "comet", "neptune", "shared", "storage",
    "webhook", "session", "refresh", "oauth", "bearer", "bot", "personal", "github", "gitlab", "slack",
})  # fmt: skip
# What speaks of a secret and is none: how long, where, what kind of it.
_OF_A_SECRET = frozenset({
    "length", "len", "size", "name", "names", "file", "files", "path", "paths", "dir", "directory", "folder", "type",
    "types", "kind", "count", "policy", "min", "max", "manager", "required", "enabled", "prompt", "regex", "pattern",
    "format", "prefix", "suffix", "version", "ttl", "timeout", "expiry", "expires", "field", "url", "uri", "endpoint",
    "host", "env", "var", "variable", "arn", "hint", "help", "error", "errors", "hash", "algorithm", "rotation",
})  # fmt: skip
# What may follow it in a name: of which place, in which form.
_ENVIRONMENTS = frozenset({
    "prod", "production", "dev", "test", "staging", "base", "value", "data", "json", "b64", "base64", "pem", "raw",
    "old", "new", "id",
})  # fmt: skip
# Tokens of a text, and keys of a table, a model, a store or a sort.
_HARMLESS = frozenset({
    "pad", "padding", "eos", "bos", "unk", "sep", "cls", "mask", "sot", "eot", "eod", "special", "end", "start",
    "begin", "stop", "image", "audio", "video", "prompt", "next", "first", "last", "per", "max", "min", "num", "n",
    "total", "new", "blank", "word", "sub", "text", "label", "input", "output", "tokens", "sort", "primary", "foreign",
    "partition", "store", "cache", "group", "batch", "column", "data", "dataset", "feature", "state", "dict", "model",
    "public", "rng", "prng", "random", "query", "lookup", "map", "row", "index", "metric", "loss", "target", "merge",
    "join", "routing", "split", "shard", "block", "attn", "head", "kv", "value", "hash", "object", "pos", "monitor",
    "score", "sample", "train", "eval", "val", "config", "json", "yaml", "field", "dst", "src", "step", "rank", "layer",
})  # fmt: skip
_NO_VALUES = frozenset({
    "none", "null", "nil", "true", "false", "yes", "no", "on", "off", "auto", "default", "str", "bytes", "int",
    "float", "bool", "any", "optional", "string", "undefined", "required", "missing", "empty", "redacted", "hidden",
    "masked", "unset", "invalid", "expired",
})  # fmt: skip
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PATH = re.compile(
    r"(?:~|\.{1,2})?/[\w.@+-]*(?:/[\w.@+-]*)*|[A-Za-z0-9_.-]+\.(?:json|pem|txt|yaml|yml|toml|key|env|py)"
)


def _named(name: str, value: str, *, typed: bool) -> Found | None:
    """The value that this name is given, if the name says that it is one. `typed`: an option, or a variable."""
    sure = _says_secret(name, typed=typed)
    if sure is None or not _may_be_one(value) or value.lower() in _NO_VALUES or _is_path(value):
        return None
    if value.startswith(("$", "<", "*", "%")) and not any(one.isalnum() for one in value[2:-1].replace("_", "")):
        return None
    if not sure and not _like_a_token(value, typed=typed):
        return None
    return Found(value=value, everywhere=len(value) >= SPREADS_FROM and (sure or not value.isalpha()))


def _says_secret(name: str, *, typed: bool) -> bool | None:
    """True: whatever it is given. False: what looks like a token. None: it says nothing of that."""
    words = [word.lower() for word in _NAME_PART.findall(name)]
    while words and (words[-1].isdigit() or (len(words) > 1 and words[-1] in _ENVIRONMENTS)):
        words.pop()
    if not words:
        return None
    strong = [at for at, word in enumerate(words) if word in _STRONG]
    if strong:
        return None if set(words[strong[-1] + 1 :]) & _OF_A_SECRET else True
    last, others = words[-1], set(words[:-1])
    if last.endswith(_GLUED):
        return True
    if last == "pwd" and others and others != {"old"}:
        return True
    if last not in ("key", "token"):
        return None
    if others & _OPENING and (last == "key" or not others & _HARMLESS):
        return True
    if others & _HARMLESS:
        return None
    return typed and bool(others) if last == "token" else False if typed else None


def _like_a_token(value: str, *, typed: bool) -> bool:
    """`--key 4` and `token: foo` are none."""
    mixed = any(one.isdigit() for one in value) and any(one.isalpha() for one in value)
    return len(value) >= (8 if typed else 16) and mixed


def _is_path(value: str) -> bool:
    """A random text may begin with a slash too: long, of one part, with letters of both kinds and digits."""
    random = len(value) >= 32 and "." not in value and value.lower() != value and any(one.isdigit() for one in value)
    return _PATH.fullmatch(value) is not None and not random


# On the text in lower case: a name from one of its words on, and what parts it from its value.
_HINTS = ("passw", "passphrase", "passcode", "pwd", "secret", "credential", "token", "key")
_GIVEN = tuple(re.compile(hint + r"[a-z0-9_.\-]{0,32}+(?:\\{0,3}[\"'])?[ \t]{0,4}(?:=>|:=|[=:])") for hint in _HINTS)
_OPTION = re.compile(r"--[a-z0-9_\-]{1,64}+(?:\\{0,3}[\"'])?,?[ \t]")
_LONGEST_NAME = 64
_QUOTED = re.compile(rf"[ \t]{{0,4}}[bruf]?(\\{{0,3}})([\"'])((?:(?!\1\2)[^\0\n\\]|(?!\1\2)\\[^\n\0]){{1,{_MOST}}})")
_BARE = re.compile(rf"[ \t]{{0,4}}([^\s\"'`,;&<>()\[\]{{}}|\\\0]{{1,{_MOST}}})")


def _pairs(text: str, *, code: bool) -> Iterator[tuple[Span, bool]]:
    """`name=value`, `"name": "value"`, `--name value`."""
    lower = text.lower()
    if len(lower) != len(text):  # of the letters there are, one has a longer small form
        lower = text.replace("\u0130", "I").lower()
    for pattern in (*_GIVEN, _OPTION):
        looked_at = 0  # what was taken for a value is looked at once, however many names are in it
        for match in pattern.finditer(lower):
            if match.start() < looked_at or not (pattern is not _OPTION or any(hint in match[0] for hint in _HINTS)):
                continue
            start = _name_begins(text, match.start())
            span, everywhere = _value_after(text, start, match.end(), code=code)
            looked_at = span[1]
            if everywhere is not None:
                yield span, everywhere


def _name_begins(text: str, at: int) -> int:
    first = max(0, at - _LONGEST_NAME)
    while at > first and (text[at - 1].isalnum() or text[at - 1] in "_.-"):
        at -= 1
    return at


def _value_after(text: str, start: int, end: int, *, code: bool) -> tuple[Span, bool | None]:
    """What stands there, and whether it is a secret everywhere; None: it is none."""
    name = text[start:end].rstrip(" \t=:>,\"'\\").lstrip("-")
    nothing = (end, end), None
    if _says_secret(name, typed=False) is None or text[max(0, start - 1) : start] == "$":
        return nothing
    if quoted := _QUOTED.match(text, end):
        told = _named(name, quoted[3], typed=False)
        return quoted.span(3), None if told is None else told.everywhere
    bare = None if code else _BARE.match(text, end)
    if bare is None:
        return nothing
    value = bare[1].rstrip(".:!?")
    span = (bare.start(1), bare.start(1) + len(value))
    is_code = text[bare.end() : bare.end() + 1] in ("(", "[") or name.lower() in value.lower()
    if is_code or len(value) < 3:  # a name again, as in `password=self.password`
        return span, None
    told = _named(name, value, typed=False)
    return span, None if told is None else told.everywhere


# Values, however deep.


def _gather(value: object, texts: dict[str, str]) -> None:
    match value:
        case Enum():
            return
        case str():
            texts[value] = value
        case tuple() | list():
            for item in value:
                _gather(item, texts)
        case Mapping():
            for key, item in value.items():
                _gather(key, texts)
                _gather(item, texts)
        case _ if is_dataclass(value):
            for field in fields(value):
                _gather(getattr(value, field.name), texts)


def _walk(value: object, changes: Mapping[str, str]) -> object:
    match value:
        case Enum():
            return value
        case str():
            return changes.get(value, value)
        case tuple():
            return tuple(_walk(item, changes) for item in value)
        case list():
            return [_walk(item, changes) for item in value]
        case dict():
            return {_walk(key, changes): _walk(item, changes) for key, item in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: _walk(getattr(value, field.name), changes) for field in fields(value)})
    return value
