"""What a seed stands for: a cluster, what is asked of it, and what goes wrong meanwhile. Plain data, drawn once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from tests.simulation.network import Weather
from whalepod.engine.interface import Fidelity
from whalepod.engine.options import RankOptions
from whalepod.engine.sampling_params import SamplingParams
from whalepod.kvstore.faulty_transport import Fault

BURSTS_S = (0.2, 1.0, 3.0)
"""When requests arrive, many at a time."""
BURST_S = 0.3
LOAD_S = 4.0
"""Things break for so long."""
HEALED_S = 10.0
"""By then everything is whole again."""
ASKS = 20
REQUEST_TIMEOUT_S = 20.0
"""Of requests that say nothing of it."""
TENANTS = ("whale", "dolphin")


class Trouble(Enum):
    KILL = "kill"
    """A rank's process is killed."""
    POWER = "power"
    """The host of a rank is gone."""
    DRAIN = "drain"
    """A rank is asked to stop, as in a rolling update."""
    PAUSE = "pause"
    """A rank's process stands still."""
    SILENCE = "silence"
    """Between a router and a rank nothing passes."""
    RESET = "reset"
    """The connections between a router and a rank break."""
    STORE = "store"
    """The store does not answer."""
    ROUTER = "router"
    """A router's process is killed."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something breaks, and is whole again after a while. `rank` and `router` by place in the plan."""

    at_s: float
    trouble: Trouble
    rank: int
    router: int
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    name: str
    at_s: float
    router: int
    tenant: str
    cache_salt: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    fidelity: Fidelity
    streams: bool
    timeout_s: float
    hangs_up_after_s: float | None = None
    over_http: bool = False
    """Else over gRPC. HTTP has no deadline of the client's."""
    choices: int = 1
    """More than one over HTTP only."""
    reads_every_s: float = 0.0
    """A client that takes so long over each message."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    routers: int
    encoders: bool
    """The prefill ranks hold the lower half of the model."""
    prefill: Sequence[RankOptions]
    decode: Sequence[RankOptions]
    weather: Weather
    store_rates: Mapping[Fault, float]
    store_s: tuple[float, float]
    """What a piece of work takes the store."""
    asks: Sequence[Ask]
    events: Sequence[Event]

    @property
    def calm(self) -> bool:
        """Nothing goes wrong."""
        return not self.events and not self.weather.late_rate and not self.store_rates

    @property
    def spared(self) -> bool:
        """What goes wrong is no reason to fail a request: whoever has the time for it, and asks a router that lives, is
        answered."""
        others = [event for event in self.events if event.trouble is not Trouble.STORE]
        routers_live = not any(event.trouble is Trouble.ROUTER for event in others)
        one_of_several = len(others) <= 1 and len(self.decode) > 1
        # A router that has not talked to a rank yet may miss that it drained, so one must be left.
        drained = all(event.trouble is Trouble.DRAIN for event in others) and len(others) < len(self.decode)
        return not self.weather.late_rate and routers_live and (one_of_several or drained)

    @property
    def tidy(self) -> bool:
        """The store does what it is told, and every prefill rank lives to tell it: no hand-off is left for long."""
        ends = (Trouble.KILL, Trouble.POWER, Trouble.DRAIN)
        ended = any(event.trouble in ends and event.rank < len(self.prefill) for event in self.events)
        return not self.store_rates and not ended and all(event.trouble is not Trouble.STORE for event in self.events)


def plan_run(seed: int, *, asks: int = ASKS) -> Plan:
    """What seed `seed` stands for."""
    draw = Random(seed)
    routers = draw.choice((1, 1, 2))
    prefill = [_options(draw, prefills=True) for _ in range(draw.choice((1, 2)))]
    decode = [_options(draw, prefills=False) for _ in range(draw.choice((1, 2, 2, 3)))]
    ranks = len(prefill) + len(decode)
    calm = draw.random() < 0.15
    return Plan(
        seed=seed,
        routers=routers,
        encoders=draw.random() < 0.3,
        prefill=prefill,
        decode=decode,
        weather=Weather() if calm else _weather(draw),
        store_rates={} if calm else _store_rates(draw),
        store_s=draw.choice(((0.0002, 0.002), (0.005, 0.05))),
        asks=_asks(draw, asks, routers),
        events=[] if calm else _events(draw, ranks=ranks, routers=routers),
    )


def _options(draw: Random, *, prefills: bool) -> RankOptions:
    """Small: slots and blocks run out, requests are preempted."""
    return RankOptions(
        slots=draw.choice((1, 2, 4)),
        blocks=draw.choice((14, 16, 40)),
        chunk_tokens=draw.choice((16, 40, 64)),
        chunk_tokens_beside_decode=draw.choice((16, 32)),
        soft_slots=32 if prefills else draw.choice((2, 8, 32)),
        waiting_max=draw.choice((3, 32)),
        context_tokens_max=208,
        async_scheduling=draw.random() < 0.4,
        load_timeout_s=draw.choice((0.3, 2.0)),
        publish_timeout_s=draw.choice((0.5, 5.0)),
        crash_tokens=draw.choice((16, 32)),
        prefix_reuse=draw.random() < 0.9,
    )


def _weather(draw: Random) -> Weather:
    if draw.random() < 0.4:
        return Weather()
    return Weather(late_rate=draw.choice((0.01, 0.05)), late_s=draw.choice((0.2, 2.0)), repeat_rate=0.1)


def _store_rates(draw: Random) -> Mapping[Fault, float]:
    if draw.random() < 0.3:
        return {}
    kinds = draw.sample([fault for fault in Fault if fault not in (Fault.NONE, Fault.DELAY)], 3)
    return {fault: draw.choice((0.02, 0.1)) for fault in kinds}


def _asks(draw: Random, count: int, routers: int) -> list[Ask]:
    stems = [_ids(draw, draw.choice((17, 48, 65, 96))) for _ in range(3)]
    asks: list[Ask] = []
    for number in range(count):
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(1, len(stem))] if draw.random() < 0.3 else stem + _ids(draw, draw.randint(0, 40))
        over_http = draw.random() < 0.5
        sampling = _sampling(draw, scored=not over_http)
        asks.append(
            Ask(
                name=f"ask-{number}",
                at_s=draw.choice(BURSTS_S) + draw.uniform(0.0, BURST_S),
                router=draw.randrange(routers),
                tenant=draw.choice(TENANTS),
                cache_salt=draw.choice(("", "", "salt")),
                prompt=prompt,
                sampling=sampling,
                fidelity=Fidelity.EXACT if draw.random() < 0.7 else Fidelity.FAST,
                streams=draw.random() < 0.6,
                timeout_s=REQUEST_TIMEOUT_S if over_http else draw.choice((2.0, 12.0, 25.0)),
                hangs_up_after_s=draw.uniform(0.0, 1.0) if draw.random() < 0.2 else None,
                over_http=over_http,
                choices=2 if over_http and not sampling.temperature and draw.random() < 0.3 else 1,
                reads_every_s=draw.choice((0.0, 0.0, 0.0, 0.05)),
            )
        )
    return sorted(asks, key=lambda ask: ask.at_s)


def _sampling(draw: Random, *, scored: bool) -> SamplingParams:
    """`scored`: log-probabilities may be asked for, of the answer and of the prompt."""
    seeded = draw.random() < 0.5
    return SamplingParams(
        temperature=1.0 if seeded else 0.0,
        seed=draw.randrange(3) if seeded else None,
        max_tokens=draw.choice((1, 2, 5, 20, 40, 60)),
        ignore_eos=draw.random() < 0.8,
        min_tokens=draw.choice((0, 0, 0, 1)),
        stop_token_ids=_ids(draw, 30) if draw.random() < 0.25 else (),
        frequency_penalty=1.5 if draw.random() < 0.3 else 0.0,
        repetition_penalty=1.3 if draw.random() < 0.2 else 1.0,
        logprobs=0 if scored and draw.random() < 0.5 else None,
        prompt_logprobs=0 if scored and draw.random() < 0.2 else None,
    )


def _ids(draw: Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 500) for _ in range(count))


def _events(draw: Random, *, ranks: int, routers: int) -> list[Event]:
    events: list[Event] = []
    kinds = list(Trouble) if draw.random() < 0.8 else [Trouble.DRAIN]  # else a rolling update
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        trouble = draw.choice(kinds)
        lasts_s = (0.05, 0.5) if trouble is Trouble.ROUTER else (0.05, 0.5, 3.0, HEALED_S - LOAD_S - BURST_S)
        events.append(
            Event(
                at_s=draw.choice((*BURSTS_S, draw.uniform(0.0, LOAD_S))) + draw.uniform(0.0, BURST_S),
                trouble=trouble,
                rank=draw.randrange(ranks),
                router=draw.randrange(routers),
                lasts_s=draw.choice(lasts_s),
            )
        )
    return sorted(events, key=lambda event: event.at_s)
