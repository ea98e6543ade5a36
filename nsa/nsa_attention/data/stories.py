"""Generated short stories in English: training data without a download.

The text is the same on every machine. A story always mentions the same people, place and object, so a model can learn
more than the frequencies of single words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .shards import Record

SHARDS, STORIES_OF_SHARD = 16, 500  # 7 MB

_PEOPLE = (
    "Anna", "Bertil", "Clara", "David", "Edith", "Felix", "Greta", "Harald", "Ingrid", "Jonas", "Katrin", "Lorenz",
    "Marta", "Nils", "Olga", "Peter", "Rosa", "Simon", "Thea", "Viktor",
)  # fmt: skip
_TRADES = (
    "baker", "carpenter", "doctor", "ferryman", "gardener", "judge", "miller", "painter", "schoolmaster", "shepherd",
    "smith", "tailor", "watchmaker", "weaver",
)  # fmt: skip
_PLACES = (
    "the harbour", "the mill", "the market", "the old bridge", "the forest", "the schoolhouse", "the station",
    "the river", "the church", "the orchard", "the lighthouse", "the inn", "the quarry", "the library",
)  # fmt: skip
_THINGS = (
    "lantern", "letter", "boat", "clock", "key", "basket of apples", "map", "violin", "coat", "ladder", "kettle",
    "silver coin", "painting", "book", "saddle", "barrel of salt",
)  # fmt: skip
_QUALITIES = (
    "broken", "heavy", "old", "small", "beautiful", "strange", "useful", "forgotten", "expensive", "ordinary", "bright",
)  # fmt: skip
_MOODS = ("happy", "worried", "tired", "proud", "surprised", "angry", "quiet", "hopeful", "curious", "ashamed")
_TIMES = (
    "In the morning", "Before noon", "At midday", "In the evening", "Late at night", "On the next day",
    "A week later", "When the rain had stopped", "As the bells rang", "After the harvest", "In the first snow",
)  # fmt: skip
_WEATHERS = (
    "The wind came from the north", "It rained without an end", "The sun stood high", "Fog lay over the fields",
    "The snow was deep", "A storm was near", "The air was warm and still", "The stars were clear",
)  # fmt: skip
_ASKED = ("asked", "said", "whispered", "called", "answered", "replied")
_NUMBERS = ("two", "three", "four", "five", "seven", "nine", "twelve", "twenty")


class _Dice:
    """A source of random choices that are the same in every Python version.

    Only `random.random()` is used, because Python guarantees its sequence across versions.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, words: Sequence[str]) -> str:
        return words[self.below(len(words))]

    def below(self, stop: int) -> int:
        return int(self._random.random() * stop)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The people, place and object of a story."""

    hero: str
    friend: str
    trade: str
    place: str
    thing: str
    quality: str


def story(number: int) -> str:
    """Return the generated story with this number: a title and several paragraphs."""
    dice = _Dice(number)
    hero = dice.one_of(_PEOPLE)
    setting = _Setting(
        hero=hero,
        friend=dice.one_of([name for name in _PEOPLE if name != hero]),
        trade=dice.one_of(_TRADES),
        place=dice.one_of(_PLACES),
        thing=dice.one_of(_THINGS),
        quality=dice.one_of(_QUALITIES),
    )
    opening = f"{setting.hero} was {_article(setting.trade)} who lived near {setting.place}."
    title = f"{setting.hero} and the {setting.quality} {setting.thing}"
    first = " ".join([opening, *(_sentence(dice, setting) for _ in range(2 + dice.below(3)))])
    others = [" ".join(_sentence(dice, setting) for _ in range(2 + dice.below(5))) for _ in range(1 + dice.below(4))]
    return "\n\n".join([title, first, *others, _ending(dice, setting)]) + "\n"


def _sentence(dice: _Dice, setting: _Setting) -> str:
    return _SENTENCES[dice.below(len(_SENTENCES))](dice, setting)


def _weather(dice: _Dice, setting: _Setting) -> str:
    return f"{dice.one_of(_WEATHERS)}, and {dice.one_of((setting.hero, setting.friend))} stayed at {setting.place}."


def _walk(dice: _Dice, setting: _Setting) -> str:
    verb = dice.one_of(("walked", "ran", "rode", "went", "came back", "hurried"))
    return f"{dice.one_of(_TIMES)} {setting.hero} {verb} to {dice.one_of(_PLACES)} with the {setting.thing}."


def _event(dice: _Dice, setting: _Setting) -> str:
    verb = dice.one_of(("found", "lost", "sold", "repaired", "hid", "showed", "carried", "cleaned"))
    return f"There {setting.friend} {verb} {_article(f'{dice.one_of(_QUALITIES)} {dice.one_of(_THINGS)}')}."


def _question(dice: _Dice, setting: _Setting) -> str:
    return f'"Whose {setting.thing} is this?" {dice.one_of(_ASKED)} {dice.one_of((setting.hero, setting.friend))}.'


def _reply(dice: _Dice, setting: _Setting) -> str:
    number = dice.one_of(_NUMBERS)
    return f'"It belongs to the {dice.one_of(_TRADES)}, who paid {number} coins for it," {setting.friend} replied.'


def _feeling(dice: _Dice, setting: _Setting) -> str:
    reason = f"the {setting.thing} was {dice.one_of(('gone', setting.quality, 'not for sale', 'safe again'))}"
    return f"{setting.hero} was {dice.one_of(_MOODS)}, because {reason}."


def _waiting(dice: _Dice, setting: _Setting) -> str:
    number = dice.one_of(_NUMBERS)
    return f"For {number} days nobody saw {setting.friend}, and the people at {dice.one_of(_PLACES)} talked about it."


_SENTENCES = (_weather, _walk, _event, _question, _reply, _feeling, _waiting)


def _ending(dice: _Dice, setting: _Setting) -> str:
    last = dice.one_of(("gave it away", "kept it", "brought it home", "told the story to the children"))
    return f"In the end {setting.hero} {last}, and {setting.friend} was {dice.one_of(_MOODS)}."


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True)
class StoryShard:
    """A shard of consecutively numbered generated stories."""

    number: int

    @property
    def name(self) -> str:
        return f"stories {self.number}"

    def identity(self) -> str:
        return self.name

    def records(self) -> Iterator[Record]:
        first = self.number * STORIES_OF_SHARD
        yield from map(story, range(first, first + STORIES_OF_SHARD))


def all_stories() -> tuple[StoryShard, ...]:
    return tuple(StoryShard(number) for number in range(SHARDS))
