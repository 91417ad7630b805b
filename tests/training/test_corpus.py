"""The corpus: documents by seed, filters that take and refuse, splits that share no prompt, an index that is right."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whalepod.training import corpus
from whalepod.training.corpus import build, read_raw, runs_of_ones, shipped_renderer, token_widths
from whalepod.training.data.assembly import MadeUp, Written, chosen_texts, documents, is_held_out
from whalepod.training.data.documents import KINDS, Document
from whalepod.training.data.facts import answered_questions, fact_document, simple_facts
from whalepod.training.data.filters import Novelty, fault_of, good_part, tidied, without_rare_words
from whalepod.training.data.json_answers import invented_document, json_document
from whalepod.training.data.prompts import everyday_questions, with_article, writer_prompts
from whalepod.training.data.recall import recall_document
from whalepod.training.data.talk import talk_document
from whalepod.training.data.tools import TOOLS, tool_document

MAKERS: tuple[Callable[[random.Random], Document], ...] = (
    talk_document,
    fact_document,
    tool_document,
    json_document,
    invented_document,
)
STORY = (
    "Tim was a little fox. One day, he saw a red kite in the park. He ran to it and took the string. The wind was "
    'strong, and the kite went up high. "Look at me!" he said. His friend Mia came to play. They were happy all day.'
)

# ------------------------------------------------------------------------------------------------------ what is made up


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_the_same_seed_makes_up_the_same_and_another_something_else(maker: Callable[[random.Random], Document]) -> None:
    one, same, other = ([maker(draw) for _ in range(40)] for draw in map(random.Random, (1, 1, 2)))
    assert one == same
    assert one != other
    assert len({json.dumps([d.body, d.answer]) for d in one}) > 10


def test_prompts_of_the_writer_are_seeded_and_of_their_kind() -> None:
    for kind in ("story", "answer"):
        one, same = (list(islice(writer_prompts(kind, 3), 200)) for _ in range(2))
        assert one == same
        assert {prompt.kind for prompt in one} == {kind}
        assert one != list(islice(writer_prompts(kind, 4), 200))
        assert len({prompt.group for prompt in one}) > 150


def test_every_question_stands_once_and_is_whole() -> None:
    questions = [asked for asked, _ in everyday_questions()]
    assert len(questions) == len(set(questions)) > 4000
    assert all(asked[-1] in ".?!" and "{" not in asked for asked in questions)
    assert not any("{" in opening for _, opening in everyday_questions())


def test_tools_are_called_with_what_their_schemas_allow() -> None:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
    draw = random.Random(3)
    by_name = {tool.name: tool for tool in TOOLS}
    called: set[str] = set()
    for _ in range(300):
        document = tool_document(draw)
        declared = {tool["function"]["name"] for tool in document.body["tools"]}
        for message in document.body["messages"]:
            for call in message.get("tool_calls", ()):
                tool, values = by_name[call["function"]["name"]], json.loads(call["function"]["arguments"])
                called.add(tool.name)
                assert tool.name in declared
                assert set(tool.required) <= set(values) <= set(tool.properties)
                for name, value in values.items():
                    schema = tool.properties[name]
                    assert isinstance(value, kinds[schema["type"]])
                    assert value in schema.get("enum", [value])
    assert called == set(by_name)


def test_a_json_answer_obeys_its_schema_and_says_what_was_told() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    draw = random.Random(3)
    schemas = 0
    for _ in range(300):
        document = json_document(draw)
        answer = json.loads(document.answer)
        asked = document.body["messages"][-1]["content"]
        assert 2 <= len(answer) <= 6
        for value in answer.values():
            for part in value if isinstance(value, list) else [value]:
                assert isinstance(part, bool) or str(part) in asked
        wanted = document.body.get("response_format", {})
        if wanted.get("type") == "json_schema":
            schemas += 1
            jsonschema.validate(answer, wanted["json_schema"]["schema"])
    assert schemas > 100


def test_what_is_recalled_was_told_before_and_once() -> None:
    draw = random.Random(3)
    for _ in range(40):
        document, used = recall_document(draw, [STORY] * 100)
        assert 0 < used <= 100
        if document.text is not None:
            head, *questions = document.text.split("\nQuestion: ")
            answers = [question.split("\nAnswer: ")[1] for question in questions]
        else:
            messages = document.body["messages"]
            head = messages[0]["content"]
            answers = [m["content"] for m in messages if m["role"] == "assistant"] + [document.answer]
        assert len(answers) >= 2
        for answer in answers:
            told = answer.removesuffix(".").removeprefix("The ")
            assert head.lower().count(told.lower()) == 1, answer


def test_facts_have_one_answer_each() -> None:
    answers: dict[str, str] = {}
    for ways, said in simple_facts():
        assert said[0].isupper()
        assert said.endswith(".")
        for asked in ways:
            assert answers.setdefault(asked, said) == said, asked
    assert len(answers) > 700
    assert (with_article("owl"), with_article("fox")) == ("an owl", "a fox")


# -------------------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (None, STORY),
        ("length", "Tim was a fox."),
        ("length", " ".join([STORY] * 6)),
        ("form", STORY + " Café."),
        ("form", STORY + "\n1. One thing."),
        ("end", STORY + " And then"),
        ("meta", STORY + " As an AI, I like it."),
        ("quotes", STORY + ' "Good night, he said.'),
        ("sentence twice", STORY + " They were happy all day."),
        ("word twice", STORY + " It was a big big day."),
        ("few words", "The cat saw a cat and " * 12 + "a cat."),
        ("run", STORY + " I see the red kite now. You see the red kite too. We see the red kite here."),
    ],
)
def test_a_text_is_refused_for_its_fault(fault: str | None, text: str) -> None:
    found = fault_of("story", text)
    assert found == fault if fault != "few words" else found in ("few words", "run")


def test_the_good_part_ends_before_the_fault_at_a_sentence() -> None:
    assert good_part("story", STORY + " It was a big big day. More.") == STORY
    assert good_part("story", STORY + " And then he we") == STORY
    assert good_part("story", STORY + ' "Now we go') == STORY
    assert good_part("story", "Tim was a fox.") == ""
    long = good_part("story", " ".join(f"On day {n} the fox number {n} went to place {n} alone." for n in range(60)))
    assert long == "" or fault_of("story", long) is None


def test_tidied_text_has_single_blanks_and_breaks() -> None:
    assert tidied("  a  b \n\n c\t d ") == "a b\nc d"


def test_alike_texts_and_rare_words_are_left_out() -> None:
    novelty = Novelty()
    assert novelty.is_new(STORY)
    assert not novelty.is_new(STORY.upper().replace("!", "."))
    assert not novelty.is_new(STORY + " And so on."), "the same first words"
    assert novelty.is_new("Mia " + STORY)
    assert list(without_rare_words(["a b", "a b", "a c"], least=2)) == [True, True, False]


# ----------------------------------------------------------------------------------------------------------- the corpus


def written(count: int) -> list[dict[str, str]]:
    """Texts as SmolLM might have written them, each with a word of its own kind."""
    names = [f"{a}{b}{c}" for a in "BDFGKLMNPRST" for b in "aeiou" for c in ("ra", "no", "mi", "lu")][:count]
    rows = [
        {"kind": "story", "group": f"{name}|fox|who finds a kite", "ask": "x", "text": STORY.replace("Tim", name)}
        for name in names
    ]
    questions = [asked for asked, _ in everyday_questions() if asked not in answered_questions()][: 3 * count]
    rows += [
        {"kind": "answer", "group": asked, "ask": asked, "text": f"{names[i % count]} likes the fox. It is number {i}."}
        for i, asked in enumerate(questions)
    ]
    return rows


def test_a_question_with_a_known_answer_takes_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalepod.training.data.assembly.RARE_LEAST", 1)
    rows = [
        {"kind": "answer", "group": q, "ask": q, "text": "It says woof, I think."}
        for q in ("What does a cow eat?", "Why?")
    ]
    assert [one.ask for one in chosen_texts(rows)] == ["Why?"]


def test_no_prompt_stands_on_both_sides() -> None:
    rows = [Written(row["kind"], row["group"], row["ask"], row["text"]) for row in written(200)]
    made_up = MadeUp(tool=30, json=300, talk=300, facts=20)
    sides = {side: documents(rows, made_up, held_out=side, seed=1) for side in (False, True)}
    groups = {side: {document.group for document in found} - {""} for side, found in sides.items()}
    assert groups[True]
    assert not groups[True] & groups[False]
    asked = {side: questions(found) for side, found in sides.items()}
    held_out = {row.ask for row in rows if row.kind == "answer" and is_held_out(row.group)}
    assert held_out
    assert held_out <= asked[True]
    assert not held_out & asked[False]


def questions(found: list[Document]) -> set[str]:
    return {m["content"] for document in found for m in document.body.get("messages", ()) if m["role"] == "user"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tmp_path_factory.mktemp("raw")
    lines = "\n".join(json.dumps(row) for row in written(200))
    (raw / "written-00.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    out = tmp_path_factory.mktemp("corpus")
    build(raw, out, made_up=MadeUp(tool=110, json=110, talk=110, facts=20), seed=1)
    return out


def test_the_index_describes_the_files(built: Path) -> None:
    index = json.loads((built / "index.json").read_text(encoding="utf-8"))
    _, tokenizer = shipped_renderer()
    widths = token_widths(tokenizer)
    for name in ("train", "valid"):
        part = index[name]
        ids = np.fromfile(built / f"{name}.bin", "<u2")
        learnt = np.fromfile(built / f"{name}.mask.bin", np.uint8)
        starts = part["offsets"]
        assert len(ids) == len(learnt) == part["tokens"] == sum(kind["tokens"] for kind in part["by_kind"].values())
        assert learnt.sum() == part["target_tokens"]
        assert part["bytes"] == widths[ids].sum()
        assert part["documents"] == len(starts) == len(part["kinds"]) == len(part["prompts"])
        assert set(part["kinds"]) <= set(KINDS)
        assert starts[0] == 0
        assert (ids[starts] == 0).all(), "every document starts with begin-of-sequence"
        assert (ids == 0).sum() == len(starts)
        assert (ids[[*(start - 1 for start in starts[1:]), -1]] == 1).all(), "and ends with the end"
        assert not learnt[starts].any()


def test_the_sample_says_what_is_to_be_said(built: Path) -> None:
    rows: list[dict[str, Any]] = list(read_sample(built))
    renderer, _ = shipped_renderer()
    assert rows
    for row in rows:
        assert row["targets"][-1][1] == len(row["ids"])
        assert row["targets"][-1][0] >= 1
        if "body" in row:
            assert renderer.prompt_ids(row["body"]) == row["ids"][: row["prompt_len"]]
            assert row["targets"][-1][0] == row["prompt_len"]


def read_sample(directory: Path) -> list[dict[str, Any]]:
    text = lzma.decompress((directory / "heldout.jsonl.xz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def test_building_again_gives_the_same_bytes(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = tmp_path_factory.mktemp("again")
    (raw / "written-00.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, written(200))).encode()))
    assert len(list(read_raw(raw))) == 800
    build(raw, tmp_path, made_up=MadeUp(tool=110, json=110, talk=110, facts=20), seed=1)
    for name in ("train.bin", "valid.bin", "train.mask.bin", "heldout.jsonl.xz", "index.json"):
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes(), name


def test_runs_of_ones() -> None:
    assert runs_of_ones([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)]
    assert runs_of_ones([0, 0]) == []


def test_the_command_builds_from_texts_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    lines = "\n".join(json.dumps(row) for row in written(200))
    (tmp_path / "raw" / "written-00.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    corpus.main(["build", "--out", str(tmp_path), "--tool", "5", "--json", "5", "--talk", "5", "--facts", "5"])
    assert json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))["train"]["tokens"] > 1000
