"""Which values are secrets, and what a text says without them."""

from __future__ import annotations

import codecs
import json
import random
import re
import shlex
import string
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from nsa_harness.core.redaction import Secrets, shell_line, where_to_set
from nsa_harness.core.secret_formats import provider_patterns
from nsa_harness.core.secret_forms import find_in_words
from nsa_harness.core.secret_names import is_random, is_word

HERE = Path(__file__).parent
HEX = "0123456789abcdef"
# Each line is a text with a secret in the place of the sign, with the escapes of Python.
FORMS = [codecs.decode(line.replace("§", "@@"), "unicode_escape") for line in
         (HERE / "redaction_forms.txt").read_text().splitlines()]  # fmt: skip
HARMLESS = (HERE / "redaction_harmless.txt").read_text().splitlines()
VALUES = ("q1w2e3r4t5Z", "kJ8#mPq2$vLx", "pa,ss(w0rd&x)1", "9f8e7d6c5b4a3928" * 2, "wJalrXUtnFEMI/K7MDENG+bPxRfiCYz")
# Forms in which a value with such characters cannot stand, or cannot be told from the rest of the line.
_NOT_FOR = {"pa,ss(w0rd&x)1": ("ignature", "ddress"), "wJalrXUtnFEMI/K7MDENG+bPxRfiCYz": ("scott/", "--user ")}

_NOISE = random.Random(7)


def noise(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_NOISE.choice(alphabet) for _ in range(length))


