"""Remember the secrets of a run by numbers, and replace them in text with placeholders.

A value that was found once is replaced by `$SECRET_1` and so on. It is also replaced elsewhere if it is long enough and
could not be an ordinary word, such as a directory, a host or a code of nsa-harness.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shlex
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum, IntEnum
from typing import Any, TypeVar, cast
from urllib.parse import quote, unquote

from nsa_harness.core.raw_bytes import with_raw_bytes
from nsa_harness.core.secret_forms import VARIABLE, Found, find_in_value, find_in_words, find_secrets
from nsa_harness.core.secret_names import Required, is_distinctive, is_number, is_word, required_of, words_of

T = TypeVar("T")

SECRETS_LIMIT = 400  # of one run; further values are replaced only where they were found, by $SECRET_MORE
_MAX_HARMLESS = 1 << 18  # texts without a secret that are remembered
_MAX_HARMLESS_CHARS = 512  # of one of these texts
_MAX_HARMLESS_NUMBER = 9999  # a larger number may be a secret, if its name announces one
_SHORTEST_SPREAD = 8  # characters; a shorter value, which may be part of any word, is replaced only where it was found


class Spread(IntEnum):
    """Where else a secret is searched."""

    NOWHERE = 0
    WHOLE_WORDS = 1  # in prose, where it is not a part of a word, a path or a name
    ANYWHERE = 2


class Secrets:
    """The secrets of one run. Each has a number, which later judgements of the run keep.

    `key` and `stored`: what `to_store` returned for an earlier judgement. `common`: words that occur in the run for
    other reasons, such as the names of users, hosts and directories; a secret of this name is not searched elsewhere.
    """

    def __init__(self, key: bytes = b"", stored: Sequence[tuple[str, int]] = (), common: Iterable[str] = ()) -> None:
        self._key = key
        self._digests = list(stored)  # of the secret $SECRET_1 and so on: its digest, and its length or 0
        self._numbers = {digest: number for number, (digest, _) in enumerate(stored, 1)}
        self._values: dict[str, int] = {}  # secret -> its number
        self._spread: dict[str, Spread] = {}
        self._suspected: dict[str, Spread] = {}  # values of the environment, which get a number once a text has them
        self.common = {word.lower() for word in common}
        self._changes = 0  # counts what was learned; another number may give another result for any text
        self._harmless: set[tuple[str, str]] = set()  # (name, text) without a secret, as of `_harmless_since`
        self._harmless_documents: set[bytes] = set()  # digests of JSON texts without a secret
        self._harmless_since = self._knowledge

    def __bool__(self) -> bool:
        return bool(self._values)

    def to_store(self) -> list[tuple[str, int]]:
        """Return what a later judgement needs to recognize these secrets, without the secrets."""
        return self._digests

    def placeholder(self, value: str) -> str:
        return f"${VARIABLE}{self._values.get(value, 'MORE')}"

    @property
    def _knowledge(self) -> tuple[int, int]:
        """A value that changes whenever something was learned that could change the redaction of a text."""
        return self._changes, len(self.common)

    # Learning.

    def learn(self, value: str, *, by_format: bool = False) -> None:
        """Give a secret a number, if it has none yet, and decide where else it is searched."""
        known = len(self._values), len(self._digests), self._spread.get(value)
        self._learn(value, by_format=by_format)
        if known != (len(self._values), len(self._digests), self._spread.get(value)):
            self._changes += 1

    def _learn(self, value: str, *, by_format: bool) -> None:
        if "%" in value and (plain := unquote(value)) != value:  # the same secret in a URL has the same number
            self.learn(plain, by_format=by_format)
            self._values.setdefault(value, self._values.get(plain, SECRETS_LIMIT))
        if value not in self._values:
            digest = self._digest(value)
            number = self._numbers.get(digest, len(self._digests) + 1)
            if number > SECRETS_LIMIT:
                return
            if number > len(self._digests):
                # The length is stored only where no name will tell a later judgement that the value is a secret.
                self._digests.append((digest, len(value) if value in self._suspected else 0))
                self._numbers[digest] = number
            self._values[value] = number
            self._values.setdefault(value.rstrip(".,:!?"), number)  # at the end of a sentence, they are left out
        spread = Spread.ANYWHERE if by_format and len(value) >= _SHORTEST_SPREAD else self._spread_of(value)
        if spread > self._spread.get(value, Spread.NOWHERE):
            self._spread[value] = spread

    def suspect(self, environment: Mapping[str, str]) -> None:
        """Treat the secrets of an environment as secrets in all text that is redacted afterwards."""
        for name, value in environment.items():
            for found in find_in_variable(name, value):
                if spread := Spread.ANYWHERE if found.by_format else self._spread_of(found.value):
                    self._changes += self._suspected.get(found.value) != spread
                    self._suspected[found.value] = spread

    def learn_text(self, text: str, *, code: bool = False) -> list[Found]:
        """Find the secrets in a text, and give each a number. Return them."""
        for value, spread in self._suspected.items():
            if value not in self._values and any(_occurrences(text, value, spread)):
                self.learn(value)
        found = sorted(find_secrets(text, code=code), key=lambda each: (each.start, -each.end))
        for each in found:
            self.learn(each.value, by_format=each.by_format)
        self._learn_stored(text)
        return found

    def _learn_stored(self, text: str) -> None:
        """Recognize the secrets that an earlier judgement knew from another environment."""
        known = set(self._values.values())
        waiting = {digest: length for at, (digest, length) in enumerate(self._digests, 1) if length and at not in known}
        for start in _WORD_START.finditer(text) if waiting else ():
            for length in set(waiting.values()):
                value = text[start.start() : start.start() + length]
                if len(value) == length and self._digest(value) in waiting:
                    self.learn(value)

    def _digest(self, value: str) -> str:
        return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), key=self._key, digest_size=12).hexdigest()

    def _spread_of(self, value: str) -> Spread:
        if len(value) < _SHORTEST_SPREAD or is_number(value) or is_word(value) or value.lower() in self.common:
            return Spread.NOWHERE
        return Spread.ANYWHERE if is_distinctive(value) else Spread.WHOLE_WORDS

    # Redacting.

    def text(self, text: str, *, code: bool = False, is_name: bool = False) -> str:
        """Return the text with a placeholder in place of each secret. Redacting the result again changes nothing.

        `code`: the text is source code. `is_name`: the text is a code, a key, a path or a location, in which only
        values that cannot be words are replaced.
        """
        while True:
            found = self.learn_text(text, code=code)
            spans = [(each.start, each.end, each.value) for each in found]
            clean = self._with_placeholders(text, [*spans, *self._spread_in(text, code=code, is_name=is_name)])
            if clean == text:
                return clean
            text = clean

    def mask(self, data: bytes) -> bytes:
        """Replace each secret in binary data with stars, without changing the length of the data."""
        text = data.decode("utf-8", "surrogateescape")
        spans = [(each.start, each.end, "") for each in self.learn_text(text)]
        for start, end, _ in [*spans, *self._spread_in(text, code=False, is_name=False)]:
            stars = "*" * len(text[start:end].encode("utf-8", "surrogateescape"))
            if len(stars) == end - start:
                text = text[:start] + stars + text[end:]
        return text.encode("utf-8", "surrogateescape")

    def value(self, value: T) -> T:
        """Return a nested value in which the secrets in every string are replaced: a copy if there were any.

        The time is that of one walk through the value, and of a search in each string that was not searched before. A
        string that has no secret is remembered until something is learned that could change this.
        """
        collected = _Texts()
        collected.add(value, "")
        texts = collected.found
        self._forget_outdated()
        before = self._knowledge
        for name, text in [each for each in texts if each not in self._harmless]:
            self._learn_named(name, text)
        harmless = self._harmless if self._knowledge == before else set()
        before = self._knowledge
        clean = {each: self._clean_named(*each) for each in texts if each not in harmless}
        changed = {each: text for each, text in clean.items() if text != each[1]}
        if self._knowledge == before:
            self._remember(each for each in clean if each not in changed)
        if not changed:
            return value
        return cast(T, _map_texts(value, "", lambda name, text: changed.get((name, text), text)))

    def _remember(self, harmless: Iterable[tuple[str, str]]) -> None:
        """Remember names and texts that have no secret, according to what is known now."""
        self._forget_outdated()
        if len(self._harmless) > _MAX_HARMLESS:
            self._harmless.clear()
        self._harmless.update(each for each in harmless if len(each[1]) <= _MAX_HARMLESS_CHARS)

    def _forget_outdated(self) -> None:
        """Forget what had no secret before something was learned that could change this."""
        if self._harmless_since != self._knowledge:
            self._harmless.clear()
            self._harmless_documents.clear()
            self._harmless_since = self._knowledge

    def json(self, text: str) -> str:
        """Redact JSON text, or lines of JSON, so that it remains valid. Any other text is redacted as plain text."""
        ending = "\n" if text.endswith("\n") else ""
        # A file and its copy have the same text.
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
        self._forget_outdated()
        if digest in self._harmless_documents:
            return text
        before = self._knowledge
        try:
            document = json.loads(text)
            clean = self.value(document)
        except (ValueError, RecursionError):
            lines = text.splitlines(keepends=True)
            return self.text(text) if len(lines) < 2 else "".join(map(self.json, lines))
        if clean == document:
            if self._knowledge == before and len(self._harmless_documents) < _MAX_HARMLESS:
                self._harmless_documents.add(digest)
            return text
        indent = 1 if "\n" in text.strip() else None
        return json.dumps(clean, indent=indent, separators=None if indent else (",", ":")) + ending

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a command line with its secrets redacted."""
        clean = [self._replaced(word, found) for word, found in zip(words, find_in_words(words), strict=True)]
        return tuple(
            self.placeholder(word) if word in self._values else self.text(word, is_name=True) for word in clean
        )

    def variable(self, name: str, value: str) -> str:
        """Return the value of an environment variable with its secrets redacted."""
        return self.text(self._replaced(value, find_in_variable(name, value)))

    def _learn_named(self, name: str, text: str) -> str:
        if self._replaced(text, _named_secret(name, text)) == text:
            self.learn_text(text, code=name == _SOURCE_LINE)
        return text

    def _clean_named(self, name: str, text: str) -> str:
        clean = self._replaced(text, _named_secret(name, text))
        return self.text(clean, code=name == _SOURCE_LINE, is_name=name in _NAME_FIELDS)

    def _replaced(self, text: str, found: list[Found]) -> str:
        """Learn the secrets found in a text, and return the text with their placeholders."""
        for each in found:
            self.learn(each.value, by_format=each.by_format)
        return self._with_placeholders(text, [(each.start, each.end, each.value) for each in found]) if found else text

    def _spread_in(self, text: str, *, code: bool, is_name: bool) -> Iterator[tuple[int, int, str]]:
        for value, spread in self._spread.items():
            if spread == Spread.ANYWHERE or not is_name:
                for start, end in _occurrences(text, value, spread):
                    is_literal = text[start - 1 : start] in _QUOTES and text[end : end + 1] in _QUOTES
                    if spread == Spread.ANYWHERE or not code or is_literal:
                        yield start, end, value

    def _with_placeholders(self, text: str, spans: list[tuple[int, int, str]]) -> str:
        """Return the text in which each range in `spans` is replaced by the placeholder of its secret."""
        parts, at = [], 0
        spans = sorted(_outside_placeholders(text, spans), key=lambda span: (span[0], -span[1]))
        begin, end, value = spans[0] if spans else (0, 0, "")
        for start, stop, other in [*spans[1:], (len(text) + 1, len(text) + 1, "")] if spans else ():
            if start < end:
                # Overlapping spans become one, with the placeholder of the longest.
                value = other if stop - start > end - begin else value
                end = max(end, stop)
                continue
            parts += [text[at:begin], self.placeholder(value)]
            at, begin, end, value = end, start, stop, other
        return "".join([*parts, text[at:]])


