"""`whalepod chat` and `whalepod generate` against a router over fake ranks, as a user types them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import typer.testing

from tests.model.vision.pictures import encoded, plain
from tests.services.router.fake_ranks import FakeDecode, says
from tests.services.router.router_under_test import RouterUnderTest, running_router, write_model_files
from whalepod.cli.main import app
from whalepod.cluster.api_keys import add_api_key
from whalepod.model.tiny_checkpoint import SMALLEST, shipped_tokenizer, write_tiny_checkpoint

TOKENIZER = shipped_tokenizer()


@pytest.fixture
def decode() -> FakeDecode:
    return FakeDecode()


@pytest.fixture
async def router(tmp_path: Path, decode: FakeDecode) -> AsyncIterator[RouterUnderTest]:
    async with running_router(write_model_files(tmp_path), [decode], prefill_replicas=0) as running:
        yield running


async def run(*arguments: str, typed: str | None = None) -> tuple[int, str]:
    runner = typer.testing.CliRunner()
    result = await asyncio.to_thread(runner.invoke, app, list(arguments), input=typed)
    return result.exit_code, result.stdout


def url(router: RouterUnderTest) -> str:
    return f"http://127.0.0.1:{router.http_port}"


async def test_one_message_is_answered_as_it_comes(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("Good [bold]morning[/]."))
    assert await run("chat", "Hello", "--url", url(router)) == (0, "Good [bold]morning[/].\n")


async def test_thinking_is_shown_before_the_answer(router: RouterUnderTest, decode: FakeDecode) -> None:
    ids = TOKENIZER.file.encode("Hm.</think>Yes.", add_special_tokens=False).ids
    decode.behaviour.next_token = says(ids)
    assert await run("chat", "Well?", "--thinking", "--url", url(router)) == (0, "Hm.\nYes.\n")


async def test_a_conversation_remembers_what_was_said_until_an_empty_line(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("Yes"))
    code, output = await run("chat", "--url", url(router), "--system", "Be short.", typed="One\nTwo\n\nThree\n")
    assert (code, output.count("Yes")) == (0, 2)
    first, second = [list(work.prompt_ids) for work in decode.seen.starts]
    assert second[: len(first)] == first
    assert len(second) > len(first)


async def test_pictures_go_with_the_first_question(router: RouterUnderTest, decode: FakeDecode, tmp_path: Path) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("Red"))
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(plain(90, 60)))
    flags = ("--image", str(picture), "--image", str(picture))
    code, output = await run("chat", "--url", url(router), *flags, typed="What is it?\nSure?\n\n")
    assert (code, output.count("Red")) == (0, 2)
    first, second = decode.seen.starts
    assert [image.content_hash for image in first.images] == [image.content_hash for image in second.images]
    assert len(first.images) == 2
    assert list(second.prompt_ids[: len(first.prompt_ids)]) == list(first.prompt_ids)
    code, _ = await run("chat", "What?", "--image", str(tmp_path / "none.png"), "--url", url(router))
    assert code == 2


@pytest.mark.parametrize("command", ["chat", "generate"])
async def test_a_broken_answer_is_an_error_and_not_an_end(
    router: RouterUnderTest, decode: FakeDecode, command: str
) -> None:
    decode.behaviour.gone_after_tokens = 2
    code, output = await run(command, "Hello", "--url", url(router))
    assert code == 1
    assert "whalepod: the stream to decode-0 broke" in output


async def test_nobody_listening_is_said_plainly() -> None:
    for command in (("chat", "Hello"), ("generate", "Hello")):
        code, output = await run(*command, "--url", "http://127.0.0.1:1")
        assert code == 1
        assert "http://127.0.0.1:1 does not answer" in output


async def test_a_refusal_is_passed_on(router: RouterUnderTest) -> None:
    code, output = await run("generate", "Hello", "--max-tokens", "100000", "--url", url(router))
    assert code == 1
    assert "context is 4096 tokens" in output


async def test_a_prompt_is_completed_through_the_cluster(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode(" upon a time"))
    assert await run("generate", "Once", "--url", url(router)) == (0, " upon a time\n")
    assert await run("generate", "Once", "--url", url(router), "--stop", " time") == (0, " upon a\n")


async def test_a_prompt_is_completed_in_this_process(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, block_tokens=16, **SMALLEST)
    code, output = await run("generate", "Once", "--model", str(tmp_path), "--max-tokens", "4")
    assert code == 0
    assert output.strip()
    assert await run("generate", "Once", "--model", str(tmp_path), "--max-tokens", "4") == (0, output)


async def test_a_key_is_taken_from_the_variable(
    tmp_path: Path, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    key = add_api_key(keys, name="me", tenant="t", scopes=frozenset({"generate"}), expires=None)
    decode.behaviour.next_token = says(TOKENIZER.encode("Good."))
    model_dir = write_model_files(tmp_path)
    async with running_router(model_dir, [decode], prefill_replicas=0, api_keys_file=keys) as locked:
        code, said = await run("chat", "Hello", "--url", url(locked))
        assert (code, "an API key is needed" in said) == (1, True)
        monkeypatch.setenv("WHALEPOD_API_KEY", key)
        assert await run("chat", "Hello", "--url", url(locked)) == (0, "Good.\n")
        assert await run("generate", "Hello", "--url", url(locked)) == (0, "Good.\n")


async def test_a_bad_file_of_authorities_is_named(router: RouterUnderTest, tmp_path: Path) -> None:
    code, _ = await run("chat", "Hello", "--url", url(router), "--ca-file", str(tmp_path / "missing.pem"))
    assert code != 0
