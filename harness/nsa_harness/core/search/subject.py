"""The subject of a bisection: the items it chooses from, and the configuration that each choice stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.scenario.yaml_tree import Plain, scalar
from nsa_harness.core.search.question import AnswerKind, SearchAnswer, spans_of

Config = Mapping[str, Plain]  # by dotted key, or by the name of what a placeholder stands for

_BARE_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_.+/-]*", re.ASCII)
ENV = "run.env."
PACKAGE = "package."
_NUMBERS = re.compile(r"[0-9]+(,[0-9]+)*", re.ASCII)  # a list of layers as scenarios keep it


class Form(StrEnum):
    """The way in which a choice of items becomes a configuration."""

    LAYERS = "layers"  # the numbers of the chosen ones, in a list
    VALUE = "value"  # the largest of the chosen ones
    CHOICE = "choice"  # the one that is chosen
    WORDS = "words"  # the chosen ones, in a list
    PARTS = "branches"  # the chosen ones with + between them; none of them and all of them are said in another way
    KEYS = "keys"  # dotted keys that have their bad value instead of their good one
    FILE = "file"  # the same in a file that the program reads
    COMMIT = "commit"  # the newest of the chosen ones


ORDERED = (Form.VALUE, Form.COMMIT)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A question: `items` are what the answer may name, in the order in which they are searched."""

    form: Form
    key: str  # "gc.layers"; for people where the form has several keys
    noun: str  # one item: "layer"
    items: tuple[Plain, ...]
    # Ordered: the value of the good end, below the first item; parts: the keys without any of them; file: both files.
    good: Plain = None
    bad_values: tuple[Plain, ...] = ()  # keys: what each item is set to; parts: the word for all of them
    good_values: tuple[Plain, ...] = ()  # keys: what each item is otherwise; None for a variable: not set
    open_end: bool = False  # ordered: the last item is not known to be bad; it is only the farthest one
    together: tuple[tuple[int, ...], ...] = ()  # items that make no sense one without the other
    labels: tuple[str, ...] = ()  # the items for people, where they are not their own
    in_a_row: bool = False  # the program is told from where to where: only neighbours can be switched on together

    @property
    def ordered(self) -> bool:
        return self.form in ORDERED

    @property
    def one_value(self) -> bool:
        """A configuration has just one of the items."""
        return self.ordered or self.form is Form.CHOICE

    @property
    def keyed(self) -> bool:
        """Whether each item is a key with a good and a bad value."""
        return self.form in (Form.KEYS, Form.FILE)

    @property
    def declared(self) -> bool:
        """Whether keys of a scenario set it; else only the program's own arguments or environment do."""
        return "." in self.key or self.form in (Form.KEYS, Form.COMMIT)

    @property
    def question(self) -> str:
        """ "gc.layers in [0,12)", "model.seq_len in (16, 256]"."""
        if self.open_end:
            return f"{self.key} above {self._shown(self.good)}, at most {self.label(len(self.items) - 1)}"
        if self.ordered:
            return f"{self.key} in ({self._shown(self.good)}, {self.label(len(self.items) - 1)}]"
        if self.form is Form.CHOICE:
            return f"{self.key} one of {', '.join(self.label(place) for place in range(len(self.items)))}"
        if self.form is Form.LAYERS:
            first, stop = _number(self.items[0]), _number(self.items[-1]) + 1
            return f"{self.key} in [{first},{stop}){', only in a row' if self.in_a_row else ''}"
        return f"{self.key} of {', '.join(self.label(place) for place in range(len(self.items)))}"

    def label(self, place: int) -> str:
        return self.labels[place] if self.labels else self._shown(self.items[place])

    def config(self, subset: Collection[int]) -> Config:
        """The configuration in which just these items are switched on."""
        if self.ordered:
            return {self.key: self.items[max(subset)] if subset else self.good}
        if self.form is Form.CHOICE:
            return {self.key: self.items[max(subset, default=0)]}
        chosen = [self.items[place] for place in sorted(subset)]
        if self.form is Form.PARTS:
            if not chosen and isinstance(self.good, dict):
                return self.good
            whole = self.bad_values if len(chosen) == len(self.items) else ()
            return {self.key: whole[0] if whole else "+".join(map(str, chosen))}
        if self.keyed:
            pairs = zip(self.items, self.good_values, self.bad_values, strict=True)
            return {str(key): bad if place in subset else good for place, (key, good, bad) in enumerate(pairs)}
        return {self.key: list(chosen)}

    def swept_away(self, subset: Collection[int]) -> frozenset[str]:
        """Return the environment variables that the configuration leaves unset."""
        unset = [key for key, value in self.config(subset).items() if value is None and key.startswith(ENV)]
        return frozenset(key.removeprefix(ENV) for key in unset)

    def packages(self, subset: Collection[int]) -> Config:
        """Return versions by the name of a package; None: the package is to be absent."""
        config = self.config(subset).items()
        return {key.removeprefix(PACKAGE): value for key, value in config if key.startswith(PACKAGE)}

    def words(self, subset: Collection[int]) -> tuple[str, ...]:
        """The configuration as overrides of a command line; no override can take a variable away."""
        if self.form is Form.FILE:
            return ()
        away = self.swept_away(subset)
        config = [(key, value) for key, value in self.config(subset).items() if not key.startswith(PACKAGE)]
        word = self._as_typed if self.one_value else override_word
        return tuple(word(key, value) for key, value in config if key.removeprefix(ENV) not in away)

    def describe(self, subset: Collection[int]) -> str:
        """A choice in a few words: "layers 0-5 [0:6]", "none", "model.seq_len 64"."""
        if self.ordered:
            return f"{self.key} {self.label(max(subset)) if subset else self._shown(self.good)}"
        places = sorted(subset)
        if not places:
            return f"no {self.noun}"
        if len(places) == len(self.items) and len(places) > 1:
            return f"all {len(places)} {plural(self.noun)}"
        noun = self.noun if len(places) == 1 else plural(self.noun)
        if self.form is Form.LAYERS:
            return f"{noun} {layer_spans([_number(self.items[place]) for place in places])}"
        return f"{noun} {', '.join(self.label(place) for place in places)}"

    @staticmethod
    def _as_typed(key: str, value: Plain) -> str:
        """A text stands for what was written: for a number where YAML reads one, but of a variable for the text."""
        written = isinstance(value, str) and not key.startswith(ENV) and not isinstance(scalar(value), str)
        return f"{key}={value}" if written else override_word(key, value)

    @staticmethod
    def _shown(value: Plain) -> str:
        return value if isinstance(value, str) else json.dumps(value)


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


