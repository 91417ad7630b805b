"""Every setting has three names; the stronger source wins; what is not known is refused with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalepod.cluster.config_sources import load_config, settings, unknown_variables
from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity


def yaml_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_no_two_settings_share_a_name() -> None:
    for names in zip(*((setting.key, setting.variable, setting.flag) for setting in settings()), strict=True):
        assert len(set(names)) == len(names)


def test_every_setting_says_what_it_is_for() -> None:
    assert [setting.key for setting in settings() if not setting.description] == []


def test_names_follow_from_the_place_and_the_router_leaves_out_its_section() -> None:
    by_key = {setting.key: setting for setting in settings()}
    assert by_key["decode.replicas"].variable == "WHALEPOD_DECODE_REPLICAS"
    assert by_key["decode.replicas"].flag == "--decode-replicas"
    assert by_key["router.http_port"].flag == "--http-port"
    assert by_key["router.http_port"].variable == "WHALEPOD_HTTP_PORT"


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "decode: {replicas: 2, slots: 2}\nprefill: {slots: 2}\n")
    config = load_config(
        file=file,
        variables={"WHALEPOD_DECODE_REPLICAS": "3", "WHALEPOD_DECODE_SLOTS": "3"},
        flags={"--decode-replicas": "4"},
    )
    assert (config.decode.replicas, config.decode.slots, config.prefill.slots, config.prefill.replicas) == (4, 3, 2, 1)


def test_lists_switches_and_empty_text_are_read_from_variables() -> None:
    config = load_config(
        variables={
            "WHALEPOD_FIDELITY_ALLOWED": "exact, fast",
            "WHALEPOD_TRUST_TENANT_HEADER": "true",
            "WHALEPOD_REDIS_URL": "",
        }
    )
    assert config.fidelity.allowed == (Fidelity.EXACT, Fidelity.FAST)
    assert config.router.trust_tenant_header
    assert config.redis_url is None


def test_the_published_engines_variable_names_the_model_and_ours_wins() -> None:
    assert load_config(variables={"DEEPINFER_HF_MODEL_DIR": "/m"}).model == "/m"
    both = {"DEEPINFER_HF_MODEL_DIR": "/m", "WHALEPOD_MODEL": "/n"}
    assert load_config(variables=both).model == "/n"


def test_what_the_published_engine_calls_fidelity_is_ours_unless_both_are_set_apart() -> None:
    assert load_config(variables={"DEEPINFER_BATCH_INVARIANT": "1"}).fidelity.default is Fidelity.EXACT
    assert load_config(variables={"DEEPINFER_BATCH_INVARIANT": "0"}).fidelity.default is Fidelity.FAST
    both = {"DEEPINFER_BATCH_INVARIANT": "1", "WHALEPOD_FIDELITY_DEFAULT": "fast"}
    with pytest.raises(ConfigError, match="DEEPINFER_BATCH_INVARIANT=1 and WHALEPOD_FIDELITY_DEFAULT=fast"):
        load_config(variables=both)


def test_every_name_of_the_published_engine_that_sets_something_is_taken() -> None:
    variables = {
        "DEEPINFER_ASYNC_SCHEDULING": "0",
        "DEEPINFER_MAX_NUM_SEQS": "3",
        "DEEPINFER_MAX_BATCHED_TOKENS": "8192",
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140",
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact",
    }
    config = load_config(variables=variables)
    assert (config.engine.async_scheduling, config.decode.slots, config.prefill.chunk_tokens) == (False, 3, 8192)
    assert config.engine.kept_rows == 140
    assert load_config(variables=variables | {"WHALEPOD_DECODE_SLOTS": "5"}).decode.slots == 5
    with pytest.raises(ConfigError, match="DEEPINFER_MAX_NUM_SEQS"):
        load_config(variables={"DEEPINFER_MAX_NUM_SEQS": "many"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode: {replica: 2}", "unknown key decode.replica; did you mean replicas?"),
        ("decodes: {replicas: 2}", "unknown key decodes; did you mean decode?"),
        ("http_port: 9000", "unknown key http_port; did you mean router.http_port?"),
        ("decode: {replicas: many}", "decode.replicas: input should be a valid integer"),
        ("decode: 3", "decode: "),
        ("- a", "must hold keys and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(file=yaml_file(tmp_path, text))
    assert said in str(refusal.value)


def test_a_bad_value_is_reported_where_it_was_set() -> None:
    with pytest.raises(ConfigError, match=r"^WHALEPOD_DECODE_SLOTS: "):
        load_config(variables={"WHALEPOD_DECODE_SLOTS": "0"})
    with pytest.raises(ConfigError, match=r"^--decode-slots: "):
        load_config(variables={"WHALEPOD_DECODE_SLOTS": "0"}, flags={"--decode-slots": "0"})


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(file=yaml_file(tmp_path, "decode: {replicas: 0}\nhots: x\n"))
    assert "decode.replicas" in str(refusal.value)
    assert "hots; did you mean host?" in str(refusal.value)


def test_a_missing_file_and_an_unknown_flag_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read"):
        load_config(file=tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="did you mean --decode-slots"):
        load_config(flags={"--decode-slot": "1"})


def test_nearly_known_variables_are_pointed_out_and_kubernetes_own_are_not() -> None:
    variables = {
        "WHALEPOD_DECODE_SLOT": "1",
        "WHALEPOD_PORT_8000_TCP_ADDR": "x",
        "WHALEPOD_DECODE_SLOTS": "1",
        "DEEPINFER_BATCH_INVARIANCE": "1",
        "DEEPINFER_MAX_NUM_SEQS": "1",
        "HOME": "/",
    }
    assert unknown_variables(variables) == {
        "WHALEPOD_DECODE_SLOT": "WHALEPOD_DECODE_SLOTS",
        "DEEPINFER_BATCH_INVARIANCE": "DEEPINFER_BATCH_INVARIANT",
    }
