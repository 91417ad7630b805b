"""All measurements of one model, in order, and their figures.

held-out text ─▶ loss ─▶ FP4 against fp32 caches ─▶ answers after a hit, `off` against `compact`
questions ─▶ recall, JSON, tools, each served in every way
without n-gram memory, selection, Markov head ─▶ what each costs
chat ─▶ drafts that stand, honesty, tokens a second
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from whalepod.engine.interface import Fidelity
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.options import SpeculationOptions

from .ablations import is_engram_table, is_markov_head, select_recent, zeroed_checkpoint
from .answers import AnswerWay, Given, Share, answer_questions, encoder_of, recall_by_distance
from .baseline import Baseline
from .drafting import compare_speeds, draft_answers
from .held_out import Document, HeldOut, Question
from .held_out_loss import Loss, TurnPlan, TurnScores, document_scores, losses_by_kind, standard_error, turn_scores
from .measured_engine import Note

Begin = Callable[[str, int], Note]
"""(what is measured, how many requests that takes) -> to be called after each of them."""
Figures = dict[str, Any]

ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    kind_tokens: int
    """Tokens of held-out text of each kind, about."""
    ablation_tokens: int
    """Of each kind, for every ablation and for fp32 caches."""
    turn_documents: int
    turn_answer_tokens: int
    turns_max: int
    questions: int
    """Of each kind."""
    distance_max: int
    drafted_answers: int
    drafted_tokens: int
    timed_answers: int
    speed_runs: int
    ways: Sequence[str] = ()
    """To serve questions; all if empty."""


QUICK: Final = Plan(
    kind_tokens=3000,
    ablation_tokens=1200,
    turn_documents=12,
    turn_answer_tokens=32,
    turns_max=4,
    questions=8,
    distance_max=2048,
    drafted_answers=160,
    drafted_tokens=48,
    timed_answers=12,
    speed_runs=1,
    ways=("as_served", "bounded_replay", "guided"),
)
FULL: Final = Plan(
    kind_tokens=20_000,
    ablation_tokens=3000,
    turn_documents=32,
    turn_answer_tokens=64,
    turns_max=6,
    questions=24,
    distance_max=1 << 30,
    drafted_answers=160,
    drafted_tokens=96,
    timed_answers=48,
    speed_runs=3,
)


@dataclass(slots=True)
class Evaluation:
    """One model on its way through a plan. `figures` fills as the parts are called."""

    directory: Path
    held_out: HeldOut
    plan: Plan
    begin: Begin
    threads: int = 1
    figures: Figures = field(default_factory=dict[str, Any])
    _model: RankModel | None = None
    _plain: RankModel | None = None

    @property
    def model(self) -> RankModel:
        """As it is served: caches in the release's packed formats."""
        if self._model is None:
            self._model = self._load(self.directory)
        return self._model

    @property
    def plain(self) -> RankModel:
        """The same weights with fp32 caches."""
        if self._plain is None:
            self._plain = self._load(self.directory, quantized_caches=False)
        return self._plain

    # Loss.

    def measure_loss(self, baseline: Baseline | None) -> Figures:
        """Of whole documents, by kind, beside the n-gram baseline's; and what FP4 caches cost."""
        chosen = self._documents(self.plan.kind_tokens)
        documents = list(chosen.values())
        losses = losses_by_kind(documents, self._scores("held-out loss", self.model, documents))
        by_kind = {kind: _loss_figures(loss) for kind, loss in losses.items()}
        if baseline is not None:
            for kind, values in by_kind.items():
                of_kind = {place: each for place, each in chosen.items() if kind in (ALL, each.kind)}
                values["bits_per_byte_5gram"] = round(baseline.bits_per_byte(of_kind), 4)
        fewer = list(self._documents(self.plan.ablation_tokens).values())
        packed, plain = (self._scores(f"{name} caches", model, fewer) for name, model in self._caches())
        whole = by_kind[ALL]
        return self._note(
            bits_per_byte=whole["bits_per_byte"],
            bits_per_byte_5gram=whole.get("bits_per_byte_5gram"),
            by_kind=by_kind,
            fp4_cost=_cost(packed, plain),
            fp4_cost_error=_error(packed, plain),
        )

    def measure_serving(self) -> Figures:
        """What bounded replay after a hit costs the answers that follow, and what `compact` prefill does."""
        plan = TurnPlan.of(self.model, answer_tokens=self.plan.turn_answer_tokens, turns_max=self.plan.turns_max)
        fitting = [each for each in self.held_out.documents if plan.prompt_ends(len(each.ids))]
        documents = _spread(fitting, self.plan.turn_documents)
        turns = sum(len(plan.prompt_ends(len(each.ids))) for each in documents)

        def scores(name: str, **way: Any) -> TurnScores:  # noqa: ANN401
            return turn_scores(self.model, documents, plan, note=self.begin(name, turns), **way)

        exact = scores("answers, exact", fidelity=Fidelity.EXACT)
        bounded = scores("answers, bounded replay", fidelity=Fidelity.FAST)
        off = scores("answers, off", every_row=True)
        return self._note(
            bounded_replay_cost=_cost(bounded.scores, exact.scores),
            bounded_replay_cost_error=_error(bounded.scores, exact.scores),
            bounded_replay_cost_by_turn=[
                _cost([one], [other]) for one, other in zip(bounded.scores, exact.scores, strict=True)
            ],
            compact_cost=_cost(exact.scores, off.scores),
            compact_cost_error=_error(exact.scores, off.scores),
            answers_after_hits={
                "documents": len(documents),
                "prompts": bounded.prompts,
                "found": bounded.found,
                "exact_found": exact.found,
                "replayed_tokens": bounded.replayed_tokens,
                "exact_replayed_tokens": exact.replayed_tokens,
                "answer_tokens": bounded.loss.tokens,
            },
        )

    # Answers.

    def measure_answers(self) -> Figures:
        """Recall by distance, JSON and tool calls, in each way to serve them."""
        plain = AnswerWay()
        ways: list[tuple[str, Callable[[], RankModel], AnswerWay]] = [
            ("as_served", lambda: self.model, plain),
            ("exact_after_hit", lambda: self.model, AnswerWay(reuse=True, fidelity=Fidelity.EXACT)),
            ("bounded_replay", lambda: self.model, AnswerWay(reuse=True)),
            ("fp32_caches", lambda: self.plain, plain),
            ("off", lambda: self.model, AnswerWay(every_row=True)),
            ("guided", lambda: self.model, AnswerWay(guided=True)),
        ]
        figures: Figures = {"recall": {}, "json": {}, "tool_calls": {}}
        for name, model, way in ways:
            if self.plan.ways and name not in self.plan.ways:
                continue
            for kind, figure in (("recall", "recall"), ("json", "json"), ("tool", "tool_calls")):
                questions = self._questions(kind)
                if not questions or (way.guided and kind == "recall"):
                    continue
                given = answer_questions(model(), questions, way, note=self.begin(f"{kind}, {name}", len(questions)))
                figures[figure][name] = _recall_figures(given) if kind == "recall" else _share_figures(given)
        return self._note(**figures)

    # Ablations.

    def measure_ablations(self) -> Figures:
        """What the model loses without its n-gram memory, and with the newest entries instead of the best."""
        documents = list(self._documents(self.plan.ablation_tokens).values())
        recall = self._questions("recall")
        whole = self._scores("whole model", self.model, documents)
        figures: Figures = {}
        with zeroed_checkpoint(self.directory, is_engram_table) as without:
            scores = self._scores("without n-gram memory", self._load(without), documents)
        figures["engram_zeroed"] = {"loss_cost": _cost(scores, whole), "loss_cost_error": _error(scores, whole)}
        recent = self._load(self.directory)
        select_recent(recent)
        scores = self._scores("newest entries", recent, documents)
        seen = _beyond(documents, scores, whole, first=self._entries_seen())
        newest: Figures = {
            "loss_cost": _cost(scores, whole),
            "loss_cost_error": _error(scores, whole),
            "loss_cost_where_it_chooses": _cost(*seen) if seen[0] else None,
        }
        if recall:
            given = answer_questions(recent, recall, AnswerWay(), note=self.begin("recall, newest", len(recall)))
            newest["recall"] = _recall_figures(given)
        figures["newest_entries"] = newest
        return self._note(ablations={**self.figures.get("ablations", {}), **figures})

    # Drafts.

    def measure_drafts(self, calibration: Calibration | None, *, temperature: float = 0.0) -> Figures:
        """Drafts that stand, how honest confidences are, and what the Markov head is worth."""
        prompts = self._chat_prompts(self.plan.drafted_answers)
        sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=self.plan.drafted_tokens)
        able = self.model.config.dspark_block_size

        def drafted(name: str, model: RankModel, table: Calibration | None) -> Any:  # noqa: ANN401
            note = self.begin(name, len(prompts))
            return draft_answers(model, prompts, sampling, draft_tokens=able, calibration=table, note=note)

        plain = drafted("drafts", self.model, None)
        calibrated = plain if calibration is None else drafted("drafts, calibrated", self.model, calibration)
        with zeroed_checkpoint(self.directory, is_markov_head) as without:
            markov = drafted("drafts without Markov head", self._load(without), None)
        return self._note(
            accepted_length=round(calibrated.accepted_length, 4),
            acceptance=[round(value, 4) for value in calibrated.counts.acceptance],
            ece=round(calibrated.calibration_error, 4),
            ece_before=round(plain.calibration_error, 4),
            ece_by_place=[round(value, 4) for value in calibrated.counts.calibration_error],
            drafted={
                "temperature": temperature,
                "calibrated": calibration is not None,
                "answers": plain.answers,
                "request_steps": plain.counts.request_steps,
            },
            ablations={
                **self.figures.get("ablations", {}),
                "markov_zeroed": {"accepted_length": round(markov.accepted_length, 4)},
            },
        )

    def measure_speed(self) -> Figures:
        """Tokens a second of answers with every number of drafts, one request at a time and eight."""
        prompts = self._chat_prompts(self.plan.timed_answers)
        sampling = SamplingParams(temperature=0, max_tokens=self.plan.drafted_tokens)
        able = self.model.config.dspark_block_size
        ways: Mapping[str, SpeculationOptions | None] = {
            "off": None,
            **{str(count): SpeculationOptions(draft_tokens=count) for count in sorted({1, 2, able})},
        }
        figures: Figures = {}
        for slots, share in ((1, 4), (8, 1)):
            some = prompts[: max(2, len(prompts) // share)]
            requests = len(some) * len(ways) * self.plan.speed_runs
            note = self.begin(f"speed, {slots} at a time", requests)
            speeds = compare_speeds(self.model, some, sampling, ways, runs=self.plan.speed_runs, slots=slots, note=note)
            figures[str(slots)] = {name: round(speed.tokens_per_second, 2) for name, speed in speeds.items()}
        return self._note(tokens_per_second=figures)

    # What is measured on.

    def _documents(self, tokens: int) -> dict[int, Document]:
        """The first of each kind, up to about so many tokens each, by place in the file."""
        spent: dict[str, int] = {}
        chosen: dict[int, Document] = {}
        for place, document in enumerate(self.held_out.documents):
            used = spent.get(document.kind, 0)
            if used < tokens and (not used or used + len(document.ids) <= 2 * tokens):
                spent[document.kind] = used + len(document.ids)
                chosen[place] = document
        return chosen

    def _questions(self, kind: str) -> list[Question]:
        near = [each for each in self.held_out.of_kind(kind) if (each.distance or 0) <= self.plan.distance_max]
        return near[: self.plan.questions]

    def _chat_prompts(self, count: int) -> list[Sequence[int]]:
        encoder, context = encoder_of(self.model), self.model.config.max_position_embeddings
        questions = self.held_out.of_kind("chat")[:count]
        return [encoder.chat(each.body, context_tokens=context).prompt_ids for each in questions]

    def _entries_seen(self) -> int:
        """Tokens before which every index source sees no more entries than it chooses."""
        config = self.model.config
        return config.index_topk * max(config.ratio(layer) for layer in config.kv_source_layer_ids)

    def _caches(self) -> list[tuple[str, RankModel]]:
        return [("FP4", self.model), ("fp32", self.plain)]

    def _scores(self, name: str, model: RankModel, documents: Sequence[Document]) -> list[list[float]]:
        return document_scores(model, documents, note=self.begin(name, len(documents)))

    def _load(self, directory: Path, *, quantized_caches: bool = True) -> RankModel:
        return RankModel.load(directory, quantized_caches=quantized_caches, threads=self.threads)

    def _note(self, **figures: Any) -> Figures:  # noqa: ANN401
        self.figures |= figures
        return figures


def _cost(scores: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    """How much higher the loss is than the reference's, as a share of it."""
    one, other = Loss(), Loss()
    for values in scores:
        one.add(values)
    for values in reference:
        other.add(values)
    return round(one.cost_over(other), 6)


def _error(scores: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    one, other = ([value for values in each for value in values] for each in (scores, reference))
    return round(standard_error(one, other), 6)


def _beyond(
    documents: Sequence[Document],
    scores: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    *,
    first: int,
) -> tuple[list[Sequence[float]], list[Sequence[float]]]:
    """Scores of tokens from position `first` on, of the documents that have some."""
    starts = [sum(place < first for place in document.places) for document in documents]
    return (
        [one[start:] for start, one in zip(starts, scores, strict=True) if start < len(one)],
        [other[start:] for start, other in zip(starts, reference, strict=True) if start < len(other)],
    )


def _spread(documents: Sequence[Document], count: int) -> list[Document]:
    """So many, of all kinds in turn."""
    by_kind: dict[str, list[Document]] = {}
    for document in documents:
        by_kind.setdefault(document.kind, []).append(document)
    turns = range(max(map(len, by_kind.values()), default=0))
    return [each[turn] for turn in turns for each in by_kind.values() if turn < len(each)][:count]


def _loss_figures(loss: Loss) -> Figures:
    return {
        "bits_per_byte": round(loss.bits_per_byte, 4),
        "nats_per_token": round(loss.nats_per_token, 4),
        "tokens": loss.tokens,
    }


def _share_figures(given: Sequence[Given]) -> Figures:
    return asdict(Share.of(given))


def _recall_figures(given: Sequence[Given]) -> Figures:
    by_distance = {str(distance): asdict(share) for distance, share in recall_by_distance(given).items()}
    return {**_share_figures(given), "by_distance": by_distance}
