"""Real ranks that speak TLS: asked by who has a certificate of theirs, and by who has none."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.certificates import Authority
from tests.services.rank_world import SECRET, running_rank, world_config
from whalepod.cluster.liveness import HealthProber, Liveness
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registry import RegistryWatcher
from whalepod.core.credentials import ClusterSecret


async def test_ranks_register_that_they_speak_tls_and_answer_nobody_without_a_certificate(
    redis_port: int, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "cluster-ca")
    pair = authority.issue("peer")
    files = {"peer_cert_file": pair.cert, "peer_key_file": pair.key, "peer_ca_file": authority.pem}
    config = world_config(redis_port, tls=dict(files))
    tls = PeerTls.of(config.tls)
    secret = ClusterSecret(SECRET.encode())
    watchers = [
        RegistryWatcher(redis_url=f"redis://127.0.0.1:{redis_port}/0", secret=secret, tls=own) for own in (tls, None)
    ]
    probers = [HealthProber(tls=own) for own in (tls, None)]
    async with running_rank(config, "decode") as rank:
        for watcher in watchers:
            await watcher.poll()
        answers = [await prober.probe(rank.info.address) for prober in probers]
    assert [set(watcher.ranks) for watcher in watchers] == [{rank.info.rank_id}, set()]
    assert "speaks TLS" in watchers[1].refused[rank.info.rank_id]
    assert answers == [Liveness.SERVING, Liveness.UNREACHABLE]
    for one in (*watchers, *probers):
        await (one.stop() if isinstance(one, RegistryWatcher) else one.close())
