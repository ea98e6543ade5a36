"""Find the secrets in a text: tokens of known formats, and values that follow a telling name.

One method serves all kinds of text: a telling name, a separator of any known form, and a value with its quotes. The
time is linear in the text: each pattern matches a limited number of characters after a name or a fixed text.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from urllib.parse import unquote

from nsa_harness.core.secret_formats import provider_patterns
from nsa_harness.core.secret_names import (
    Required,
    full_name,
    goes_on_as_prose,
    is_basic_login,
    is_random,
    is_reference,
    is_secret,
    required_of,
    words_of,
)
from nsa_harness.core.secret_phrases import (
    TAKES_PASSWORD,
    announced_secrets,
    cut_at_end,
    passwords_in_text,
    passwords_in_words,
)

VARIABLE = "SECRET_"
_MAX_CHARS = 4096  # characters of one value
_MAX_KEY_CHARS = 1 << 16  # characters of one private key


@dataclass(frozen=True)
class Found:
    """A secret in a text: its position, its value, and whether its format alone shows that it is a secret."""

    start: int
    end: int
    value: str
    by_format: bool = False


def find_secrets(text: str, *, code: bool = False, typed: bool = False) -> list[Found]:
    """Return the secrets in a text.

    `code`: the text is source code, so an unquoted word is a name and not a value. `typed`: the text is one argument of
    a command or the value of an environment variable.
    """
    search = _find_secrets if len(text) > _MAX_CACHED_CHARS else _cached_secrets
    return list(search(text, code, typed))


def _find_secrets(text: str, code: bool, typed: bool) -> tuple[Found, ...]:
    found: list[Found] = []
    is_plain = True  # whether the text itself is searched, and not only its decoded views
    for pattern, decode, replaces in _VIEWS:
        if pattern.search(text):
            is_plain = is_plain and not replaces
            plain, positions = _decoded(text, pattern, decode)
            found += (
                Found(positions[each.start], positions[each.end - 1] + 1, each.value, each.by_format)
                for each in _found_in_view(plain, code=code, typed=typed)
            )
    found += _found_in_view(text, code=code, typed=typed) if is_plain else ()
    return tuple(each for each in found if f"${VARIABLE}" not in text[each.start : each.end])


_MAX_CACHED_CHARS = 512  # a document repeats its short texts
_cached_secrets = lru_cache(maxsize=1 << 15)(_find_secrets)


def find_in_words(words: Sequence[str]) -> list[list[Found]]:
    """Return the secrets in each argument of a command line."""
    found = [find_secrets(word, typed=True) for word in words]
    filled = [at for at, word in enumerate(words) if word.strip()]  # a continued line may leave an empty argument
    spans = ((filled[at], start, end) for at, start, end in passwords_in_words([words[at] for at in filled]))
    name, sets = "", False
    for order, at in enumerate(filled):
        word = words[at]
        if word == "|" and order and TAKES_PASSWORD.search(" ".join(words[at + 1 : at + 12])):
            piped = words[filled[order - 1]]
            if is_secret(piped, Required.NO_WORD):
                found[filled[order - 1]].append(Found(0, len(piped), piped))
        if sets and required_of(words[filled[order - 1]]) == Required.ANYTHING and not word.startswith("-"):
            found[at] += _value_of("", word, Required.NO_WORD, 0, may_be_url=False)
        sets = sets or word in _SETTING_WORDS
        required = Required.MIXED if name == "p" else required_of(name, typed=True)
        if name and not word.startswith("--"):
            found[at] += _value_of(name, word, required, 0, may_be_url=True)
        option, equals, right = word.partition("=")
        if equals and re.fullmatch(r"[\w.:/@+~-]+", option):
            found[at] += find_in_value(option, right, len(option) + 1)
        name = word.lstrip("-") if re.fullmatch(r"-[\w.,-]+", word) else ""
    line, starts = " ".join(words), list(accumulate((len(word) + 1 for word in words[:-1]), initial=0))
    ends = (starts[at] + each.end for at, several in enumerate(found) for each in several if each.by_format)
    partners = [partner.span(1) for end in ends if (partner := _partner_of(line, end))]
    for start, end in (*announced_secrets(line), *partners):
        at = bisect_right(starts, start) - 1
        if end <= starts[at] + len(words[at]):
            found[at].append(Found(start - starts[at], end - starts[at], line[start:end]))
    for at, start, end in spans:
        if end > start and is_secret(words[at][start:end], Required.ANYTHING):
            found[at].append(Found(start, end, words[at][start:end]))
    return found


def find_in_value(name: str, value: str, start: int = 0, *, typed: bool = True) -> list[Found]:
    """Return the secret in `value`, if its name announces one. `typed`: an option or environment variable."""
    return _value_of(name, value, required_of(name.lstrip("-"), typed=typed), start, may_be_url=typed)


def _value_of(name: str, value: str, required: Required | None, start: int, *, may_be_url: bool) -> list[Found]:
    if required is None:
        return []
    login = _LOGIN_PAIR.fullmatch(value) if "auth" in name.lower() else None
    if login and not login[1].isdigit():
        return [Found(start + login.start(1), start + login.end(1), login[1])]
    if is_secret(value, required, may_be_url=may_be_url) or is_basic_login(value):
        return [Found(start, start + len(value), value)]
    return []


_SETTING_WORDS = words_of("set modify config")  # of a command that goes on with a name and its value
_LOGIN_PAIR = re.compile(r"[^\s:/]{1,128}:([^\s:/]{1,512})")


# Views: the text as a person would read it, with the position of each character.

_VIEWS = (
    (
        re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e)(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\n]{0,256}\x07)"),
        lambda _: "",
        True,
    ),
    (re.compile(r"%(?:3[ADad]|2[26])"), unquote, False),
    (re.compile(r"&(?:quot|apos|#0?3[49]|#x2[27]|lt|gt|amp|#61|#58);"), html.unescape, False),
)


def _decoded(text: str, pattern: re.Pattern[str], decode: Callable[[str], str]) -> tuple[str, list[int]]:
    """Return the text with each match of `pattern` decoded, and the position in `text` of each of its characters."""
    parts, positions, at = [], [], 0
    for match in pattern.finditer(text):
        plain = decode(match[0])
        parts += [text[at : match.start()], plain]
        positions += [*range(at, match.start()), *[match.start()] * len(plain)]
        at = match.end()
    return "".join([*parts, text[at:]]), [*positions, *range(at, len(text))]


def _found_in_view(text: str, *, code: bool, typed: bool) -> Iterator[Found]:
    if _MAY_BE_TOKEN.search(text):
        for token in _formatted(text):
            yield token
            if partner := _partner_of(text, token.end):
                yield Found(*partner.span(1), partner[1])
    yield from _private_keys(text)
    yield from _in_addresses(text)
    yield from (Found(start, end, text[start:end]) for start, end in announced_secrets(text))
    yield from _named(text, code=code)
    if code:
        for match in _TEXT_IN_CODE.finditer(text):
            quoted_text = match[0].strip("\"'")
            offset = match.start() + match[0].index(quoted_text)
            for each in _named(quoted_text, code=False):
                yield replace(each, start=offset + each.start, end=offset + each.end)
    if not typed:
        yield from (Found(start, end, text[start:end]) for start, end in passwords_in_text(text))


# String literals and comments of a program, which may quote a configuration or a connection string.
_TEXT_IN_CODE = re.compile(
    r"\"{3}(?:[^\"]|\"(?!\"\")){8,4096}|'{3}(?:[^']|'(?!'')){8,4096}"
    r"|\"[^\"\n]{8,2048}\"|'[^'\n]{8,2048}'|#[^\n]{8,512}"
)

# Tokens of known formats.


_PARTNER = re.compile(
    r"[\"']?[ ]{0,2}(?:[:,/]|-{1,2}[\w-]{1,32}[ =])[ ]{0,2}[\"']?([A-Za-z0-9/+=_-]{24,128})(?=[\s\"',;)]|$)"
)
_MAY_BE_TOKEN = re.compile(r"[^\s\"']{16}")


@cache
def _patterns() -> tuple[tuple[str, bool, re.Pattern[str]], ...]:
    """Return, for each pattern of a provider, a text in all its tokens, whether it is the start, and the pattern."""
    patterns = []
    for anchor, pattern in provider_patterns():
        at_start = pattern.startswith((anchor, re.escape(anchor)))
        begin = "" if at_start else r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
        patterns.append((anchor, at_start, re.compile(begin + pattern)))
    return tuple(patterns)


def _formatted(text: str) -> Iterator[Found]:
    for anchor, at_start, pattern in _patterns():
        at = text.find(anchor)
        if at < 0:
            continue
        if not at_start:
            for match in pattern.finditer(text):
                yield Found(*match.span(match.lastindex or 0), match[match.lastindex or 0], by_format=True)
            continue
        while at >= 0:
            token = pattern.match(text, at) if _begins(text, at) else None
            if token:
                yield Found(*token.span(token.lastindex or 0), token[token.lastindex or 0], by_format=True)
            at = text.find(anchor, token.end() if token else at + len(anchor))


def _partner_of(text: str, end: int) -> re.Match[str] | None:
    """Return the match of the secret that stands behind the id of an access key, which ends at `end`, or None."""
    partner = _PARTNER.match(text, end)
    return partner if partner and is_secret(partner[1], Required.RANDOM_OR_HEX) else None


def _begins(text: str, at: int) -> bool:
    return (
        at == 0
        or not (text[at].isalnum() and text[at - 1].isalnum())
        or text[max(0, at - 2) : at] in ("\\n", "\\t", "\\r")
    )


# Private keys, whose lines may have prefixes.

_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")
_KEY_REST = re.compile(r"(?:(?:\\[nr]|[^\n]){0,160}?[A-Za-z0-9+/]{24,100}={0,2}[\"',\\nr|+ \t\r]{0,16}(?:\n|$)){1,200}")
_ESCAPED_KEY_REST = re.compile(rf"(?:[A-Za-z0-9+/=]|\\{{1,4}}[nr]){{16,{_MAX_KEY_CHARS}}}")


def _private_keys(text: str) -> Iterator[Found]:
    searched_to = 0
    for match in _KEY_BEGIN.finditer(text):
        if match.start() < searched_to:
            continue
        end_match = _KEY_END.search(text, match.end(), match.end() + _MAX_KEY_CHARS)
        rest = text.find("\n", match.end(), match.end() + 256) + 1 or match.end()
        if end_match and not _KEY_BEGIN.search(text, match.end(), end_match.start()):
            end = end_match.end()
        else:
            rest_match = _ESCAPED_KEY_REST.match(text, match.end()) or _KEY_REST.match(text, rest)
            end = rest_match.end() if rest_match else match.end()
        searched_to = end
        yield Found(match.start(), end, text[match.start() : end], by_format=True)
        body = text[match.end() : end].replace("\\n", "\n ").replace("\\r", "\r ")
        offset_is_same = len(body) == end - match.end()
        for line in _KEY_LINE.finditer(body):  # a log may show a line without the others
            start = match.end() + line.start() if offset_is_same else match.start()
            if len(line[0]) >= 32:
                yield Found(start, start + len(line[0]) if offset_is_same else end, line[0], by_format=True)


# Addresses.

_HOST = r"(?=[\w.\-\[\]$%{}]{1,253}(?:[:/?#,\s\"'<>)\]\\;&|]|$))"
_LOGIN = re.compile(
    rf"://([^\s/?#:\"'<>\0]{{0,256}}):([^\s/?#\"'<>\0]{{1,256}})@{_HOST}"
    rf"|://([^\s/?#:@\"'<>\0]{{0,256}}):(?![0-9]{{1,5}}/)((?:(?!://)[^\s\"'<>\0]){{1,256}})@{_HOST}"
    r"|://([^\s/?#:@\"'<>\0]{16,256})@"
)
_LOGIN_WITHOUT_SCHEME = re.compile(
    r"(?<![\w/.:@-])[\w.+-]{1,64}:([^\s:@/\"'<>\0]{6,128})@(?:[\w-]{1,63}\.){1,8}[A-Za-z0-9-]{2,63}(?![\w@])"
    r"|(?<![\w/.@-])[\w.+-]{1,64}/([^\s:@/\"'<>\0]{4,128})@(?:/{2})?[\w.-]{1,253}:[0-9]{2,5}/\w"
)


def _in_addresses(text: str) -> Iterator[Found]:
    if "@" not in text:
        return
    if "://" in text:
        for match in _LOGIN.finditer(text):
            for group in (2, 4, 5):
                if match[group] and is_secret(match[group], Required.ANYTHING):
                    yield Found(*match.span(group), match[group], by_format=group == 5)
            user = 1 if match[1] else 3
            if match[user] and len(match[user]) >= 16 and (is_random(match[user]) or _is_hex(match[user])):
                yield Found(*match.span(user), match[user], by_format=True)
    for match in _LOGIN_WITHOUT_SCHEME.finditer(text):
        group = match.lastindex or 0
        if is_secret(match[group], Required.NO_WORD) and not match[group].startswith("sha256"):
            yield Found(*match.span(group), match[group])


def _is_hex(value: str) -> bool:
    return re.fullmatch("[0-9a-fA-F]{32,}", value) is not None


# Values after a telling name.

_NAME = re.compile(
    r"(?<![a-z0-9_.\-])[a-z0-9_.\-]*?(?:p(?:ass|w|swd|at|in|hrase|sk)|auth|ke(?:y|nnwort)|tok|s(?:ecret|ig|id|ess|alt|as|enha)"
    r"|c(?:red|ookie|srf|on(?:n|trasena))|webhook|dsn|jwt|bearer|otp|licen[cs]e|xsrf|nonce|mnemonic)[a-z0-9_.\-]*+"
)
_LONGEST_NAME = 100
_QUOTE = r"(?:\\{0,7}[\"'`])"
# The separators between a name and its value. In this order: the first that matches counts.
_SEPARATORS = (
    # {"name": "password", "value": "x"}, and the same in YAML, XML and HTML
    (
        "pair",
        re.compile(
            rf"{_QUOTE}?[ \t]{{0,4}}[,;]?[ \t]{{0,4}}\r?\n?[ \t\-]{{0,32}}{_QUOTE}?(?:value|default|content|val|data)"
            rf"{_QUOTE}?[ \t]{{0,4}}[:=][ \t]{{0,4}}",
            re.IGNORECASE,
        ),
    ),
    # add_argument("--token", help="x", default="y")
    (
        "pair",
        re.compile(rf"{_QUOTE},[^\n()]{{0,120}}?\b(?:default|value|const|envvar_default)[ \t]{{0,2}}=[ \t]{{0,2}}"),
    ),
    # name=value, name: value, "name": value, x["name"] = value, name: Type = value
    (
        "assigned",
        re.compile(
            rf"{_QUOTE}?[ \t]{{0,8}}[\])]{{0,2}}[ \t]{{0,16}}(?:"
            r":[ \t]{0,4}[A-Za-z_][\w.\[\], |]{0,40}[\w\]][ \t]{0,4}=(?!=)"
            r"|string[ \t]{0,4}=|===?|!==?|:=|=>|->|\+=|\?=|=|:)(?:[ \t]|\\t){0,16}"
        ),
    ),
    # ("name", "value"), and setenv("name", "value")
    ("listed", re.compile(rf"{_QUOTE}[ \t]{{0,8}},[ \t]{{0,8}}(?=[bBfFrRuU]?{_QUOTE})")),
    # <name>value</name>, <item key="name">value</item>, <name>api.key</name><value>x</value>
    ("assigned", re.compile(r"</[^<>\n]{1,32}>\s{0,32}<(?:value|default|val)>")),
    ("assigned", re.compile(rf"{_QUOTE}?(?:[ \t][^<>\n]{{0,80}})?>(?=[^<>\s])")),
)
_OPTION_SEPARATOR = re.compile(rf"{_QUOTE}?,?(?:[ \t]{{1,8}}|[ \t]{{0,4}}\\?\r?\n[ \t]{{0,16}})")
_PROSE = re.compile(
    r"[ \t]{1,4}(?:(?:is|was|are|set to|changed to|equals|provided|used|given|received|value|now|sent|=)"
    r"[ \t:]{1,4}){0,2}(?=[^\n]|(?<=:)\n)"
)
_NEXT_LINE = re.compile(
    r"(?:[|>][-+]?)?(?:[ \t]{0,8}[\\(])?(?:[ \t]{0,8}\r?\n){1,2}"
    r"(?:\[[^\]\n]{1,32}\]:?)?[ \t]{0,32}(?:[+>#-][ \t]{1,8})?"
)
_ANCHOR = re.compile(r"&[\w-]{1,32}[ \t]{1,4}(?=[\"'\w])")  # of YAML
_WRAPPER = re.compile(
    r"(?:[A-Za-z_]\w{0,30}\.){0,3}(?:Secret(?:Str|Bytes)?|str|bytes|String|Some|Optional|Field|field|Value"
    r"|quote(?:_plus)?|b64decode|b64encode|Variable|encode|NewSecret|Password|SecureString|CONST|var)\("
    r"(?:[ \t]{0,4}default[ \t]{0,2}=)?[ \t]{0,4}"
)
_QUOTED = re.compile(
    rf"[bBrRfFuU]{{0,2}}(\\{{0,7}})([\"'`])(?!\1\2)"
    # YAML and SQL write a quote in a text as two quotes
    rf"((?:(?!\1\2)[^\0\n\\]|(?!\1\2)\\[^\n\0]|(?<=\w)''(?=\w)){{1,{_MAX_CHARS}}})"
)
_BRACED = re.compile(r"\{([^{}\n\"']{1,256}(?:\}\}[^{}\n\"']{0,256})*)\}(?=;|$|[\"'\s])")
_LIST = re.compile(rf"[\[(][ \t\n]{{0,16}}(?:[bru]?{_QUOTE}[^\"'`\\\n]{{1,512}}{_QUOTE}[,\s]{{0,16}}){{1,64}}")
_ITEM = re.compile(rf"(?<=[\[(,\s])[bru]?{_QUOTE}(?=[^\s,\])])")
_BARE = re.compile(rf"(?:[^\s\"'`;|<>\\\0]|\\(?![nrtu\"'\\x\s])|(?<=\w)[\"'](?=\w)){{1,{_MAX_CHARS}}}")
_END_OF_LINE = re.compile(r"[ \t]*(?:\r?\n|$|#)")
_IS_NAME = re.compile(rf"{_QUOTE}[ \t]{{0,4}}:[ \t]{{0,4}}[\"'{{\[]")
_NEXT_NAME = re.compile(r"[A-Za-z_][\w.-]{0,64}=")
_CODE_LINE = re.compile(
    r"^([ \t|]{0,64})File \"[^\"\n]{1,512}\", line \d+[^\n]{0,256}\n\1[ \t]{1,8}([^\n]{1,512})", re.MULTILINE
)
_GETTER = re.compile(r"(?:get|getenv|setdefault|setenv|putenv|setattr|set|pop|environ)\([ \t]{0,4}[bfru]?\\{0,7}[\"']$")
_LOGIN_ARGUMENT = re.compile(r"(?:login|auth\w{0,16}|connect|[Cc]lient|Session|configure|A[Pp][Ii])\([^()\n]{0,40}$")
_ENVIRONMENT_COMMAND = re.compile(r"(?:\b(?:ENV|ARG|setenv|setx)|\bset[ \t]+-g?x)[ \t]+$")


def _named(text: str, *, code: bool) -> Iterator[Found]:
    """Yield the values that follow a telling name."""
    code_lines = [match.span(2) for match in _CODE_LINE.finditer(text)] if 'File "' in text and not code else []
    starts = [start for start, _ in code_lines]
    searched_to = 0  # a value is searched once, however many names it contains
    lower = text.lower()
    if len(lower) != len(text):  # one letter has a longer lower-case form
        lower = text.replace("\u0130", "I").lower()
    for match in _NAME.finditer(lower):
        if match.start() < searched_to:
            continue
        start, end = max(match.start(), match.end() - _LONGEST_NAME), match.end()
        if start and text[start - 1] == "\\" and text[start] in "nrt":
            start += 1
        name = text[start:end].rstrip(".-")
        end = start + len(name)
        if required_of(name.lstrip("-")) is None and required_of(name.lstrip("-"), typed=True) is None:
            continue
        if text[max(0, start - 2) : start].endswith(("$", "${")) or "arn:" in text[max(0, start - 80) : start]:
            continue
        before = text[max(0, start - 48) : start]
        if before.endswith(" ") and not name.startswith("-"):
            name = full_name(before[:-1], name)
        line = bisect_right(starts, start) - 1
        in_code = code or (line >= 0 and start < code_lines[line][1])
        in_code = in_code and not _ENVIRONMENT_COMMAND.search(before)  # a line of a Dockerfile is never Python
        for found in _values_after(text, name, before, end, code=in_code):
            searched_to = max(searched_to, found.end)
            if found.value:
                yield found


def _values_after(text: str, name: str, before: str, end: int, *, code: bool) -> Iterator[Found]:
    """Yield the secrets that belong to a name. One without a value is a text that need not be searched again."""
    is_option = name.startswith("-")
    name = name.lstrip("-")
    in_address = before[-1:] in ("?", "&")
    for kind, separator in _SEPARATORS:
        match = separator.match(text, end)
        if match is None:
            continue
        is_variable = name.isupper() and ("_" in name or text[end : match.end()] == "=")
        is_argument = "username" in before or (
            "(" in before and (_GETTER.search(before) or _LOGIN_ARGUMENT.search(before))
        )
        typed = is_option or in_address or is_variable or bool(is_argument)
        required = required_of(name, typed=typed)
        is_logger = "." in name and ":" in match[0]  # as in "INFO trainer.auth.tokens: module loaded"
        if (kind == "listed" or is_logger) and not typed and required is not None:
            required = max(required, Required.NO_WORD)
        items = _LIST.match(text, match.end()) if kind != "listed" else None
        starts = [each.start() for each in _ITEM.finditer(text, *items.span())] if items else []
        values = [
            _value_at(text, at, name, required, code=code, is_pair=kind != "listed") for at in starts or [match.end()]
        ]
        if values[0] and required == Required.ANYTHING and ":" in match[0] and _goes_on_as_phrase(before, name):
            values[0] = _with_more_words(text, values[0])
        if any(values):
            yield from filter(None, values)
            return
        if kind == "assigned":
            break
    else:
        match = _OPTION_SEPARATOR.match(text, end)
        if match and (is_option or _ENVIRONMENT_COMMAND.search(before)):
            is_quoted = text[match.start()] in "\\\"'`"  # an item of a list, so its value has quotes too
            required = required_of(name, typed=True)
            found = _value_at(text, match.end(), name, required, code=is_quoted, is_option=True)
            if found:
                yield found
                return
        match = _PROSE.match(text, end)
        required = required_of(name)
        if match and required is not None and not code:
            least = Required.NO_WORD if required == Required.ANYTHING else Required.MIXED
            is_next_name = _NEXT_NAME.match(text, match.end())
            found = None if is_next_name else _value_at(text, match.end(), name, max(required, least), code=False)
            if found:
                yield found
                return
    if (required_of(name) or Required.RANDOM) < Required.RANDOM or required_of(name) == Required.ANYTHING:
        yield from _random_nearby(text, end, code=code)


_NEARBY = re.compile(r"[\"'`]([^\s\"'`\\]{7,128})[\"'`]|([A-Za-z0-9+/=_\-.~!@#$%^&*,(]{8,512})")
_CHECKSUM_NAME = re.compile(r"(?:sha[0-9]{1,3}|md5)[:=-]$", re.IGNORECASE)
_EMAIL = re.compile(r"[\w.+-]+@[\w.-]+")


def _random_nearby(text: str, end: int, *, code: bool) -> Iterator[Found]:
    """Yield random texts that follow a telling name on the same line."""
    stop = text.find("\n", end, end + 80)
    for match in _NEARBY.finditer(text, end, stop if stop >= 0 else end + 160):
        value, start = match[match.lastindex or 0], match.start(match.lastindex or 0)
        value = value if match[1] else value.rstrip(".=-!*,(")
        if _CHECKSUM_NAME.search(text, max(0, start - 8), start):
            continue
        has_symbols = re.search("[!#$%^&*~]", value) is not None and not _EMAIL.fullmatch(value)
        required = Required.MIXED if match[1] or has_symbols else Required.RANDOM
        if start - end <= 80 and not (code and match[2]) and is_secret(value, required) and not is_reference(value):
            yield Found(start, start + len(value), value)


_PASSPHRASE_NAME = re.compile("phrase|mnemonic", re.IGNORECASE)
_MORE_WORDS = re.compile(r"(?:[ \t]{1,4}[\w!?.'&@-]{1,32}){1,24}(?=[ \t]{0,16}(?:\r?\n|$|#))")


def _goes_on_as_phrase(before: str, name: str) -> bool:
    """Return whether a value may have several words: that of a passphrase, or of a line of YAML."""
    return not before.rpartition("\n")[2].strip(" \t-+") or _PASSPHRASE_NAME.search(name) is not None


def _with_more_words(text: str, found: Found) -> Found:
    more = _MORE_WORDS.match(text, found.end) if found.value.isalpha() else None
    return replace(found, end=more.end(), value=text[found.start : more.end()]) if more else found


def _value_at(
    text: str, at: int, name: str, required: Required | None, *, code: bool,
    is_pair: bool = True, is_option: bool = False,
) -> Found | None:  # fmt: skip
    """Return the secret value that begins at a position, or None if it is no secret."""
    if required is None:
        return None
    if next_line := _NEXT_LINE.match(text, at) if is_pair else None:
        at, required = next_line.end(), max(required, Required.NO_WORD)
    may_be_url = any(word in name.lower() for word in ("webhook", "dsn"))
    if anchor := _ANCHOR.match(text, at):
        at = anchor.end()
    if wrapper := _WRAPPER.match(text, at):
        at = wrapper.end()
    if text.startswith("$'", at):  # a shell's quote that may contain escapes
        at += 1
    if text.startswith(('"""', "'''"), at):
        at += 2
    if quoted := _QUOTED.match(text, at):
        value = (
            quoted[3].rstrip("\\")
            if quoted[3].endswith("\\") and text[quoted.end() : quoted.end() + 1] in "\"'`"
            else quoted[3]
        )
        if value[0] in "),]}":  # the quote ends a text such as "Password: "
            return None
        if value == name or _IS_NAME.match(text, quoted.end()) or (" " in value and goes_on_as_prose(value, "")):
            return None
        for found in _value_of(name, value, required, quoted.start(3), may_be_url=may_be_url):
            return replace(found, value=_without_escapes(found.value.replace("''", "'")))
        return None
    if code or wrapper:
        return None
    if (braced := _BRACED.match(text, at)) and is_secret(braced[1], required):
        return Found(*braced.span(1), braced[1])
    bare = _BARE.match(text, at)
    if bare is None or (is_option and bare[0].startswith("--")):
        return None
    value = cut_at_end(bare[0])
    if next_line and (not _END_OF_LINE.match(text, bare.end()) or bare[0].endswith(":")):
        return None
    rejected = Found(at, bare.end(), "") if bare.end() - at > 64 else None
    if (
        (len(value) < 3 and not is_option)
        or is_reference(bare[0])
        or is_reference(value)
        or name.lower().endswith(value.lower())
        or goes_on_as_prose(value, text[bare.end() : bare.end() + 16])
    ):
        return rejected
    return next(iter(_value_of(name, value, required, at, may_be_url=may_be_url)), rejected)


def _without_escapes(value: str) -> str:
    if "\\" not in value:
        return value
    try:
        return str(json.loads(f'"{value}"'))
    except ValueError:
        return value.replace("\\'", "'")
