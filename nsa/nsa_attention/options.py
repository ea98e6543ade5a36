"""Command-line options of the programs in this package."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .values import switch


class SettingsError(Exception):
    """Raised if the settings are invalid. The message has one line per error."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A command-line option.

    `parse` converts text from the command line or the YAML file, and raises ValueError for a wrong value. `env` lists
    the environment variables that set the option, each with its own parser. `spellings` are other names of the flag.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    about: str
    env: tuple[tuple[str, Callable[[str], Any]], ...] = ()
    spellings: tuple[str, ...] = field(default=())

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.parse is switch


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add options to an argument parser. The parser leaves their values as strings."""
    for option in options:
        parser.add_argument(option.flag, dest=option.name, default=None, help=option.about)


def parse_values(options: Sequence[Option], texts: Mapping[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """Return the parsed value of each option in `texts`, or its default if the text is None.

    A wrong value adds an error message to `mistakes`.
    """
    values = {option.name: option.default for option in options}
    for option in options:
        try:
            if texts[option.name] is not None:
                values[option.name] = option.parse(texts[option.name])
        except ValueError as error:
            mistakes.append(f"{option.flag}: {error}")
    return values
