"""Find secrets such as passwords and tokens in text, and replace them with placeholders.

Secrets are found by the shapes of tokens and by the names of values. A value that was found once is a secret wherever
it occurs. Each has a number, and `$SECRET_1` replaces it. The time is linear in the text: the module searches for hints
and matches a limited number of characters after each.
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
SPREADS_FROM = 6  # characters; a shorter value, which may be part of any word, is replaced only where it was found
VALUES_LIMIT = 400  # of one run; further values are replaced only where they were found
_MAX_CHARS = 4096  # characters of one value
_MAX_PEM_CHARS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A secret value, and whether to replace it everywhere or only where it was found."""

    value: str
    everywhere: bool


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """The secrets found so far in one run, each with a number that never changes."""

    secrets: tuple[Secret, ...] = ()  # the first is $SECRET_1
    suspected_values: tuple[str, ...] = ()  # values of the environment, which get a number once a text contains them

    def placeholder(self, value: str) -> str:
        number = next((at for at, secret in enumerate(self.secrets, 1) if secret.value == value), None)
        return f"${VARIABLE}{'MORE' if number is None else number}"

    def with_secrets(self, secrets: Iterable[Secret]) -> Secrets:
        by_value = {secret.value: secret for secret in self.secrets}
        for secret in secrets:
            if secret.value in by_value:
                by_value[secret.value] = replace(
                    secret, everywhere=secret.everywhere or by_value[secret.value].everywhere
                )
            elif len(by_value) < VALUES_LIMIT:
                by_value[secret.value] = secret
        numbered = tuple(by_value.values())
        return self if numbered == self.secrets else replace(self, secrets=numbered)

    def with_suspected(self, values: Iterable[str]) -> Secrets:
        new = [value for value in dict.fromkeys(values) if value not in self.suspected_values]
        return replace(self, suspected_values=(*self.suspected_values, *new)) if new else self

    def with_secrets_of(self, text: str, *, code: bool = False) -> Secrets:
        """Return these secrets and the secrets found in `text`, which is source code if `code` is True."""
        printed_secrets = [
            Secret(value=value, everywhere=True)
            for value in self.suspected_values
            if any(form in text for form in _forms(value)) and not any(value == known.value for known in self.secrets)
        ]
        return self.with_secrets([*printed_secrets, *(secret for _, secret in _secrets_in(text, code=code))])


def secrets_of_command(words: Sequence[str]) -> list[Secret]:
    """Return the secrets in a command line, such as the value after `--api-key`."""
    secrets: list[Secret] = []
    name = ""
    for word in words:
        secret = _secret_by_name(name, word, typed=True) if name and not word.startswith("-") else None
        name = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
        name_part, equals, right = word.partition("=")
        if secret is None and equals and " " not in name_part:
            secret = _secret_by_name(name_part.lstrip("-"), right, typed=True)
        secrets += [secret] if secret else []
        secrets += [secret for _, secret in _secrets_in(word, code=False)]
    return secrets


def secrets_of_environment(environment: Iterable[tuple[str, str]]) -> list[Secret]:
    """Return the secrets in environment variables, given as (name, value) pairs."""
    secrets: list[Secret] = []
    for name, value in environment:
        secret = _secret_by_name(name, value, typed=True)
        secrets += [secret] if secret else []
        secrets += [secret for _, secret in _secrets_in(value, code=False)]
    return secrets


def redact(text: str, secrets: Secrets, *, code: bool = False) -> str:
    """Return the text with a placeholder such as `$SECRET_1` in place of each secret.

    Redacting the result again changes nothing.
    """
    redacted_text = _once(text, secrets, code=code)
    while redacted_text != text:
        text, redacted_text = redacted_text, _once(redacted_text, secrets, code=code)
    return redacted_text


def redact_value(value: T, secrets: Secrets) -> T:
    """Return a copy of a nested value in which the secrets in every string are replaced."""
    texts: dict[str, str] = {}
    _collect_texts(value, texts)
    changes = {text: clean for text in texts if (clean := redact(text, secrets)) != text}
    return cast(T, _replace_texts(value, changes)) if changes else value


def joined_texts(value: object) -> str:
    """Return all strings in a nested value, joined into one string."""
    texts: dict[str, str] = {}
    _collect_texts(value, texts)
    return "\0\n".join(texts)


def mask_bytes(data: bytes, secrets: Secrets) -> bytes:
    """Replace each secret in binary data with stars, without changing the length of the data."""
    values = (secret.value.encode("utf-8", "surrogateescape") for secret in secrets.secrets if secret.everywhere)
    for value in sorted(values, key=len, reverse=True):
        data = data.replace(value, b"*" * len(value))
    return data


