"""GBNF, the grammar notation of llama.cpp, as the Lark that llguidance reads.

llguidance splits a grammar into lexemes, which it matches greedily, and rules over them, and is slow if lexemes are
single characters. So everything that is regular becomes a lexeme, as large as possible: rules that do not reach
themselves, and runs of regular items in the others. A grammar without recursion is followed exactly; in one with
recursion a lexeme takes all it can, so some answers that the grammar allows are not reached (`[0-9]+` before a rule
that may begin with a digit, say). What is generated is always in the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import GrammarError
from .python_regex import literal

_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z0-9_-]+[ \t]*::=")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z0-9_-]+)\s*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<characters>(?:[^\]\\]|\\.)*)\]
    |\{\s*(?P<low>[0-9]+)\s*(?P<range>,\s*(?P<high>[0-9]*)\s*)?\}
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<one>.))|.", re.S
)
_ESCAPES: Mapping[str, str] = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(source: str) -> bool:
    """GBNF defines with `::=`, Lark with `:`."""
    return _RULE.search(source) is not None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """Lark text of something regular without names."""

    lark: str


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    lark: str


@dataclass(frozen=True, slots=True)
class Series:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


Node = Lexeme | Reference | Repeat | Series | Choice


def lark_of_gbnf(source: str) -> str:
    """Raises GrammarError, with the line, on what is not GBNF."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise GrammarError("a GBNF grammar needs a rule named root")
    try:
        return _Writer(rules).lark()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None


class _Parser:
    """Recursive descent over the tokens of a whole grammar. A rule ends where the next one begins."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = [*_tokens(source)]
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while (token := self._peek()) is not None:
            name = token["rule"]
            if name is None:
                raise self._error("expected a rule: name ::= …")
            if name in rules:
                raise self._error(f"rule {name} is defined twice")
            self._at += 1
            try:
                rules[name] = self._choice()
            except RecursionError:
                raise GrammarError(f"rule {name} is nested too deeply") from None
        return rules

    def _choice(self) -> Node:
        options = [self._series()]
        while self._take_sign("|"):
            options.append(self._series())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _series(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Series(tuple(items))

    def _item(self) -> Node | None:
        token = self._peek()
        if token is None or token["rule"] is not None:
            return None
        if self._take_sign("("):
            inner = self._choice()
            if not self._take_sign(")"):
                raise self._error("expected )")
            return inner
        if self._take_sign("."):
            return Lexeme("/(?s:.)/")
        if token["name"] is not None:
            node: Node = Reference(token["name"])
        elif token["text"] is not None:
            node = Lexeme(json.dumps("".join(character for character, _ in _characters(token["text"]))))
        elif token["characters"] is not None:
            node = Lexeme(_lark_class(token["characters"]))
        elif token["sign"] in ("|", ")"):
            return None
        else:
            raise self._error("nothing to repeat")
        self._at += 1
        return node

    def _repeated(self, item: Node) -> Node:
        while (token := self._peek()) is not None:
            if token["low"] is not None:
                high = token["high"] if token["range"] is not None else token["low"]
                item = Repeat(item, f"{{{token['low']},{high}}}")
            elif token["sign"] in ("*", "+", "?"):
                item = Repeat(item, token["sign"])
            else:
                break
            self._at += 1
        return item

    def _peek(self) -> re.Match[str] | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take_sign(self, sign: str) -> bool:
        token = self._peek()
        taken = token is not None and token["sign"] == sign
        self._at += taken
        return taken

    def _error(self, reason: str) -> GrammarError:
        token = self._peek()
        return _error(self._source, len(self._source) if token is None else token.start(), reason)


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._regular: dict[str, bool] = {}
        self._larks = {
            name: f"{'T' if self._is_regular(Reference(name)) else 'r'}{index}" for index, name in enumerate(rules)
        }
        self._lexemes: list[str] = []

    def lark(self) -> str:
        lines = [f"{self._larks[name]}: {self._text(node)}" for name, node in self._rules.items()]
        return "\n".join([f"start: {self._larks['root']}", *lines, *self._lexemes, ""])

    def _is_regular(self, node: Node) -> bool:
        """Reaches no rule that reaches itself."""
        match node:
            case Lexeme():
                return True
            case Repeat():
                return self._is_regular(node.item)
            case Series():
                return all(self._is_regular(item) for item in node.items)
            case Choice():
                return all(self._is_regular(option) for option in node.options)
            case Reference(name):
                if name not in self._rules:
                    raise GrammarError(f"rule {name} is not defined")
                if name not in self._regular:
                    self._regular[name] = False  # what asks for it meanwhile is reached by it
                    self._regular[name] = self._is_regular(self._rules[name])
                return self._regular[name]

    def _text(self, node: Node) -> str:
        """Lark of a node. In a rule that is not regular, what is regular becomes a lexeme of its own."""
        match node:
            case Lexeme(lark):
                return lark
            case Reference(name):
                return self._larks[name]
            case Repeat():
                return f"({self._text(node.item)}){node.lark}"
            case Series():
                return " ".join(f"({part})" for part in self._parts(node.items, " ")) or '""'
            case Choice():
                return " | ".join(f"({part})" for part in self._parts(node.options, " | "))

    def _parts(self, nodes: tuple[Node, ...], between: str) -> Iterator[str]:
        """Text of each node, but neighbours that are regular in one lexeme, if there is anything else."""
        regular = [self._is_regular(node) for node in nodes]
        run: list[str] = []
        for node, is_regular in zip(nodes, regular, strict=True):
            if is_regular and not all(regular):
                run.append(f"({self._text(node)})")
                continue
            if run:
                yield self._lexeme(between.join(run))
                run = []
            yield self._text(node)
        if run:
            yield self._lexeme(between.join(run))

    def _lexeme(self, lark: str) -> str:
        name = f"L{len(self._lexemes)}"
        self._lexemes.append(f"{name}: {lark}")
        return name


def _tokens(source: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            raise _error(source, at, f"unexpected {source[at]!r}")
        if token["space"] is None:
            yield token
        at = token.end()


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Each character, and whether it was escaped."""
    for match in _CHARACTER.finditer(text):
        code = match["x"] or match["u"] or match["U"]
        if code is not None:
            try:
                yield chr(int(code, 16)), True
            except (ValueError, OverflowError):
                raise GrammarError(f"U+{code} is no character") from None
        elif match["one"] is not None:
            yield _ESCAPES.get(match["one"], match["one"]), True
        else:
            yield match.group(), False


def _lark_class(text: str) -> str:
    negated = text.startswith("^")
    characters = [*_characters(text[negated:])]
    items: list[str] = []
    at = 0
    while at < len(characters):
        low = literal(characters[at][0])
        if characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters):
            low, at = f"{low}-{literal(characters[at + 2][0])}", at + 2
        items.append(low)
        at += 1
    if not items:
        raise GrammarError("[] is no set of characters" if not negated else "[^] is no set of characters")
    return f"/[{'^' if negated else ''}{''.join(items)}]/"


def _error(source: str, at: int, reason: str) -> GrammarError:
    return GrammarError(f"invalid grammar in line {source.count(chr(10), 0, at) + 1}: {reason}")
