"""A file beside a written job from which its model is made again."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..ir.documents import Unreadable, plain_errors, read_json
from ..ir.errors import PlanError

FILE = "model.json"


class Remembered(BaseModel):
    """Of the options what makes a job's model again."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None
    head: str | None
    labels: int | None
    dropout: bool
    seed: int
    adapter: str | None = None
    base: str | None = None

    def write(self, directory: Path) -> None:
        (directory / FILE).write_text(self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(directory: Path) -> Remembered:
        """Raises `PlanError` for anything but what `write` wrote."""
        try:
            return Remembered.model_validate(read_json(directory / FILE))
        except (Unreadable, ValidationError) as error:
            what = plain_errors(error) if isinstance(error, ValidationError) else error
            where = directory / FILE
            raise PlanError(f"{where}: not what `penstock plan --out` writes beside a job: {what}") from error
