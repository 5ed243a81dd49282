"""Shared memory that is used again and again, between a writer and readers; and messages that arrive in pieces."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import selectors
import socket
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models.connections import Connection
from penstock.transport import channel as channels
from penstock.transport import segments as module
from penstock.transport.channel import Channel, Frames, anonymous_file, frame, read_all, write_all
from penstock.transport.packing import pack, unpack
from penstock.transport.segments import LEAST_BYTES, Leases, Segments

SMALL = LEAST_BYTES // 2  # bytes of an array that fits into the least segment


def numbered(number, size=SMALL):
    return [np.full(size, number, "u1"), f"row {number}"]


def read(leases, segments, segment):
    """What a reader gets that is sent the descriptor."""
    (block,) = unpack(leases.read(segments.ref(segment, 0), [segment.fd]))
    return block


def is_intact(array, number):
    return bool((array == number).all())


@pytest.fixture(autouse=True, scope="module")
def no_garbage():
    """Files that other tests have left to the collector are closed before any are counted."""
    gc.collect()


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def segments():
    found = Segments()
    yield found
    found.close()


@pytest.fixture(params=[False, True], ids=["shared", "private"])
def leases(request):
    return Leases(private=request.param)


def report(leases, segments):
    """The reader says what it does not refer to any more, and the writer hears it."""
    found = leases.take_freed()
    assert set(found) <= {segments.owner}
    numbers = found.get(segments.owner, [])
    segments.freed(numbers)
    return numbers


# Round trips.


@pytest.mark.parametrize("size", [0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 << 20])
def test_what_is_written_is_read(segments, leases, size):
    block = [np.arange(size, dtype="u1"), {"a": np.ones((3, 4)), "b": "text"}, None]
    segment = segments.write(pack(block))
    array, row, nothing = read(leases, segments, segment)
    np.testing.assert_array_equal(array, block[0])
    np.testing.assert_array_equal(row["a"], block[1]["a"])
    assert (row["b"], nothing) == ("text", None)
    assert array.flags.writeable


def test_a_reference_says_where_it_is(segments):
    segment = segments.write([b"abc", memoryview(b"de")])
    assert segments.ref(segment, 7) == (7, segments.owner, segment.number, 5)
    assert bytes(read_all(segment.fd, 0, 5)) == b"abcde"
    assert not os.get_inheritable(segment.fd)


def test_it_is_the_right_one_of_several_descriptors(segments, leases):
    fds, refs = [], []
    for number in range(3):
        segment = segments.write(pack(numbered(number)))
        refs.append(segments.ref(segment, len(fds)))
        fds.append(segment.fd)
    for number in (2, 0, 1):
        ((array, _),) = unpack(leases.read(refs[number], fds))
        assert is_intact(array, number)


def test_what_is_in_the_message_itself_can_be_changed_and_is_nobodys(leases):
    data = b"".join(bytes(buffer) for buffer in pack(numbered(1, 10)))
    ((array, _),) = unpack(leases.read(data, []))
    array[0] = 9
    del array
    assert leases.take_freed() == {}


def test_what_a_private_reader_writes_nobody_else_sees(segments):
    segment = segments.write(pack(numbered(1)))
    array, _ = read(Leases(private=True), segments, segment)
    array[:] = 9
    for private in (False, True):
        assert is_intact(read(Leases(private), segments, segment)[0], 1)
    assert is_intact(array, 9)


# Using a segment again.


def test_a_segment_is_used_again_when_both_sides_have_let_go(segments, leases):
    first = segments.write(pack(numbered(1)))
    array, _ = read(leases, segments, first)
    number, fd = first.number, first.fd
    segments.done(first)
    del array
    assert report(leases, segments) == [number]
    again = segments.write(pack(numbered(2)))
    assert (again is first, again.fd) == (True, fd)
    assert again.number != number, "a late report about the first use is not about this one"
    assert is_intact(read(leases, segments, again)[0], 2)


@pytest.mark.parametrize("order", ["the reader first", "the writer first"])
def test_the_order_in_which_they_let_go_does_not_matter(segments, order):
    first = segments.write(pack(numbered(1)))
    steps = [lambda: segments.freed([first.number]), lambda: segments.done(first)]
    for step in steps if order == "the reader first" else reversed(steps):
        assert segments.write(pack(numbered(2))).number != first.number
        step()
    assert segments.write(pack(numbered(3))).number == first.number


def test_a_segment_is_not_used_again_while_an_array_in_it_is_alive(segments, leases):
    first = segments.write(pack([numbered(1)[0], numbered(2)[0]]))
    one, other = read(leases, segments, first)
    segments.done(first)
    part = one[5:10].reshape(5, 1)
    del one, other
    for number in range(5):
        assert report(leases, segments) == []
        later = segments.write(pack(numbered(100 + number)))
        assert later.number != first.number
    assert is_intact(part, 1)
    del part
    assert report(leases, segments) == [first.number]


def test_a_segment_that_is_used_again_needs_a_new_report(segments, leases):
    first = segments.write(pack(numbered(1)))
    array, _ = read(leases, segments, first)
    del array
    segments.done(first)
    report(leases, segments)
    again = segments.write(pack(numbered(2)))
    array, _ = read(leases, segments, again)
    segments.done(again)
    assert segments.write(pack(numbered(3))).number != again.number
    assert is_intact(array, 2)


def test_the_smallest_that_fits_is_used(segments):
    made = [segments.write([bytes(size)]) for size in (8 * LEAST_BYTES, LEAST_BYTES, 2 * LEAST_BYTES)]
    for segment in made:
        segments.done(segment)
        segments.freed([segment.number])
    large, small, middle = made
    sizes = [LEAST_BYTES + 1, 10, 3 * LEAST_BYTES, 10]
    *again, new = [segments.write([bytes(size)]) for size in sizes]
    assert again == [middle, small, large]
    assert new not in made


def test_reports_of_what_is_not_there_change_nothing(segments):
    segment = segments.write(pack(numbered(1)))
    segments.freed([99, 98])
    segments.done(segment)
    segments.freed([segment.number] * 2)
    segments.done(segment)
    again, new = [segments.write([b"x"]) for _ in range(2)]
    assert again is segment
    assert new is not segment


def test_what_was_freed_is_taken_once_also_if_another_thread_takes_the_last(leases):
    class TakenByAnother(deque):
        def __bool__(self):  # whoever looks finds something, and it is gone when it is taken
            return True

    leases.freed = TakenByAnother([("a", 1), ("a", 2)])
    assert leases.take_freed() == {"a": [1, 2]}
    assert leases.take_freed() == {}


def test_reports_are_told_apart_by_owner(leases):
    with contextlib.ExitStack() as stack:
        writers = [Segments(), Segments()]
        for writer in writers:
            stack.callback(writer.close)
        held = [read(leases, writer, writer.write(pack(numbered(n)))) for n, writer in enumerate(writers * 2)]
        assert leases.take_freed() == {}
        held.clear()
        assert {owner: sorted(numbers) for owner, numbers in leases.take_freed().items()} == {
            writer.owner: [1, 2] for writer in writers
        }
        assert leases.take_freed() == {}


operations = st.one_of(
    st.tuples(st.just("write"), st.sampled_from([10, SMALL, 3 * LEAST_BYTES])),
    st.tuples(st.sampled_from(["write", "read", "drop", "done", "report"]), st.integers(0, 5)),
)


@settings(max_examples=150)
@given(operations=st.lists(operations, max_size=40), private=st.booleans(), kept=st.integers(0, 4))
def test_nothing_changes_under_a_reader_or_before_it_reads(operations, private, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEPT_BYTES", kept * LEAST_BYTES)
        before = open_files()
        segments, leases = Segments(), Leases(private)
        sent = []  # not read yet: segment, value
        held = []  # array, value
        unfinished = []  # the writer needs it still
        for value, (name, argument) in enumerate(operations):
            if name == "write":
                segment = segments.write(pack(numbered(value, max(argument, 1))))
                assert segment not in unfinished
                sent.append((segment, value))
                unfinished.append(segment)
            elif name == "read" and sent:
                segment, number = sent.pop(argument % len(sent))
                held.append((read(leases, segments, segment)[0], number))
            elif name == "drop" and held:
                del held[argument % len(held)]
            elif name == "done" and unfinished:
                index = argument % len(unfinished)
                if all(unfinished[index] is not segment for segment, _ in sent):  # the descriptor was sent first
                    segments.done(unfinished.pop(index))
            elif name == "report":
                report(leases, segments)
            assert all(is_intact(array, number) for array, number in held)
        for segment, number in sent:
            assert is_intact(read(leases, segments, segment)[0], number)
        segments.close()
        assert all(is_intact(array, number) for array, number in held), "readers outlive the writer"
        held.clear()
        del leases
        assert open_files() == before


# What is kept.


def test_of_free_segments_the_oldest_are_given_up(segments, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * LEAST_BYTES)
    before = open_files()
    made = [segments.write(pack(numbered(n))) for n in range(4)]
    each = (open_files() - before) // 4
    for segment in made:
        segments.done(segment)
        segments.freed([segment.number])
    assert open_files() == before + 2 * each
    again = {segments.write([b"x"]) for _ in range(3)}
    assert again & set(made) == set(made[2:])


def test_of_segments_that_nobody_reports_the_oldest_are_given_up(segments, leases, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * LEAST_BYTES)
    made = [segments.write(pack(numbered(n))) for n in range(4)]
    held = [read(leases, segments, segment)[0] for segment in made]
    for segment in made:
        segments.done(segment)
    assert all(is_intact(array, n) for n, array in enumerate(held))
    held.clear()
    assert sorted(report(leases, segments)) == [1, 2, 3, 4], "two of the reports come too late"
    again = {segments.write([b"x"]) for _ in range(3)}
    assert again & set(made) == set(made[2:])


def test_what_the_writer_still_needs_is_never_given_up(segments, leases, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", LEAST_BYTES)
    needed = [segments.write(pack(numbered(n))) for n in range(5)]
    segments.freed([segment.number for segment in needed])  # their readers died, say
    for n in range(5, 10):
        segments.done(segments.write(pack(numbered(n))))
    for n, segment in enumerate(needed):
        assert is_intact(read(leases, segments, segment)[0], n), "it can be sent once more"


def test_what_is_about_to_be_written_is_not_given_up(segments, leases, monkeypatch):
    """Between taking a free segment and writing it, other threads come in."""
    monkeypatch.setattr(module, "KEPT_BYTES", LEAST_BYTES)
    first = segments.write(pack(numbered(1)))
    segments.done(first)
    segments.freed([first.number])
    write = module.Segment.write

    def interrupted(segment, buffers, size):
        monkeypatch.setattr(module.Segment, "write", write)
        segments.done(segments.write(pack(numbered(2))))
        segments.freed([segment.number])  # a report that comes twice
        assert segments.write(pack(numbered(3))).number != segment.number
        write(segment, buffers, size)

    monkeypatch.setattr(module.Segment, "write", interrupted)
    again = segments.write(pack(numbered(4)))
    assert again.number == first.number
    assert is_intact(read(leases, segments, again)[0], 4)


def test_a_reader_keeps_so_many_mapped_and_whatever_is_referred_to(segments, monkeypatch):
    monkeypatch.setattr(module, "MAPS", 2)
    leases = Leases(private=False)
    made = [segments.write(pack(numbered(n))) for n in range(5)]
    before = open_files()
    held = [read(leases, segments, segment)[0] for segment in made]
    assert all(is_intact(array, n) for n, array in enumerate(held))
    held.clear()
    assert open_files() <= before + 2
    assert [is_intact(read(leases, segments, segment)[0], n) for n, segment in enumerate(made)] == [True] * 5


def test_a_segment_that_is_used_again_stays_mapped(segments, monkeypatch):
    leases = Leases(private=False)
    mapped = []
    real = mmap.mmap
    monkeypatch.setattr(module.mmap, "mmap", lambda *args: mapped.append(args) or real(*args))
    for n in range(5):
        segment = segments.write(pack(numbered(n)))
        assert is_intact(read(leases, segments, segment)[0], n)
        segments.done(segment)
        report(leases, segments)
    assert len(mapped) == 2, "once by the writer, once by the reader"


# When memory is full.


def fails(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_full_memory_falls_back_to_disk(segments, leases, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", fails(number))
    first, second = (segments.write(pack(numbered(n, 3 * LEAST_BYTES))) for n in (1, 2))
    assert is_intact(read(leases, segments, first)[0], 1)
    array, name = read(leases, segments, second)
    assert (is_intact(array, 2), name) == (True, "row 2")
    monkeypatch.undo()
    third = segments.write(pack(numbered(3)))
    assert third.capacity == LEAST_BYTES, "memory is tried again"
    assert is_intact(array, 2)
    del array
    assert sorted(report(leases, segments)) == [first.number, second.number]


def test_memory_that_cannot_be_mapped_falls_back_to_disk(segments, leases, monkeypatch):
    before = open_files()
    monkeypatch.setattr(module.mmap, "mmap", fails(errno.ENOMEM))
    segment = segments.write(pack(numbered(1)))
    assert open_files() == before + 1
    monkeypatch.undo()
    assert is_intact(read(leases, segments, segment)[0], 1)


def test_a_file_on_disk_is_used_once_and_let_go_of(segments, leases, monkeypatch):
    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    for n in range(3):
        segment = segments.write(pack(numbered(n)))
        assert is_intact(read(Leases(private=True), segments, segment)[0], n)
        segments.done(segment)
        segments.freed([segment.number])
    assert open_files() == before


def test_files_on_disk_that_nobody_reports_are_let_go_of_too(segments, monkeypatch):
    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    for n in range(3):
        segments.done(segments.write(pack(numbered(n))))
    assert open_files() == before


def test_other_errors_are_raised_and_leave_nothing_open(segments, monkeypatch):
    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        segments.write(pack(numbered(1)))
    assert open_files() == before


def test_files_on_different_devices_may_have_the_same_number(segments, monkeypatch):
    in_memory = segments.write(pack(numbered(1)))
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
    on_disk = segments.write(pack(numbered(2)))
    real = os.fstat
    leases = Leases(private=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_ino=7, st_dev=real(fd).st_dev, st_size=real(fd).st_size))
        assert is_intact(read(leases, segments, in_memory)[0], 1)
        assert is_intact(read(leases, segments, on_disk)[0], 2)


def test_closing_leaves_no_descriptor_open(leases):
    before = open_files()
    segments = Segments()
    made = [segments.write(pack(numbered(n))) for n in range(6)]
    held = [read(leases, segments, segment)[0] for segment in made]
    for segment in made[:4]:
        segments.done(segment)
    segments.freed([segment.number for segment in made[:2]])
    segments.close()
    segments.close()
    for segment in made:
        segments.done(segment)  # too late, and no matter
    segments.freed([segment.number for segment in made])
    assert all(is_intact(array, n) for n, array in enumerate(held))
    held.clear()
    leases.forget()
    assert open_files() == before


# Two processes.

READER = """
import os, socket, sys
import numpy as np
from penstock.transport.channel import Channel
from penstock.transport.packing import pack, unpack
from penstock.transport.segments import Leases, Segments

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
leases, segments, held, lent = Leases(private=sys.argv[2] == "private"), Segments(), {}, {}
while True:
    try:
        (what, argument), fds = channel.receive()
    except EOFError:
        break
    if what == "keep":
        (block,) = unpack(leases.read(argument, fds))
        held[argument.number] = block[0]
        del block
        channel.send("kept")
    elif what == "double":
        answer = segments.write(pack([held[argument].astype("u2") * 2]))
        channel.send(segments.ref(answer, 0), [answer.fd])
        segments.done(answer)
    elif what == "spoil":
        held[argument][:] = 77
        channel.send("spoilt")
    elif what == "drop":
        del held[argument]
        channel.send(leases.take_freed())
    elif what == "freed":
        segments.freed(argument)
        channel.send("freed")
    for fd in fds:
        os.close(fd)
