"""Where a training is: what a process needs to know to go on with the others, or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass
class Position:
    """A place in the loop.

    Attributes:
        epoch: of ``epochs``; -1 before the first.
        section: the number of the call of ``steps`` in the epoch.
        index: of the step in the section.
        samples: how many samples all ranks together have had in the section.
        done: all steps that are done.
        loaded: the newest checkpoint, if there is one, is loaded.
        saved: how many steps were done when the last checkpoint was begun; -1: one is to be written.
    """

    epoch: int = -1
    section: int = 0
    index: int = 0
    samples: int = 0
    done: int = 0
    loaded: bool = True
    saved: int = 0

    def take(self, other: Position) -> None:
        """Goes to another one's place."""
        vars(self).update(vars(other))

    def move(self, epoch: int, section: int = 0) -> None:
        """Goes to the beginning of a section."""
        self.epoch, self.section, self.index, self.samples = epoch, section, 0, 0