def find_in_variable(name: str, value: str) -> list[Found]:
    """Return the secrets in the value of an environment variable."""
    return find_in_value(name, value) or find_secrets(value, typed=True)


# The name given to source code, and the names of fields whose values are codes, keys, paths or locations.
_SOURCE_LINE = "source_line"
_NAME_FIELDS = words_of("""
    about at backend blocked_in cause causes code cwd device dir directory dtype dtypes event file files frame function
    group groups host id job key keys kind location loop module name names node op operation path phase place program
    proof_reason reason_of root run run_id scenario scenarios schema setting settings spec stacks_file stage state
    status subject_dir syscall tags target type unit variable verdict visible wchan
""")
_QUOTES = tuple("\"'`")
_WORD_START = re.compile(r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=\x1b\[[0-9]m)|(?<=\x1b\[[0-9]{2}m))(?=[!-~])")


def _named_secret(name: str, text: str) -> list[Found]:
    return find_in_value(name, text, typed=name.isupper()) if name and f"${VARIABLE}" not in text else []


def _occurrences(text: str, value: str, spread: Spread) -> Iterator[tuple[int, int]]:
    for form in _forms(value):
        at = text.find(form)
        while at >= 0:
            end = at + len(form)
            if spread == Spread.ANYWHERE or _is_whole_word(text, at, end):
                yield at, end
            at = text.find(form, end)


def _is_whole_word(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    begins = not before or not (before[-1].isalnum() or before[-1] in "_/.\\-") or before in ("\\n", "\\t", "\\r")
    return begins and not (
        after[:1].isalnum() or after[:1] in ("_", "/", "-") or (after[:1] == "." and after[1:].isalnum())
    )


def _forms(value: str) -> tuple[str, ...]:
    """Return a secret value in each notation in which it could occur, such as JSON or URL-encoded."""
    if value.isalnum() and value.isascii():
        return (value,)
    forms = (
        value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1],
        value.replace("'", "'\"'\"'"), html.escape(value), quote(value, safe=""), quote(value),
    )  # fmt: skip
    return tuple(dict.fromkeys(forms))


def _map_texts(value: object, name: str, function: Callable[[str, str], str]) -> Any:
    """Return a copy of a nested value in which `function(name, text)` replaces each string.

    `name` is the key or the field of the string, or the string before it that gives it a name: an option, or the first
    item of a pair.
    """
    match value:
        case Enum() | None | bool() | float():
            return value
        case str():
            return function(name, value)
        case int():
            return function(name, str(value)) if _is_secret_number(value, name) else value
        case tuple() | list():
            items = [_map_texts(item, item_name, function) for item_name, item in _named_items(value, name)]
            return items if isinstance(value, list) else tuple(items)
        case Mapping():
            return {
                function("name", key) if isinstance(key, str) else key: _map_texts(
                    item, _name_of_item(value, str(key)), function
                )
                for key, item in value.items()
            }
        case _ if is_dataclass(value) and not isinstance(value, type):
            old = {field.name: getattr(value, field.name) for field in fields(value)}
            new = {
                key: item if isinstance(item, int) else _map_texts(item, _name_of_item(old, key), function)
                for key, item in old.items()
            }
            return value if new == old else replace(value, **new)
    return value


_FEW_REFERENCES = 8  # an object with so few is hardly shared; the walk itself holds about five


class _Texts:
    """Collects each string for which `_map_texts` would call its function, once, as (name, text), in the same order.

    Objects of which a value has many, such as frames, are often shared, and are walked only once under each name.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], None] = {}
        self._walked: set[tuple[int, str]] = set()
        self._keys: set[str] = set()

    def add(self, value: object, name: str) -> None:
        """Add the strings in a value with this name. The value must stay alive and unchanged."""
        kind = type(value)
        if kind is str:
            self.found[name, value] = None  # type: ignore[index]  # mypy does not narrow by `kind`
        elif kind in _WITHOUT_TEXT:
            return
        elif kind is int:
            if _is_secret_number(value, name):  # type: ignore[arg-type]
                self.found[name, str(value)] = None
        elif kind is dict:
            self._add_items(value)  # type: ignore[arg-type]
        elif kind is list or kind is tuple:
            if value and self._is_new(value, name):
                self._add_list(value, name)  # type: ignore[arg-type]
        elif kind in _FIELDS or (is_dataclass(value) and not isinstance(value, type)):
            if self._is_new(value, name):
                self._add_fields(value)
        else:
            _map_texts(value, name, self._note)

    def _is_new(self, value: object, name: str) -> bool:
        if sys.getrefcount(value) <= _FEW_REFERENCES:
            return True  # remembering it would cost more memory than walking it again costs time
        key = id(value), name
        is_new = key not in self._walked
        self._walked.add(key)
        return is_new

    def _note(self, name: str, text: str) -> str:
        self.found[name, text] = None
        return text

    def _add_items(self, items: dict[Any, Any]) -> None:
        for key, item in items.items():
            if isinstance(key, str) and key not in self._keys:
                self._keys.add(key)
                self.found["name", str(key)] = None
            kind = type(item)
            if kind in _WITHOUT_TEXT:
                continue
            name = str(key)
            if name in _NAMED_BY_OTHERS:
                name = _name_of_item(items, name)
            if kind is str:
                self.found[name, item] = None
            elif kind is not int or item > _MAX_HARMLESS_NUMBER:
                self.add(item, name)

    def _add_list(self, items: Sequence[object], name: str) -> None:
        kinds = set(map(type, items))
        if kinds == {int} and required_of(name) != Required.ANYTHING:
            return
        if any(issubclass(kind, str) for kind in kinds):
            for item_name, item in _named_items(items, name):
                self.add(item, item_name)
        else:
            for item in items:
                self.add(item, name)

    def _add_fields(self, value: object) -> None:
        for field in _fields_of(type(value)):
            item = getattr(value, field)
            kind = type(item)
            if kind in _WITHOUT_TEXT:
                continue
            name = field if field not in _NAMED_BY_OTHERS else _name_of_item(_values_of(value), field)
            if kind is str:
                self.found[name, item] = None
            elif not isinstance(item, int):
                self.add(item, name)


_WITHOUT_TEXT = frozenset({float, bool, type(None)})
_NAMED_BY_OTHERS = frozenset({"text", "value", "default"})  # their names depend on the fields beside them
_FIELDS: dict[type, tuple[str, ...]] = {}  # the names of the fields of each dataclass that was walked


def _values_of(value: object) -> Mapping[str, object]:
    """Return the values of a dataclass instance by field."""
    return {field: getattr(value, field) for field in _fields_of(type(value))}


def _fields_of(dataclass_type: type) -> tuple[str, ...]:
    if dataclass_type not in _FIELDS:
        _FIELDS[dataclass_type] = tuple(field.name for field in fields(dataclass_type))
    return _FIELDS[dataclass_type]


def _is_secret_number(number: int, name: str) -> bool:
    return number > _MAX_HARMLESS_NUMBER and bool(name) and required_of(name) == Required.ANYTHING


def _name_of_item(items: Mapping[str, object], key: str) -> str:
    """Return the name of an item: its key, the name beside a "value", or `source_line` for the text of a location."""
    if key == "text" and "file" in items:
        return _SOURCE_LINE
    names = (items.get(other) for other in ("name", "key", "variable")) if key in ("value", "default") else ()
    return next((name for name in names if isinstance(name, str)), key)


def _named_items(items: Sequence[object], name: str) -> Iterator[tuple[str, object]]:
    """Yield each item of a list with its name."""
    is_pair = len(items) == 2 and isinstance(items[0], str) and " " not in items[0]
    previous: object = None
    for item in items:
        is_option = isinstance(previous, str) and previous.startswith("--") and "=" not in previous
        if isinstance(previous, str) and (is_option or is_pair) and isinstance(item, str) and not item.startswith("--"):
            own_name = previous.lstrip("-")
            is_named = required_of(own_name, typed=is_option) is not None
            yield own_name.upper() if is_option and is_named else own_name if is_named else name, item
        else:
            yield name, item
        previous = item


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
    return (
        "$'" + "".join(_SPELLED.get(character) or _octal_escape(character) for character in with_raw_bytes(word)) + "'"
    )


_SPELLED = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\x1b": "\\e"}


def _octal_escape(character: str) -> str:
    if character.isprintable():
        return character
    escaped = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", escaped))


_PLACEHOLDER = re.compile(rf"(\${VARIABLE}(?:\d+|MORE))")


def _outside_placeholders(text: str, spans: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges that overlap no placeholder."""
    taken = [match.span() for match in _PLACEHOLDER.finditer(text)] if f"${VARIABLE}" in text else []
    for span in spans:
        at = bisect_right(taken, (span[0], len(text)))
        if not any(start < span[1] and end > span[0] for start, end in taken[max(0, at - 1) : at + 1]):
            yield span
