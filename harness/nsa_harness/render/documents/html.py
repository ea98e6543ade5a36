"""report.html: the report as one page that needs no network and no script."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.outcome.callstacks import stack_trees
from nsa_harness.core.report import Report, counts
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render import answer
from nsa_harness.render.documents import lanes
from nsa_harness.render.documents.tables import hypotheses, tables
from nsa_harness.render.experiments import picture as bisect_picture
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.text import escaped, link_target
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning


def report_html(report: Report, playbook: Playbook, search: BisectReport | None = None) -> str:
    """What SUMMARY.md says, with a picture of the ranks and of a bisection. Same report, same bytes."""
    report, search = escaped((report, search))
    given, told = counts(report.outcomes), answer.told_at_length(report)
    return _TEMPLATE.render(
        total=sum(given.values()),
        report=report,
        tally=[(status, given[status]) for status in words.LOUDEST_FIRST if given[status]],
        numbered=words.bad_news_first(report),
        single=len(report.outcomes) == 1,
        sections=told,
        told={number for number, _ in told},
        answer=answer,
        words=words,
        meaning=meaning,
        asked=hypotheses(report, playbook),
        tables=tables(report, playbook),
        severity=severity,
        draw=lanes.lanes,
        stack_trees=stack_trees,
        search=search,
        searched=bisect_picture,
        said=bisect_words,
        link_target=link_target,
    )


def _compiled() -> Template:
    source = files("nsa_harness.render.documents").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)


# With the code that fills it, and not when the page is written: a plan may outlast an upgrade of the harness.
_TEMPLATE = _compiled()
