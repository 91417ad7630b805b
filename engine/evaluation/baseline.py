"""The n-gram baseline of a trained model: computed from its training tokens, and recorded beside its weights, because a
clone has the model and not the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import ConfigError

from .held_out import Document
from .kneser_ney import KneserNey

BASELINE_FILE: Final = "baseline_5gram.json"
"""In the model's directory."""
TRAINING_FILE: Final = "train.bin"
"""In a corpus directory: uint16 token ids, little-endian, documents one after the other."""
ORDER: Final = 5


@dataclass(frozen=True, slots=True)
class Baseline:
    """Bits of every held-out document's scored tokens under a 5-gram model."""

    bits: Sequence[float]
    """By document, in the order of the held-out file."""
    held_out_sha256: str
    training_sha256: str
    """Of TRAINING_FILE, as hex."""
    training_tokens: int
    recorded: bool = False
    """Read from the model's directory, not computed now."""

    @classmethod
    def computed(
        cls,
        training: NDArray[np.uint16],
        documents: Sequence[Document],
        *,
        held_out_sha256: str,
        vocab_size: int,
        bos_id: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """From training tokens [count], each document from its begin-of-sequence on. Takes a minute for 20 million."""
        try:
            model = KneserNey.trained(training, vocab_size=vocab_size, bos_id=bos_id, order=ORDER, progress=progress)
        except ValueError as error:
            raise ConfigError(f"the training tokens are not of this model: {error}") from None
        bits = [
            -float(model.log_probabilities(np.array(each.ids))[np.array(each.places)].sum()) / math.log(2)
            for each in documents
        ]
        digest = hashlib.sha256(np.ascontiguousarray(training, "<u2").tobytes()).hexdigest()
        return cls(bits, held_out_sha256, digest, len(training))

    @classmethod
    def read(cls, path: Path, *, held_out_sha256: str) -> Self | None:
        """The recorded one; None: there is none, or it is of other text. Raises ConfigError if it cannot be read."""
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = cls(
                bits=[float(value) for value in values["bits_by_document"]],
                held_out_sha256=str(values["held_out_sha256"]),
                training_sha256=str(values["training_sha256"]),
                training_tokens=int(values["training_tokens"]),
                recorded=True,
            )
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no recorded baseline: {type(error).__name__} {error}") from None
        return found if found.held_out_sha256 == held_out_sha256 else None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> Mapping[str, Any]:
        return {
            "order": ORDER,
            "smoothing": "interpolated modified Kneser-Ney",
            "training_tokens": self.training_tokens,
            "training_sha256": self.training_sha256,
            "held_out_sha256": self.held_out_sha256,
            "bits_by_document": [round(value, 3) for value in self.bits],
        }

    def bits_per_byte(self, documents: Mapping[int, Document]) -> float:
        """Of some documents, by their place in the held-out file."""
        text_bytes = sum(document.text_bytes for document in documents.values())
        return math.fsum(self.bits[place] for place in documents) / max(1, text_bytes)


def read_training_tokens(directory: Path) -> NDArray[np.uint16]:
    """[count] of a corpus directory. Raises ConfigError."""
    try:
        return np.fromfile(directory / TRAINING_FILE, dtype="<u2")
    except OSError as error:
        raise ConfigError(f"{directory / TRAINING_FILE} cannot be read: {error.strerror}") from None
