"""The items that a bisection switches on and off, and the configuration that follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.scenario.yaml_tree import Plain, scalar
from nsa_harness.core.search.question import AnswerKind, SearchAnswer, spans_of

Config = Mapping[str, Plain]  # values by dotted scenario key, or by placeholder name

_BARE_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_.+/-]*", re.ASCII)
ENV = "run.env."
PACKAGE = "package."
_LAYER_LIST = re.compile(r"[0-9]+(,[0-9]+)*", re.ASCII)  # the form in which scenarios store several layers


class SubjectForm(StrEnum):
    """The way a set of switched-on items is turned into a configuration."""

    LAYERS = "layers"  # a list of the layer numbers in the set
    VALUE = "value"  # the largest value in the set
    CHOICE = "choice"  # the only value in the set
    WORDS = "words"  # a list of the texts in the set
    PARTS = "branches"  # the parts in the set joined by "+"; special values for no part and for all parts
    KEYS = "keys"  # dotted scenario keys: a key in the set has its bad value, any other its good value
    FILE = "file"  # keys of a config file of the program: a key in the set has its bad value, any other its good value
    COMMIT = "commit"  # the latest commit in the set


ORDERED = (SubjectForm.VALUE, SubjectForm.COMMIT)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a bisection: a list of items that can be switched on and off."""

    form: SubjectForm
    key: str  # "gc.layers"; a human-readable name if several keys are varied
    noun: str  # the word for one item: "layer"
    items: tuple[Plain, ...]
    # VALUE and COMMIT: the value of the good end, below the first item. PARTS: the configuration without any part.
    # FILE: the names of both files.
    good: Plain = None
    bad_values: tuple[Plain, ...] = ()  # KEYS and FILE: the bad value of each item. PARTS: the value for all parts.
    good_values: tuple[Plain, ...] = ()  # KEYS and FILE: the good value of each item; None: the variable is not set
    open_end: bool = False  # VALUE: the last item is only the largest value to try, and not known to fail
    together: tuple[tuple[int, ...], ...] = ()  # groups of items that are only switched on and off together
    labels: tuple[str, ...] = ()  # human-readable names of the items; empty if the items themselves are readable
    in_a_row: bool = False  # the program takes a start and a stop: only consecutive items can be switched on together

    @property
    def ordered(self) -> bool:
        """Whether each item includes all earlier ones, as values and commits do."""
        return self.form in ORDERED

    @property
    def one_value(self) -> bool:
        """Whether every configuration contains exactly one of the items."""
        return self.ordered or self.form is SubjectForm.CHOICE

    @property
    def has_keys(self) -> bool:
        """Whether each item is a key that changes from a known-good to a known-bad value."""
        return self.form in (SubjectForm.KEYS, SubjectForm.FILE)

    @property
    def is_declared(self) -> bool:
        """Whether the configuration can be written as scenario keys."""
        return "." in self.key or self.form in (SubjectForm.KEYS, SubjectForm.COMMIT)

    @property
    def question(self) -> str:
        """The question as a short string, such as "gc.layers in [0,12)"."""
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
        """Return the human-readable name of an item."""
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
        """Return the environment variables that must not be set when exactly these items are switched on."""
        unset = [key for key, value in self.config(subset).items() if value is None and key.startswith(ENV)]
        return frozenset(key.removeprefix(ENV) for key in unset)

    def packages(self, subset: Collection[int]) -> Config:
        """Return the required version of each package, or None for a package that must not be installed."""
        config = self.config(subset).items()
        return {key.removeprefix(PACKAGE): value for key, value in config if key.startswith(PACKAGE)}

    def overrides(self, subset: Collection[int]) -> tuple[str, ...]:
        """Return the configuration as KEY=VALUE arguments, leaving out variables that must be unset."""
        if self.form is SubjectForm.FILE:
            return ()
        unset = self.unset_variables(subset)
        config = [(key, value) for key, value in self.config(subset).items() if not key.startswith(PACKAGE)]
        word = self._typed_override if self.one_value else format_override
        return tuple(word(key, value) for key, value in config if key.removeprefix(ENV) not in unset)

    def describe(self, subset: Collection[int]) -> str:
        """Return a human-readable description of a set of items, such as "layers 0-5 [0:6]" or "no layer"."""
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
        """Return KEY=VALUE with the value as the user typed it."""
        # Text that YAML reads as a number stays unquoted, except in environment variables.
        is_quoted_number = isinstance(value, str) and not key.startswith(ENV) and not isinstance(scalar(value), str)
        return f"{key}={value}" if is_quoted_number else format_override(key, value)

    @staticmethod
    def _value_text(value: Plain) -> str:
        return value if isinstance(value, str) else json.dumps(value)


def plural(noun: str) -> str:
    """Return the plural of an English noun, such as "layers" for "layer"."""
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


SEED = "seed"
_SEED_MEANINGS = {
    AnswerKind.CHOICE: "the cause is the data, or something else that depends on the seed: the same seeds fail every"
    " time, the others never",
    AnswerKind.INDEPENDENT: "the cause is a race and not the data: the seed makes no difference",
}


def answer_for_subject(subject: Subject, answer: SearchAnswer) -> SearchAnswer:
    """Return the answer, adapted to the kind of items that the bisection varied."""
    if subject.noun == SEED and (meaning := _seed_meaning(answer)):
        return replace(answer, why="; ".join(filter(None, (meaning, answer.why))))
    if answer.kind is not AnswerKind.RANGE or subject.form is SubjectForm.LAYERS:
        return answer
    return replace(answer, kind=AnswerKind.SET, items=tuple(range(*answer.items)))


def _seed_meaning(answer: SearchAnswer) -> str:
    """Return what an answer about seeds says about the cause, or "" if it says nothing."""
    if answer.kind is AnswerKind.INDEPENDENT and answer.p_bad is None:
        return "the cause is neither the data nor a race: it fails with every seed"
    if answer.kind is AnswerKind.CHOICE and answer.p_bad is not None:
        return "the data matters, but there is also a race: some seeds fail more often than others, but not every time"
    return _SEED_MEANINGS.get(answer.kind, "")


def format_override(key: str, value: Plain) -> str:
    """Return KEY=VALUE as the command line accepts it, such as `gc.layers=[2,6]`."""
    if key == "gc.layers":
        return f"{key}={format_layers(value)}"
    # Only if YAML reads the unquoted text as this same text, quotes can be left out.
    is_bare = isinstance(value, str) and _BARE_WORD.fullmatch(value) and scalar(value) == value
    return f"{key}={value if is_bare else json.dumps(value)}"


def format_layers(value: Plain) -> str:
    """Return a list of layer numbers as scenarios accept it, such as `none`, `2:6` or `[0-1,4]`."""
    numbers = sorted(map(_number, value)) if isinstance(value, list) else None
    if numbers is None:
        return f"[{value}]" if _LAYER_LIST.fullmatch(str(value)) else str(value)
    if not numbers:
        return "none"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}:{numbers[-1] + 1}"
    return f"[{','.join(_spans(numbers))}]"


def describe_layers(numbers: Collection[int]) -> str:
    """Return a human-readable list of layer numbers, such as "0-5 [0:6]" or "3 and 8"."""
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