def redact_json(text: str, secrets: Secrets) -> str:
    """Redact the secrets in JSON text so that it remains valid JSON. Any other text is redacted as plain text."""
    ending = "\n" if text.endswith("\n") else ""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        lines = text.splitlines(keepends=True)
        return redact(text, secrets) if len(lines) < 2 else "".join(redact_json(line, secrets) for line in lines)
    clean = redact_value(document, secrets)
    if clean == document:
        return text
    indent = 1 if "\n" in text.strip() else None
    return json.dumps(clean, indent=indent, separators=None if indent else (",", ":")) + ending


def redact_words(words: Sequence[str], secrets: Secrets) -> tuple[str, ...]:
    """Return a command line with its secrets redacted."""
    short = {secret.value for secret in secrets_of_command(words) if not secret.everywhere}
    clean, name = [], ""
    for word in words:
        name_part, equals, right = word.partition("=")
        if word in short and name and _secret_by_name(name, word, typed=True):
            clean.append(secrets.placeholder(word))
        elif right in short and _secret_by_name(name_part.lstrip("-"), right, typed=True):
            clean.append(f"{name_part}={secrets.placeholder(right)}")
        else:
            clean.append(redact(word, secrets))
        name = word.lstrip("-") if word.startswith("-") and not equals else ""
    return tuple(clean)


def redact_environment(environment: Iterable[tuple[str, str]], secrets: Secrets) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, secrets.placeholder(value) if _secret_by_name(name, value, typed=True) else redact(value, secrets))
        for name, value in environment
    )


def shell_line(words: Iterable[str], environment: Iterable[tuple[str, str]] = ()) -> str:
    """Return a redacted command as shell code in which each placeholder is a shell variable."""
    return " ".join([*(f"{name}={_shell_word(value)}" for name, value in environment), *map(_shell_word, words)])


def where_to_set(text: str, where: str) -> tuple[str, ...]:
    """Return, for each placeholder in a command, a comment line that says where its value is: in `where`."""
    return tuple(f"# export {name}=...: the value is in {where}" for name in placeholders([text]))


