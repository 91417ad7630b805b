"""Regular expressions as people write them, in llguidance's dialect (that of Rust's `regex` crate).

What comes out matches a subset of what `re.fullmatch` matches with the expression that goes in, and of what the other
usual engines do. They disagree about `\\d`, `\\w`, `\\s`: ASCII or Unicode, and which version of Unicode. So a class
stands for what all of them accept: `\\d` is 0-9, and `\\D` what is a digit to none. Inside a negated class it is the
other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import GrammarError

# Written with properties where Unicode is meant: llguidance narrows `\d` and `\w` itself in some places.
_ASCII_SPACES = r"\x20\t\n\r\x0b\x0c"
_WORDS = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}"
_SPACES = r"\p{White_Space}\x1c-\x1f\x{feff}"
ACCEPTED_BY_ALL: Mapping[str, str] = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": _ASCII_SPACES,
    "D": r"[^\p{Nd}]",
    "W": f"[^{_WORDS}]",
    "S": f"[^{_SPACES}]",
}
ACCEPTED_BY_ANY: Mapping[str, str] = {
    "d": r"\p{Nd}",
    "w": _WORDS,
    "s": _SPACES,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": f"[^{_ASCII_SPACES}]",
}

_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")

_REPEAT = re.compile(r"[*+?]|\{(?P<low>[0-9]*)(?P<range>,(?P<high>[0-9]*))?\}")
_GROUP = re.compile(r"\((\?(?::|P?<[A-Za-z_][A-Za-z0-9_]*>|[a-zA-Z-]+:|(?P<flags>[a-zA-Z-]+)\)))?")
_REFUSED_GROUPS: Mapping[str, str] = {
    "(?=": "look-ahead is",
    "(?!": "look-ahead is",
    "(?<=": "look-behind is",
    "(?<!": "look-behind is",
    "(?P=": "backreferences are",
    "(?>": "atomic groups are",
    "(?(": "conditional groups are",
}
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_CODE_POINT = re.compile(r"x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}")
_PROPERTY = re.compile(r"[pP](?:[A-Z]|\{[^{}]+\})")


def rust_regex(pattern: str, *, search: bool = False) -> str:
    """The expression to give to llguidance. Raises GrammarError, with the position, on what it has no word for.

    `search`: it is looked for in a text, so its anchors mean something, and are llguidance's to follow. Otherwise the
    whole answer must match.
    """
    reader = _Reader(pattern, search)
    while not reader.done:
        reader.take_one()
    return "".join(reader.out)


@dataclass(slots=True)
class _Reader:
    """Reads one construct after the other and writes its translation. Balance of groups is llguidance's to check."""

    pattern: str
    search: bool
    at: int = 0
    depth: int = 0
    alternative_begins: bool = True
    """Nothing of the current alternative of the whole expression has been read."""
    out: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.at >= len(self.pattern)

    def take_one(self) -> None:
        character = self.pattern[self.at]
        if self._at_repeat():
            raise self._error("nothing to repeat")
        if character == "(":
            self._take_group()
        elif self._take_anchor(character):
            return
        elif character in "|)":
            self.at += 1
            self.depth -= character == ")"
            self.out.append(character)
            self.alternative_begins = character == "|" and self.depth == 0
        else:
            self.out.append(self._atom(character))
            self.alternative_begins = False
        if self.out and self.out[-1] not in ("|", "(", "(?:"):
            self._take_repeat()

    def _atom(self, character: str) -> str:
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape(ACCEPTED_BY_ALL, in_class=False)
        self.at += 1
        return "." if character == "." else literal(character)

    def _take_anchor(self, character: str) -> bool:
        """Where the whole answer is matched, an anchor at the very ends says nothing."""
        two = self.pattern[self.at : self.at + 2]
        begins, ends = character == "^" or two == r"\A", character == "$" or two in (r"\Z", r"\z")
        if not begins and not ends:
            return False
        length = 1 if character in "^$" else 2
        if self.search:
            self.out.append("^" if begins else "$")
            self.at += length
            return True
        rest = self.pattern[self.at + length :]
        at_end = not rest or rest[0] in "|$" or rest[:2] in (r"\Z", r"\z")
        if self.depth or not (self.alternative_begins if begins else at_end):
            raise self._error("anchors are understood at the ends of the whole expression only")
        self.at += length
        return True

    def _take_group(self) -> None:
        for opening, what in _REFUSED_GROUPS.items():
            if self.pattern.startswith(opening, self.at):
                raise self._error(f"{what} not supported")
        if self.pattern.startswith("(?#", self.at):
            end = self.pattern.find(")", self.at)
            self.at = len(self.pattern) if end < 0 else end + 1
            return
        match = _GROUP.match(self.pattern, self.at)
        assert match is not None
        opening, flags = match.group(), match.group("flags")
        if opening == "(" and self.pattern.startswith("(?", self.at):
            raise self._error("an unknown kind of group")
        if flags is None and not opening.endswith(":"):
            opening = "("
        if "x" in (flags or opening.removeprefix("(?").removesuffix(":")):
            raise self._error("verbose expressions are not supported")
        self.at = match.end()
        self.depth += flags is None
        if flags is None:
            self.alternative_begins = False
        self.out.append("(?:" if opening == "(" else opening)

    def _take_repeat(self) -> None:
        match = self._at_repeat()
        if match is None:
            return
        text = match.group()
        if text[0] == "{":
            text = "{" + (match["low"] or "0") + (f",{match['high']}" if match["range"] else "") + "}"
        self.at = match.end()
        following = self.pattern[self.at : self.at + 1]
        if following == "?":
            self.at += 1
        elif following == "+":
            raise self._error("possessive repeats are not supported")
        if self._at_repeat():
            raise self._error("multiple repeat")
        self.out.append(text)

    def _at_repeat(self) -> re.Match[str] | None:
        match = _REPEAT.match(self.pattern, self.at)
        return None if match is not None and match.group() == "{}" else match

    def _escape(self, classes: Mapping[str, str], *, in_class: bool) -> str:
        """One escape. A class of characters comes back in brackets."""
        escaped = self.pattern[self.at + 1 : self.at + 2]
        if escaped in classes:
            self.at += 2
            text = classes[escaped]
            return text if text.startswith("[") else f"[{text}]"
        for known in (_CODE_POINT, _PROPERTY):
            match = known.match(self.pattern, self.at + 1)
            if match is not None:
                self.at = match.end()
                return _code_point(match.group()) if known is _CODE_POINT else f"[\\{match.group()}]"
        if escaped and escaped in "afnrtv":
            self.at += 2
            return f"\\{escaped}"
        if in_class and escaped == "b":
            self.at += 2
            return r"\x08"
        if not escaped or (escaped.isascii() and escaped.isalnum()):
            raise self._error(_REFUSED_ESCAPES.get(escaped, f"\\{escaped} is not supported"))
        self.at += 2
        return literal(escaped)

    def _class(self) -> str:
        """From `[` to its `]`. Set operations and nested classes of other dialects are plain characters here."""
        start, self.at = self.at, self.at + 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        classes = ACCEPTED_BY_ANY if negated else ACCEPTED_BY_ALL
        items: list[str] = []
        while self.done or self.pattern[self.at] != "]" or not items:
            if self.done:
                self.at = start
                raise self._error("unterminated character set")
            low = self._class_item(classes)
            after = self.pattern[self.at : self.at + 2]
            if len(after) == 2 and after[0] == "-" and after[1] != "]":
                self.at += 1
                high = self._class_item(classes)
                if low.startswith("[") or high.startswith("["):
                    raise self._error("a class of characters cannot bound a range")
                low = f"{low}-{high}"
            items.append(low)
        self.at += 1
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _class_item(self, classes: Mapping[str, str]) -> str:
        posix = _POSIX_CLASS.match(self.pattern, self.at)
        if posix is not None:
            self.at = posix.end()
            return f"[{posix.group()}]"
        character = self.pattern[self.at]
        if character == "\\":
            return self._escape(classes, in_class=True)
        self.at += 1
        return literal(character)

    def _error(self, reason: str) -> GrammarError:
        return GrammarError(f"invalid regular expression at position {self.at}: {reason}")


_REFUSED_ESCAPES: Mapping[str, str] = {
    "": "nothing follows the last backslash",
    "b": "word boundaries are not supported",
    "B": "word boundaries are not supported",
    "0": "octal escapes are not supported",
    **{str(digit): "backreferences are not supported" for digit in range(1, 10)},
}


def literal(character: str) -> str:
    """One character that stands for itself, anywhere in an expression."""
    if character.isascii() and not character.isprintable():
        return f"\\x{ord(character):02x}"
    return f"\\{character}" if character in _SPECIAL else character


def _code_point(text: str) -> str:
    return f"\\x{{{text.strip('xuU{}').lstrip('0') or '0'}}}"
