"""How often a scenario is run, and when a plan stops early: --repeat, --retries and --maxfail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.compared.flakiness import repetitions, with_flakiness
from harness.core.diagnosed.causes import Cause
from harness.core.report import Outcome, Status


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the command line says about attempts."""

    repeat: int = 1  # attempts of each scenario, whatever they say
    retries: int = 0  # further attempts while the last one is not as expected
    maxfail: int | None = None  # scenarios not as expected after which nothing more is started


ONCE = Policy()


def another_wanted(policy: Policy, attempts: Sequence[Outcome]) -> bool:
    """One more attempt of a scenario after these. An interrupted one said nothing, a deeper look is none."""
    judged = [attempt for attempt in repetitions(attempts) if not interrupted(attempt)]
    if len(judged) < policy.repeat:
        return True
    return len(judged) < policy.repeat + policy.retries and not as_expected(judged[-1])


def failed_enough(policy: Policy, scenarios: Iterable[Sequence[Outcome]]) -> bool:
    """The limit of --maxfail is reached by these scenarios, each given by its attempts. One that goes on is open."""
    if policy.maxfail is None:
        return False
    done = [attempts for attempts in scenarios if attempts and not another_wanted(policy, attempts)]
    counting = [one for attempts in done for one in with_flakiness(attempts) if one.final]
    return sum(not as_expected(one) for one in counting) >= policy.maxfail


def as_expected(outcome: Outcome) -> bool:
    """A SKIP is nobody's fault; an ERROR is no answer, whatever was expected."""
    return outcome.expected and outcome.verdict.status is not Status.ERROR


def interrupted(outcome: Outcome) -> bool:
    return outcome.verdict.cause == Cause.INTERRUPTED
