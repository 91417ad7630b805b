"""GBNF in Lark: llama.cpp's own examples, escapes, names and mistakes."""

from __future__ import annotations

import pytest

from tests.engine.grammar.shipped_vocabulary import accepts, compiled
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.gbnf import is_gbnf, lark_of_gbnf
from whalepod.engine.grammar.spec import GrammarKind

# A grammar of JSON as it is usually written in GBNF: recursion, comments, rules over several lines.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_a_recursive_grammar_accepts_its_sentences_and_no_others() -> None:
    grammar = compiled(GrammarKind.EBNF, JSON)
    for text in ['{"a": [1, -2.5e+3, true, {"b":"x\\n\\u00e9"}], "é": null}', "{}", '{ "": []}']:
        assert accepts(grammar, text), text
    for text in ["[1]", '{"a":01}', '{"a" 1}', '{"a":1,}', "{"]:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        (r'root ::= "\u00e9" [\u0041-\u005A] "\x41" [\x30-\x39] "/" "\U0001F600"', "éQA5/😀", "éqA5/😀"),
        (r'root ::= "a" [^\x00-\x1F\]] "]"', "ax]", "a]]"),
        (r"root ::= [a\-z] [-+] [^\]\\] [&~] [a&&b]", "-+x&b", "b+x&b"),
        (r'root ::= "it\'s \"q\" / \\ \n\t"'.replace(r"\'", "'"), 'it\'s "q" / \\ \n\t', "it"),
        ('root ::= "" | "a" root', "aaa", "b"),
        ('root ::= fooBar foo-bar foo_bar\nfooBar ::= "x"\nfoo-bar ::= "y"\nfoo_bar ::= "z"', "xyz", "xxx"),
        ('root ::= start\nstart ::= "x"', "x", "y"),
        ('root ::= . "a"', "\na", "a"),
        ('root ::= "(" root ")" | [0-9]{2} | ("x"){,}'.replace("{,}", "*"), "((12))", "(1)"),
        ('root ::= "a"\n  | "b" # either\n  | "c"\n', "b", "d"),
        ('root ::= ("ab" | "c"){2,3} "d"?', "cabcd", "cd"),
        ('root ::= [0-9]+ "x" [0-9]+', "12x3", "12"),
        ("root ::= [ぁ-ゟ]{1,3} tail\ntail ::= [。、]", "あい。", "あい"),
        ('root ::= a\na ::= b | "["a"]"\nb ::= "1"', "[[1]]", "[1"),
    ],
)
def test_gbnf_means_what_it_says(source: str, inside: str, outside: str) -> None:
    grammar = compiled(GrammarKind.EBNF, source)
    assert accepts(grammar, inside)
    assert not accepts(grammar, outside)


def test_a_grammar_without_recursion_is_followed_exactly_even_where_items_overlap() -> None:
    grammar = compiled(GrammarKind.EBNF, 'root ::= word "x" tail?\nword ::= [a-z]+\ntail ::= [a-z] "y"')
    assert all(accepts(grammar, text) for text in ["ax", "xx", "axxby", "axay"])
    assert not accepts(grammar, "x")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('a ::= "x"', "needs a rule named root"),
        ("root ::= x", "rule x is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ('root ::= "a"\nb ::= ("x" | "y"\n', "expected )"),
        ('root ::= "a" )', "expected a rule"),
        ('root ::= "a"\n\nb ::= *', "line 3: nothing to repeat"),
        ('root ::= "a', "line 1: unexpected '\"'"),
        ("root ::= [a", "unexpected '['"),
        ("root ::= []", "no set of characters"),
        ("root ::= [^]", "no set of characters"),
        (r'root ::= "\UFFFFFFFF"', "is no character"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(3000)) + '\nr3000 ::= "z"', "too deeply"),
    ],
)
def test_mistakes_are_told_with_their_line(source: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        lark_of_gbnf(source)
    assert reason in str(caught.value)


def test_lark_is_not_taken_for_gbnf() -> None:
    assert is_gbnf(JSON)
    assert not is_gbnf('start: "::=" NAME\nNAME: /[a-z]+/')
    grammar = compiled(GrammarKind.EBNF, 'start: "::=" NAME\nNAME: /[a-z]{1,3}/')
    assert accepts(grammar, "::=abc")


@pytest.mark.parametrize("source", ["start: <think>", "start: x", 'start: "a', "%import nowhere.X\nstart: X"])
def test_bad_lark_is_refused(source: str) -> None:
    with pytest.raises(GrammarError):
        compiled(GrammarKind.EBNF, source)
