"""The tokenizer that ships, in a vocabulary that is no multiple of 32 and has ids without tokens at its end."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from whalepod.engine.grammar.lowering import lower
from whalepod.engine.grammar.matcher import CompiledGrammar
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.grammar.vocabulary import Vocabulary
from whalepod.model.tokenizer import Tokenizer

EOS_ID = 1
VOCAB_SIZE = 6150


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(Path(__file__).parents[3] / "model" / "assets")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.create(tokenizer(), size=VOCAB_SIZE, eos_id=EOS_ID)


def compiled(kind: GrammarKind, source: object = None) -> CompiledGrammar:
    spec = GrammarSpec.create(kind, source)
    return CompiledGrammar(spec, lower(spec, marker_id=vocabulary().call_marker_id), vocabulary())


def regex(pattern: str) -> CompiledGrammar:
    return compiled(GrammarKind.REGEX, pattern)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """The whole text is a sentence of the grammar, in the tokens that the tokenizer writes it with."""
    matcher = grammar.matcher()
    ids = tokenizer().encode(text)
    return matcher.accept_all(ids) == len(ids) and matcher.accepting
