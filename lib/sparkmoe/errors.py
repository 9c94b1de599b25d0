"""What can go wrong, said once and clearly.

Every error a user can cause is a `SparkmoeError` whose message is whole by itself: what is wrong, what was found, what
to do about it. The command line prints that message and nothing else; a notebook shows it as the last line of its
traceback.
"""


class SparkmoeError(Exception):
    """Base of all errors with a message for the user."""


class MachineError(SparkmoeError):
    """The machine lacks what was asked of it (memory, a port, a GPU, a writable folder)."""


class ModelError(SparkmoeError):
    """A model folder is missing, damaged, or not of a supported architecture."""


class RecipeError(SparkmoeError):
    """A recipe does not exist, contradicts itself, or cannot run on this machine."""


class EngineError(SparkmoeError):
    """The server did not start, died, fell silent, or answered something that is no answer."""


class NotEngaged(SparkmoeError):
    """A lever of the recipe was requested but is not on in the running server."""


class DataError(SparkmoeError):
    """A prompt file, data set or trace is missing, damaged or empty."""


class StoreError(SparkmoeError):
    """A results folder cannot be written, or holds something this version cannot read."""
