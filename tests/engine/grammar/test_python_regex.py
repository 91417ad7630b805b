"""Regular expressions of Python in the dialect that llguidance follows, judged by `re` itself."""

from __future__ import annotations

import re

import pytest

from tests.engine.grammar.shipped_vocabulary import accepts, compiled, regex
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.python_regex import rust_regex
from whalepod.engine.grammar.spec import GrammarKind


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python would like classes to be written otherwise one day
@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^abc$", "abc", "^abc$"),
        (r"\Aab\Z|^c$", "c", "abc"),
        ("(?i)^Ab$", "aB", "b"),
        ("[a&&b]", "&", "c"),
        ("[+--b]", "-", "&"),
        ("[[\\]]+", "[]", "a"),
        ("[]a]", "]", "b"),
        ("[^]a]", "b", "]"),
        ("[a-c-]", "-", "d"),
        ("[[:digit:]x]", "7", "d"),
        ("a{,2}b", "aab", "aaab"),
        ("a{1,}?b", "aab", "b"),
        ("x{y}{}", "x{y}{}", "xy"),
        (r"[\b]", "\b", "b"),
        (r"\<\>\"\é\ ", '<>"é ', "<"),
        (r"\x41\u00e9\U0001F600", "Aé😀", "A"),
        ("(?P<n>a)(?#comment)b", "ab", "a"),
        ("a#b ~/", "a#b ~/", "a"),
        ("a\nb\t", "a\nb\t", "a b"),
        ("", "", "a"),
        ("(?s).", "\n", ""),
        (".", "é", "\n"),
    ],
)
def test_an_expression_means_what_it_means_to_python(pattern: str, inside: str, outside: str) -> None:
    if "[:digit:]" not in pattern:
        assert re.fullmatch(pattern, inside), "the example is wrong"
        assert not re.fullmatch(pattern, outside), "the example is wrong"
    assert accepts(regex(pattern), inside)
    assert not accepts(regex(pattern), outside)


@pytest.mark.parametrize("name", ["d", "D", "w", "W", "s", "S"])
@pytest.mark.parametrize("brackets", ["{}", "[{}]", "[^{}]"])
def test_a_class_holds_only_what_it_holds_in_ascii_and_in_unicode(name: str, brackets: str) -> None:
    pattern = brackets.format(f"\\{name}")
    grammar = regex(pattern)
    # Digits, letters, marks, joiners, numbers and spaces that engines disagree about, and some that they agree about.
    for character in "5a_ \n-é٣½Ⅷ\u0301\u200d\u00a0\u2003\x1c\x85\ufeff日ªͅ":
        if accepts(grammar, character):
            assert re.fullmatch(pattern, character), f"{pattern} let {character!r} through"
            assert re.fullmatch(pattern, character, re.ASCII), f"{pattern} let {character!r} through"
    assert any(accepts(grammar, character) for character in "5a -日")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "position 0: look-ahead is not supported"),
        ("a(?!b)", "position 1: look-ahead"),
        ("(?<=a)b", "look-behind"),
        (r"(a)\1", "position 3: backreferences"),
        ("(?P<x>a)(?P=x)", "backreferences"),
        (r"\bword", "word boundaries"),
        (r"\0", "octal"),
        (r"\N{BULLET}", r"\N is not supported"),
        ("a*+b", "position 2: possessive"),
        ("(?>a)b", "atomic groups"),
        ("(?(1)a|b)", "conditional groups"),
        ("(?x)a b", "verbose"),
        ("a^b", "position 1: anchors"),
        ("(^a|b)c", "anchors"),
        ("a$b", "anchors"),
        ("(a$)*", "anchors"),
        ("a**", "multiple repeat"),
        ("*a", "position 0: nothing to repeat"),
        ("a|*", "nothing to repeat"),
        ("[a", "position 0: unterminated"),
        ("[", "unterminated"),
        (r"[\d-z]", "cannot bound a range"),
        ("a\\", "nothing follows the last backslash"),
        ("(?~a)", "an unknown kind of group"),
        ("(a", "unclosed group"),
        ("a)", "unopened group"),
        ("a{3,2}", "invalid repetition"),
        ("[z-a]", "invalid character class range"),
        (r"\p{Nonsense}", "Unicode property not found"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_position_and_reason(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        regex(pattern)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_a_pattern_is_searched_for_its_anchors_stay() -> None:
    assert rust_regex(r"^a$|\Ab\Z", search=True) == "^a$|^b$"
    grammar = compiled(GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^a|b$", "maxLength": 3})
    for text, holds in [('"axx"', True), ('"xxb"', True), ('"xax"', False)]:
        assert accepts(grammar, text) is holds
