"""Position of a training: the data that a process needs to continue with other ranks, or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass
class Position:
    """A position in the loops of a training.

    Attributes:
        loop: Odd in a loop of epochs. Even before the first loop, between two loops, and after the last.
        epoch: Epoch of ``epochs``. -1 before the first.
        section: Number of the call of ``steps`` in the epoch.
        index: Index of the step in the section.
        samples: Number of samples that all ranks together have processed in the section.
        done: Number of completed steps in total.
        loaded: The newest checkpoint is loaded, or none exists.
        saved: Number of completed steps when the last checkpoint was started. -1: a checkpoint must be written.
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
        """Key of the section. The order of the keys is the order of the sections in the program."""
        return self.loop, self.epoch if self.loop % 2 else 0, self.section

    def take(self, other: Position) -> None:
        """Copy another position."""
        vars(self).update(vars(other))

    def move(self, loop: int, epoch: int, section: int = 0) -> None:
        """Move to the beginning of a section."""
        self.loop, self.epoch, self.section, self.index, self.samples = loop, epoch, section, 0, 0