def placeholders(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of all placeholders in the given strings, longest first."""
    # Longer names come first, because one name can be the beginning of another.
    names = {name.removeprefix("$") for text in texts for name in _PLACEHOLDER.findall(text)}
    return tuple(sorted(names, key=lambda name: (-len(name), name)))


def _shell_word(word: str) -> str:
    parts = _PLACEHOLDER.split(word)
    if len(parts) == 1:
        return _typed_word(word)
    return "".join(f'"{part}"' if at % 2 else _typed_word(part) if part else "" for at, part in enumerate(parts))


def shell_words(words: Sequence[str]) -> str:
    """Return a command in a form that can be typed into a shell, with unprintable characters escaped."""
    return " ".join(map(_typed_word, words))


def _typed_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # ANSI-C quotes: bash, zsh and ksh read them.
    return "$'" + "".join(_SPELLED.get(character) or _octal_escape(character) for character in word) + "'"


_SPELLED = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\x1b": "\\e"}


def _octal_escape(character: str) -> str:
    if character.isprintable():
        return character
    escaped = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", escaped))


# Finding and replacing values in a text.

Span = tuple[int, int]
_PLACEHOLDER = re.compile(rf"(\${VARIABLE}(?:\d+|MORE))")
# Placeholders contain no secret, and no value may be a part of one.
_IN_PLACEHOLDER = re.compile(r"\$?S?E?C?R?E?T?_?(?:\d{0,4}|M?O?R?E?)")


def _once(text: str, secrets: Secrets, *, code: bool) -> str:
    spans = [(start, end, secret.value) for (start, end), secret in _secrets_in(text, code=code)]
    for secret in secrets.secrets:
        if secret.everywhere:
            for form in _forms(secret.value):
                at = text.find(form)
                while at >= 0:
                    spans.append((at, at + len(form), secret.value))
                    at = text.find(form, at + len(form))
    return _with_placeholders(text, spans, secrets) if spans else text


def _with_placeholders(text: str, spans: list[tuple[int, int, str]], secrets: Secrets) -> str:
    """Return the text in which each range in `spans` is replaced by the placeholder of its secret."""
    spans.sort(key=lambda span: (span[0], -span[1]))
    parts, at = [], 0
    begin, end, value = spans[0]
    for start, stop, other in [*spans[1:], (len(text) + 1, len(text) + 1, "")]:
        if start < end:
            # Overlapping spans become one, with the placeholder of the longest.
            value = other if stop - start > end - begin else value
            end = max(end, stop)
            continue
        parts += [text[at:begin], secrets.placeholder(value)]
        at, begin, end, value = end, start, stop, other
    return "".join([*parts, text[at:]])


def _forms(value: str) -> tuple[str, ...]:
    """Return a secret value in each notation in which it could occur, such as JSON or URL-encoded."""
    if value.isalnum() and value.isascii():
        return (value,)
    forms = (
        value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1],
        value.replace("'", "'\"'\"'"), html.escape(value), quote(value, safe=""), quote(value),
    )  # fmt: skip
    return tuple(dict.fromkeys(forms))


def _secrets_in(text: str, *, code: bool) -> Iterator[tuple[Span, Secret]]:
    for span in _shapes(text):
        yield from _shaped_secrets(text, span)
    for (start, end), everywhere in _named_values(text, code=code):
        value = text[start:end]
        if _may_be_secret(value):
            yield (start, end), Secret(value=value, everywhere=everywhere)
            if "\\" in value and (plain := _without_escapes(value)) != value and everywhere:
                yield (start, end), Secret(value=plain, everywhere=True)


def _shaped_secrets(text: str, span: Span) -> Iterator[tuple[Span, Secret]]:
    value = text[slice(*span)]
    if not _may_be_secret(value):
        return
    yield span, Secret(value=value, everywhere=True)
    if _PEM in value:  # each line too, because a log may separate them
        for line in _PEM_LINE.finditer(value):
            yield (span[0] + line.start(), span[0] + line.end()), Secret(value=line[0], everywhere=True)


def _may_be_secret(value: str) -> bool:
    return (
        bool(value) and f"${VARIABLE}" not in value and not (_IN_PLACEHOLDER.fullmatch(value) and not value.isdigit())
    )


def _without_escapes(value: str) -> str:
    try:
        return str(json.loads(f'"{value}"'))
    except ValueError:
        return value


# Tokens by their shapes.

_PEM = "PRIVATE KEY-----"
_PEM_BLOCK = re.compile(
    rf"-----BEGIN [A-Z0-9 ]{{0,32}}{_PEM}(?:[A-Za-z0-9+/=:, \t\r\n]|\\[nr]|-(?!----)){{0,{_MAX_PEM_CHARS}}}"
    rf"(?:-----END [A-Z0-9 ]{{0,32}}{_PEM})?"
)
_PEM_LINE = re.compile(
    r"(?<![A-Za-z0-9+/])(?:(?<=\\n)|(?<!\\))[A-Za-z0-9+/]{32,}={0,2}|(?<=\\n)[A-Za-z0-9+/]{32,}={0,2}"
)
_DENSE = r"(?=[A-Za-z_-]{0,64}[0-9])"  # a token has a digit
# The beginning of a token, and its pattern without an end: a longer text is a token too.
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
# Values after a word that announces them. Searching for the word is faster than searching for the pattern.
_WANDB = r"(?:wandb[ \t]{1,4}login|api_key|[Pp]assword)[ \t]{1,4}([0-9a-f]{40})"
_ANNOUNCED = tuple(
    (hint, re.compile(pattern))
    for hint, pattern in (
        ("://", r"://[^\s/?#:@\"'<>\0]{0,256}:([^\s/\"'<>\0]{1,256})@|://([^\s/?#:@\"'<>\0]{16,256})@"),
        ("sig=", r"[?&]sig=([A-Za-z0-9%+/=_-]{20,512})"),
        *((hint, _WANDB) for hint in ("wandb", "assword", "api_key")),
        ("earer ", r"[Bb]earer[ \t]{1,4}((?=[A-Za-z._~+/=-]{0,64}[0-9])[A-Za-z0-9._~+/=-]{8,4096})"),
        (
            "uthorization",
            r"uthorization(?:\\{0,3}[\"'])?[ \t]{0,4}[:=,][ \t]{0,4}(?:\\{0,3}[\"'])?(?:[A-Za-z]{1,12}[ \t]{1,4})?"
            r"([A-Za-z0-9._~+/=-]{8,4096})",
        ),
    )
)


def _shapes(text: str) -> Iterator[Span]:
    for hint, shape in _SHAPES:
        at = text.find(hint)
        while at >= 0:
            match = shape.match(text, at) if _begins(text, at) else None
            if match:
                yield match.span()
            at = text.find(hint, match.end() if match else at + len(hint))
    for hint, shape in _ANNOUNCED:
        if hint in text:
            for match in shape.finditer(text):
                yield match.span(match.lastindex or 0)


def _begins(text: str, at: int) -> bool:
    return at == 0 or not text[at - 1].isalnum() or text[max(0, at - 2) : at] in ("\\n", "\\t", "\\r")


# Values by their names.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words("password passwd passphrase secret secrets credential credentials passcode")
_GLUED_WORDS = tuple(_words("password passwd passphrase apikey secretkey accesskey privatekey authtoken apitoken"))
# Words that make a "key" or "token" a secret.
_OPENING_WORDS = _words("""
    api access private secret auth account encryption signing service license ssh master subscription app client
    admin deploy deployment user rsa aes hmac jwt ssl tls wandb openai anthropic azure aws gcp hf comet neptune
    shared storage webhook session refresh oauth bearer bot personal github gitlab slack
""")
# Words after a secret's name that make it a property of the secret: its length, its file, its kind.
_PROPERTY_WORDS = _words("""
    length len size name names file files path paths dir directory folder type types kind count policy min max
    manager required enabled prompt regex pattern format prefix suffix version ttl timeout expiry expires field url
    uri endpoint host env var variable arn hint help error errors hash algorithm rotation
""")
# Words that may follow in the name of a secret: its environment, its form.
_SUFFIX_WORDS = _words("prod production dev test staging base value data json b64 base64 pem raw old new id")
# Words of harmless tokens and keys: of a text, a table, a model, a store or a sort.
_HARMLESS_WORDS = _words("""
    pad padding eos bos unk sep cls mask sot eot eod special end start begin stop image audio video prompt next
    first last per max min num n total new blank word sub text label input output tokens sort primary foreign
    partition store cache group batch column data dataset feature state dict model public rng prng random query
    lookup map row index metric loss target merge join routing split shard block attn head kv value hash object pos
    monitor score sample train eval val config json yaml field dst src step rank layer
""")
_PLACEHOLDER_VALUES = _words("""
    none null nil true false yes no on off auto default str bytes int float bool any optional string undefined
    required missing empty redacted hidden masked unset invalid expired
""")
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PATH = re.compile(
    r"(?:~|\.{1,2})?/[\w.@+-]*(?:/[\w.@+-]*)*|[A-Za-z0-9_.-]+\.(?:json|pem|txt|yaml|yml|toml|key|env|py)"
)


def _secret_by_name(name: str, value: str, *, typed: bool) -> Secret | None:
    """Return `value` as a Secret if `name` suggests that it is secret, otherwise None.

    Set `typed` for a command-line option or an environment variable.
    """
    sure = _names_secret(name, typed=typed)
    if sure is None or not _may_be_secret(value) or value.lower() in _PLACEHOLDER_VALUES or _is_path(value):
        return None
    if value.startswith(("$", "<", "*", "%")) and not any(
        character.isalnum() for character in value[2:-1].replace("_", "")
    ):
        return None
    if not sure and not _like_a_token(value, typed=typed):
        return None
    return Secret(value=value, everywhere=len(value) >= SPREADS_FROM and (sure or not value.isalpha()))


def _names_secret(name: str, *, typed: bool) -> bool | None:
    """Return whether all values with this name are secrets, or None if no value is.

    True: all of them. False: only those that look like a token. None: no value is.
    """
    words = [word.lower() for word in _NAME_PART.findall(name)]
    while words and (words[-1].isdigit() or (len(words) > 1 and words[-1] in _SUFFIX_WORDS)):
        words.pop()
    if not words:
        return None
    strong = [at for at, word in enumerate(words) if word in _SECRET_WORDS]
    if strong:
        return None if set(words[strong[-1] + 1 :]) & _PROPERTY_WORDS else True
    last, others = words[-1], set(words[:-1])
    if last.endswith(_GLUED_WORDS):
        return True
    if last == "pwd" and others and others != {"old"}:
        return True
    if last not in ("key", "token"):
        return None
    if others & _OPENING_WORDS and (last == "key" or not others & _HARMLESS_WORDS):
        return True
    if others & _HARMLESS_WORDS:
        return None
    return typed and bool(others) if last == "token" else False if typed else None


def _like_a_token(value: str, *, typed: bool) -> bool:
    """Return whether a value is long enough, and mixes letters and digits, like a typical access token."""
    is_mixed = any(character.isdigit() for character in value) and any(character.isalpha() for character in value)
    return len(value) >= (8 if typed else 16) and is_mixed


def _is_path(value: str) -> bool:
    """Return whether the value is a file path rather than a token."""
    # A long part with digits and letters of both cases is a token.
    random = (
        len(value) >= 32
        and "." not in value
        and value.lower() != value
        and any(character.isdigit() for character in value)
    )
    return _PATH.fullmatch(value) is not None and not random


# In the lower-case text: a name from one of its words on, and the separator before its value.
_HINTS = ("passw", "passphrase", "passcode", "pwd", "secret", "credential", "token", "key")
_ASSIGNED = tuple(re.compile(hint + r"[a-z0-9_.\-]{0,32}+(?:\\{0,3}[\"'])?[ \t]{0,4}(?:=>|:=|[=:])") for hint in _HINTS)
_OPTION = re.compile(r"--[a-z0-9_\-]{1,64}+(?:\\{0,3}[\"'])?,?[ \t]")
_LONGEST_NAME = 64
_QUOTED = re.compile(
    rf"[ \t]{{0,4}}[bruf]?(\\{{0,3}})([\"'])((?:(?!\1\2)[^\0\n\\]|(?!\1\2)\\[^\n\0]){{1,{_MAX_CHARS}}})"
)
_BARE = re.compile(rf"[ \t]{{0,4}}([^\s\"'`,;&<>()\[\]{{}}|\\\0]{{1,{_MAX_CHARS}}})")


def _named_values(text: str, *, code: bool) -> Iterator[tuple[Span, bool]]:
    """Yield the position of each secret value that follows a name, as in `name=value`.

    The bool says whether the value is a secret everywhere, and not only at this position.
    """
    lower = text.lower()
    if len(lower) != len(text):  # one letter has a longer lower-case form
        lower = text.replace("\u0130", "I").lower()
    for pattern in (*_ASSIGNED, _OPTION):
        searched_to = 0  # a value is searched once, however many names it contains
        for match in pattern.finditer(lower):
            if match.start() < searched_to or not (pattern is not _OPTION or any(hint in match[0] for hint in _HINTS)):
                continue
            start = _name_begins(text, match.start())
            span, everywhere = _value_after(text, start, match.end(), code=code)
            searched_to = span[1]
            if everywhere is not None:
                yield span, everywhere


def _name_begins(text: str, at: int) -> int:
    first = max(0, at - _LONGEST_NAME)
    while at > first and (text[at - 1].isalnum() or text[at - 1] in "_.-"):
        at -= 1
    return at


def _value_after(text: str, start: int, end: int, *, code: bool) -> tuple[Span, bool | None]:
    """Return the position of the value that follows a name, and whether it is a secret wherever it occurs.

    True: everywhere. False: only at this position. None: it is no secret.
    """
    name = text[start:end].rstrip(" \t=:>,\"'\\").lstrip("-")
    nothing = (end, end), None
    if _names_secret(name, typed=False) is None or text[max(0, start - 1) : start] == "$":
        return nothing
    if quoted_match := _QUOTED.match(text, end):
        secret = _secret_by_name(name, quoted_match[3], typed=False)
        return quoted_match.span(3), None if secret is None else secret.everywhere
    bare_match = None if code else _BARE.match(text, end)
    if bare_match is None:
        return nothing
    value = bare_match[1].rstrip(".:!?")
    span = (bare_match.start(1), bare_match.start(1) + len(value))
    is_code = text[bare_match.end() : bare_match.end() + 1] in ("(", "[") or name.lower() in value.lower()
    if is_code or len(value) < 3:  # another name, as in `password=self.password`
        return span, None
    secret = _secret_by_name(name, value, typed=False)
    return span, None if secret is None else secret.everywhere


# Texts in nested values.


def _collect_texts(value: object, texts: dict[str, str]) -> None:
    match value:
        case Enum():
            return
        case str():
            texts[value] = value
        case tuple() | list():
            for item in value:
                _collect_texts(item, texts)
        case Mapping():
            for key, item in value.items():
                _collect_texts(key, texts)
                _collect_texts(item, texts)
        case _ if is_dataclass(value):
            for field in fields(value):
                _collect_texts(getattr(value, field.name), texts)


def _replace_texts(value: object, changes: Mapping[str, str]) -> object:
    match value:
        case Enum():
            return value
        case str():
            return changes.get(value, value)
        case tuple():
            return tuple(_replace_texts(item, changes) for item in value)
        case list():
            return [_replace_texts(item, changes) for item in value]
        case dict():
            return {_replace_texts(key, changes): _replace_texts(item, changes) for key, item in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{field.name: _replace_texts(getattr(value, field.name), changes) for field in fields(value)}
            )
    return value
