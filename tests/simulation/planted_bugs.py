"""Bugs that someone could write between the router and the blocks, each as one change of its source."""

from __future__ import annotations

from tests.mutants.planted_bug import PlantedBug

BUGS = (
    PlantedBug(
        "a request's blocks are given back twice",
        "engine/scheduler.py",
        "        self.blocks.release(sequence.blocks)\n        sequence.slot,",
        "        self.blocks.release(sequence.blocks)\n        self.blocks.release(sequence.blocks)\n"
        "        sequence.slot,",
    ),
    PlantedBug(
        "a snapshot forgets the rows of unfinished pairs",
        "engine/state_image.py",
        "        count = boundary % self._config.ratio(source)\n",
        "        count = 0\n",
    ),
    PlantedBug(
        "a stream goes on one token late",
        "services/router/dispatch.py",
        "resumed_ids=tuple(self.ids))",
        "resumed_ids=tuple(self.ids[:-1]))",
    ),
    PlantedBug(
        "the salt is no part of a block's name",
        "core/block_keys.py",
        "frame(salt) + frame(adapter)",
        "frame(adapter)",
    ),
    PlantedBug(
        "a cancellation is lost",
        "services/decode/servicer.py",
        "            self._drop(key)\n            self._part_if_done(stream)\n",
        "            self._part_if_done(stream)\n",
    ),
    PlantedBug(
        "a router that dies leaves its requests running",
        "services/decode/servicer.py",
        "            self._drop(key, goes_on=True)\n",
        "            self._disown(key)\n",
    ),
    PlantedBug(
        "a refusal for lack of room is a loss",
        "services/router/dispatch.py",
        "        if isinstance(error, CapacityError | DrainingError):\n",
        "        if isinstance(error, DrainingError):\n",
    ),
    PlantedBug(
        "a lost attempt stays counted on its ranks",
        "services/router/dispatch.py",
        "                    legs.release()  # here",
        "                    pass  # here",
    ),
    PlantedBug(
        "a hand-off that was read is kept",
        "engine/publishing.py",
        "        if sequence.handoff_unread:\n"
        "            self.unlink_handoff(sequence.request.request_id, sequence.request.attempt)\n"
        "        sequence.handoff = None\n",
        "        sequence.handoff = None\n",
    ),
    PlantedBug(
        "a prefill goes on without its request",
        "services/router/attempt.py",
        "            self._prefill_task.cancel()\n",
        "            pass\n",
    ),
    PlantedBug(
        "any block of the right size is taken",
        "kvstore/plain_block_headers.py",
        "            and head[CLASS_AT:CHECKSUM_AT] == self._before_identity + identities_of((key,)) + self._sizes\n",
        "",
    ),
    PlantedBug(
        "a block's checksum is not looked at",
        "kvstore/value_sinks.py",
        "refusal = Refusal.CHECKSUM if payload_checksum(follows) != self._checksum else None",
        "refusal = None",
    ),
    PlantedBug(
        "approximate blocks pass for exact ones",
        "engine/publishing.py",
        "            sequence.blocks_exact.append(sequence.exact)\n",
        "            sequence.blocks_exact.append(True)\n",
    ),
    PlantedBug(
        "exact requests take approximate blocks on the device",
        "engine/block_pool.py",
        " or (exact_only and not self._blocks[block_id].exact):",
        ":",
    ),
    PlantedBug(
        "what the own prefill has stored is a hit",
        "engine/interface.py",
        "return min(restored_tokens, self.cached_tokens) if self.prefilled else restored_tokens",
        "return restored_tokens",
    ),
    PlantedBug(
        "room in the queue is not given back",
        "services/router/front_door.py",
        "            self.admission.leave(visit, started_s)\n",
        "            pass\n",
    ),
)
