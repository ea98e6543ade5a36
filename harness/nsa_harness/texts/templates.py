"""Render the text templates in causes.toml.

A template is compiled when it is first rendered. A missing fact is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template, UndefinedError

from nsa_harness.texts.causes import SHARED, sections
from nsa_harness.texts.template_filters import FILTERS


def render_template(section: str, key: str, facts: Mapping[str, object]) -> str:
    """Return the text of a template with `facts` filled in. Raise jinja2.TemplateError if that fails.

    An exception that a filter raises is passed on.
    """
    return template(section, key).render(facts)


@cache
def template(section: str, key: str) -> Template:
    """Return the compiled template for a key in a section of causes.toml.

    A cause without advice gets a template of its remedy.
    """
    source = sections()[section].get(key, "{{ remedy }}") if key == "advice" else sections()[section][key]
    return environment().from_string(source)


@cache
def environment() -> Environment:
    """Return the Jinja environment shared by all templates."""
    # Sentences are plain text. The writers of HTML and Markdown escape them.
    # `{% include "name" %}` inserts a sentence of [shared], rendered with the facts of the including template.
    loader = FunctionLoader(lambda name: sections()[SHARED].get(name))
    environment = Environment(undefined=StrictUndefined, autoescape=False, finalize=_reject_none, loader=loader)
    environment.filters.update(FILTERS)
    return environment


def _reject_none(value: object) -> object:
    """Return the value, or raise UndefinedError if it is None."""
    if value is None:
        raise UndefinedError("a fact that is None was printed")
    return value
