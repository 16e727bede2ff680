import pytest

from specdec_ray.models.kv_cache import BlockPool, OutOfBlocks, slots_of


def test_allocation_takes_all_or_nothing():
    pool = BlockPool(4, 16)
    taken = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.free_count == 1
    pool.release(taken)
    assert pool.free_count == 4


def test_double_release_is_an_error():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks[:1])


def test_slots_follow_the_block_table():
    assert slots_of([5, 2], block_size=3, length=5).tolist() == [15, 16, 17, 6, 7]
