"""Which values are secrets, and what a text says without them."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from nsa_harness.core.redaction import (
    Secret,
    Secrets,
    joined_texts,
    redact,
    redact_environment,
    redact_json,
    redact_value,
    redact_words,
    secrets_of_command,
    secrets_of_environment,
    shell_line,
    where_to_set,
)

# Made up: the shape alone counts. Parted, so that no scanner of this repository takes them for real ones.
HEX40 = "0123456789abcdef" * 2 + "01234567"
TOKENS = {
    "aws": "AKIA" + "Q3EXAMPLE7ABCDEF",
    "aws session": "ASIA" + "Q3EXAMPLE7ABCDEF",
    "github": "ghp_" + "a1B2c3D4" * 4 + "e5F6",
    "github, fine": "github_pat_" + "11ABCDEFG0a1B2c3D4" + "_e5F6" * 8,
    "gitlab": "glpat-" + "xY12_zzzz-9876543210",
    "hugging face": "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ12345678",
    "openai": "sk-proj-" + "abcDEF123456_7890-xyz",
    "anthropic": "sk-ant-api03-" + "abcDEF123456_7890-xyzAA",
    "slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "google": "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
    "google oauth": "ya29." + "a0AfH6SMBx_1234567890-abcdef",
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0" + ".c2lnbmF0dXJlLTEyMw",
}
PEM = "\n".join(
    [
        "-----BEGIN RSA " + "PRIVATE KEY-----",
        "MIIEpAIBAAKCAQEA" + "1aB2" * 12,
        "c3D4" * 16,
        "-----END RSA PRIVATE KEY-----",
    ]
)
GIVEN = {
    "an option": ("run --api-key q1w2e3r4t5", "q1w2e3r4t5"),
    "an option with =": ("run --db-password=q1w2e3r4t5 x", "q1w2e3r4t5"),
    "an option in a list": ("['run', '--auth-token', 'q1w2e3r4t5']", "q1w2e3r4t5"),
    "a variable": ("WANDB_API_KEY=" + HEX40, HEX40),
    "an AWS secret": ("AWS_SECRET_ACCESS_KEY=wJalrXUtn/K7MDENG+bPxRfi", "wJalrXUtn/K7MDENG+bPxRfi"),
    "a password of letters": ("password: letmein", "letmein"),
    "JSON": ('{"client_secret": "q1w~2e3r", "n": 4}', "q1w~2e3r"),
    "JSON within JSON": (json.dumps({"log": '{"api_key": "q1w2e3r4"}'}), "q1w2e3r4"),
    "Python": ("{'hf_token': 'q1w2e3r4'}", "q1w2e3r4"),
    "an address": ("postgresql://bob:q1w2@e3r4@db.local:5432/x", "q1w2@e3r4"),
    "a token in an address": ("git clone https://q1w2e3r4q1w2e3r4zz@host/x", "q1w2e3r4q1w2e3r4zz"),
    "a header": ("Authorization: Bearer q1w2e3r4t5", "q1w2e3r4t5"),
    "a basic header": ("'Authorization': 'Basic dXNlcjpwYXNzd29yZA=='", "dXNlcjpwYXNzd29yZA=="),
    "a bearer": ("sent with bearer q1w2e3r4t5", "q1w2e3r4t5"),
    "Azure": ("AccountName=a;AccountKey=Zm9vYmFyYmF6Zm9v==;EndpointSuffix=x", "Zm9vYmFyYmF6Zm9v=="),
    "Azure, signed": ("https://a.blob/x?sv=1&sig=Zm9vYmFyYmF6Zm9vYmFy%3D", "Zm9vYmFyYmF6Zm9vYmFy%3D"),
    "wandb": ("wandb login " + HEX40, HEX40),
    "netrc": ("machine api.wandb.ai login user password " + HEX40, HEX40),
}
HARMLESS = (
    "tokenizer=gpt2-xl-1234567890abcdef", "num_tokens=1234567890123456789", "--max-token-length 32768",
    "--tokenizer-name meta/llama-3.1-8b", "key_padding_mask=torch.bool", "pad_token=<|endoftext|>",
    "store key: default_pg/0//worker/rank_1/1234567890abcdef", "KeyError: 'blocks.0.attn.q_proj.weight'",
    "Unexpected key(s) in state_dict: head.weight1234567890", f"commit {HEX40}", f"git: {HEX40} is dirty",
    "sha256:" + "0123456789abcdef" * 4, "password = os.environ['DB_PASSWORD']", "Client(password=self.password)",
    "secret: str = None", "token: 5", "password_file=/run/secrets/db", "SSH_AUTH_SOCK=/tmp/ssh-abc123/agent.1",
    "tokens/s: 12345.678", "sort_key=created_at_1234567890ab", "https://example.com:8080/path@v1.2.3",
    "file:///home/user/train.py:12", "task-force-1234567890-abcdef", "skip-connection-of-4-layers-a1",
    "PWD=/home/user/project", "basic training on 8 GPUs", "token_embedding.weight: (50257, 768)",
    "o_token = first_query + 1",
)  # fmt: skip


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("around", ["{}", "failed with {}: 401", "'{}'", '{{"x": "{}"}}', "a\n{}\nb", "line\\n{}\\n"])
def test_a_token_is_known_by_its_shape(kind: str, around: str) -> None:
    assert cleaned(around.format(TOKENS[kind])) == around.format("$SECRET_1")


@pytest.mark.parametrize("kind", GIVEN)
def test_a_value_is_known_by_the_name_it_is_given(kind: str) -> None:
    text, value = GIVEN[kind]
    assert cleaned(text) == text.replace(value, "$SECRET_1")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_sounds_like_a_secret_stays(text: str) -> None:
    assert cleaned(text) == text


def test_a_path_is_no_secret() -> None:
    words = ["--password", "/run/secrets/db", "--auth-token", "~/.config/token.json"]
    assert secrets_of_command(words) == []


@pytest.mark.parametrize("form", [PEM, PEM.replace("\n", "\\n"), json.dumps({"private_key": PEM})])
def test_a_private_key_is_taken_out_whole(form: str) -> None:
    assert not any(line in cleaned(form) for line in PEM.splitlines()[1:3])


def test_a_line_of_a_private_key_is_known_by_itself() -> None:
    secrets = Secrets().with_secrets_of(PEM)
    assert PEM.splitlines()[2] not in redact(f"[rank0] {PEM.splitlines()[2]}", secrets)


def test_a_value_that_was_found_once_is_one_wherever_it_occurs() -> None:
    secrets = Secrets().with_secrets_of("login with password=hunter2-x")
    assert redact("ValueError: hunter2-x is refused (hunter2-xy)", secrets) == (
        "ValueError: $SECRET_1 is refused ($SECRET_1y)"
    )


def test_of_two_values_the_longer_one_goes_first() -> None:
    secrets = Secrets().with_secrets_of("password=abcdef12").with_secrets_of("api_key=abcdef12345")
    assert redact("abcdef12345 abcdef12", secrets) == "$SECRET_2 $SECRET_1"


def test_a_value_of_an_environment_has_a_number_once_it_is_seen() -> None:
    values = [
        one.value for one in secrets_of_environment([("DB_PASSWORD", "horse-battery"), ("API_KEY", "never-printed")])
    ]
    secrets = Secrets().with_suspected(values).with_secrets_of("rank 0 connects with horse-battery")
    assert [one.value for one in secrets.secrets] == ["horse-battery"]
    assert redact("horse-battery", secrets) == "$SECRET_1"


def test_a_value_is_found_however_it_is_written() -> None:
    value = "p'a\"s\\s wörd<&>"
    secrets = Secrets().with_secrets([Secret(value=value, everywhere=True)])
    for text in (value, json.dumps(value), repr(value), f"https://h/?p={value}"):
        assert "a" not in redact(text, secrets).replace("https://h/?p=", "").replace("$SECRET_1", "")


def test_a_command_asks_the_shell_for_what_was_taken_out() -> None:
    words = ["train.py", "--api-key", "q1", "--url", "https://u:p$w@h/x y", "--tokenizer", "gpt2"]
    secrets = Secrets().with_secrets(secrets_of_command(words))
    line = shell_line(redact_words(words, secrets), redact_environment([("HF_TOKEN", "abc")], secrets))
    assert line == (
        'HF_TOKEN="$SECRET_MORE" train.py --api-key "$SECRET_1" --url https://u:"$SECRET_2"\'@h/x y\' --tokenizer gpt2'
    )
    assert where_to_set("$SECRET_1 $SECRET_2", "spec.json") == (
        "# export SECRET_1=...: the value is in spec.json",
        "# export SECRET_2=...: the value is in spec.json",
    )


def test_source_keeps_its_names_and_loses_its_literals() -> None:
    line = 'client = Client(api_key="q1w2e3r4", password=secret_of_mine, token=args)'
    assert redact(line, Secrets(), code=True) == line.replace("q1w2e3r4", "$SECRET_MORE")


def test_a_short_value_is_taken_from_its_place_alone() -> None:
    secrets = Secrets().with_secrets_of("password=abc")
    assert redact("password=abc and abc", secrets) == "password=$SECRET_1 and abc"


def test_the_redactor_is_linear_in_a_text_made_to_stop_it() -> None:
    hostile = ["--api-key" * 6_000, "-----BEGIN PRIVATE KEY-----" * 2_000, "password=" * 6_000, "eyJ" * 20_000,
               "://" + "a" * 60_000, "'" * 60_000, "password='" + "\\" * 60_000, "key" * 20_000]  # fmt: skip
    began = time.process_time()
    for text in hostile:
        cleaned(text)
    assert time.process_time() - began < 4


# Properties. What is drawn has quotes, escapes, names and parts of placeholders in it.

_WORDS = some.sampled_from([*TOKENS.values(), "password=", "--api-key", "token", "$SECRET_1", "SECRET_", "://u:", "@"])
_TEXT = some.lists(_WORDS | some.text(alphabet="ab1=:\"'\\ \n$@-_é", max_size=12), max_size=8).map("".join)
_VALUES = some.lists(some.text(alphabet="abcXY12\"'\\ $é_-", min_size=6, max_size=20), max_size=4)


def known(values: list[str]) -> Secrets:
    usable = [one for one in values if "$SECRET_" not in one]
    return Secrets().with_secrets(Secret(value=one, everywhere=True) for one in usable)


@settings(max_examples=40)
@given(_TEXT, _VALUES)
def test_redaction_is_idempotent_and_bounded_and_leaves_no_known_value(text: str, values: list[str]) -> None:
    text = "".join([text, *values, text])
    secrets = known(values).with_secrets_of(text)
    clean = redact(text, secrets)
    assert redact(clean, secrets) == clean
    assert redact(clean, secrets.with_secrets_of(clean)) == clean
    assert len(clean) <= 15 * len(text) + 15
    assert not any(one.everywhere and one.value in clean for one in secrets.secrets)


_JSON = some.recursive(
    some.none() | some.integers() | some.booleans() | _TEXT,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(_JSON, _VALUES)
def test_json_stays_json_of_the_same_form(document: object, values: list[str]) -> None:
    text = json.dumps([document, *values])
    secrets = known(values).with_secrets_of(joined_texts([document, *values]))
    clean = json.loads(redact_json(text, secrets))
    assert clean == redact_value([document, *values], secrets)
    assert not any(one.everywhere and one.value in joined_texts(clean) for one in secrets.secrets)


@settings(max_examples=40)
@given(_TEXT)
def test_a_line_of_words_is_what_a_shell_takes(text: str) -> None:
    import shlex

    words = re.split(r"\s", text)
    assert shlex.split(shell_line(redact_words(words, Secrets().with_secrets(secrets_of_command(words))))) is not None


def cleaned(text: str) -> str:
    return redact(text, Secrets().with_secrets_of(text))
