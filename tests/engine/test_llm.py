"""The offline interface."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine_world import CHECKPOINT, GREEDY, SEEDED, oracle, prompt_of
from whalepod import LLM, SamplingParams
from whalepod.core.errors import ConfigError, ContextLengthError, InvalidFieldError, RequestError
from whalepod.engine.interface import FinishReason
from whalepod.engine.llm_outputs import Choice
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@cache
def _llm() -> LLM:
    return LLM(CHECKPOINT, context_tokens_max=128)


def test_outputs_come_in_order_with_tokens_and_text() -> None:
    outputs = _llm().generate([prompt_of(29), prompt_of(17)], [SEEDED, GREEDY])
    assert [output.prompt_ids for output in outputs] == [prompt_of(29), prompt_of(17)]
    assert outputs[0].output.tokens == oracle(29, SEEDED)
    assert outputs[1].output.tokens == oracle(17)
    assert outputs[1].output.finish_reason is FinishReason.LENGTH
    assert isinstance(outputs[1].output.text, str)


def test_one_failure_does_not_lose_the_others() -> None:
    outputs = _llm().generate([prompt_of(17), prompt_of(200), prompt_of(17)], GREEDY)
    assert isinstance(outputs[1].error, ContextLengthError)
    assert (outputs[1].output.tokens, outputs[1].output.finish_reason) == ((), FinishReason.ERROR)
    assert outputs[0].output.token_ids == outputs[2].output.token_ids == tuple(token.id for token in oracle(17))


def test_choices_of_a_prompt_differ_and_are_those_of_any_other_run() -> None:
    three = replace(SEEDED, n=3)
    (first,), (second, beside) = _llm().generate([prompt_of(60)], three), _llm().generate([prompt_of(60)] * 2, three)
    assert first.outputs == second.outputs == beside.outputs
    assert first.output.tokens == oracle(60, SEEDED)
    assert len({output.token_ids for output in first.outputs}) == 3


def test_each_choice_ends_for_itself_and_a_refused_prompt_has_none_that_did() -> None:
    good, bad = _llm().generate([prompt_of(17), (-1,)], replace(SEEDED, n=2))
    assert [len(output.tokens) for output in good.outputs] == [4, 4]
    assert isinstance(bad.error, InvalidFieldError)
    assert [output.finish_reason for output in bad.outputs] == [FinishReason.ERROR] * 2


def test_log_probabilities_of_a_prompt_come_with_it() -> None:
    asked = replace(SEEDED, prompt_logprobs=1, n=2)
    scored, plain, refused = _llm().generate([prompt_of(40), prompt_of(40), prompt_of(200)], [asked, SEEDED, asked])
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert [token.id for token in scored.prompt_logprobs[1:] if token is not None] == list(prompt_of(40)[1:])
    assert all(token is None or len(token.top_ids) == 1 for token in scored.prompt_logprobs)
    assert [len(output.tokens) for output in scored.outputs] == [4, 4]
    assert plain.prompt_logprobs is None
    assert refused.prompt_logprobs == (None,)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_its_own_answer_only(include: bool) -> None:
    whole = _llm().generate([prompt_of(29), prompt_of(17)], replace(SEEDED, max_tokens=12))
    text, other = whole[0].output.text, whole[1].output.text
    stop = next(text[at : at + 3] for at in range(3, len(text)) if text.count(text[at : at + 3]) == 1)
    assert stop not in other
    sampling = replace(SEEDED, max_tokens=12, stop=(stop, "never said"), include_stop_str_in_output=include)
    cut, left = _llm().generate([prompt_of(29), prompt_of(17)], sampling)
    assert cut.output.text == text[: text.index(stop) + (len(stop) if include else 0)]
    assert (cut.output.finish_reason, cut.output.matched_stop) == (FinishReason.STOP, stop)
    assert whole[0].output.tokens[: len(cut.output.tokens)] == cut.output.tokens
    assert (left.output.text, left.output.finish_reason) == (other, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31, None])
def test_b9_odd_lengths_and_empty_prompts_harm_no_other_prompt(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        with pytest.raises(InvalidFieldError, match="max_tokens must be at least 1"):
            SamplingParams(max_tokens=max_tokens)
        return
    nothing, good = _llm().generate([[], prompt_of(125)], replace(GREEDY, max_tokens=max_tokens))
    assert isinstance(nothing.error, InvalidFieldError)
    assert len(good.output.tokens) == 3, "the context has no room for more"
    (empty,) = _llm().generate("", replace(GREEDY, max_tokens=1))
    assert len(empty.output.tokens) == 1, "a text begins with the begin-of-sequence token"


@pytest.mark.parametrize("n", [1, 2])
def test_e14_log_probabilities_are_those_of_one_alone_up_to_the_end_of_the_context(n: int) -> None:
    asked = replace(SEEDED, n=n, max_tokens=None, logprobs=3)
    many = _llm().generate([prompt_of(tokens) for tokens in (125, 127)], asked)
    assert [len(output.tokens) for one in many for output in one.outputs] == [3] * n + [1] * n
    for tokens, together in zip((125, 127), many, strict=True):
        (alone,) = _llm().generate([prompt_of(tokens)], asked)
        assert together.outputs == alone.outputs
        for token in together.output.tokens:
            assert token.logprob is not None
            assert token.logprob < 0
            assert len(token.top_ids) == 3


def test_e15_a_seed_is_kept_and_no_neighbours_seed_matters() -> None:
    seeds = [replace(SEEDED, seed=seed) for seed in (7, 8, 9)]
    first = _llm().generate([prompt_of(29)] * 3, seeds)
    other = _llm().generate([prompt_of(29)] * 3, [seeds[0], replace(SEEDED, seed=-1), seeds[2]])
    assert [one.output for one in (first[0], first[2])] == [one.output for one in (other[0], other[2])]
    assert len({one.output.token_ids for one in first}) == 3


def test_a_smaller_priority_goes_first_and_changes_no_answer() -> None:
    llm, ended = LLM(CHECKPOINT, context_tokens_max=64, slots=1), list[int]()
    prompts = [prompt_of(17), prompt_of(20), prompt_of(29)]
    plain = llm.generate(prompts, GREEDY)
    end = Choice.end

    def noted(self: Choice, *arguments: Any, **names: Any) -> None:
        ended.append(len(self.tokens) and self.tokens[0].id)
        end(self, *arguments, **names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choice, "end", noted)
        outputs = llm.generate(prompts, GREEDY, priority=[1, 1, -1])
    assert [one.output for one in outputs] == [one.output for one in plain]
    assert ended == [plain[index].output.token_ids[0] for index in (2, 0, 1)]
    with pytest.raises(ValueError, match="3 prompts, but 1 priorities"):
        llm.generate(prompts, GREEDY, priority=[1])


def test_a_text_starts_with_the_begin_token_and_a_single_prompt_is_a_list_of_one() -> None:
    (text,) = _llm().generate("hello", replace(GREEDY, max_tokens=1))
    (ids,) = _llm().generate(text.prompt_ids, replace(GREEDY, max_tokens=1))
    assert text.prompt_ids[0] == 0
    assert ids.output == text.output


def test_one_set_of_parameters_a_prompt() -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling"):
        _llm().generate(["a", "b"], [GREEDY])
    assert _llm().generate([]) == []


def test_what_is_not_given_is_taken_from_the_published_engines_variables() -> None:
    variables = {"DEEPINFER_HF_MODEL_DIR": str(CHECKPOINT), "DEEPINFER_MAX_NUM_SEQS": "1"}
    llm = LLM(context_tokens_max=64, variables=variables | {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "28"})
    assert llm.slots == 1
    assert LLM(slots=2, context_tokens_max=64, variables=variables).slots == 2
    for more, named in (
        ({"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}, "KEEP_TOKENS.* is 140, but this model keeps 28 rows"),
        ({"DEEPINFER_MAX_NUM_SEQS": "few"}, "DEEPINFER_MAX_NUM_SEQS must be a whole number"),
        ({"DEEPINFER_BATCH_INVARIANT": "1"}, "DEEPINFER_BATCH_INVARIANT=1 and fidelity=fast"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(fidelity="fast", variables=variables | more)
    with pytest.raises(ConfigError, match="DEEPINFER_HF_MODEL_DIR"):
        LLM(variables={})


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, whalepod; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert SamplingParams(temperature=0).greedy


def test_a_conversation_is_answered_as_its_prompt_is(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model")
    llm, one = LLM(tmp_path / "model", context_tokens_max=128), replace(GREEDY, max_tokens=2)
    conversation = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(conversation, one)
    both = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "x"}, *conversation]], one)
    assert both[0].output == answer.output
    assert len(both[1].prompt_ids) > len(both[0].prompt_ids)
    assert llm.generate([answer.prompt_ids], one)[0].output == answer.output
    assert llm.chat(conversation, one, thinking=True)[0].prompt_ids != answer.prompt_ids
    with pytest.raises(RequestError):
        llm.chat([{"role": "nobody", "content": "hi"}], one)


def test_progress_is_shown_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    _llm().generate([prompt_of(17), prompt_of(200)], replace(GREEDY, max_tokens=1), use_tqdm=True)
    shown = capsys.readouterr()
    assert (shown.out, "requests: 2 requests in " in shown.err) == ("", True)
    _llm().generate([prompt_of(17)], replace(GREEDY, max_tokens=1))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "model")
    page = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(code.replace("CHECKPOINT_DIRECTORY", str(tmp_path / "model")), "offline.md", "exec"), {})
    *_, formed, _ = capsys.readouterr().out.splitlines()
    assert formed in ("yes", "no")
    assert "python examples/offline_inference.py" in page


@pytest.mark.slow
def test_the_example_runs() -> None:
    example = ROOT / "examples" / "offline_inference.py"
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("->") == 4
