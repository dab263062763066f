"""Errors of the trainer: each names the boundary that failed and what the reader can do."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all errors that the trainer raises on purpose."""


class ConfigurationError(TrainerError):
    """The configuration is wrong; the command line ends with exit code 2.

    Attributes:
        field: dotted name of the setting, or the file.
        fix: what is wrong and what to do.
    """

    def __init__(self, field: str, fix: str) -> None:
        super().__init__(f"{field}: {fix}")
        self.field = field
        self.fix = fix


class EngineFailed(TrainerError):
    """A rollout engine died, did not boot, or answered nonsense; its rank is quarantined."""


class EngineRefused(TrainerError):
    """A living engine refused one call; another call may pass.

    Attributes:
        reason: `invalid`, `unauthorized`, `duplicate`, `busy`, `updating`, `no_weights` or `not_newer`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class WeightsDiffer(TrainerError):
    """A rollout engine does not hold the weights that were published; it serves nothing until a good update."""


class BackendFailed(TrainerError):
    """The training backend died, did not boot, or did not answer before its deadline."""


class ProcessFailed(TrainerError):
    """A child process died or was not ready in time; the message ends with the tail of its log."""


class RunFailed(TrainerError):
    """The run cannot go on; the message says why and what is kept."""


class ImageRefused(TrainerError):
    """What was given is no image that can be taken; the giver must give another."""


class ImageFailed(TrainerError):
    """The run's image store cannot keep an image, or does not hold one that it should."""
