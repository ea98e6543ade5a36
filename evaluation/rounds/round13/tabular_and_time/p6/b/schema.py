"""Column types of a headered CSV, found from the values."""
import csv
from dataclasses import dataclass, field


def read_columns(path):
    with open(path, newline="") as f:
        rows = list(csv.reader(f))
    return {name: [r[i] for r in rows[1:]] for i, name in enumerate(rows[0])}


def looks_numeric(values):
    try:
        for v in values:
            float(v)
    except ValueError:
        return False
    return True


@dataclass
class Schema:
    target: str
    numeric: list = field(default_factory=list)
    categorical: list = field(default_factory=list)


def infer_schema(paths, target):
    schema, tables = Schema(target), [read_columns(p) for p in paths]
    for name in tables[0]:
        if name == target:
            continue
        numeric = all(looks_numeric(t[name]) for t in tables)
        (schema.numeric if numeric else schema.categorical).append(name)
    return schema
