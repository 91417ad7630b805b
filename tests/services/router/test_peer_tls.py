"""Router and ranks show each other certificates: with right ones everything works, with others nothing is said."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.cluster.certificates import Authority
from tests.services.router.fake_ranks import SECRET, FakeDecode, FakePrefill, FakeVision, expected_ids
from tests.services.router.router_under_test import answer_to, failure_of, running_router, until
from tests.services.router.test_vision_ahead import ask
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.static_ranks import StaticRanks
from whalepod.core.errors import ConfigError

PROMPT = [400 + index % 90 for index in range(100)]


def peer_tls(authority: Authority, name: str = "peer", *, ca: Path | None = None) -> PeerTls:
    pair = authority.issue(name)
    return PeerTls(cert_file=pair.cert, key_file=pair.key, ca_file=ca or authority.pem)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster-ca")


async def test_every_call_of_a_router_goes_over_mutual_tls(model_dir: Path, authority: Authority) -> None:
    decode, prefill, vision = FakeDecode(), FakePrefill(), FakeVision()
    for rank in (decode, prefill, vision):
        rank.server.tls = peer_tls(authority)
    async with running_router(model_dir, [decode, prefill, vision], tls=peer_tls(authority, "router")) as router:
        assert await answer_to(router, PROMPT) == expected_ids(PROMPT, 6)
        assert len(prefill.seen.starts) == 1
        step = decode.behaviour.step = asyncio.Event()
        answer = asyncio.create_task(ask(router, 1))
        await until(lambda: len(vision.orders) == 1)
        step.set()
        assert await answer == 200


async def test_a_request_that_meets_files_as_they_are_replaced_is_served(model_dir: Path, authority: Authority) -> None:
    decode, prefill = FakeDecode(), FakePrefill()
    tls = decode.server.tls = prefill.server.tls = peer_tls(authority)
    async with running_router(model_dir, [decode, prefill], tls=tls) as router:
        for file in authority.pem.parent.iterdir():
            file.unlink()
        assert await answer_to(router, PROMPT) == expected_ids(PROMPT, 6)
        assert len(prefill.seen.starts) == 1


async def test_certificates_are_replaced_while_everything_runs(
    model_dir: Path, tmp_path: Path, authority: Authority
) -> None:
    """Both sides share the files. The old authority's certificates are worth nothing afterwards."""
    decode, prefill = FakeDecode(), FakePrefill()
    tls = decode.server.tls = prefill.server.tls = peer_tls(authority)
    async with running_router(model_dir, [decode, prefill], tls=tls) as router:
        assert await answer_to(router, PROMPT) == expected_ids(PROMPT, 6)
        later = Authority(tmp_path, "later-ca")
        new = later.issue("new")
        for file, name in ((new.cert, "peer.crt"), (new.key, "peer.key"), (later.pem, "cluster-ca.pem")):
            shutil.copy(file, tmp_path / name)
        other = [7, *PROMPT]
        assert await answer_to(router, other) == expected_ids(other, 6), "prefill is asked over a new channel"
        await decode.server.restart()
        await until(lambda: bool(router.front.table.decode_ranks()))
        another = [8, *PROMPT]
        assert await answer_to(router, another) == expected_ids(another, 6)
        assert len(prefill.seen.starts) == 3


@pytest.mark.parametrize("router_has", ["none", "another authority's"])
async def test_a_router_with_wrong_certificates_says_nothing_to_a_rank(
    model_dir: Path, tmp_path: Path, authority: Authority, router_has: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode = FakeDecode()
    decode.server.tls = peer_tls(authority)
    own = None if router_has == "none" else peer_tls(Authority(tmp_path, "other-ca"), "other")
    async with running_router(model_dir, [decode], tls=own) as router:
        assert (await failure_of(router, PROMPT))[0] in (502, 503)
        assert decode.seen.starts == []
    if own is not None:
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_a_rank_with_plain_text_is_not_talked_to(model_dir: Path, authority: Authority) -> None:
    decode = FakeDecode()
    async with running_router(model_dir, [decode], tls=peer_tls(authority)) as router:
        assert (await failure_of(router, PROMPT))[0] in (502, 503)
        assert decode.seen.starts == []


async def test_a_rank_at_an_address_is_refused_by_name_if_its_certificate_is_wrong(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    decode = FakeDecode()
    decode.server.tls = peer_tls(authority)
    await decode.server.start()
    address = f"127.0.0.1:{decode.server.port}"
    stranger = peer_tls(Authority(tmp_path, "other-ca"), "other")
    for tls, found in ((stranger, False), (peer_tls(authority, "router"), True)):
        ranks = StaticRanks([address], secret=SECRET, on_change=lambda _: None, tls=tls)
        await ranks.poll()
        assert bool(ranks.ranks) is found
        assert ranks.settled
        await ranks.stop()
    assert f"refused the rank at {address}" in caplog.text
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    await decode.server.kill()


def test_files_that_no_peer_would_believe_are_named_at_start(tmp_path: Path, authority: Authority) -> None:
    other = Authority(tmp_path, "other-ca")
    with pytest.raises(ConfigError, match=r"tls\.peer_cert_file .*peer\.crt would not be believed.*other-ca\.pem"):
        peer_tls(authority, ca=other.pem)
    pair = authority.issue("named")
    PeerTls(cert_file=pair.cert, key_file=pair.key, ca_file=authority.pem, name="localhost")
    with pytest.raises(ConfigError, match=r"elsewhere \(tls\.peer_name\)"):
        PeerTls(cert_file=pair.cert, key_file=pair.key, ca_file=authority.pem, name="elsewhere")
    with pytest.raises(ConfigError, match=r"tls\.peer_key_file"):
        PeerTls(cert_file=pair.cert, key_file=tmp_path / "missing.key", ca_file=authority.pem)


def test_settings_for_certificates_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set tls\.peer_key_file and tls\.peer_ca_file too"):
        ClusterConfig.model_validate({"tls": {"peer_cert_file": str(tmp_path / "a")}})
    with pytest.raises(ValueError, match=r"tls\.peer_name is set without"):
        ClusterConfig.model_validate({"tls": {"peer_name": "whalepod"}})
    files = {f"peer_{name}_file": str(tmp_path / name) for name in ("cert", "key", "ca")}
    config = ClusterConfig.model_validate({"tls": files})
    assert not config.serves_direct, "values would leave a prefill rank in plain text"
    assert ClusterConfig.model_validate({"tls": files, "kv": {"direct": True}}).serves_direct
