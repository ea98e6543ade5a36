"""`nsa-harness fit`: its options, and what they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.run import Out


def fit(
    stored: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run directories with a sweep; the newest one unless given."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(envvar="NSA_HARNESS_TOKENS", metavar="N", min=2, help="What would a step of this length cost?"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(envvar="NSA_HARNESS_LAYERS", metavar="N", min=1, help="What would so many layers cost?"),
    ] = None,
    out: Out = None,
) -> None:
    """Say how a step's time, memory and graph grow over stored runs, and what a larger one will cost.

    Exit 1 where a run at half the size contradicts it, 125 where the cells do not say.
    """
    from nsa_harness.commands.fit import Asked
    from nsa_harness.commands.fit import fit as answered

    answer = answered(stored or (), Asked(tokens=tokens, layers=layers), out or Path("reports"))
    print("\n".join(answer.lines).lstrip("\n"))
    raise typer.Exit(answer.code)
