"""The shards of each data source that `--data` can name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..values import Data, HubData
from ..world import CannotRunError
from .shards import TEXT_ENDINGS, FileShard, HubShard, Shard, files_at, has_ending
from .stories import all_stories


def shards_for(data: Data | Path | HubData, text_field: str) -> Sequence[Shard]:
    """Return the shards of a data source.

    `text_field` is the JSON field or table column that contains the text. Raises CannotRunError if no file matches a
    path, or if a matching file is not a text file.
    """
    if isinstance(data, HubData):
        return [HubShard(path=data.path, config=data.config, split=data.split, text_field=text_field)]
    if data is Data.STORIES:
        return all_stories()
    files = files_at(data) if isinstance(data, Path) else [shipped_file()]
    unknown = [path for path in files if not has_ending(path, *TEXT_ENDINGS)]
    if unknown:
        raise CannotRunError(f"--data {unknown[0]}: expected a file that ends with {', '.join(TEXT_ENDINGS)}")
    return [FileShard(path=path, text_field=text_field) for path in files]


def shipped_file() -> Path:
    """Return the path of the sample text in this package."""
    return Path(str(resources.files(__package__).joinpath("..", "texts", "village.txt")))


def shipped_text() -> bytes:
    return shipped_file().read_bytes()