segments.close()
print("open:", len(os.listdir("/proc/self/fd")))
"""


@pytest.fixture(params=["shared", "private"])
def reader(request):
    """Asks a reader in another process, and hears what it says at its end."""
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-c", READER, str(theirs.fileno()), request.param]
    process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    channel = Channel(ours)

    def ask(what, argument, fds=()):
        channel.send((what, argument), fds)
        return channel.receive()

    ask.private = request.param == "private"
    ask.end = lambda: (channel.close(), process.communicate(timeout=60)[0])[1]
    yield ask
    channel.close()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.timeout(60)
def test_two_processes(reader, segments):
    leases = Leases(private=False)
    before = open_files()
    first, second = (segments.write(pack(numbered(n))) for n in (1, 2))
    for segment in (first, second):
        assert reader("keep", segments.ref(segment, 0), [segment.fd]) == ("kept", [])
        segments.done(segment)
    third = segments.write(pack(numbered(3)))
    assert third.number not in (first.number, second.number)

    ref, fds = reader("double", first.number)
    ((doubled,),) = unpack(leases.read(ref, fds))
    os.close(fds[0])
    assert ref.owner != segments.owner
    assert is_intact(doubled, 2)

    assert reader("drop", first.number) == ({segments.owner: [first.number]}, [])
    segments.freed([first.number])
    again = segments.write(pack(numbered(4)))
    assert again.number == first.number
    reader("keep", segments.ref(again, 0), [again.fd])
    assert is_intact(doubled, 2), "the reader's answers are its own"
    number = ref.number
    ref, fds = reader("double", again.number)
    ((doubled_again,),) = unpack(leases.read(ref, fds))
    os.close(fds[0])
    assert ref.number != number, "the first answer is still referred to"
    assert (is_intact(doubled, 2), is_intact(doubled_again, 8)) == (True, True)

    del doubled
    assert leases.take_freed() == {ref.owner: [number]}
    reader("freed", [number])
    ref, fds = reader("double", second.number)
    os.close(fds[0])
    assert ref.number > number
    del doubled_again
    leases.forget()
    segments.close()
    assert open_files() <= before


@pytest.mark.timeout(60)
def test_what_another_process_writes(reader, segments):
    segment = segments.write(pack(numbered(1)))
    reader("keep", segments.ref(segment, 0), [segment.fd])
    reader("spoil", segment.number)
    assert is_intact(read(Leases(private=False), segments, segment)[0], 1 if reader.private else 77)


@pytest.mark.timeout(60)
def test_a_reader_that_lets_go_has_nothing_open(reader, segments):
    used = set()
    for n in range(20):
        segment = segments.write(pack(numbered(n)))
        used.add(segment)
        reader("keep", segments.ref(segment, 0), [segment.fd])
        reader("double", segment.number)[1]
        freed, _ = reader("drop", segment.number)
        segments.done(segment)
        segments.freed(freed[segments.owner])
    assert len(used) == 1
    kept = 0 if reader.private else 1  # a mapping
    assert reader.end() == f"open: {5 + kept}\n"  # standard ones, the channel, and the list itself


# Messages that arrive in pieces.


@pytest.fixture
def line():
    """A socket to write to, and the frames that come out at its other end."""
    one, other = socket.socketpair()
    frames = Frames(other)
    yield one, frames
    one.close()
    frames.close()
    other.close()


def numbered_file(number):
    file = anonymous_file()
    write_all(file, [bytes([number])], 0)
    return file


def send(sock, message, fds, cuts=()):
    """Send a message in pieces; its descriptors go with the first."""
    with frame(message, fds) as (data, beside):
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            socket.send_fds(sock, [data[start:stop]], beside if start == 0 else [])
            yield


def received(frames):
    try:
        return frames.receive()
    except BlockingIOError:
        return []


@settings(max_examples=150)
@given(data=st.data(), messages=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.booleans()), max_size=8))
def test_messages_in_any_pieces_arrive_whole_and_in_order(data, messages):
    before = open_files()
    one, other = socket.socketpair()
    frames = Frames(other)
    got = []
    for number, (size, count, large) in enumerate(messages):
        file = numbered_file(number)
        message = (number, b"x" * (channels.INLINE_BYTES + 1 if large else size))
        with frame(message, [file] * count) as (whole, _):
            cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
        for _ in send(one, message, [file] * count, cuts):
            if data.draw(st.booleans()):
                got += received(frames)
        os.close(file)
    one.close()
    with pytest.raises(EOFError):
        while True:
            got += frames.receive()
    assert [number for (number, _), _ in got] == list(range(len(messages)))
    for ((number, content), fds), (size, count, large) in zip(got, messages, strict=True):
        assert len(content) == (channels.INLINE_BYTES + 1 if large else size)
        assert [bytes(read_all(fd, 0, 1)) for fd in fds] == [bytes([number])] * count
        for fd in fds:
            os.close(fd)
    frames.close()
    other.close()
    assert open_files() == before


@pytest.mark.timeout(5, method="signal")
def test_a_message_byte_by_byte_and_never_a_wait(line):
    one, frames = line
    file = numbered_file(5)
    with frame(["a", "message"], [file]) as (data, _):
        cuts = range(1, len(data))
    pieces = send(one, ["a", "message"], [file], cuts)
    for _ in cuts:
        next(pieces)
        assert frames.receive() == []
        with pytest.raises(BlockingIOError):
            frames.receive()
    next(pieces)
    ((message, (fd,)),) = frames.receive()
    os.close(file)
    assert message == ["a", "message"]
    assert bytes(read_all(fd, 0, 1)) == b"\x05"
    os.close(fd)


@pytest.mark.timeout(5, method="signal")
def test_nothing_to_read_is_no_wait(line):
    with pytest.raises(BlockingIOError):
        line[1].receive()


@pytest.mark.timeout(5, method="signal")
def test_a_peer_that_does_not_read_is_not_waited_for(line):
    one, frames = line
    with selectors.DefaultSelector() as selector:
        sender = Connection(one.dup(), selector, None)
        for number in range(100):
            sender.send((number, b"x" * (channels.INLINE_BYTES // 2)))
        got = []
        while len(got) < 100:
            got += received(frames)
            sender.flush()
        sender.close()
    assert [number for (number, _), _ in got] == list(range(100))


def test_many_messages_at_once(line):
    one, frames = line
    for number in range(50):
        for _ in send(one, number, []):
            pass
    assert frames.receive() == [(number, []) for number in range(50)]


def test_as_many_descriptors_as_a_message_may_have(line):
    one, frames = line
    file = numbered_file(0)
    for _ in send(one, "few", []):
        pass
    for _ in send(one, "many", [file] * (channels.MAX_FDS - 1)):
        pass
    for _ in send(one, "one", [file]):
        pass
    os.close(file)
    got = received(frames) + received(frames)
    assert [(message, len(fds)) for message, fds in got] == [("few", 0), ("many", channels.MAX_FDS - 1), ("one", 1)]
    for _, fds in got:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("cut", [1, 5, 6, 7, 20, None])
def test_a_side_that_dies_within_a_message_is_gone_and_leaves_nothing_open(cut):
    before = open_files()
    one, other = socket.socketpair()
    frames = Frames(other)
    file = numbered_file(0)
    with frame(list(range(30)), [file]) as (data, beside):
        socket.send_fds(one, [data[:cut]], beside)
    one.close()
    got = frames.receive()
    assert len(got) == (1 if cut is None else 0)
    for _ in range(2):
        with pytest.raises(EOFError, match="the other side is gone"):
            frames.receive()
    for fd in (file, *(fd for _, fds in got for fd in fds)):
        os.close(fd)
    frames.close()
    other.close()
    assert open_files() == before


def test_descriptors_that_got_lost_are_an_end_too(line):
    one, frames = line
    file = numbered_file(0)
    with frame("message", [file]) as (data, _):
        one.sendall(data)
    os.close(file)
    with pytest.raises(EOFError, match="0 of 1 file descriptors arrived"):
        frames.receive()
