"""Several generators as one: the choices of a request run at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from specdec_ray.errors import EngineLost

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams, each with its stream's index, as they come.

    The first stream that raises ends all; closing this generator closes them all.
    """
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=4 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await items.put((index, item))
            await items.put(None)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task but something it waited for was cancelled, as an RPC can be.
            await items.put(EngineLost("a generation was cancelled from below"))
        except Exception as error:  # handed to the consumer, who raises it
            await items.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
