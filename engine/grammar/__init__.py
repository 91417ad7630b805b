"""Structured output: what a request promised its answer looks like, followed token by token.

GrammarSpec ──▶ GrammarCompiler ──▶ CompiledGrammar ──▶ GrammarState (one a request) ──▶ masks ──▶ sampler
                └ a child process tries every grammar first: llguidance has no way to be interrupted

`spec.py` says what may be asked for, `lowering.py` with `python_regex.py` and `gbnf.py` turns it into what llguidance
reads, `trial.py` runs in the child, `compiler.py` owns the pool and the cache, `matcher.py` is a place in a grammar,
`state.py` a request's, `masks.py` the bits.
"""
