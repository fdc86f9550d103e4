from __future__ import annotations

import asyncio

from router.mailbox import Mailbox


async def test_get_when_letters_came_then_they_are_read_in_order():
    box: Mailbox[int] = Mailbox()
    for letter in range(3):
        box.put(letter)
    assert [await box.get() for _ in range(3)] == [0, 1, 2]


async def test_get_when_nothing_came_then_it_waits_for_the_next():
    box: Mailbox[str] = Mailbox()
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not reader.done()
    box.put("a")
    box.put("b")
    assert await reader == "a"
    assert await box.get() == "b"


async def test_get_when_its_reader_was_cancelled_then_no_letter_is_lost():
    box: Mailbox[str] = Mailbox()
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    box.put("a")
    assert await box.get() == "a"


async def test_room_when_the_reader_is_slow_then_the_writer_waits_and_ends_do_not():
    box: Mailbox[int] = Mailbox(limit=2)
    written = []

    async def write() -> None:
        for letter in range(5):
            box.put(letter)
            written.append(letter)
            await box.room()

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert written == [0, 1]
    box.put(99)  # an end
    assert [await box.get() for _ in range(3)] == [0, 1, 99]
    assert await box.get() == 2
    assert await box.get() == 3
    assert await box.get() == 4
    await writer
