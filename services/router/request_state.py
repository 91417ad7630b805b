"""Where a request stands, for whoever looks at the router. Never a word of its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """What a request is about; one with several choices is as far as the first of them."""

    PREPARING = "preparing"
    """Its body is read, checked, tokenized, looked up."""
    QUEUED = "queued"
    """It waits for admission."""
    PROMPT = "prompt"
    """It is placed, its prompt restored and computed."""
    GENERATING = "generating"
    RESUMING = "resuming"
    """It lost its rank and goes on elsewhere."""


@dataclass(slots=True)
class RequestState:
    stage: Stage = Stage.PREPARING
    tokens: int = 0
    """Generated so far, of all choices."""
