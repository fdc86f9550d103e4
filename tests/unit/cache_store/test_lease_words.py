"""The words that say whether leases stand, between two processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from cache_store.memory.lease_words import WORDS, LeaseWords, PeerWords
from cache_store.memory.staging import MemoryUnavailable
from protos import cache_store_pb2 as pb

WAIT_S = 20.0


def stands(peer: PeerWords, said: pb.LeaseWord) -> bool:
    return asyncio.run(peer.stands(said))


def word(taken: tuple[int, int] | None) -> pb.LeaseWord:
    assert taken is not None
    return pb.LeaseWord(index=taken[0], value=taken[1])


def test_word_when_its_lease_has_ended_then_it_says_nothing_nor_does_that_of_the_next_one() -> None:
    own = LeaseWords(1)
    peer = PeerWords(own.describe())
    first = word(own.take())
    assert stands(peer, first)
    assert own.take() is None, "there is one word"
    own.clear(first.index)
    assert not stands(peer, first)
    second = word(own.take())
    assert second.index == first.index
    assert stands(peer, second) and not stands(peer, first)
    other = LeaseWords(1)
    assert word(other.take()).value not in (first.value, second.value), "nor is it that of another engine"
    for each in (peer, own, other):
        each.close()


def test_word_that_is_none_then_it_says_nothing() -> None:
    own = LeaseWords(4)
    peer = PeerWords(own.describe())
    for index, value in ((0, 0), (3, 0), (4, 1), (2**32 - 1, 1)):
        assert not stands(peer, pb.LeaseWord(index=index, value=value))
    peer.close()
    own.close()


def _own(pipe: Connection) -> None:
    own = LeaseWords()
    taken = own.take()
    pipe.send((own.describe().SerializeToString(), taken))
    pipe.recv()


def test_word_when_its_owner_is_killed_then_it_says_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_own, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(WAIT_S), "the owner does not start"
    described, taken = ours.recv()
    peer = PeerWords(pb.SharedLayer.FromString(described))
    assert stands(peer, word(taken))
    process.kill()
    process.join(WAIT_S)
    assert process.exitcode is not None
    assert not stands(peer, word(taken)), "its memory may belong to somebody else"
    with pytest.raises(MemoryUnavailable):
        PeerWords(pb.SharedLayer.FromString(described))
    peer.close()


@pytest.mark.parametrize(
    "shared",
    [
        pb.SharedLayer(),
        pb.SharedLayer(handle=b"1:2", bytes=8),
        pb.SharedLayer(handle=b"1:0:/etc/passwd", bytes=8),
        pb.SharedLayer(handle=b"\xff", bytes=8),
    ],
)
def test_words_that_a_peer_names_wrongly_then_they_are_not_opened(shared: pb.SharedLayer) -> None:
    with pytest.raises(MemoryUnavailable):
        PeerWords(shared)


def test_words_that_are_fewer_than_said_then_they_are_not_opened() -> None:
    own = LeaseWords(2)
    shared = own.describe()
    shared.bytes += 8
    with pytest.raises(MemoryUnavailable, match="smaller than said"):
        PeerWords(shared)
    own.close()


def test_words_when_their_owner_cuts_the_file_short_then_they_say_nothing() -> None:
    """Without an end of this process, as memory of a file has it that is too short."""
    own = LeaseWords(WORDS)
    peer = PeerWords(own.describe())
    first = word(own.take())
    assert stands(peer, first)
    os.ftruncate(own.file.descriptor, 0)
    assert not stands(peer, first)
    peer.close()
    own.close()
