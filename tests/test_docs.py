"""Pages that describe the code agree with it: settings, metrics, commands, and links to files."""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pytest
import typer.core
import yaml

from tests.deploy.rendering import EXAMPLES, cluster_yaml, pod_templates, render
from tests.docs_blocks import COMMAND, PAGES, Block, all_blocks, blocks, run_by_tests, wrong_in
from tests.docs_tables import DeclaredMetric, declared_metrics, tables, with_table
from tests.failure_rows import FAULTS, ROWS, faults_tested, row_tests
from tests.house_rules import PRODUCT_FOLDERS, ROOT, Source, read_sources
from whalepod import __version__
from whalepod.cli.main import COMMANDS, load_command
from whalepod.cluster.ray_runtime import MACHINE_ENVIRONMENT


@pytest.mark.parametrize("path", tables(), ids=lambda path: path.name)
def test_the_page_lists_what_the_code_declares(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert with_table(page, *tables()[path]) == page, f"run `make docs`, and read what changed in {path.name}"


def test_every_row_of_the_failure_table_has_a_test_that_is_named_after_it() -> None:
    assert {test.row for test in row_tests(read_sources(folders=("tests",)))} == set(ROWS)


def test_every_fault_that_users_of_other_systems_met_has_a_test_that_is_named_after_it() -> None:
    faults = {f"{letter}{number}" for letter, numbers in FAULTS.items() for number in numbers}
    assert faults - faults_tested(read_sources(folders=("tests",))) == set()


def test_every_metric_that_the_code_names_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = {
        name
        for source in read_sources(folders=PRODUCT_FOLDERS)
        for name in re.findall(r'"((?:whalepod_|vllm:|sglang:)[a-z0-9_]+)"', source.text)
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if name not in page] == []


def test_a_declared_metric_is_read_with_the_name_that_is_scraped() -> None:
    source = Source(
        PurePosixPath("engine/x.py"),
        "from prometheus_client import Counter, Gauge\n"
        'A = Counter("whalepod_steps", "Steps.", ["phase"])\n'
        'B = Gauge(name="whalepod_blocks_free", documentation="Free blocks.")\n',
    )
    assert declared_metrics([source]) == [
        DeclaredMetric("whalepod_blocks_free", "gauge", (), "Free blocks."),
        DeclaredMetric("whalepod_steps_total", "counter", ("phase",), "Steps."),
    ]


def test_every_metric_says_what_it_means_in_base_units() -> None:
    for metric in declared_metrics(read_sources(folders=PRODUCT_FOLDERS)):
        assert metric.meaning, metric.name
        assert not re.search(r"_(ms|us|minutes|kb|mb|mib|gib|percent)(_|$)", metric.name), metric.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_links_only_to_what_is_there(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_page_about_ray_sets_what_ranks_need_of_it() -> None:
    (exports, _) = [block.text for block in all_blocks() if block.page.name == "ray.md"]
    assert [name for name, value in MACHINE_ENVIRONMENT.items() if f" {name}={value}" not in exports] == []


def test_commands_that_pages_tell_people_to_run_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        for target in re.findall(r"\bmake ([a-z][a-z-]*)\b", "\n".join(re.findall(r"`[^`]+`", page))):
            assert target in targets, f"{path.name}: make {target}"
        for command in re.findall(
            r"(?<!from )\bwhalepod ([a-z][a-z-]*[a-z])\b", "\n".join(re.findall(r"`[^`\n]+`", page))
        ):
            assert command in COMMANDS, f"{path.name}: whalepod {command}"


def test_every_block_of_commands_is_run_by_a_test_or_says_what_it_needs() -> None:
    assert {block.name: list(wrong_in(block)) for block in all_blocks() if list(wrong_in(block))} == {}
    assert len(run_by_tests()) >= 6, "tests/e2e/test_docs_commands.py runs these"
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        loose = [line for line in text.splitlines() if line.startswith("    ") and COMMAND.match(line)]
        assert loose == [], f"{page.name}: commands belong into a fence that says sh"


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```\nwhalepod serve\n```", 1),
        ("```bash\nwhalepod serve\n```", 1),
        ("```text\na ─▶ b\nwhalepod serve\n```", 1),
        ("```text\n  .venv/bin/whalepod serve\n```", 1),
        ("```sh\n# needs: patience\nwhalepod serve\n```", 1),
        ("```sh\nwhalepod serve\n# needs: a GPU\n```", 1),
        ("```text\nclient ─▶ whalepod\n```", 0),
        ("```sh\n# needs: a GPU\nwhalepod serve\n```", 0),
        ("```sh\nwhalepod serve\n```", 0),
    ],
)
def test_a_block_that_slips_through_is_noticed(page: str, wrong: int) -> None:
    (block,) = blocks(ROOT / "docs/x.md", page)
    assert len(list(wrong_in(block))) == wrong


