"""Judge whether a name, such as `DB_PASSWORD`, announces a secret, and whether a value could be one."""

from __future__ import annotations

import base64
import binascii
import re
from enum import IntEnum
from functools import lru_cache


class Required(IntEnum):
    """What a value must look like to be a secret. The clearer its name, the less is required of the value."""

    ANYTHING = 0  # any value that is not a placeholder, a path or a reference
    NO_WORD = 1  # a digit with letters, or a symbol
    MIXED = 2  # digits and letters in turn, a symbol, or a long hexadecimal number
    RANDOM_OR_HEX = 3  # a long random text or a long hexadecimal number
    RANDOM = 4  # a long random text; hexadecimal numbers are mostly hashes


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, which are separated by spaces."""
    return frozenset(text.split())


# Sections of words.
# secret: their values are secrets, whatever they look like
# short: short names of passwords
# key: secrets if another word says so, or if the value looks like one
# other: secrets if the value looks like one
# opening: make a "key" or "token" a secret
# property: follow a secret's name, and make it a property of the secret: its length, its file, its kind
# suffix: may follow in the name of a secret: its environment, its form
# harmless: make harmless keys and tokens: of a text, a table, a model, a store or a sort
# public: make a key that anyone may know
# placeholder: values that stand for another value
# spaced: with "opening" and "harmless", words that make one name with the word behind them: "seed phrase"
# prose: with which a sentence goes on after "password:" or "the token is"
_TABLE = """
[secret]
    password passwords passwd passphrase passcode passkey secret secrets credential credentials creds apikey apikeys
    apitoken authtoken accesstoken accesskey secretkey privatekey connectionstring connstr mnemonic
    passwort kennwort contrasena senha
[short]
    pass pw pwd pswd psk
[key]
    key token keys tokens
[other]
    auth cred tok cookie cookies webhook signature sig dsn pat jwt bearer session sessionid sid sessid otp totp license
    licence salt pin authorization sas csrf csrftoken xsrf oauth nonce seedphrase storepass keypass
[opening]
    api access private secret auth account encryption signing service license ssh master subscription app client
    admin deploy deployment user rsa aes hmac jwt ssl tls wandb openai anthropic azure aws gcp hf comet neptune
    shared storage webhook session refresh oauth bearer bot personal github gitlab slack datadog dd sentry stripe
    twilio sendgrid mailgun heroku cohere mistral groq xai nvidia ngc replicate together pinecone langchain langsmith
    cloudflare digitalocean databricks npm pypi docker vault kaggle huggingface hub google gemini telegram discord
    ci gh registry integration ingest decryption cipher security write login
    fernet rails django flask consumer cosmos redis s3 minio sas codecov sonar snyk newrelic grafana
[property]
    length len size name names file files path paths dir directory folder type types kind count policy min max
    manager required enabled disabled prompt regex pattern format prefix suffix version ttl timeout expiry expires
    field fields url uri endpoint host port env var variable arn hint help error errors hash algorithm rotation age
    rate ratio time sec ms seconds duration interval limit budget through thru mode method methods scheme style
    provider helper backend store sock socket server username group groups role scope scopes domain realm
    issuer audience params param jar dim dims num ids per second usage index idx offset mask
    embedding embeddings embed embeddings position positions states state cache shape dtype weight weights bias proj
    projection layer layers norm head heads attn loss acc accuracy scale score scores logits ratio threshold
    status result results failed ok by attempts retries retry checks check strength complexity source
    hasher hashers stdin manager sort order function fn class cls module frame frames board map point points word words
    space bits bit address bus stage stages number step steps rejected warning level
[suffix]
    prod production dev develop development test testing stage staging local live sandbox base value val data json b64
    base64 pem raw old new id v primary secondary main default current previous backup plain text txt str string
