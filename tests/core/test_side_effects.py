"""What a program may change outside its run is found before an experiment launches it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.recording.side_effects import side_effects


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch, os\nimport torch.distributed as dist\n", []),
        ("import wandb\n", ["tracker wandb"]),
        ("from psycopg.rows import dict_row\n", ["database psycopg"]),
        ("def f():\n    import requests as r\n", ["service requests"]),
        ("from google.cloud import storage\n", ["service google.cloud"]),
        ("import google.protobuf\n", []),
        ("from .redis import x\nfrom mine.redis import y\n", []),
        ("import sqlite3\n", []),
        ("import sqlite3 as sql\nsql.connect('runs.db')\n", ["database runs.db"]),
        ("from sqlite3 import connect\nconnect(database=path)\n", ["database sqlite3"]),
        ("import sqlite3\nsqlite3.connect(':memory:')\n", []),
        ("import wandb, (", []),
    ],
)
def test_imports_and_database_files_are_side_effects(text: str, found: list[str]) -> None:
    assert [f"{effect.kind.value} {effect.name}" for effect in side_effects([text])] == found


def test_a_connection_to_a_process_outside_the_job_is_a_side_effect() -> None:
    def socket(peer: str, **more: object) -> Socket:
        fields = {"state": "ESTABLISHED", "local": "10.0.0.1:40000", "peer": peer, "inode": 1} | more
        return Socket(**fields, unacked_bytes=0, unread_bytes=0, retransmits=0)  # type: ignore[arg-type]

    sockets = (
        socket("10.0.0.9:5432"),
        socket("127.0.0.1:29500", in_job=True),
        socket("10.0.0.7:29500", is_store=True),
        socket("10.0.0.2:4711", peer_rank=1),
        socket("0.0.0.0:0", state="LISTEN"),
    )
    rank = Process(pid=7, parent=1, command="", state="S", cpu_s=0.0, io_bytes=None, rss_bytes=0, sockets=sockets)
    (found,) = side_effects([], [rank])
    assert found.name == "10.0.0.9:5432"
    on_other_node = replace(
        rank, sockets=(socket("127.0.0.1:29500", local="10.0.0.2:1"), socket("10.0.0.1:40000", local="10.0.0.2:4711"))
    )
    assert side_effects([], [rank, on_other_node]) == (found,)  # the agent of each node knows only its own processes