# Made up, and parted, so that no scanner of this repository takes them for real ones.
TOKENS = {
    "aws": "AK" + "IA" + noise(16, string.ascii_uppercase + "234567"),
    "anthropic": "sk-" + "ant-api03-" + noise(93) + "AA",
    "azure ad": noise(3) + "8Q" + "~" + noise(34),
    "databricks": "da" + "pi" + noise(32, HEX),
    "digitalocean": "do" + "p_v1_" + noise(64, HEX),
    "discord webhook": "https://discord.com/api/web" + f"hooks/{noise(18, string.digits)}/{noise(68)}",
    "github": "gh" + "p_" + noise(36),
    "github, fine": "github_" + f"pat_{noise(22)}_{noise(59)}",
    "gitlab": "gl" + "pat-" + noise(20),
    "gitlab runner": "gl" + "rt-" + noise(20),
    "google": "AI" + "za" + noise(35),
    "google client": "GOC" + "SPX-" + noise(28),
    "groq": "gs" + "k_" + noise(52),
    "hugging face": "h" + "f_" + noise(34),
    "hugging face oauth": "hf_" + "oauth_" + noise(40),
    "jwt": "ey" + f"J{noise(33)}.eyJ{noise(60)}.{noise(43)}",
    "langsmith": "ls" + f"v2_pt_{noise(32, HEX)}_{noise(10, HEX)}",
    "npm": "np" + "m_" + noise(36),
    "nvidia": "nv" + "api-" + noise(64),
    "openai": "sk-" + "proj-" + noise(64),
    "openrouter": "sk-" + "or-v1-" + noise(64, HEX),
    "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + noise(150),
    "replicate": "r" + "8_" + noise(37),
    "sendgrid": "S" + f"G.{noise(22)}.{noise(43)}",
    "sentry": f"https://{noise(32, HEX)}@o123.ingest.sentry.io/456",
    "slack": "xo" + f"xb-{noise(11, string.digits)}-{noise(12, string.digits)}-{noise(24)}",
    "slack webhook": "https://hooks.slack.com/ser" + f"vices/T{noise(8)}/B{noise(8)}/{noise(24)}",
    "stripe": "sk_" + "live_" + noise(24),
    "teams webhook": "https://a.web" + f"hook.office.com/webhookb2/{noise(36)}@{noise(36)}/IncomingWebhook/{noise(32)}",
    "telegram": f"{noise(10, '123456789')}:A" + f"A{noise(33)}",
    "telegram webhook": f"https://api.telegram.org/bot{noise(10, '123456789')}:A" + f"A{noise(33)}/sendMessage",
    "vault": "hv" + "s." + noise(90),
    "xai": "xa" + "i-" + noise(80),
}
_BODY = [noise(64, string.ascii_letters + string.digits + "+/") for _ in range(6)]
PEM = ["-----BEGIN RSA " + "PRIVATE KEY-----", *_BODY, "Qw8dKz+aB3c=", "-----END RSA PRIVATE KEY-----"]
KEY_FORMS = {
    "plain": "\n".join(PEM),
    "of a rank": "\n".join(f"[rank0]: {line}" for line in PEM),
    "with times": "\n".join(f"2026-11-28 12:00:00,123 INFO root: {line}" for line in PEM),
    "quoted": "\n".join(f"> {line}" for line in PEM),
    "diff": "\n".join(f"+{line}" for line in PEM),
    "JSON": json.dumps({"private_key": "\n".join(PEM)}),
    "JSON in JSON": json.dumps(json.dumps({"private_key": "\n".join(PEM)})),
    "Python": "\n".join(f'  "{line}\\n"' for line in PEM),
    "colours": "\n".join(f"\x1b[32m{line}\x1b[0m" for line in PEM),
    "one line": " ".join(PEM),
    "without end": "\n".join([*(f"[rank1] {line}" for line in PEM[:-2]), "next line"]),
    "CRLF": "\r\n".join(PEM),
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_known_by_the_name_it_is_given(value: str) -> None:
    possible = [form for form in FORMS if not any(part in form for part in _NOT_FOR.get(value, ()))]
    clean = [cleaned(form.replace("@@", value)) for form in possible]
    assert [text for text in clean if any(value[at : at + 6] in text for at in range(len(value) - 5))] == []


@pytest.mark.parametrize("around", ["{}", "x {} y", "[rank0]: {}", "\x1b[32m{}\x1b[0m"])
def test_what_only_sounds_like_a_secret_stays(around: str) -> None:
    texts = [around.replace("{}", text) for text in HARMLESS]
    assert [text for text in texts if cleaned(text) != text] == []


@pytest.mark.parametrize("text", [text for text in HARMLESS if re.match("-|[A-Z_]+=", text)])
def test_an_argument_or_variable_that_only_sounds_like_a_secret_stays(text: str) -> None:
    name, equals, value = text.partition("=")
    if equals and name.isupper():
        assert Secrets().variable(name, value) == value
    if text.startswith("-"):
        assert Secrets().words(text.split(" ")) == tuple(text.split(" "))


@pytest.mark.parametrize(
    "around", ["{}", "failed with {}: 401", "'{}'", '{"x": "{}"}', "a\n{}\nb", "line\\n{}\\n", "\x1b[31m{}\x1b[0m"]
)
def test_a_token_is_known_by_its_format(around: str) -> None:
    clean = {kind: cleaned(around.replace("{}", token)) for kind, token in TOKENS.items()}
    assert {kind: text for kind, text in clean.items() if re.search("[A-Za-z0-9]{16}", text)} == {}
    assert {text.count("$SECRET_") for text in clean.values()} == {1}


def test_the_start_of_each_provider_pattern_is_text_that_it_matches() -> None:
    for anchor, pattern in provider_patterns():
        assert anchor, pattern
        re.compile(pattern)


@pytest.mark.parametrize("form", KEY_FORMS)
def test_a_private_key_is_taken_out_whole(form: str) -> None:
    clean = cleaned(f"before\n{KEY_FORMS[form]}\nafter")
    assert not any(line in clean for line in PEM[1:-1])
    assert clean.startswith("before\n")
    assert clean.endswith("after")


def test_a_line_of_a_private_key_is_known_by_itself() -> None:
    secrets = Secrets()
    secrets.learn_text("\n".join(PEM))
    assert PEM[2] not in secrets.text(f"[rank0] {PEM[2]}")


# Commands and environments.


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        (["--pat=x1y2"], "x1y2"), (["--pat", "x1y2"], "x1y2"), (["--auth", "a:b"], "b"), (["--password", "abc"], "abc"),
        (["-p", "s3cr3tPa55"], "s3cr3tPa55"), (["curl", "-u", "a:bcd", "https://x"], "bcd"),
        (["sshpass", "-p", "abc"], "abc"), (["mysql", "-phunter"], "hunter"), (["--hf_token=abc"], "abc"),
        (["docker", "login", "-p", "abc"], "abc"), (["+logger.api_key=q1"], "q1"),
        (["tool", "set", "db", "password", "3bh_8r.tf"], "3bh_8r.tf"), (["x", "\n", "--api-key", "\n", "abc1"], "abc1"),
        (["echo", "Torv9713*", "|", "sudo", "-S", "ls"], "Torv9713*"),
        (["mc", "alias", "set", "s", "https://s.example", "me", "SzwnCqLrz5RhrbY92wh3dyh"], "SzwnCqLrz5RhrbY92wh3dyh"),
        (["conda", "-c", "https://c.example/t/tk-c184bdebfb35758e74722c/ml"], "tk-c184bdebfb35758e74722c"),
        (["bash", "-c", "curl -u a:hunter2 https://x"], "hunter2"),
    ],
)  # fmt: skip
def test_an_argument_is_known_by_the_one_before_it(words: list[str], secret: str) -> None:
    clean = Secrets().words(words)
    assert [word for word, old in zip(clean, words, strict=True) if word != old] == [
        next(word for word in words if secret in word).replace(secret, "$SECRET_1")
    ]


