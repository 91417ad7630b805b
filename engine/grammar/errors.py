"""What can be wrong with a grammar. Callers turn it into an error of the request, naming the field that held it."""

from __future__ import annotations


class GrammarError(Exception):
    """A grammar that cannot be used, or that has no way on. `str(error)` is safe to show to the client."""


class DeadEndError(GrammarError):
    """No token can follow: nothing that begins so is in the grammar."""

    def __init__(self) -> None:
        super().__init__("no token can follow: nothing that begins so is in the grammar")
