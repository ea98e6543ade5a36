"""What the redaction remembers of texts without a secret never lets a secret through."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nsa_harness.core.redaction import Secrets

SECRET = "kJ8mPq2vLx7Rt5Zw9"
PROSE = f"the worker said {SECRET} and went on"


@dataclass(frozen=True)
class Note:
    """An object with a name that announces a secret, or not."""

    note: object = None
    password: object = None


def test_a_text_that_had_no_secret_is_searched_again_once_the_secret_is_known() -> None:
    secrets = Secrets()
    assert secrets.value({"line": PROSE}) == {"line": PROSE}, "nothing shows yet that this word is a secret"
    secrets.value({"password": SECRET})
    assert SECRET not in str(secrets.value({"line": PROSE}))


def test_a_document_that_had_no_secret_is_searched_again_once_the_secret_is_known() -> None:
    secrets, document = Secrets(), json.dumps({"line": PROSE})
    assert secrets.json(document) == document == secrets.json(document)
    secrets.words(["train.py", f"--api-key={SECRET}"])
    assert SECRET not in secrets.json(document)


def test_a_secret_of_the_environment_is_found_in_a_text_that_had_none_before() -> None:
    secrets, document = Secrets(), json.dumps({"line": PROSE})
    secrets.json(document)
    secrets.value({"line": PROSE})
    secrets.suspect({"API_TOKEN": SECRET})
    assert SECRET not in secrets.json(document)
    assert SECRET not in str(secrets.value({"line": PROSE}))


def test_a_secret_of_the_same_value_that_comes_later_is_replaced_in_the_text_before_it() -> None:
    assert SECRET not in str(Secrets().value([{"line": PROSE}, {"password": SECRET}]))


def test_a_text_is_remembered_only_under_its_own_name() -> None:
    secrets = Secrets()
    assert secrets.value({"title": "hunter22x"}) == {"title": "hunter22x"}
    assert "hunter22x" not in str(secrets.value({"password": "hunter22x"}))


def test_an_object_that_two_names_share_is_searched_under_both() -> None:
    shared = ("hunter22x",)
    clean = Secrets().value(Note(note=shared, password=shared))
    assert "hunter22x" not in str(clean.password)


def test_a_number_is_a_secret_under_a_telling_name_although_it_was_none_under_another() -> None:
    secrets = Secrets()
    assert secrets.value({"pid": 48151623}) == {"pid": 48151623}
    assert "48151623" not in str(secrets.value({"password": 48151623}))
    assert "48151623" not in str(secrets.value({"passwords": [1, 48151623]}))


def test_a_word_that_became_common_is_no_longer_replaced_elsewhere() -> None:
    """The set of common words may grow between two texts, and counts from then on."""
    secrets = Secrets()
    secrets.value({"password": "holidaybox"})
    before = secrets.value({"line": "in holidaybox today"})
    secrets.common |= {"unrelated"}
    assert secrets.value({"line": "in holidaybox today"}) == before


def test_a_value_without_a_secret_is_returned_as_it_is() -> None:
    value = {"lines": ["all_reduce", {"rank": 3, "at_s": 1.5}], "note": Note(note=("a", 1))}
    assert Secrets().value(value) is value


def test_the_numbers_of_secrets_follow_their_order_in_the_value() -> None:
    secrets = Secrets()
    clean = secrets.value([{"password": "Xk29vv81qLm"}, {"password": "Zt77bn40wRs"}])
    assert clean == [{"password": "$SECRET_1"}, {"password": "$SECRET_2"}]