def test_a_path_is_no_secret() -> None:
    words = ["--password", "/run/secrets/db", "--auth-token", "~/.config/token.json", "-p", "29500", "--auth", "basic"]
    assert not any(find_in_words(words))


def test_a_command_asks_the_shell_for_what_was_taken_out() -> None:
    secrets = Secrets()
    words = secrets.words(["train.py", "--api-key", "q1", "--url", "https://u:p$w@h/x y", "--tokenizer", "gpt2"])
    line = shell_line(words, [("HF_TOKEN", secrets.variable("HF_TOKEN", "abc"))])
    assert line == (
        'HF_TOKEN="$SECRET_3" train.py --api-key "$SECRET_1" --url https://u:"$SECRET_2"\'@h/x y\' --tokenizer gpt2'
    )
    assert where_to_set("$SECRET_1 $SECRET_2", "spec.json") == (
        "# export SECRET_1=...: the value is in spec.json",
        "# export SECRET_2=...: the value is in spec.json",
    )


# Where else a secret is replaced.


def test_a_value_that_was_found_once_is_one_wherever_it_occurs() -> None:
    secrets = Secrets()
    secrets.learn_text("login with password=hunter2-x#")
    assert secrets.text("ValueError: hunter2-x# is refused (/a/hunter2-x#)") == (
        "ValueError: $SECRET_1 is refused (/a/$SECRET_1)"
    )


@pytest.mark.parametrize("weak", ["ubuntu", "exception", "node0017", "12345678", "checkpoint"])
def test_a_weak_password_leaves_paths_and_words_as_they_are(weak: str) -> None:
    secrets = Secrets(common={"node0017"})
    assert secrets.variable("VNC_PASSWORD", weak) == "$SECRET_1"
    document = {"cause": weak, "file": f"/home/{weak}/train.py", weak: 1, "why": f"{weak}: open /home/{weak}/{weak}.py"}
    assert secrets.value(document) == document


def test_a_readable_password_is_replaced_in_sentences_alone() -> None:
    secrets = Secrets()
    secrets.variable("DB_PASSWORD", "correct-horse")
    document = {
        "cause": "correct-horse",
        "why": "got correct-horse.",
        "path": "/a/correct-horse",
        "x": "correct-horse-2",
    }
    assert secrets.value(document) == {**document, "why": "got $SECRET_1."}
    assert secrets.text("connect('correct-horse', correct-horse)", code=True) == "connect('$SECRET_1', correct-horse)"


def test_of_two_values_the_longer_one_goes_first() -> None:
    secrets = Secrets()
    secrets.learn_text("password=abcd#f12 api_key=abcd#f12345")
    assert secrets.text("abcd#f12345 abcd#f12") == "$SECRET_2 $SECRET_1"


def test_a_value_of_an_environment_has_a_number_once_it_is_seen() -> None:
    secrets = Secrets()
    secrets.suspect({"DB_PASSWORD": "horse-battery", "API_KEY": "never-printed"})
    assert secrets.text("nothing") == "nothing"
    assert not secrets
    assert secrets.text("rank 0 connects with horse-battery") == "rank 0 connects with $SECRET_1"


def test_a_later_judgement_keeps_the_numbers_and_knows_what_only_the_environment_told() -> None:
    first = Secrets(b"key")
    first.suspect({"DB_PASSWORD": "horse-battery"})
    assert first.text("token=q1w2e3r4 with horse-battery") == "token=$SECRET_2 with $SECRET_1"
    assert "horse" not in json.dumps(first.to_store())
    later = Secrets(b"key", first.to_store())
    assert later.text("by horse-battery and api_key=zz9x8c7 and token=q1w2e3r4") == (
        "by $SECRET_1 and api_key=$SECRET_3 and token=$SECRET_2"
    )


