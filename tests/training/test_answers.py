"""What the backbone says step by step is what it says of whole sequences, and takes the place of a corpus' answers."""

from __future__ import annotations

import numpy as np
import torch

from tests.training.test_backbone import TOKENS, TOLERANCE, backbone, tensors, text, trained_pass, weights
from whalepod.training.answers import AnswerRecipe, Prompts, Stepping, answered, answers
from whalepod.training.backbone import Options
from whalepod.training.batches import Corpus

PROMPT, SAID = (30, 21), 24


def test_a_step_a_token_gives_the_logits_of_the_whole() -> None:
    run, wanted = trained_pass()
    stepping, given = Stepping(backbone(), sequences=1, tokens=TOKENS), tensors()
    found = torch.stack([stepping.step(given, run.ids[:1, place]) for place in range(TOKENS)], dim=1)
    assert float((found - wanted[:1]).abs().max()) < TOLERANCE


def prompts(lengths: tuple[int, int], temperature: float) -> Prompts:
    ids = torch.tensor([text(), text(1)])[:, : lengths[0]]
    return Prompts(ids, torch.tensor(lengths), torch.full((2,), temperature, dtype=torch.float64))


def test_greedy_answers_are_the_most_likely_tokens_after_each_prompt() -> None:
    asked = prompts(PROMPT, 0)
    ids, ends = answers(backbone(), tensors(), asked, tokens_max=SAID, generator=torch.Generator())
    padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % weights().config.window))
    with torch.no_grad():
        run = backbone().forward(tensors(), padded, torch.zeros_like(padded), Options())
        best = backbone().logits(tensors(), run).argmax(dim=-1)
    for row, (length, end) in enumerate(zip(PROMPT, ends.tolist(), strict=True)):
        assert torch.equal(ids[row, :length], asked.ids[row, :length])
        assert torch.equal(ids[row, length:end], best[row, length - 1 : end - 1])
        assert end == length + SAID or ids[row, end - 1] == weights().config.eos_token_id


def test_the_same_seed_draws_the_same_answers_and_another_others() -> None:
    def drawn(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return answers(backbone(), tensors(), prompts((4, 3), 1.0), tokens_max=6, generator=generator)[0].tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_answers_take_the_place_of_the_corpus_and_long_prompts_keep_their_own() -> None:
    lengths, given = (20, 40, 12), (6, 33, 1)
    starts = np.cumsum([0, *lengths])
    ids = np.array(text()[: starts[-1]], dtype=np.uint16)
    own = np.arange(starts[-1]) % 2 == 0
    corpus = Corpus(ids, own, starts, np.array([0, 1, 0]), ("chat", "tool"), np.array(given))
    recipe = AnswerRecipe(prompt_max=32, tokens_max=5, opening=8, sequences=1)
    made = answered(corpus, backbone(), tensors(), recipe)

    def part(of: Corpus, document: int) -> tuple[list[int], list[bool]]:
        start, end = of.starts[document : document + 2]
        return of.ids[start:end].tolist(), of.targets[start:end].tolist()

    assert part(made, 1) == part(corpus, 1)
    for document, begun in ((0, 6), (2, 6)):  # half of the short one, which answers nothing
        said, targets = part(made, document)
        assert said[:begun] == part(corpus, document)[0][:begun]
        assert begun < len(said) <= begun + 5
        assert targets == [False] * begun + [True] * (len(said) - begun)
    assert made.kinds.tolist() == [0, 1, 0]
