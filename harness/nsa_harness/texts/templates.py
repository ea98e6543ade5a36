"""Templates of causes.toml. Each is compiled when it is first rendered, and a missing fact is an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template, UndefinedError

from nsa_harness.texts.causes import SHARED, sections
from nsa_harness.texts.template_filters import FILTERS


def render_template(section: str, key: str, facts: Mapping[str, object]) -> str:
    """Return the template rendered with these facts. Raises `jinja2.TemplateError` and any error of a filter."""
    return template(section, key).render(facts)


@cache
def template(section: str, key: str) -> Template:
    """Return the compiled template. A cause without its own advice uses its remedy."""
    source = sections()[section].get(key, "{{ remedy }}") if key == "advice" else sections()[section][key]
    return environment().from_string(source)


@cache
def environment() -> Environment:
    """Return the one environment of all templates."""
    # Sentences are plain text. The writers of HTML and Markdown escape them.
    # `{% include "name" %}` inserts a sentence of [shared], rendered with the facts of the including template.
    loader = FunctionLoader(lambda name: sections()[SHARED].get(name))
    environment = Environment(undefined=StrictUndefined, autoescape=False, finalize=_reject_none, loader=loader)
    environment.filters.update(FILTERS)
    return environment


def _reject_none(value: object) -> object:
    """Raise if a template prints None: it has to check first whether the fact is known."""
    if value is None:
        raise UndefinedError("a fact that is None was printed")
    return value