def test_a_value_is_found_however_it_is_written() -> None:
    value = "p'a\"s\\s wörd<&>"
    secrets = Secrets()
    secrets.learn(value, by_format=True)
    for text in (value, json.dumps(value), repr(value), f"https://h/?p={value}"):
        assert "a" not in secrets.text(text).replace("https://h/?p=", "").replace("$SECRET_1", "")


def test_a_secret_has_one_number_in_a_url_a_sentence_and_an_environment() -> None:
    secrets = Secrets()
    secrets.suspect({"DB_PASSWORD": "S3cr3t#Pw!"})
    assert secrets.text("password=S3cr3t#Pw! of db://u:S3cr3t%23Pw%21@h") == "password=$SECRET_1 of db://u:$SECRET_1@h"
    assert cleaned("db://u:x%23y@h password=x#y") == "db://u:$SECRET_1@h password=$SECRET_1"


def test_source_keeps_its_names_and_loses_its_literals() -> None:
    line = 'client = Client(api_key="q1w2e3r4", password=secret_of_mine, token=args)'
    assert Secrets().text(line, code=True) == line.replace("q1w2e3r4", "$SECRET_1")
    trace = f'  File "train.py", line 3, in f\n    {line}\nValueError: password=hunter2'
    assert cleaned(trace) == trace.replace("q1w2e3r4", "$SECRET_1").replace("hunter2", "$SECRET_2")


def test_a_short_value_is_taken_from_its_place_alone() -> None:
    assert cleaned("password=abc and abc") == "password=$SECRET_1 and abc"


@pytest.mark.parametrize(
    ("document", "clean"),
    [
        ({"DB_PASS": "hunter", "X": "y"}, {"DB_PASS": "$SECRET_1", "X": "y"}),
        (["run", "--password", "abc"], ["run", "--password", "$SECRET_1"]),
        ([["DB_PASSWORD", "abc"]], [["DB_PASSWORD", "$SECRET_1"]]),
        ({"name": "DB_PASSWORD", "value": "abc"}, {"name": "DB_PASSWORD", "value": "$SECRET_1"}),
        ({"api_keys": ["k1a2", "k2b3"]}, {"api_keys": ["$SECRET_1", "$SECRET_2"]}),
        ({"password": 12345678}, {"password": "$SECRET_1"}),
        ({"file": "a.py", "text": "password = typed"}, {"file": "a.py", "text": "password = typed"}),
        ({"log": '{"api_key": "q1w2e3r4"}'}, {"log": '{"api_key": "$SECRET_1"}'}),
    ],
)
def test_a_document_names_its_secrets_by_keys_options_and_pairs(document: object, clean: object) -> None:
    assert json.loads(Secrets().json(json.dumps(document))) == clean


def test_a_word_is_told_from_a_random_value() -> None:
    assert [word for word in ("exception", "Ubuntu", "train01", "q1w2e3r4t5", "xkqzvbnmpw") if is_word(word)] == [
        "exception", "Ubuntu", "train01",
    ]  # fmt: skip
    assert not any(map(is_random, ("Qwen2.5-7B-Instruct-1M", "resnet50", "checkpoint_0001000", "layer1.conv2.weight")))
    assert all(map(is_random, ("wJalrXUtnFEMIKbPxRfiCYz", "a8Kd92LmQz01", "JBSWY3DPEHPK3PXP")))


