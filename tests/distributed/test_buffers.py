from __future__ import annotations

import torch

from trine.distributed._fsdp.buffers import BufferPool

CPU = torch.device("cpu")


def test_a_released_buffer_serves_the_next_request_of_its_size_and_dtype() -> None:
    pool = BufferPool()
    buffer = pool.acquire((2, 8), torch.float32, CPU)
    address = buffer.data_ptr()

    pool.release(buffer)
    again = pool.acquire((4, 4), torch.float32, CPU)

    assert again.data_ptr() == address
    assert again.shape == (4, 4)


def test_a_buffer_in_use_is_never_lent_twice() -> None:
    pool = BufferPool()

    first = pool.acquire((16,), torch.float32, CPU)
    second = pool.acquire((16,), torch.float32, CPU)

    assert first.data_ptr() != second.data_ptr()


def test_another_dtype_gets_another_buffer() -> None:
    pool = BufferPool()
    pool.release(pool.acquire((16,), torch.float32, CPU))

    assert pool.acquire((16,), torch.bfloat16, CPU).dtype is torch.bfloat16


def test_idle_buffers_beyond_the_bound_are_freed_oldest_first() -> None:
    pool = BufferPool(keep_nbytes=2 * 64)
    buffers = [pool.acquire((16,), torch.float32, CPU) for _ in range(3)]
    addresses = [buffer.data_ptr() for buffer in buffers]

    for buffer in buffers:
        pool.release(buffer)
    kept = [pool.acquire((16,), torch.float32, CPU).data_ptr() for _ in range(2)]

    assert kept == [addresses[2], addresses[1]]


def test_a_bound_of_zero_keeps_nothing() -> None:
    pool = BufferPool(keep_nbytes=0)
    buffer = pool.acquire((16,), torch.float32, CPU)
    pool.release(buffer)

    assert pool.acquire((16,), torch.float32, CPU) is not buffer


def test_a_buffer_made_in_inference_mode_serves_training() -> None:
    pool = BufferPool()
    with torch.inference_mode():
        pool.release(pool.acquire((4,), torch.float32, CPU))

    buffer = pool.acquire((4,), torch.float32, CPU)

    assert not buffer.is_inference()


def test_the_buffer_of_a_large_layer_goes_once_small_ones_take_turns() -> None:
    pool = BufferPool()
    large = pool.acquire((64,), torch.float32, CPU)
    pool.release(large)
    small = [pool.acquire((16,), torch.float32, CPU) for _ in range(2)]

    for buffer in small:
        pool.release(buffer)

    assert pool.idle_nbytes == 2 * 64


def test_a_larger_buffer_takes_the_place_of_smaller_ones() -> None:
    pool = BufferPool(keep_nbytes=2**10)
    buffers = [pool.acquire((16,), torch.float32, CPU) for _ in range(3)]
    for buffer in buffers:
        pool.release(buffer)

    pool.acquire((32,), torch.float32, CPU)

    assert pool.idle_nbytes == 64


def test_a_smaller_buffer_leaves_larger_ones_for_whoever_takes_turns_on_them() -> None:
    pool = BufferPool(keep_nbytes=2**10)
    pool.release(pool.acquire((32,), torch.float32, CPU))

    pool.acquire((16,), torch.float32, CPU)

    assert pool.idle_nbytes == 128


def test_idle_buffers_can_be_freed_at_once() -> None:
    pool = BufferPool()
    pool.release(pool.acquire((16,), torch.float32, CPU))

    pool.free_idle()

    assert pool.idle_nbytes == 0
