"""Find what a program may change outside the directory of its run, before it is launched again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.evidence.host import Process
from nsa_harness.core.source_code.excerpt import parse_python


class SideEffectKind(StrEnum):
    """What a further run of the program could change."""

    DATABASE = "database"
    TRACKER = "tracker"  # an experiment tracker, in which each run appears
    SERVICE = "service"  # another service on the network
    CONNECTION = "connection"  # a connection that a rank had to a process outside the job


@dataclass(frozen=True, kw_only=True, order=True)
class SideEffect:
    """One thing outside the run that the program may change."""

    kind: SideEffectKind
    name: str  # the imported package, the database file, or the address of the other end


_PACKAGES = {
    SideEffectKind.DATABASE: (
        "psycopg|psycopg2|asyncpg|pymysql|MySQLdb|mysql|sqlalchemy|pymongo|redis|cassandra|clickhouse_driver|duckdb"
        "|snowflake|elasticsearch|lmdb"
    ),
    SideEffectKind.TRACKER: "wandb|mlflow|comet_ml|neptune|clearml|aim|swanlab|trackio",
    SideEffectKind.SERVICE: (
        "requests|httpx|aiohttp|boto3|botocore|s3fs|gcsfs|google.cloud|azure|kafka|confluent_kafka|pika|paramiko"
        "|smtplib|ftplib|slack_sdk|telegram"
    ),
}
_KIND_OF_PACKAGE = {name: kind for kind, names in _PACKAGES.items() for name in names.split("|")}


def side_effects(texts: Iterable[str], processes: Iterable[Process] = ()) -> tuple[SideEffect, ...]:
    """Return what the program may change outside its run.

    `texts` are its source files, and `processes` its processes as a snapshot of an earlier run shows them.
    """
    found = {effect for text in texts for effect in _in_source(text)}
    sockets = [socket for process in processes for socket in process.sockets if socket.state == "ESTABLISHED"]
    # An agent sees only its own node, so it cannot know that the other end is in the job, but another agent can.
    in_job = {socket.local for socket in sockets}
    in_job |= {socket.peer for socket in sockets if socket.in_job or socket.peer_rank is not None}
    found |= {
        SideEffect(kind=SideEffectKind.CONNECTION, name=socket.peer)
        for socket in sockets
        if socket.peer not in in_job and not socket.is_store
    }
    return tuple(sorted(found))


def _in_source(text: str) -> Iterator[SideEffect]:
    tree = parse_python(text)
    imported = {alias: name for node in ast.walk(tree) for alias, name in _imports(node)}
    for name in imported.values():
        parts = name.split(".")
        package = next((one for one in (parts[0], ".".join(parts[:2])) if one in _KIND_OF_PACKAGE), None)
        if package is not None:
            yield SideEffect(kind=_KIND_OF_PACKAGE[package], name=package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _full_name(node.func, imported) == "sqlite3.connect":
            yield from _sqlite(node)


def _sqlite(call: ast.Call) -> Iterator[SideEffect]:
    """Yield the file of a database of sqlite. A database in memory is no side effect."""
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "database")]
    for value in values:
        if not isinstance(value, ast.Constant):
            yield SideEffect(kind=SideEffectKind.DATABASE, name="sqlite3")
        elif isinstance(value.value, str) and value.value not in ("", ":memory:"):
            yield SideEffect(kind=SideEffectKind.DATABASE, name=value.value[:200])


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import defines, and the full name of what it imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.expr, imported: Mapping[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return imported.get(name, name)
        case ast.Attribute(value=value, attr=name):
            return f"{_full_name(value, imported)}.{name}"
    return ""
