"""What a person sees in the terminal: one line per event, a bar while profiling."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

NAME = "poplar"


def console() -> Console:
    """A console on standard error; plain text where that is not a terminal."""
    stream = sys.stderr
    return Console(file=stream, width=None if stream.isatty() else 160, soft_wrap=not stream.isatty())


def say(text: str) -> None:
    """One line of information."""
    console().print(f"{NAME}: {text}", markup=False, highlight=False)


def warn(text: str) -> None:
    """One line that asks for attention."""
    console().print(f"{NAME}: warning: {text}", markup=False, highlight=False, style="yellow")


def quiet_third_party() -> None:
    """Silence what a user of DeepSpeed can do nothing about: it calls collectives by names torch has deprecated."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


class ProfilingProgress:
    """A bar that says what is being measured; silent on all ranks but one.

    Args:
        active: Show anything at all.
        world_size: Number of ranks.
    """

    def __init__(self, *, active: bool, world_size: int) -> None:
        self.active = active
        self.world_size = world_size
        self._progress: Progress | None = None
        self._last = ""

    def __enter__(self) -> ProfilingProgress:
        if self.active:
            out = console()
            if out.is_terminal:
                columns = (
                    TextColumn(f"{NAME}: profiling"),
                    BarColumn(pulse_style="cyan"),
                    TextColumn("{task.description}"),
                )
                self._progress = Progress(*columns, TimeElapsedColumn(), console=out, transient=True)
                self._progress.start()
                self._task = self._progress.add_task("starting", total=None)
            else:
                say(f"profiling {self.world_size} rank{'s' if self.world_size > 1 else ''}")
        return self

    def __call__(self, text: str) -> None:
        """Show what is being measured now, for example "rank 1/2: micro-batch 8"."""
        self._last = text
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
