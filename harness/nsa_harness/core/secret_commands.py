"""Find the passwords in commands, such as that of `curl -u user:password`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from nsa_harness.core.secret_formats import command_options
from nsa_harness.core.secret_names import Required, is_reference, is_secret

_MAX_CHARS = 4096  # characters of one command
_WORD = re.compile(r"(?:\"(?:[^\"\\\n]|\\.)*+\"|'[^'\n]*+'|[^\s\"'])+|[\"']")


@cache
def _commands() -> tuple[dict[str, frozenset[str]], re.Pattern[str]]:
    options = command_options()
    return options, re.compile(rf"(?<![\w.-])(?:{'|'.join(sorted(options, key=len, reverse=True))})(?=[ \t\"',])")


def passwords_in_text(text: str) -> Iterator[tuple[int, int]]:
    """Yield the range of each password in the command lines that a text quotes."""
    _, pattern = _commands()
    searched_to = 0
    for match in pattern.finditer(text):
        if match.start() < searched_to:
            continue
        line_end = text.find("\n", match.start(), match.start() + _MAX_CHARS)
        searched_to = line_end if line_end >= 0 else match.start() + _MAX_CHARS
        words = []
        for word in _WORD.finditer(text, match.start(), searched_to):
            plain = word[0].strip("[](),")
            quote = plain[:1] if plain[:1] in "\"'" and plain[-1:] == plain[:1] and len(plain) > 1 else ""
            plain_start = word.start() + word[0].index(plain) + len(quote)
            words.append((plain[len(quote) : -1] if quote else plain, plain_start))
        words = [word for word in words if word[0]]
        for at, start, end in passwords_in_words([word for word, _ in words]):
            value = words[at][0][start:end]
            if len(value) > 2 and value[0] in "\"'" and value[-1] == value[0]:
                start, end, value = start + 1, end - 1, value[1:-1]
            if is_secret(value, Required.ANYTHING) and not is_reference(value):
                yield words[at][1] + start, words[at][1] + end


def passwords_in_words(words: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the place of each password in a command line: the number of the word, and the range in it."""
    options, _ = _commands()
    taking: frozenset[str] = frozenset()
    before, is_login = "", False
    for at, word in enumerate(words):
        previous, before = before, word
        if (name := word.rpartition("/")[2]) in options and not word.startswith("-"):
            taking, is_login = options[name], False
            continue
        is_login = is_login or word in ("login", "alias")
        option, equals, _ = word.partition("=")
        glued = next(
            (each[:-1] for each in taking if each[-1] == "*" and ":*" not in each and word.startswith(each[:-1])), ""
        )
        if word.startswith("-") and not equals and not glued:
            continue
        if (
            previous in taking
            or (is_login and f"login:{previous}" in taking)
            or (is_login and "login:*" in taking and not word.startswith("-") and is_secret(word, Required.MIXED))
        ):
            start = 0
        elif equals and option in taking:
            start, previous = len(option) + 1, option
        elif glued and len(word) > len(glued):
            start = len(glued)
        else:
            continue
        if previous in _LOGIN_OPTIONS:
            separators = ":%," if previous == "-u" else ":%"
            separator = next((each for each in separators if each in word[start:]), "")
            start = word.index(separator, start) + 1 if separator else start if previous == "-a" else len(word)
        yield at, start, len(word)


_LOGIN_OPTIONS = ("-u", "--user", "-U", "--proxy-user", "-a", "--auth")  # take user:password
