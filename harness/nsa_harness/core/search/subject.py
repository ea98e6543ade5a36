"""The subject of a bisection: the items that it switches on and off, and the configuration of each choice of items."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.scenario.yaml_tree import Plain, scalar
from nsa_harness.core.search.question import AnswerKind, SearchAnswer, spans_of

Config = Mapping[str, Plain]  # values by dotted key, or by the name of a placeholder

_BARE_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_.+/-]*", re.ASCII)
ENV = "run.env."
PACKAGE = "package."
_LAYER_LIST = re.compile(r"[0-9]+(,[0-9]+)*", re.ASCII)  # a list of layers as scenarios keep it


class SubjectForm(StrEnum):
    """The way in which a choice of items becomes a configuration."""

    LAYERS = "layers"  # a list of the chosen layer numbers
    VALUE = "value"  # the largest chosen value
    CHOICE = "choice"  # the one chosen value
    WORDS = "words"  # a list of the chosen words
    PARTS = "branches"  # the chosen parts joined by +; other words for no part and for all parts
    KEYS = "keys"  # dotted keys: a chosen key has its bad value, any other its good value
    FILE = "file"  # keys of a file that the program reads, in the same way
    COMMIT = "commit"  # the latest chosen commit


ORDERED = (SubjectForm.VALUE, SubjectForm.COMMIT)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject: its `items` are what the answer may name, in the order of the search."""

    form: SubjectForm
    key: str  # "gc.layers"; a human-readable name if the form has several keys
    noun: str  # the word for one item: "layer"
    items: tuple[Plain, ...]
    # Ordered: the value of the good end, below the first item; parts: the keys without any part; file: both files.
    good: Plain = None
    bad_values: tuple[Plain, ...] = ()  # keys: the bad value of each item; parts: the word for all parts
    good_values: tuple[Plain, ...] = ()  # keys: the good value of each item; None for a variable that is not set
    open_end: bool = False  # ordered: the last item is only the largest value to try, and not known to be bad
    together: tuple[tuple[int, ...], ...] = ()  # items that are only useful together
    labels: tuple[str, ...] = ()  # human-readable names of the items, if they need any
    in_a_row: bool = False  # the program takes a start and a stop: only neighbours can be switched on together

    @property
    def ordered(self) -> bool:
        return self.form in ORDERED

    @property
    def one_value(self) -> bool:
        """Whether a configuration has exactly one of the items."""
        return self.ordered or self.form is SubjectForm.CHOICE

    @property
    def has_keys(self) -> bool:
        """Whether each item is a key with a good and a bad value."""
        return self.form in (SubjectForm.KEYS, SubjectForm.FILE)

    @property
    def is_declared(self) -> bool:
        """Whether keys of a scenario set it, and not just the program's own arguments or environment."""
        return "." in self.key or self.form in (SubjectForm.KEYS, SubjectForm.COMMIT)

    @property
    def question(self) -> str:
        """The question in short, such as "gc.layers in [0,12)" or "model.seq_len in (16, 256]"."""
        if self.open_end:
            return f"{self.key} above {self._value_text(self.good)}, at most {self.label(len(self.items) - 1)}"
        if self.ordered:
            return f"{self.key} in ({self._value_text(self.good)}, {self.label(len(self.items) - 1)}]"
        if self.form is SubjectForm.CHOICE:
            return f"{self.key} one of {', '.join(self.label(index) for index in range(len(self.items)))}"
        if self.form is SubjectForm.LAYERS:
            first, stop = _number(self.items[0]), _number(self.items[-1]) + 1
            return f"{self.key} in [{first},{stop}){', only in a row' if self.in_a_row else ''}"
        return f"{self.key} of {', '.join(self.label(index) for index in range(len(self.items)))}"

    def label(self, index: int) -> str:
        return self.labels[index] if self.labels else self._value_text(self.items[index])

    def config(self, subset: Collection[int]) -> Config:
        """Return the configuration in which exactly these items are switched on."""
        if self.ordered:
            return {self.key: self.items[max(subset)] if subset else self.good}
        if self.form is SubjectForm.CHOICE:
            return {self.key: self.items[max(subset, default=0)]}
        chosen_items = [self.items[index] for index in sorted(subset)]
        if self.form is SubjectForm.PARTS:
            if not chosen_items and isinstance(self.good, dict):
                return self.good
            whole = self.bad_values if len(chosen_items) == len(self.items) else ()
            return {self.key: whole[0] if whole else "+".join(map(str, chosen_items))}
        if self.has_keys:
            pairs = zip(self.items, self.good_values, self.bad_values, strict=True)
            return {str(key): bad if index in subset else good for index, (key, good, bad) in enumerate(pairs)}
        return {self.key: list(chosen_items)}

    def unset_variables(self, subset: Collection[int]) -> frozenset[str]:
        """Return the environment variables that the configuration leaves unset."""
        unset = [key for key, value in self.config(subset).items() if value is None and key.startswith(ENV)]
        return frozenset(key.removeprefix(ENV) for key in unset)

    def packages(self, subset: Collection[int]) -> Config:
        """Return the version of each package by name; None: the package must be absent."""
        config = self.config(subset).items()
        return {key.removeprefix(PACKAGE): value for key, value in config if key.startswith(PACKAGE)}

    def overrides(self, subset: Collection[int]) -> tuple[str, ...]:
        """Return the configuration as overrides of a command line, which cannot unset a variable."""
        if self.form is SubjectForm.FILE:
            return ()
        unset = self.unset_variables(subset)
        config = [(key, value) for key, value in self.config(subset).items() if not key.startswith(PACKAGE)]
        word = self._typed_override if self.one_value else format_override
        return tuple(word(key, value) for key, value in config if key.removeprefix(ENV) not in unset)

    def describe(self, subset: Collection[int]) -> str:
        """Return a choice of items as text: "layers 0-5 [0:6]", "no layer", "model.seq_len 64"."""
        if self.ordered:
            return f"{self.key} {self.label(max(subset)) if subset else self._value_text(self.good)}"
        indices = sorted(subset)
        if not indices:
            return f"no {self.noun}"
        if len(indices) == len(self.items) and len(indices) > 1:
            return f"all {len(indices)} {plural(self.noun)}"
        noun = self.noun if len(indices) == 1 else plural(self.noun)
        if self.form is SubjectForm.LAYERS:
            return f"{noun} {describe_layers([_number(self.items[index]) for index in indices])}"
        return f"{noun} {', '.join(self.label(index) for index in indices)}"

    @staticmethod
    def _typed_override(key: str, value: Plain) -> str:
        """Return an override as the user wrote it: YAML may read it as a number, except in a variable."""
        is_quoted_number = isinstance(value, str) and not key.startswith(ENV) and not isinstance(scalar(value), str)
        return f"{key}={value}" if is_quoted_number else format_override(key, value)

    @staticmethod
    def _value_text(value: Plain) -> str:
        return value if isinstance(value, str) else json.dumps(value)


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


