"""Ranks listen where the others look for them."""

from __future__ import annotations

from whalepod.cluster.config_sources import load_config
from whalepod.cluster.rank_addresses import rank_addresses, rank_port


def test_ranks_with_an_address_of_their_own_listen_on_one_port_and_find_each_other_by_name() -> None:
    flags = {"--decode-replicas": "200", "--prefill-replicas": "150", "--ranks-apart": "true"}
    config = load_config(flags={**flags, "--rank-host": "wp-{pool}-{index}.wp-{pool}"})
    assert rank_port(config, "decode", 199) == config.decode.port
    assert rank_addresses(config, "decode")[199] == "wp-decode-199.wp-decode:8200"
    assert rank_addresses(config, "prefill")[0] == "wp-prefill-0.wp-prefill:8100"
    together = load_config(flags={"--decode-replicas": "2", "--advertise-host": "10.0.0.7"})
    assert rank_addresses(together, "decode") == ["10.0.0.7:8200", "10.0.0.7:8201"]