def test_names_in_the_kubernetes_commands_are_those_that_the_chart_makes() -> None:
    block, secrets, _ = [block for block in all_blocks() if block.name.startswith("docs/kubernetes.md")]
    (release, chart) = re.findall(r"helm install (\S+) (\S+)", block.text)[0]
    (example,) = re.findall(r"--values (\S+)", block.text)
    manifests = render(EXAMPLES[Path(example).stem], name=release)
    made = {f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests}
    named = set(re.findall(r"\b(?:deployment|service)/\S+", block.text))
    assert len(named) == 3
    assert named <= made
    assert f"--tag whalepod:{__version__} " in block.text
    assert f"helm --namespace serving test {release}" in block.text
    assert (ROOT / chart).is_dir()
    assert (ROOT / example).is_file()
    created = {
        name: set(re.findall(r"--from-(?:file|literal)=([\w.-]+)", rest)) for name, rest in secret_commands(secrets)
    }
    assert created["whalepod-tls"] == set(), "kubectl names the two keys of such a Secret itself"
    created["whalepod-tls"] = {"tls.crt", "tls.key"}
    wanted = secrets_named(render(EXAMPLES["secured"]))
    assert {name: keys & created[name] for name, keys in wanted.items()} == wanted


def secret_commands(block: Block) -> list[tuple[str, str]]:
    """Name and further words of each `kubectl create secret`."""
    return re.findall(r"create secret \w+ (\S+)(.*)", block.text)


def secrets_named(manifests: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Keys that pods read of each Secret, by its name."""
    wanted: dict[str, set[str]] = {}
    config = yaml.safe_load(cluster_yaml(manifests))
    files = {Path(file) for file in [config["secret_file"], config["router"]["api_keys_file"], *config["tls"].values()]}
    for template in pod_templates(manifests):
        mounted = {mount["name"]: Path(mount["mountPath"]) for mount in template.container.get("volumeMounts", ())}
        for volume in template.spec.get("volumes", ()):
            if "secret" in volume:
                keys = {file.name for file in files if file.parent == mounted[volume["name"]]}
                assert keys, volume
                wanted.setdefault(volume["secret"]["secretName"], set()).update(keys)
        for variable in template.container.get("env", ()):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                wanted.setdefault(reference["name"], set()).add(reference["key"])
    return wanted


def commands_named(page: str) -> list[list[str]]:
    """Words behind `whalepod` in each command of a page, in blocks of code and in the text."""
    fence = r"^```\w*\n(.*?)^```"
    lines = [line for block in re.findall(fence, page, flags=re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(fence, "", page, flags=re.MULTILINE | re.DOTALL))
    found = (re.match(r"(?:\S*/)?whalepod ([a-z][^#`]*)", line.strip()) for line in lines)
    return [match[1].split() for match in found if match]


COMMAND_OF = functools.cache(load_command)


def unknown_words(words: list[str]) -> list[str]:
    """Flags, and names of commands below commands, that do not exist."""
    command, rest = COMMAND_OF(words[0]), words[1:]
    while rest and isinstance(command, typer.core.TyperGroup) and not rest[0].startswith("-"):
        names = rest[0].split("|")
        if unknown := [name for name in names if name not in command.commands]:
            return unknown
        command, rest = cast("Any", command.commands[names[0]]), rest[1:]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in {*flags, "--help"}]


@pytest.mark.slow  # imports every command
def test_flags_and_subcommands_that_pages_name_exist() -> None:
    named = {path.name: commands_named(path.read_text(encoding="utf-8")) for path in PAGES}
    assert sum(map(len, named.values())) > 60
    assert [(name, words) for name, listed in named.items() for words in listed if unknown_words(words)] == []
    assert unknown_words(["kv", "purge", "--tenants"]) == ["--tenants"]
    assert unknown_words(["kv", "prune"]) == ["prune"]
