import asyncio

import pytest

from specdec_ray.errors import EngineLost
from specdec_ray.serve.merge import merge


async def test_a_stream_that_is_cancelled_from_below_ends_the_merge():
    """A cancelled RPC raises CancelledError in the stream, though nobody cancelled the reader."""

    async def cancelled():
        yield 1
        raise asyncio.CancelledError

    async with asyncio.timeout(1):
        with pytest.raises(EngineLost):
            async for _ in merge([cancelled()]):
                pass
