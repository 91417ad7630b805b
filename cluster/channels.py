"""Channels to other processes of the cluster, each opened once and kept. For one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from dataclasses import dataclass

import grpc

from .peer_tls import Dialler, open_channel

CALLS_LEFT_S = 600.0
"""What is being called over a channel that is replaced may take so long to end."""


@dataclass(frozen=True, slots=True)
class _Opened:
    channel: grpc.aio.Channel
    version: object
    """Of the certificates it shows."""


class Channels:
    """By key: mostly the address, or whatever makes one process at an address another one. When there are new
    certificates, the next call goes over a new channel, and those under way end over the old one."""

    def __init__(self, tls: Dialler | None = None) -> None:
        """`tls` None: plain text."""
        self._tls = tls
        self._opened: dict[Hashable, _Opened] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str, *, key: Hashable = None) -> grpc.aio.Channel:
        key = address if key is None else key
        version = None if self._tls is None else self._tls.version
        opened = self._opened.get(key)
        if opened is None or opened.version != version:
            if opened is not None:
                self._close_later(opened)
            opened = self._opened[key] = _Opened(open_channel(address, self._tls), version)
        return opened.channel

    def try_again(self, key: Hashable) -> None:
        """The process is there: a channel that has failed to reach it would not even try for up to a second."""
        opened = self._opened.get(key)
        if opened is not None and opened.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._close_later(self._opened.pop(key))

    def close_all_but(self, keep: Collection[Hashable]) -> None:
        """Calls that are under way on the others end first."""
        for key in [key for key in self._opened if key not in keep]:
            self._close_later(self._opened.pop(key))

    async def close(self) -> None:
        """Calls end."""
        for task in self._closing:
            task.cancel()
        opened, self._opened = self._opened, {}
        await asyncio.gather(*(one.channel.close() for one in opened.values()), *self._closing, return_exceptions=True)

    def _close_later(self, opened: _Opened) -> None:
        task = asyncio.create_task(opened.channel.close(CALLS_LEFT_S), name="closing a channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
