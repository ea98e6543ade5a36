"""Find the secrets that a fixed text announces: headers, cookies, prompts, the configuration of tools, and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from nsa_harness.core.secret_formats import command_options
from nsa_harness.core.secret_names import Required, is_basic_login, is_reference, is_secret, words_of

_NEXT_PAIR = re.compile(r",(?=\s|$|[\w.-]{1,64}[=:])|&(?=[\w.\-\[\]]{1,64}=)")

_HEADER = re.compile(
    r"(?i:authorization)(?:\\{0,3}[\"'])?[ \t]{0,4}[:=,][ \t]{0,4}(?:\\{0,3}[bfr]?[\"'])?"
    r"(?:(?i:bearer|basic|token|digest|negotiate|ntlm|apikey|api-key|key|oauth|bot|jwt|splunk|sso-key|genie_?key|pat"
    r"|aws4-hmac-sha256)[ \t=]{1,4})?(?:token=)?\"?(?![\w-]{1,20}=[^=\s])((?:[^\s\"'<>\\,;{}]|,(?=\w)){4,4096})"
)
_BEARER = re.compile(r"\b[Bb]earer[ \t]{1,4}([^\s\"'<>\\;{}]{8,4096})")
_DIGEST = re.compile(r"\bresponse=\\{0,3}\"?([0-9A-Za-z]{16,128})")
_OAUTH_CODE = re.compile(r"[?&]code=([^\s&\"'<>#]{8,512})")
TAKES_PASSWORD = re.compile(r"(?:sudo[ ]-S|password-stdin|passwd|kinit|with-token|cryptsetup)")
_PIPED = re.compile(
    r"\b(?:echo[ ](?:-n[ ])?|printf[ ](?:'%s'[ ]|\"%s\"[ ]|%s[ ])?)[\"']?([^\s\"'|]{4,256})[\"']?[ ]{0,4}"
    rf"(?:\||\n\+{{1,3}}[ ])[^\n|]{{0,80}}{TAKES_PASSWORD.pattern}"
)
_USER_OPTION = re.compile(
    r"(?<![\w-])--?(?:user|userpass|login|creds?)[ \t=]{1,4}\\{0,3}[\"']?[^\s:\"'/]{1,64}:([^\s\"'@/:]{5,128})"
)
_BASIC = re.compile(r"\b[Bb]asic[ \t]{1,4}([A-Za-z0-9+/]{8,1024}={0,2})")
_COOKIES = re.compile(r"(?i:cookies?)(?:\\{0,3}[\"'])?[ \t]{0,4}[:=,][ \t]{0,4}(?:\\{0,3}[\"'{])?([^\n\0]{1,4096})")
_CRUMB = re.compile(
    r"(?<![\w.-])\\{0,3}[\"']?([\w.$-]{1,64}+)\\{0,3}[\"']?[ \t]{0,2}[=:][ \t]{0,2}\\{0,3}[\"']?"
    r"((?:[^\s;,\"'\\}]|,(?=\w)){6,2048})"
)
_COOKIE_ATTRIBUTES = words_of("path domain expires max-age samesite secure httponly version priority")
_NETRC = re.compile(
    r"\b(?:login|user|username)[ \t\n]{1,8}\S{1,128}[ \t\n]{1,8}(?:password|passwd|pass)[ \t\n]{1,8}(?![=:])(\S{1,512})"
)
_PHRASE = re.compile(
    r"(?i:identified[ ]by(?:[ ]password)?|wandb[ ]login(?:[ ]--?[\w-]{1,16}(?:=\S{1,256})?){0,3}"
    r"|\bpassw(?:or)?d[ ](?:for|of)[ ]\S{1,64}[ ](?:is|was|:|=)"
    r"|\bpassw(?:or)?d)[ \t]{1,4}([\"'`]?)([^\s\"'`]{4,512})\1"
)
_FOREIGN_NAME = re.compile(
    r"mot de passe|contrase(?:ñ|n)a|palavra-passe|passwor[td]\b|пароль|密码|密碼|口令|パスワード|비밀번호|wachtwoord"
    r"|hasło|heslo|lösenord|adgangskode|parola",
    re.IGNORECASE,
)
_WORD_NEARBY = re.compile(r"[^\s«»“”„\"'`,;()：:]{6,128}")
_PASSPHRASE = re.compile(r"(?i:pass ?phrase|mnemonic|seed phrase)[ \t:=]{1,4}([\"'])([^\"'\n]{12,256})\1")
_PROMPT = re.compile(
    r"^Password(?: for '[^'\n]{1,256}')?:[ \t]{0,4}\r?\n[ \t]{0,8}(\S{6,128})[ \t]{0,8}$", re.MULTILINE
)
_FORMATTED = re.compile(
    r"(?:earer|asic|oken|[Kk]ey|assword)[^\"'\n]{0,40}\{\w{0,16}\}[\"']\.format\([ \t]{0,4}[\"']([^\"'\n]{8,256})[\"']"
)
_FIRST_ARGUMENT = re.compile(
    r"\b(?:(?:Offline)?Experiment|Session|Client|Api|API|login)\([ \t\n]{0,16}[\"']([A-Za-z0-9_\-]{20,128})[\"']"
)
_PGPASS = re.compile(r"^[\w.*-]{1,253}:(?:\d{1,5}|\*):[\w*-]{1,63}:[\w*@.-]{1,63}:(\S{4,256})$", re.MULTILINE)
_LOGIN_CALL = re.compile(
    r"\b(?:login|[sg]et_?(?:password|token|secret|api_?key)|authenticate|HTTPBasicAuth|HTTPDigestAuth|BasicAuth|basic_auth"
    r"|SecretStr|Fernet|Github|Gitlab|HfApi|WebClient"
    r"|with_(?:token|password|api_?key)|auth[ \t]{0,2}=[ \t]{0,2}|credentials?[ \t]{0,2}=[ \t]{0,2})"
    r"\(((?:[^()\n\"']{0,64}b?(?:\"[^\"\n]{0,512}\"|'[^'\n]{0,512}')){1,4}),?[ \t]{0,4}\)"
)
_LITERAL = re.compile(r"\"([^\"\n]{1,512})\"|'([^'\n]{1,512})'")


# Texts of which one occurs in each match, the pattern, and what its groups must look like.
_SIMPLE_PHRASES: tuple[tuple[tuple[str, ...], re.Pattern[str], Required], ...] = (
    (("code=",), _OAUTH_CODE, Required.NO_WORD),
    (("echo ", "printf "), _PIPED, Required.NO_WORD),
    (("-user", "-login", "-cred"), _USER_OPTION, Required.NO_WORD),
    (("login", "user"), _NETRC, Required.ANYTHING),
    (("Password",), _PROMPT, Required.NO_WORD),
    (("(",), _FIRST_ARGUMENT, Required.RANDOM),
    ((".format(",), _FORMATTED, Required.NO_WORD),
    # Client("name of an account", "token")
    (
        ("Client(",),
        re.compile(
            r"\b\w{0,32}Client\((?:[ \t\n]{0,16}[\"'][^\"'\n]{1,128}[\"'],){1,3}[ \t\n]{0,16}[\"']([0-9a-f]{32,64})\b"
        ),
        Required.RANDOM_OR_HEX,
    ),
    # The debugging output of smtplib and imaplib.
    (
        ("AUTH",),
        re.compile(r"\bAUTH(?:ENTICATE)? (?:PLAIN|LOGIN|XOAUTH2|CRAM-MD5) ([A-Za-z0-9+/]{8,1024}={0,2})"),
        Required.NO_WORD,
    ),
    (("appid=", "subscription-key="), re.compile(r"[?&](?:appid|subscription-key)=(\w{24,128})"), Required.MIXED),
    # A plan of Terraform, and the configuration of SNMP.
    (
        ("random_password",),
        re.compile(r"\"random_password\"[^}]{0,400}?\bresult[ \t]{0,8}=[ \t]{0,8}\"([^\"\n]{4,256})\""),
        Required.NO_WORD,
    ),
    (
        ("createUser",),
        re.compile(r"\bcreateUser \S{1,64} \w{3,8} \"?([^\s\"]{4,128})\"?(?: \w{3,8} \"?([^\s\"]{4,128}))?"),
        Required.NO_WORD,
    ),
    (("http-basic.",), re.compile(r"\bhttp-basic\.\S{1,64} \S{1,128} ([^\s\"']{4,256})"), Required.NO_WORD),  # Poetry
    # Commands of Windows.
    (
        ("SecureString",),
        re.compile(r"ConvertTo-SecureString[ ]{1,4}(?:-String[ ]{1,4})?[\"']([^\"'\n]{4,256})[\"']"),
        Required.NO_WORD,
    ),
    (
        ("net use ",),
        re.compile(r"\bnet use [^\n]{1,200}?(?:/user:\S{1,128} ([^\s/]\S{3,127})|\\ ([^\s/\\]\S{3,127}) /user:)"),
        Required.NO_WORD,
    ),
)


def announced_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions, as start and end, of the secrets that follow a fixed text."""
    if "uthorization" in text or "UTHORIZATION" in text:
        for match in _HEADER.finditer(text):
            if is_secret(match[1], Required.NO_WORD) or is_basic_login(match[1]):
                yield match.span(1)
    if "earer" in text:
        for match in _BEARER.finditer(text):
            value = cut_at_end(match[1])
            if is_secret(value, Required.NO_WORD):
                yield match.start(1), match.start(1) + len(value)
    if "asic" in text:
        yield from (m.span(1) for m in _BASIC.finditer(text) if is_basic_login(m[1]))
    if "igest" in text:
        yield from (m.span(1) for m in _DIGEST.finditer(text))
    for hints, pattern, required in _SIMPLE_PHRASES:
        for match in pattern.finditer(text) if any(hint in text for hint in hints) else ():
            for group in range(1, pattern.groups + 1):
                if match[group] and is_secret(match[group], required):
                    yield match.span(group)
    if "ookie" in text or "OOKIE" in text:
        for match in _COOKIES.finditer(text):
            for crumb in _CRUMB.finditer(text, *match.span(1)):
                if crumb[1].lower() not in _COOKIE_ATTRIBUTES and is_secret(crumb[2], Required.MIXED):
                    yield crumb.span(2)
    lower = text.lower()
    if "identified by" in lower or "wandb login" in lower or "password " in lower or "passwd " in lower:
        for match in _PHRASE.finditer(text):
            value = match[2].rstrip(".,;:!?)")
            required = Required.MIXED if "login" in match[0] else Required.NO_WORD
            if is_secret(value, required) and (match[1] or not is_reference(match[2])):
                yield match.start(2), match.start(2) + len(value)
    for match in _FOREIGN_NAME.finditer(text) if not text.isascii() or "asse" in lower else ():
        stop = text.find("\n", match.end(), match.end() + 60)
        for word in _WORD_NEARBY.finditer(text, match.end(), stop if stop >= 0 else match.end() + 60):
            if is_secret(word[0], Required.NO_WORD) and any(map(str.isdigit, word[0])):
                yield word.span()
                break
    if "phrase" in lower or "mnemonic" in lower:
        yield from (m.span(2) for m in _PASSPHRASE.finditer(text) if m[2].count(" ") >= 2)
    if text.count(":") >= 4:
        yield from (m.span(1) for m in _PGPASS.finditer(text) if is_secret(m[1], Required.NO_WORD))
    for match in _LOGIN_CALL.finditer(text):
        *_, literal = _LITERAL.finditer(match[1])
        group = literal.lastindex or 0
        start = match.start(1) + literal.start(group)
        if is_secret(literal[group], Required.NO_WORD):
            yield start, start + len(literal[group])


def cut_at_end(value: str) -> str:
    """Return an unquoted value without what follows it: punctuation, a closing bracket, or the next name."""
    if next_pair := _NEXT_PAIR.search(value):
        value = value[: next_pair.start()]
    opened = 0
    for at, character in enumerate(value):
        opened += (character in "([{") - (character in ")]}")
        if opened < 0:
            value = value[:at]
            break
    return value.rstrip(".,:!?") if not value.endswith("://") else value


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
