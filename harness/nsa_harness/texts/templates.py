"""Render the text templates in causes.toml, compiled when first used. A missing fact is an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template, UndefinedError

from nsa_harness.texts.causes import SHARED, sections
from nsa_harness.texts.template_filters import FILTERS


def render_template(section: str, key: str, facts: Mapping[str, object]) -> str:
    """Return a template's text with `facts` filled in. Raise TemplateError, or what a filter raises, on failure."""
    return template(section, key).render(facts)


@cache
def template(section: str, key: str) -> Template:
    """Return the compiled template for a key in a section of causes.toml. The advice defaults to the remedy."""
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
