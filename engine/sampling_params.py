"""How a request's tokens are drawn. The order of the steps is `runtime.md` §7.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from whalepod.core.errors import InvalidFieldError

from .grammar.errors import GrammarError
from .grammar.spec import GrammarSpec

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy."""
CHOICES_MAX = 128
TEMPERATURE_MAX = 1e3
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 1e-2, 1e2
"""Within these no sum or quotient of a model's logits leaves float32: a token can always be drawn."""
ALLOWED_IDS_MAX = 1 << 14
BAD_WORDS_MAX = 64
BAD_WORD_CHARS_MAX = 256
BAD_WORD_TOKENS_MAX = 64
BAD_WORD_IDS_MAX = 4 * BAD_WORDS_MAX
"""Words: each text becomes two."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises InvalidFieldError, naming the field and the allowed range, on a bad value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    min_p: float = 0.0
    max_tokens: int | None = None
    """None: the rest of the context."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    """Choices of one prompt. The offline interface and the router make a request of each."""
    stop: Sequence[str] = ()
    """Strings before which the answer ends, one or several. They are of its text: the offline interface and the router
    look for them, no rank does."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """In the text."""
    seed: int | None = None
    """Signed 64 bit. None: noise that differs from request to request."""
    logprobs: int | None = None
    """None: none; 0: the sampled token's; k: and the k best."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, except the first. No row of the prompt is left out then (mode `off` of
    `design.md` §4), and no stored prefix is used."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is drawn, none that ends the sequence either. None: every one may be."""
    bad_words: Sequence[str] = ()
    """Texts that the answer does not hold, one or several. The offline interface and the router make ids of them
    (`bad_words.py`)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of token ids that do not occur in the output: the last token of one is not drawn after the others."""
    grammar: GrammarSpec | None = None
    """What the answer must look like. Its end is the end of the sequence, if need be before `min_tokens`."""
    grammar_starts_after: int | None = None
    """The token that ends the model's reasoning: the answer is what follows it. None: everything is the answer."""
    so_args: InitVar[Mapping[str, object] | None] = None
    """The grammar as the offline interface spells it: {"schema_type": …, "schema": …}."""
    seq_seed: InitVar[int | None] = None
    """`seed` as the offline interface spells it."""

    def __post_init__(self, so_args: Mapping[str, object] | None, seq_seed: int | None) -> None:
        if so_args is not None:
            object.__setattr__(self, "grammar", _grammar_of(so_args))
        if seq_seed is not None:
            _check("seq_seed", seq_seed, f"seed ({self.seed})", self.seed in (None, seq_seed))
            object.__setattr__(self, "seed", seq_seed)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "bad_word_ids", tuple(map(tuple, self.bad_word_ids)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check("n", self.n, f"in [1, {CHOICES_MAX}]", 1 <= self.n <= CHOICES_MAX)
        _check("stop", self.stop, "strings that are not empty", all(self.stop))
        heat = f"in [0, {TEMPERATURE_MAX:g}]"
        _check("temperature", self.temperature, heat, 0 <= self.temperature <= TEMPERATURE_MAX)
        _check("top_p", self.top_p, "in (0, 1]", 0 < self.top_p <= 1)
        _check("top_k", self.top_k, "-1 (off) or in [0, 2^31)", -1 <= self.top_k < 2**31)
        _check("min_p", self.min_p, "in [0, 1]", 0 <= self.min_p <= 1)
        _check("max_tokens", self.max_tokens, "at least 1", self.max_tokens is None or self.max_tokens >= 1)
        _check("min_tokens", self.min_tokens, "at least 0", self.min_tokens >= 0)
        if self.max_tokens is not None:
            allowed = f"at most max_tokens ({self.max_tokens})"
            _check("min_tokens", self.min_tokens, allowed, self.min_tokens <= self.max_tokens)
        _check("seed", self.seed, "a signed 64-bit integer", self.seed is None or -(2**63) <= self.seed < 2**63)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value, "in [0, 20]", value is None or 0 <= value <= 20)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, "in [-2, 2]", -2 <= value <= 2)
        least, most = REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, f"in [{least:g}, {most:g}]", least <= penalty <= most)
        for token_id, bias in self.logit_bias.items():
            _check(
                "logit_bias",
                bias,
                "token ids of at least 0 with values in [-100, 100]",
                token_id >= 0 and abs(bias) <= 100,
            )
        _check_allowed_ids(self.allowed_token_ids)
        _check_bad_words(self.bad_words, self.bad_word_ids)
        if self.grammar is not None and self.ignore_eos:
            raise InvalidFieldError("ignore_eos", "ignore_eos must be false with a grammar, which ends with that token")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _grammar_of(so_args: Mapping[str, object]) -> GrammarSpec:
    try:
        return GrammarSpec.from_so_args(so_args)
    except GrammarError as error:
        raise InvalidFieldError("so_args", f"so_args: {error}") from error


def _check_allowed_ids(ids: tuple[int, ...] | None) -> None:
    if ids is not None:
        ok = 0 < len(ids) <= ALLOWED_IDS_MAX
        _check("allowed_token_ids", len(ids), f"1 to {ALLOWED_IDS_MAX} token ids", ok)
        _check("allowed_token_ids", min(ids), "token ids of at least 0", min(ids) >= 0)


def _check_bad_words(words: Sequence[str], ids: tuple[tuple[int, ...], ...]) -> None:
    _check("bad_words", len(words), f"at most {BAD_WORDS_MAX} texts", len(words) <= BAD_WORDS_MAX)
    for word in words:
        wanted = f"texts of 1 to {BAD_WORD_CHARS_MAX} characters"
        _check("bad_words", word[:40], wanted, 0 < len(word) <= BAD_WORD_CHARS_MAX)
    _check("bad_word_ids", len(ids), f"at most {BAD_WORD_IDS_MAX} words", len(ids) <= BAD_WORD_IDS_MAX)
    for run in ids:
        ok = 0 < len(run) <= BAD_WORD_TOKENS_MAX and min(run) >= 0
        _check("bad_word_ids", run[:8], f"words of 1 to {BAD_WORD_TOKENS_MAX} token ids of at least 0", ok)


def _check(field_name: str, value: object, allowed: str, ok: bool) -> None:
    if not ok:
        raise InvalidFieldError(field_name, f"{field_name} must be {allowed}, not {value!r}")