[harmless]
    pad padding eos bos unk sep cls mask sot eot eod special end start begin stop image audio video prompt next
    first last per max min num n total new blank word sub text label input output tokens sort primary foreign
    partition store cache group batch column data dataset feature state dict model rng prng random query
    lookup map row index metric loss target merge join routing split shard block attn head kv value hash object pos
    monitor score sample train eval val config json yaml field dst src step rank layer past cross self latent keys
    rope rotary run job experiment study
    sweep trial artifact compile graph kernel triton trace
    request idempotency dedup step checkpoint ckpt param parameter module buffer tensor
    gpg pgp hot cold short cut fast forward backward left right up down foreign natural composite unique
    one two single multi every missing unexpected dict k q v seq context summary action event
[public]
    public pub known authorized host fingerprint error errors up down press stroke board
[placeholder]
    none null nil true false yes no on off auto default str bytes int float bool any optional string undefined
    required missing empty redacted hidden masked unset invalid expired unknown disabled enabled placeholder changeme
    secretstr list dict tuple object self cls todo tbd n/a na example your-token your_token your-api-key
    your_api_key text varchar char blob
[spaced]
    authentication authorization security pass recovery seed one-time
[prose]
    must should can cannot could may will would is was are were has have had not no and or of for from to in on at by
    with the a an this that these too very please incorrect wrong rejected accepted denied
    not-set set given provided found unset string value your my their enter type use using used reset changed updated
    already only never always also as if when because than then
