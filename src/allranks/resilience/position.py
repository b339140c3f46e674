"""Where a training is: what a process needs to know to continue with the others, or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass
class Position:
    """A place in the loops of a training.

    Attributes:
        loop: odd in a loop of epochs, even before the first, between two, and after the last.
        epoch: of ``epochs``; -1 before the first.
        section: the number of the call of ``steps`` in the epoch.
        index: of the step in the section.
        samples: the number of samples that all ranks together have had in the section.
        done: the number of all steps that are done.
        loaded: the newest checkpoint, if there is one, is loaded.
        saved: the number of steps that were done when the last checkpoint was begun; -1: one must be written.
    """

    loop: int = 0
    epoch: int = -1
    section: int = 0
    index: int = 0
    samples: int = 0
    done: int = 0
    loaded: bool = True
    saved: int = 0

    @property
    def section_key(self) -> tuple[int, int, int]:
        """The section; sections of a program are in the order of their keys."""
        return self.loop, self.epoch if self.loop % 2 else 0, self.section

    def take(self, other: Position) -> None:
        """Continue from another position."""
        vars(self).update(vars(other))

    def move(self, loop: int, epoch: int, section: int = 0) -> None:
        """Go to the beginning of a section."""
        self.loop, self.epoch, self.section, self.index, self.samples = loop, epoch, section, 0, 0
