"""Where a plain loop is in its data, in a form that does not depend on the plan."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ConfigError

STATE_FILE_NAME = "poplar_state.json"
STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """Position of a plain loop, at the end of an optimizer step."""

    epoch: int
    """Epoch, from 0."""
    samples_consumed: int
    """Samples of the epoch that optimizer steps were taken for, over all ranks."""
    batches_done: int
    """Micro-batches that rank 0's loop has run in the epoch."""
    global_batch_size: int
    """Samples per optimizer step."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the epoch; the last one may be shorter."""
        return -(-self.samples_consumed // self.global_batch_size)

    def save(self, folder: str | Path) -> None:
        """Write `poplar_state.json`, version 1, to a folder."""
        text = json.dumps({"version": STATE_VERSION, **asdict(self)}, indent=2)
        (Path(folder) / STATE_FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> LoopState | None:
        """Read it back; None where the folder has none.

        Raises:
            ConfigError: The file is damaged or of another version.
        """
        path = Path(folder) / STATE_FILE_NAME
        if not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            version = data.pop("version")
            if version != STATE_VERSION:
                raise ConfigError(f"{path}: version is {version!r}, this release reads version {STATE_VERSION}.")
            return cls(**{name: int(value) for name, value in data.items()})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as problem:
            if isinstance(problem, ConfigError):
                raise
            raise ConfigError(f"{path}: cannot be read: {problem}") from None


def newest_checkpoint(project_dir: str | Path) -> Path:
    """The checkpoint that Accelerate's automatic naming made last."""

    def number(folder: Path) -> int:
        found = re.search(r"(\d+)$", folder.name)
        return int(found.group(1)) if found else -1

    return max((Path(project_dir) / "checkpoints").iterdir(), key=number)