"""
_SECTIONS = re.split(r"\[([a-z]+)\]", _TABLE)
_WORDS = dict(zip(_SECTIONS[1::2], map(words_of, _SECTIONS[2::2]), strict=True))
_SECRET_WORDS = _WORDS["secret"]
_SHORT_WORDS = _WORDS["short"]
_KEY_WORDS = _WORDS["key"]
_OTHER_WORDS = _WORDS["other"]
_OPENING_WORDS = _WORDS["opening"]
_PROPERTY_WORDS = _WORDS["property"]
_SUFFIX_WORDS = _WORDS["suffix"]
_HARMLESS_WORDS = _WORDS["harmless"]
_PUBLIC_WORDS = _WORDS["public"]
_PLACEHOLDERS = _WORDS["placeholder"]
_SPACED_WORDS = _WORDS["spaced"]
_PROSE_WORDS = _WORDS["prose"]
# Endings of names that are written as one word.
_GLUED = re.compile(
    r"(?:password|passwd|passphrase|passwort|apikey|secretkey|accesskey|privatekey|authtoken|apitoken|accesstoken"
    r"|secret|credentials|passw[dor]{2,4})s?$"
)
_GLUED_SHORT = re.compile(
    r"(?<!^by)(?<!^com)(?<!^encom)(?<!^sur)(?<!^tres)(?<!^low)(?<!^high)(?<!^band)(?<!^under)(?<!^over)(?<!^all)"
    r"(?:pass|pwd|(?:db|user|admin|bind|root|ldap|mail|ftp)pw)$|(?:hf|bot|user|csrf|xsrf|npm|git|identity|refresh|session|bearer)token$"
    r"|(?:ssh|master|aes|hmac|auth|signing|session|encryption)key$"
)
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def full_name(before: str, name: str) -> str:
    """Return a name with the word before it if both make one name, as in "API key" and "cache key"."""
    word = before.rpartition(" ")[2].lower()
    return f"{word}_{name}" if word in _OPENING_WORDS or word in _HARMLESS_WORDS or word in _SPACED_WORDS else name


@lru_cache(maxsize=4096)
def required_of(name: str, *, typed: bool = False) -> Required | None:
    """Return what the value of `name` must look like to be a secret, or None. `typed`: a carefully chosen name."""
    parts = [part.lower() for part in _PART.findall(name)]
    if "existing" in parts:  # the value is the name of a secret that is stored elsewhere
        return Required.RANDOM
    is_id = parts[-1:] == ["id"]
    while parts and (parts[-1].isdigit() or (len(parts) > 1 and parts[-1] in _SUFFIX_WORDS)):
        parts.pop()
    if not parts:
        return None
    if "connection" in parts and ("string" in name.lower() or parts[-1] in ("str", "uri")):
        return Required.NO_WORD
    position, kind = _telling_part(parts)
    if kind is None:
        return None
    before, after = set(parts[:position]), set(parts[position + 1 :])
    if after & _PUBLIC_WORDS or (before & _PUBLIC_WORDS and kind not in (_SECRET_WORDS, _SHORT_WORDS)):
        return None
    if after & _PROPERTY_WORDS:
        return Required.RANDOM
    if kind is _SECRET_WORDS:
        return Required.ANYTHING
    if kind is _SHORT_WORDS:
        if after or before & _HARMLESS_WORDS:
            return Required.MIXED if typed else Required.RANDOM
        alone_pwd = parts == ["pwd"] or parts == ["old", "pwd"]
        return Required.ANYTHING if typed and not alone_pwd else Required.NO_WORD
    if kind is _KEY_WORDS:
        if parts[position] == "key" and "cache" in before:
            return None
        if is_id:
            return Required.RANDOM
        return _required_of_key(parts[position], parts[:position], typed=typed, is_last=not after)
    word = parts[position]
    if before & _HARMLESS_WORDS and not typed:
        return Required.RANDOM_OR_HEX if word in ("sig", "signature") else Required.RANDOM
    if word in ("webhook", "dsn", "pat") and (before or typed):
        return Required.NO_WORD
    if word in ("otp", "totp", "pin", "salt", "nonce", "license", "licence", "session", "oauth") and not typed:
        return Required.RANDOM
    return Required.MIXED if typed else Required.RANDOM_OR_HEX if word in ("sig", "signature") else Required.RANDOM


def _telling_part(parts: list[str]) -> tuple[int, frozenset[str] | None]:
    """Return the position of the part of a name that announces a secret, and the set to which the part belongs."""
    for kind in (_SECRET_WORDS, _SHORT_WORDS, _OTHER_WORDS, _KEY_WORDS):
        for at in range(len(parts) - 1, -1, -1):
            part = parts[at]
            if part in kind or (kind is _SECRET_WORDS and _GLUED.search(part)):
                if kind is _OTHER_WORDS and parts[at + 1 :] and parts[at + 1] in _KEY_WORDS:
                    continue
                if part in ("keys", "tokens") and not {"api", "access", "secret", "private", "auth"} & set(parts[:at]):
                    continue
                return at, kind
            if kind is _SHORT_WORDS and _GLUED_SHORT.search(part):
                return at, _SECRET_WORDS if part.endswith(("token", "key")) else kind
    return 0, None


def _required_of_key(word: str, before: list[str], *, typed: bool, is_last: bool) -> Required:
    opens = _OPENING_WORDS | _OTHER_WORDS
    if is_last and word == "token" and before[-1:] == ["id"]:
        return Required.MIXED
    if (
        is_last
        and before
        and (before[-1] in opens or (opens & set(before) and (typed or not _HARMLESS_WORDS & set(before))))
    ):
        return Required.ANYTHING
    if _HARMLESS_WORDS & set(before):
        return Required.RANDOM
    if typed:
        is_token = word == "token" and is_last
        return Required.ANYTHING if is_token and before else Required.NO_WORD if is_token else Required.MIXED
    if not before and is_last:
        return Required.MIXED if word == "token" else Required.RANDOM
    return Required.RANDOM_OR_HEX if is_last else Required.RANDOM


# Values.

_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Za-z]:|\$\{?[A-Z_]+\}?)?[/\\][\w.@+~ -]*(?:[/\\][\w.@+~ -]*)*"
    r"|[\w./-]{1,200}\.(?:json|pem|txt|yaml|yml|toml|key|env|py|cfg|ini|crt|cert|pub|pt|pth|bin|safetensors|log|gz|csv)"
)
_REFERENCE = re.compile(
    r"\$\{?(?:[A-Z_][A-Z0-9_]*|[a-z_]+)\}?|\$[{(].*|%[A-Za-z_]\w*%|%[-+ 0-9.]*[a-zA-Z]|<[^<>]*>|\{.*\}|\[[A-Za-z_ -]*\]"
    r"|@[\w.-]+@|[*•x.#_-]+|\(.*\)"
    r"|(?:vault|op|ssm|sops|keyring|secretsmanager|awssm|gcpsm|gcp-sm|akv|azkv|ref\+\w+):(?://)?[\w./#-]+"
    r"|&\w+;?|(?:Optional|Union|List|Dict|Literal|Annotated|Final)\[.*"
)
_CALLED = re.compile(r"(?:(?:await|not|new) )?(?:[A-Za-z_]\w*\.)*+[A-Za-z_]\w*+(?=[(\[])")
_ATTRIBUTE = re.compile(
    r"(?:self|cls|args?|cfg|conf|config|os|settings|opts?|options|env|environ|params|ctx|flags|hparams|this|process"
    r"|request|secrets|credentials|creds|var|local|data|module)(?:\.[A-Za-z_]\w*)+"
)
_CMDLET = re.compile(r"\(?(?:Get|Read|New|Import|Convert\w{0,16})-[A-Z]\w{1,64}")  # a command of PowerShell
_IDENTIFIER = re.compile(r"_*[A-Za-z]+(?:[_.][A-Za-z]+)+_*|[a-z]+(?:[A-Z][a-z]+)+")
_NUMBER = re.compile(
    r"[-+~≈<>]?(?:0x[0-9a-fA-F]+|[0-9][0-9.,:/x×_eE+\-]*(?:[a-zA-Zµ%]{0,4}(?:/[a-zA-Z]{1,6})?))|v?[0-9]+\.[0-9a-z][\w.+-]{0,20}"
    r"|(?:nan|inf)"
)
_FLOAT = re.compile(r"[-+]?[0-9]*\.?[0-9]+e[-+]?[0-9]{1,3}|[-+]?[0-9]*\.[0-9]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_HEX = re.compile(r"(?:0x)?(?:[0-9a-f]{16,}|[0-9A-F]{16,})")
_CHECKSUM = re.compile(r"(?:sha[0-9]{1,3}|md5|blake[0-9a-z]*|crc32c?|xxh[0-9]*|SHA256|MD5)[:=-].*", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]{1,20}://\S*", re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9]+")
_SEGMENT = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_SYMBOL = re.compile(r"[!@#$%^&*+~?§€£]")
_SHORTEST = {Required.NO_WORD: 4, Required.MIXED: 7, Required.RANDOM_OR_HEX: 10, Required.RANDOM: 10}


# A value that only says where the secret is: a file, a variable in an address, a tag of YAML, a mount of docker.
_PLACE_OF_SECRET = re.compile(
    r"^(?:file|env|fd|prompt|keyring):|://[^\s:@/]{0,128}:(?:\$\{?\w+\}?|\{\w+\}|%\(\w+\)s)@|^![a-z_/-]+$|^(?:id=[a-z_]{1,32},)?(?:type|src|source)=[\w.,=/-]+$"
    r"|^[\"']{2}$"
)


def is_secret(value: str, required: Required, *, may_be_url: bool = False) -> bool:
    """Return whether a value is a secret if its name requires this of it."""
    if _PLACE_OF_SECRET.search(value):
        return False
    if not value.strip() or value.lower() in _PLACEHOLDERS or _REFERENCE.fullmatch(value) or _is_path(value):
        return False
    if required == Required.ANYTHING:
        return not (_FLOAT.fullmatch(value) or (len(value) < 4 and value.isdigit()) or _CHECKSUM.fullmatch(value))
    if len(value) < _SHORTEST[required] or _NUMBER.fullmatch(value) or _CHECKSUM.fullmatch(value):
        return False
    if _URL.fullmatch(value):
        return may_be_url and len(value) > 24
    digits, letters = any(map(str.isdigit, value)), any(map(str.isalpha, value))
    symbols = len(set(_SYMBOL.findall(value)))
    if required == Required.NO_WORD:
        return (digits and letters) or symbols > 0 or is_random(value)
    if required == Required.MIXED:
        has_hex = _HEX.fullmatch(value) or _UUID.fullmatch(value)
        turns = max((len(_SEGMENT.findall(run)) for run in _RUN.findall(value)), default=0)
        return (
            bool(has_hex)
            or is_random(value)
            or symbols > 1
            or (symbols == 1 and digits)
            or (digits and letters and (turns >= 3 or (len(value) >= 24 and "/" not in value and " " not in value)))
        )
    if _UUID.fullmatch(value):
        return False
    return is_random(value) or (required == Required.RANDOM_OR_HEX and len(value) >= 32 and bool(_HEX.fullmatch(value)))


def is_random(value: str) -> bool:
    """Return whether a text looks as if a machine had drawn its characters: classes of characters alternate."""
    if len(value) < 10 or _HEX.fullmatch(value) or _UUID.fullmatch(value) or " " in value:
        return False
    runs = _RUN.findall(value)
    if any(map(_alternates, runs)):
        return True
    joined = "".join(run for run in runs if len(run) > 2 or not run.isdigit())
    is_dense = len(runs) * 7 <= len(value) or ("+" in value and len(runs) * 4 <= len(value))
    return len(joined) >= 16 and is_dense and len(runs) > 1 and _alternates(joined)


def _alternates(run: str) -> bool:
    if len(run) < 10 or _HEX.fullmatch(run):
        return False
    segments = len(_SEGMENT.findall(run))
    if any(map(str.isdigit, run)):
        return segments >= 4 and len(run) <= (4.6 if len(run) >= 20 and segments >= 5 else 3.5) * segments
    return len(run) >= 14 and segments >= 5 and len(run) <= (3.2 if len(run) >= 18 else 2.7) * segments


def is_basic_login(value: str) -> bool:
    """Return whether a text is `user:password` in base64, as in HTTP headers and the configuration of docker."""
    if len(value) < 8 or len(value) % 4 or not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", value):
        return False
    try:
        plain = base64.b64decode(value).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in plain and plain.isprintable()


def is_reference(value: str) -> bool:
    """Return whether an unquoted value is an expression of a program, such as `self.password` or `get_token()`."""
    if called := _CALLED.match(value):
        arguments = value[called.end() :]
        return arguments.startswith("[") or ")" in arguments or arguments.endswith(("(", ","))
    if _ATTRIBUTE.fullmatch(value) or _CMDLET.fullmatch(value):
        return True
    return _IDENTIFIER.fullmatch(value) is not None and required_of(value, typed=True) is not None


def goes_on_as_prose(value: str, rest: str) -> bool:
    """Return whether a sentence goes on with the word `value` and the text `rest`, so the word is no secret."""
    value, space, more = value.partition(" ")
    rest = f"{space}{more}{rest}"
    return value.lower() in _PROSE_WORDS and (not rest.strip() or re.match(r"[ \t]+\w", rest) is not None)


def _is_path(value: str) -> bool:
    """Return whether the value is a file path rather than a token."""
    # A long part with digits and letters of both cases is a token.
    return _PATH.fullmatch(value) is not None and not (len(value) >= 32 and "." not in value and is_random(value))


def is_word(value: str) -> bool:
    """Return whether a value looks like a word of a language, perhaps with a digit or two at its end."""
    letters = value.rstrip("0123456789")
    if not letters.isalpha() or len(value) - len(letters) > 2 or len(letters) > 15:
        return False
    if not (letters.islower() or letters.isupper() or letters.istitle()):
        return len(_SEGMENT.findall(letters)) <= 3
    vowels = len(re.findall("[aeiouyäöü]", letters.lower()))
    return len(letters) / 6 <= vowels <= len(letters) * 0.75 and not re.search("[^aeiouyäöü]{5}", letters.lower())


def is_number(value: str) -> bool:
    return value.isdigit() or _NUMBER.fullmatch(value) is not None


def is_distinctive(value: str) -> bool:
    """Return whether a value cannot be an ordinary name: it is random, a hexadecimal number, or has symbols."""
    is_hex = _HEX.fullmatch(value) or _UUID.fullmatch(value)
    return bool(is_hex) or is_random(value) or _SYMBOL.search(value) is not None