def test_the_redactor_is_linear_in_a_text_made_to_stop_it() -> None:
    hostile = ["--api-key", "-----BEGIN " + "PRIVATE KEY-----\n", "password=", "eyJ", "'", "\\", "key ", "key: ", "{",
               "curl -u a:b ", "auth=(", "login('a',", "cookie=a1b2c3d4e5;", "%3D", "\x1b[0m", "token>", "@",
               'password="f()))', "name: password\n", "token=['a',", "a1b2", "0f", "bearer "]  # fmt: skip
    began = time.process_time()
    for text in hostile:
        cleaned(text * (20_000 // len(text)))
    assert time.process_time() - began < 20  # 0.5 MB, most of which is a name


# Properties. What is drawn has quotes, escapes, names and parts of placeholders in it.

_WORDS = some.sampled_from([*TOKENS.values(), "password=", "--api-key", "token", "$SECRET_1", "SECRET_", "://u:", "@"])
_TEXT = some.lists(_WORDS | some.text(alphabet="ab1=:\"'\\ \n$@-_é", max_size=12), max_size=8).map("".join)
_VALUES = some.lists(some.text(alphabet="abcXY12\"'\\ $é_-", min_size=6, max_size=20), max_size=4)


def known(values: list[str]) -> Secrets:
    secrets = Secrets()
    for value in values:
        if "$SECRET_" not in value and len(value) >= 8:
            secrets.learn(value, by_format=True)
    return secrets


@settings(max_examples=40)
@given(_TEXT, _VALUES)
def test_redaction_is_idempotent_and_bounded_and_leaves_no_known_value(text: str, values: list[str]) -> None:
    text = "".join([text, *values, text])
    secrets = known(values)
    clean = secrets.text(text)
    assert secrets.text(clean) == clean
    assert Secrets().text(clean) == clean
    assert len(clean) <= 15 * len(text) + 15
    without_placeholders = re.sub(r"\$SECRET_(?:\d+|MORE)", "\0", clean)
    assert not any(value in without_placeholders for value in values if len(value) >= 8 and "$SECRET_" not in value)


_HARMLESS_VALUES = (
    some.uuids().map(str)
    | some.floats(allow_nan=False, allow_infinity=False).map(repr)
    | some.integers().map(str)
    | some.lists(some.integers(0, 4096), min_size=1, max_size=4).map(str)
    | some.binary(min_size=16, max_size=32).map(bytes.hex)
    | some.lists(some.sampled_from(["data", "home", "ubuntu", "run1", "x.py"]), min_size=1).map(
        lambda p: "/" + "/".join(p)
    )
)


@settings(max_examples=60)
@given(
    some.sampled_from(["loss", "shape", "commit", "sha256", "path", "run id", "cache_key", "num_tokens"]),
    _HARMLESS_VALUES,
)
def test_hashes_shapes_numbers_paths_and_uuids_stay(name: str, value: str) -> None:
    for text in (f"{name}={value}", f"{name}: {value}", f"{name} {value}", json.dumps({name: value}), value):
        assert cleaned(text) == text
        assert Secrets().json(json.dumps([text])) == json.dumps([text])


_JSON = some.recursive(
    some.none() | some.integers() | some.booleans() | _TEXT,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(_JSON, _VALUES)
def test_json_stays_json_without_a_known_value(document: object, values: list[str]) -> None:
    secrets = known(values)
    clean = secrets.json(json.dumps([document, *values]))
    assert secrets.json(clean) == clean
    json.loads(clean)


@settings(max_examples=40)
@given(_TEXT)
def test_a_line_of_words_is_what_a_shell_takes(text: str) -> None:
    words = re.split(r"\s", text)
    assert shlex.split(shell_line(Secrets().words(words))) is not None


def cleaned(text: str) -> str:
    return Secrets().text(text)


@pytest.mark.parametrize("password", ["!Hunter42x", "!9kQz71Lw"])
def test_a_password_that_begins_like_a_tag_of_yaml_is_a_secret(password: str) -> None:
    assert password not in Secrets().text(f"password: {password}")


def test_a_quote_that_yaml_doubles_does_not_end_the_secret() -> None:
    redacted = Secrets().text("passphrase: 'it''s a #7 blue: moth'\nlog: it's a #7 blue: moth\n")
    assert redacted == "passphrase: '$SECRET_1'\nlog: $SECRET_1\n"


def test_a_line_of_a_dockerfile_is_no_code() -> None:
    token = noise(24)
    assert token not in Secrets().text(f"ENV HUB_TOKEN={token} \\\n    NCCL_DEBUG=INFO", code=True)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("send: 'AUTH PLAIN §\\r\\n'", "AHRyYWluQG5vcmRsYWIuaW8A" + "TWpvbGswcGFrZXQh"),
        ("GET /data?lat=59.3&appid=§ HTTP/1.1", noise(32, HEX)),
        ('createUser gpumon SHA "first-1-part" AES "§"', "c0rmorant.Bay7"),
        ('client = Client("name of the account", "§")', noise(32, HEX)),
    ],
    ids=["smtp", "query", "snmp", "client"],
)
def test_a_secret_that_a_fixed_text_announces_is_found(text: str, secret: str) -> None:
    assert secret not in Secrets().text(text.replace("§", secret))


def test_the_secret_of_an_access_key_is_known_by_the_id_before_it() -> None:
    key, secret = "LTAI5t" + noise(18), noise(30)
    assert secret not in Secrets().text(f"auth = oss2.Auth('{key}', '{secret}')", code=True)
    assert secret in {each.value for each in find_in_words(["ossutil", "config", "-i", key, "-k", secret])[5]}
