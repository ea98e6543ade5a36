"""How a command shows its help: options in groups, and what each takes and gives unless given."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperOption

_COLUMNS = 26  # of an option and what it takes
_OTHERS = "Options"
_VARIABLES = "Every option is also a variable of the environment: --dry-run is NSA_HARNESS_DRY_RUN."


class GroupedCommand(TyperCommand):
    """Options under the panels that they name."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[OPTIONS]", *(_in_usage(param) for param in self.params if isinstance(param, TyperArgument))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [
            (str(param.metavar), param.help or "") for param in self.params if isinstance(param, TyperArgument)
        ]
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": arguments}
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption) and (record := _without_variable(param).get_help_record(ctx)):
                groups.setdefault(param.rich_help_panel or _OTHERS, []).append(record)
        groups[_OTHERS] = groups.pop(_OTHERS)  # last, with --help
        column = max(len(name) for records in groups.values() for name, _ in records if len(name) <= _COLUMNS)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl([(f"{option:<{column}}", told) for option, told in records], col_max=_COLUMNS)
        formatter.write_paragraph()
        formatter.write_text(_VARIABLES)


def _in_usage(argument: TyperArgument) -> str:
    name = str(argument.metavar)
    optional = name if argument.required or name.startswith("[") else f"[{name}]"
    return f"{optional}..." if argument.nargs == -1 and not name.endswith("...") else optional


def _without_variable(option: TyperOption) -> TyperOption:
    """Told once for all options."""
    plain = copy.copy(option)
    plain.show_envvar = False
    return plain