SEED = "seed"
_SEED_MEANINGS = {
    AnswerKind.CHOICE: "it is the data, or what else the seed draws: the same seeds fail each time, the others never",
    AnswerKind.INDEPENDENT: "it is a race, and not the data: which seed it is decides nothing",
}


def answer_for_subject(subject: Subject, answer: SearchAnswer) -> SearchAnswer:
    """Return the answer in the terms of this subject: only layers form a range, so other items become a set.

    For seeds, its `why` explains what the answer means.
    """
    if subject.noun == SEED and (meaning := _seed_meaning(answer)):
        return replace(answer, why="; ".join(filter(None, (meaning, answer.why))))
    if answer.kind is not AnswerKind.RANGE or subject.form is SubjectForm.LAYERS:
        return answer
    return replace(answer, kind=AnswerKind.SET, items=tuple(range(*answer.items)))


def _seed_meaning(answer: SearchAnswer) -> str:
    """Return what runs with several seeds mean: the data or a race."""
    if answer.kind is AnswerKind.INDEPENDENT and answer.p_bad is None:
        return "neither the data nor a race: it fails whatever the seed"
    if answer.kind is AnswerKind.CHOICE and answer.p_bad is not None:
        return "both: some seeds fail more often than others, but not each time, so there is a race too"
    return _SEED_MEANINGS.get(answer.kind, "")


def format_override(key: str, value: Plain) -> str:
    """Return `gc.layers=[2,6]`, as a command line takes it; an empty list of layers is `none`."""
    if key == "gc.layers":
        return f"{key}={format_layers(value)}"
    # YAML reads the letters of a bare word as this very text.
    is_bare = isinstance(value, str) and _BARE_WORD.fullmatch(value) and scalar(value) == value
    return f"{key}={value if is_bare else json.dumps(value)}"


def format_layers(value: Plain) -> str:
    """Return a list of layer numbers as a scenario takes it: none, 2:6 or [0-1,4]."""
    numbers = sorted(map(_number, value)) if isinstance(value, list) else None
    if numbers is None:
        return f"[{value}]" if _LAYER_LIST.fullmatch(str(value)) else str(value)
    if not numbers:
        return "none"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}:{numbers[-1] + 1}"
    return f"[{','.join(_spans(numbers))}]"


def describe_layers(numbers: Collection[int]) -> str:
    """Return human-readable layers: inclusive, with Python's form after a single span: "0-5 [0:6]", "3 and 8", "7"."""
    layers_in_order = sorted(numbers)
    spans = _spans(layers_in_order)
    if len(layers_in_order) > 1 and len(spans) == 1:
        return f"{spans[0]} [{layers_in_order[0]}:{layers_in_order[-1] + 1}]"
    return spans[0] if len(spans) == 1 else f"{', '.join(spans[:-1])} and {spans[-1]}"


def _spans(numbers: Collection[int]) -> list[str]:
    return [str(first) if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in spans_of(numbers)]


def _number(item: Plain) -> int:
    assert isinstance(item, int)
    return item