SEED = "seed"
_OF_SEEDS = {
    AnswerKind.CHOICE: "it is the data, or what else the seed draws: the same seeds fail each time, the others never",
    AnswerKind.INDEPENDENT: "it is a race, and not the data: which seed it is decides nothing",
}


def in_its_words(subject: Subject, answer: SearchAnswer) -> SearchAnswer:
    """The answer as this subject can be spoken of: only layers lie side by side; of other items a range is a set."""
    if subject.noun == SEED and (meaning := _meaning(answer)):
        return replace(answer, why="; ".join(filter(None, (meaning, answer.why))))
    if answer.kind is not AnswerKind.RANGE or subject.form is Form.LAYERS:
        return answer
    return replace(answer, kind=AnswerKind.SET, items=tuple(range(*answer.items)))


def _meaning(answer: SearchAnswer) -> str:
    """Return what runs with several seeds mean: the data or a race."""
    if answer.kind is AnswerKind.INDEPENDENT and answer.p_bad is None:
        return "neither the data nor a race: it fails whatever the seed"
    if answer.kind is AnswerKind.CHOICE and answer.p_bad is not None:
        return "both: some seeds fail more often than others, but not each time, so there is a race too"
    return _OF_SEEDS.get(answer.kind, "")


def override_word(key: str, value: Plain) -> str:
    """Return `gc.layers=[2,6]`, as a command line takes it; an empty list of layers is `none`."""
    if key == "gc.layers":
        return f"{key}={layers_word(value)}"
    # YAML reads the letters of a bare word as this very text.
    is_bare = isinstance(value, str) and _BARE_WORD.fullmatch(value) and scalar(value) == value
    return f"{key}={value if is_bare else json.dumps(value)}"


def layers_word(value: Plain) -> str:
    """A list of layer numbers as a scenario takes it: none, 2:6 or [0-1,4]."""
    numbers = sorted(map(_number, value)) if isinstance(value, list) else None
    if numbers is None:
        return f"[{value}]" if _NUMBERS.fullmatch(str(value)) else str(value)
    if not numbers:
        return "none"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}:{numbers[-1] + 1}"
    return f"[{','.join(_spans(numbers))}]"


def layer_spans(numbers: Collection[int]) -> str:
    """Return layers for people, inclusive, with the code's form after a span: "0-5 [0:6]", "3 and 8", "7"."""
    ordered = sorted(numbers)
    spans = _spans(ordered)
    if len(ordered) > 1 and len(spans) == 1:
        return f"{spans[0]} [{ordered[0]}:{ordered[-1] + 1}]"
    return spans[0] if len(spans) == 1 else f"{', '.join(spans[:-1])} and {spans[-1]}"


def _spans(numbers: Collection[int]) -> list[str]:
    return [str(first) if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in spans_of(numbers)]


def _number(item: Plain) -> int:
    assert isinstance(item, int)
    return item
