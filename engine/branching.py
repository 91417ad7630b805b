"""Choices of one prompt (`n`) that meet on a rank: the first computes it, the others go on from its state.

    submitted ──▶ join: follows choice 0 ──▶ choice 0 is one row before the end of the prompt ──▶ fork: parked there
                        └──▶ choice 0 ends before that ──▶ leave: the next one takes its place
    handed off ──▶ wait_for_blocks: choice 0 restores the blocks of both ──▶ restored

The last row is each choice's own, because what is drawn after it is. Waiting to follow is waiting without a slot, and
going on is resuming, as after a preemption: blocks that are still on the device are shared, and nothing is approximate
that was not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

from whalepod.core.ids import RequestId
from whalepod.core.lifecycle import Phase

from .images import same_images
from .publishing import Publisher
from .sequence import Sequence


def join(sequence: Sequence, sequences: Mapping[RequestId, Sequence]) -> None:
    """Let a new sequence follow its choice 0, if that is among `sequences` and has yet to compute what both need."""
    request = sequence.request
    first = sequences.get(request.branch_of) if request.branch_of is not None else None
    if first is not None and _are_alike(first, sequence) and first.launched < fork_row(first):
        _follow(sequence, first)


def fork_row(sequence: Sequence) -> int:
    """Rows that choices of a prompt have in common. On a rank that draws no token, that is all it computes."""
    return min(sequence.rows_end, sequence.prompt_tokens - 1)


def stops_of(sequence: Sequence, borders: Ordered[int]) -> Ordered[int]:
    """Where a sequence's chunks end, ascending: its borders, and where others leave it."""
    return sorted({*borders, fork_row(sequence)}) if sequence.followers else borders


def fork(sequence: Sequence, publisher: Publisher) -> None:
    """Rows of a sequence were computed, and none are on their way: if it is time, those that follow it go on alone."""
    if not sequence.followers or sequence.computed != fork_row(sequence):
        return
    copy = publisher.copy_of(sequence)
    for follower in sequence.followers:
        follower.following = None
        follower.cached_tokens, follower.replayed_tokens = sequence.cached_tokens, sequence.replayed_tokens
        follower.windows_exact_from = sequence.windows_exact_from
        publisher.park_for(follower, copy)
        if follower.prompt_scores is not None:
            follower.prompt_scores.leave_to_another()
    sequence.followers = []


def wait_for_blocks(sequence: Sequence, sequences: Mapping[RequestId, Sequence]) -> None:
    """The hand-off of a choice has come. If choice 0 is about to restore the same blocks, it finds them on the device a
    moment later."""
    request = sequence.request
    first = sequences.get(request.branch_of) if request.branch_of is not None else None
    if (
        first is not None
        and first.handoff_unread
        and first.phase in (Phase.WAITING, Phase.LOADING)
        and first.request.chain_root == request.chain_root
        and first.request.prompt_ids == request.prompt_ids
        and same_images(first.request.images, request.images)
    ):
        _follow(sequence, first)


def restored(sequence: Sequence) -> None:
    """A sequence has its state: who waited for its blocks finds them."""
    for follower in [each for each in sequence.followers if each.handoff is not None]:
        follower.following = None
        sequence.followers.remove(follower)


def leave(sequence: Sequence) -> None:
    """A sequence has ended. Who follows it follows the first of them from now on."""
    if sequence.following is not None:
        sequence.following.followers.remove(sequence)
        sequence.following = None
    followers, sequence.followers = sequence.followers, []
    for follower in followers:
        follower.following = None
    for follower in followers[1:]:
        _follow(follower, followers[0])


def _follow(sequence: Sequence, first: Sequence) -> None:
    sequence.following = first
    first.followers.append(sequence)


def _are_alike(first: Sequence, sequence: Sequence) -> bool:
    """They compute the same prompt in the same way, and neither has state from elsewhere."""
    one, other = first.request, sequence.request
    return (
        not (first.awaiting or first.handoff is not None or sequence.awaiting)
        and len(first.tokens) == first.prompt_tokens == len(sequence.tokens) == sequence.prompt_tokens
        and (one.work, one.fidelity, one.chain_root) == (other.work, other.fidelity, other.chain_root)
        and first.truncates == sequence.truncates
        and first.tokens == sequence.tokens
        and same_images(one.images, other.images)
    )
