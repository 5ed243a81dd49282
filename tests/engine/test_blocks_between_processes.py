"""Blocks on their way between processes: packed, cut, written to files, sent over a channel."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.blocks import byte_size, row_count, rows_of
from penstock.engines.local.wire import take_files, travelling
from penstock.errors import NotShippableError
from penstock.run import chunks as chunk_files
from penstock.run.chunks import AnonymousFile, Chunk, Cutter, KeptRows, PackedShipment
from penstock.transport import channel as channels
from penstock.transport.channel import Channel, anonymous_file, read_all, write_all
from penstock.transport.packing import ALIGNMENT, pack, unpack


def packed(*blocks):
    return bytearray(b"".join(bytes(buffer) for block in blocks for buffer in pack(block, "step")))


def packed_size(block):
    return sum(memoryview(buffer).nbytes for buffer in pack(block, "step"))


def native(array):
    return array.astype(array.dtype.newbyteorder("="))  # NumPy itself gives up a foreign byte order now and then


def same(one, other):
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (native(one).dtype, one.shape) == (native(other).dtype, other.shape)
            and native(one).tobytes() == native(other).tobytes()
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# Round trips.

dtypes = st.sampled_from(["u1", "i2", "f4", "f8", "c16", "?", "S3", "M8[s]"])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    dtype, shape = np.dtype(draw(dtypes)), draw(shapes)
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    way = draw(st.sampled_from(["as it is", "fortran", "reversed", "transposed"]))
    if way == "fortran":
        return np.asfortranarray(array)
    if way == "reversed" and array.ndim:
        return array[::-1]
    return array.T if way == "transposed" else array


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
columns = st.sampled_from(
    [
        pa.array([1, None, 3, 4]),
        pa.array(["a", "", None, "dé"]),
        pa.array([[1], [], None, [2, 3]]),
        pa.array([{"a": 1}, {"a": None}, None, {"a": 4}]),
        pa.array([True, False, None, True]),
        pa.array(["x", "y", "x", None]).dictionary_encode(),
        pa.nulls(4),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8.0)), 2),
    ]
)


@st.composite
def tables(draw):
    table = pa.table({f"c{n}": draw(columns) for n in range(draw(st.integers(1, 3)))})
    if draw(st.booleans()):
        table = pa.concat_tables([table, table])  # several chunks
    start = draw(st.integers(0, table.num_rows))
    return table.slice(start, draw(st.integers(0, table.num_rows)))


@settings(max_examples=200)
@given(st.lists(st.lists(values, max_size=4) | tables(), max_size=3))
def test_blocks_come_back_as_they_were(blocks):
    again = list(unpack(memoryview(packed(*blocks))))
    assert len(again) == len(blocks)
    for before, after in zip(blocks, again, strict=True):
        if isinstance(before, list):
            assert same(before, after)
        else:
            after.validate(full=True)
            assert after.schema == before.schema
            assert after.equals(before)


@settings(max_examples=100)
@given(st.lists(arrays(), min_size=1, max_size=5), st.integers(0, 40))
def test_arrays_can_be_written_to_and_lie_straight(rows, pickled_bytes):
    block = [b"x" * pickled_bytes, *rows]
    _, *again = next(unpack(memoryview(packed(block))))
    for before, after in zip(rows, again, strict=True):
        assert after.flags.writeable
        assert after.flags.aligned
        after.fill(0)
        assert not np.shares_memory(before, after)


def test_arrays_do_not_share_what_they_are_read_from():
    chunk = Chunk(1, 0, data=bytes(packed([np.zeros(3)])))
    (one,), (two,) = next(chunk.read()), next(chunk.read())
    one[:] = 7
    assert two.tolist() == [0, 0, 0]


def test_every_buffer_starts_at_a_multiple_of_the_alignment():
    at = 0
    for number, buffer in enumerate(pack([np.zeros(3), np.zeros((2, 5), "u1"), "text"], "step")):
        if number % 2 == 0:
            assert at % ALIGNMENT == 0
        at += memoryview(buffer).nbytes
    assert at % ALIGNMENT == 0


def test_arrays_are_not_copied_into_the_pickle():
    array = np.zeros(100_000)
    assert any(np.shares_memory(array, np.asarray(buffer)) for buffer in pack([array], "step") if len(memoryview(buffer)))


@pytest.mark.parametrize(
    "column",
    [
        pa.array(range(50_000)),
        pa.array([f"value {i}" for i in range(50_000)]),
        pa.array([[i, i] for i in range(50_000)]),
        pa.array([{"a": i, "b": str(i)} for i in range(50_000)]),
        pa.array([i % 3 == 0 for i in range(50_000)] * 20),
        pa.FixedSizeListArray.from_arrays(pa.array(range(100_000)), 2),
    ],
    ids=lambda column: str(column.type),
)
def test_a_slice_of_a_table_is_packed_without_the_rest(column):
    table = pa.table({"x": column})
    part = table.slice(1000, 10)
    assert packed_size(part) < 2000 < packed_size(table)
    assert next(unpack(memoryview(packed(part)))).to_pylist() == part.to_pylist()


def test_rows_that_are_views_of_one_array_are_packed_once_each():
    matrix = np.arange(200_000.0).reshape(1000, 200)
    assert packed_size(list(matrix)) < 2 * matrix.nbytes


def test_whatever_map_batches_may_return_can_be_packed():
    rows = ps.Pipeline(workers=1) | ps.Create([{"x": 1}, {"x": 2}])
    made = rows | ps.MapBatches(lambda table: table.to_batches()[0], format="arrow")
    assert made.collect() == [{"x": 1}, {"x": 2}]


# Rows that cannot travel.


class Stubborn:
    def __reduce__(self):
        raise TypeError("I stay here")


class Quiet(Stubborn):
    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("row", "kind", "why"),
    [
        (threading.Lock(), "lock", "cannot pickle"),
        ((x for x in [1]), "generator", "cannot pickle"),
        (Stubborn(), "Stubborn", "TypeError: I stay here"),
        (Quiet(), "Quiet", "Quiet whose repr raises ValueError"),
        ([1, threading.Lock()], "list", "cannot pickle"),
    ],
)
def test_a_row_that_cannot_be_pickled_is_named(row, kind, why):
    with pytest.raises(NotShippableError) as caught:
        pack([1, "two", row, 4], "my step")
    message = str(caught.value)
    assert message.startswith(f"step 'my step': a row of type {kind} cannot be sent to another process")
    assert why in message
    assert "ps.Map(...)" in message
    assert caught.value.__cause__ is not None


def test_a_shipment_names_the_step_too():
    shipment = PackedShipment("my step", Cutter(False))
    with pytest.raises(NotShippableError, match="step 'my step'.*type lock"):
        shipment.add([threading.Lock()])


# Cutting.

blocks_to_cut = st.lists(
    st.lists(st.integers() | st.text(max_size=30), min_size=1, max_size=120)
    | st.integers(1, 120).map(lambda n: pa.table({"x": range(n), "y": ["some text"] * n})),
    max_size=6,
)


@settings(max_examples=150)
@given(blocks=blocks_to_cut, spread=st.booleans(), chunk_bytes=st.sampled_from([1, 64, 500, 1 << 20]))
def test_pieces_are_the_rows_in_order_within_bounds(blocks, spread, chunk_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_files, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(chunk_files, "SPREAD_ROWS", (4, 20))
        cutter = Cutter(spread)
        rows, chunks = [], [[]]
        for block in blocks:
            cut = list(cutter.cut(block))
            assert [row for piece, _ in cut for row in rows_of(piece)] == rows_of(block)
            rows += rows_of(block)
            for piece, full in cut:
                assert row_count(piece) > 0
                chunks[-1].append(piece)
                if full:
                    chunks.append([])
    sizes = [sum(map(row_count, chunk)) for chunk in chunks]
    assert sum(sizes) == len(rows)
    assert all(sizes[:-1]), "an empty chunk"
    if spread:
        bounds = [4, 8, 16] + [20] * len(sizes)
        assert all(size <= bound for size, bound in zip(sizes, bounds, strict=False))
    if chunk_bytes == 1:
        assert all(size == 1 for size in sizes[:-1])
    if not spread and chunk_bytes == 1 << 20:
        assert len(chunks) == 1, "cut for no reason"


def test_chunks_grow_where_rows_are_spread():
    ends = [row_count(piece) for piece, full in Cutter(True).cut(list(range(100_000))) if full]
    assert ends[:4] == [16, 32, 64, 128]
    assert max(ends) == chunk_files.SPREAD_ROWS[1]


def test_a_chunk_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 10_000)
    cutter = Cutter(False)
    chunk, sizes = 0, []
    for piece, full in cutter.cut([np.zeros(100) for _ in range(100)]):
        chunk += byte_size(piece)
        if full:
            sizes.append(chunk)
            chunk = 0
    assert sizes
    assert all(10_000 - 800 < size <= 10_000 + 800 for size in sizes)


# Shipments.


@pytest.fixture
def small(monkeypatch):
    """Limits that a test reaches: chunks of 4 kB, 10 kB in memory."""
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(chunk_files, "MEMORY_BYTES", 10_000)
    monkeypatch.setattr(chunk_files, "INLINE_BYTES", 2000)


def is_on_disk(fd):
    return not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")


def arrived(chunks):
    """The chunks as the receiver of a message sees them, which has descriptors of its own."""
    fds = []
    sent = pickle.loads(pickle.dumps([travelling(chunk, fds) for chunk in chunks]))
    take_files(sent, [os.dup(fd) for fd in fds])
    return sent


def fds_of(shipment):
    return [file.fd for file in shipment.files]


def test_an_empty_shipment():
    shipment = PackedShipment("step", Cutter(False))
    assert shipment.seal() == []
    assert shipment.files == []


def test_what_is_small_travels_in_the_message():
    shipment = PackedShipment("step", Cutter(False))
    shipment.add([1, 2])
    shipment.add([3])
    (chunk,) = shipment.seal()
    assert (chunk.rows, chunk.size, shipment.files) == (3, len(chunk.data), [])
    assert list(pickle.loads(pickle.dumps(chunk)).read()) == [[1, 2], [3]]


def test_what_is_larger_goes_to_memory_and_what_is_more_to_disk(small):
    shipment = PackedShipment("step", Cutter(False))
    rows = [np.full(40, number) for number in range(200)]
    for at in range(0, 200, 10):
        shipment.add(rows[at : at + 10])
    made = shipment.seal()
    try:
        assert len(shipment.files) == 2
        if sys.platform == "linux":
            assert [is_on_disk(fd) for fd in fds_of(shipment)] == [False, True]
        chunks = arrived(made)
        assert {chunk.file.fd for chunk in chunks}.isdisjoint(fds_of(shipment))
        assert sum(chunk.rows for chunk in chunks) == 200
        assert same([row for chunk in chunks for block in chunk.read() for row in block], rows)
        in_memory = [chunk for chunk in chunks if chunk.file is chunks[0].file]
        assert sum(chunk.size for chunk in in_memory) < 10_000 + 2 * 4000
    finally:
        shipment.discard()
    for chunk in chunks:
        chunk.file.release()


def test_discard_closes_the_files(small):
    shipment = PackedShipment("step", Cutter(False))
    shipment.add([b"x" * 900 for _ in range(50)])
    fds = fds_of(shipment)
    assert fds
    shipment.discard()
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_chunk_that_cannot_be_written_leaves_no_file(small, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(chunk_files, "write_all", full)
    shipment = PackedShipment("step", Cutter(False))
    with pytest.raises(OSError, match="no space"):
        shipment.add([b"x" * 900 for _ in range(50)])
    (fd,) = fds_of(shipment)
    shipment.discard()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_descriptors_are_numbered_within_the_whole_message(small):
    shipments = [PackedShipment("step", Cutter(False)) for _ in range(2)]
    for number, shipment in enumerate(shipments):
        shipment.add([bytes([number]) * 900 for _ in range(30)])
    fds = []
    first, second = ({travelling(chunk, fds).file for chunk in shipment.seal()} for shipment in shipments)
    assert fds == [fd for shipment in shipments for fd in fds_of(shipment)]
    assert first == set(range(len(shipments[0].files)))
    assert second == set(range(len(shipments[0].files), len(fds)))
    for shipment in shipments:
        shipment.discard()


def test_a_file_is_closed_with_its_last_chunk():
    fd = anonymous_file()
    file = AnonymousFile(fd)
    assert file.shared() is file.shared() is file
    file.release()
    os.fstat(fd)
    file.release()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_blocks_that_stay_are_not_copied():
    shipment = KeptRows()
    blocks = [[1, 2], pa.table({"x": [1]}), [threading.Lock()]]
    for block in blocks:
        shipment.add(block)
    (kept,) = shipment.seal()
    assert all(one is other for one, other in zip(kept.read(), blocks, strict=True))
    assert kept.rows == 4


def test_packed_blocks_can_stay_and_the_many_of_them_are_on_disk(small):
    shipment = PackedShipment("step", Cutter(False))
    rows = [np.full(40, number) for number in range(200)]
    for at in range(0, 200, 10):
        shipment.add(rows[at : at + 10])
    shipment.seal()
    assert same([row for chunk in shipment.chunks for block in chunk.read() for row in block], rows)
    assert sum(chunk.rows for chunk in shipment.chunks) == 200
    assert [is_on_disk(fd) for fd in fds_of(shipment)] == [False, True]
    for chunk in shipment.chunks:
        chunk.release()
    for fd in fds_of(shipment):
        with pytest.raises(OSError):
            os.fstat(fd)


# Files and channels.


def test_files_are_written_and_read_piece_by_piece():
    for on_disk in (False, True):
        fd = anonymous_file(on_disk)
        assert write_all(fd, [b"ab", memoryview(b""), np.arange(2, dtype="u1"), pa.py_buffer(b"cd")], 3) == 6
        assert bytes(read_all(fd, 3, 6)) == b"ab\x00\x01cd"
        with pytest.raises(EOFError, match="1 bytes early"):
            read_all(fd, 3, 7)
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    ends = Channel(one), Channel(other)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "size", [0, 1, channels.INLINE_BYTES - 100, channels.INLINE_BYTES, channels.INLINE_BYTES + 1, 20 << 20]
)
def test_messages_of_any_size_do_not_block_the_sender(pair, size):
    one, other = pair
    one.send({"data": b"x" * size})  # nobody reads yet
    message, fds = other.receive()
    assert (len(message["data"]), fds) == (size, [])


def test_messages_keep_their_order_and_their_descriptors(pair):
    one, other = pair
    files = []
    for number, size in enumerate([10, 1 << 20, 10, 10]):
        file = anonymous_file()
        write_all(file, [bytes([number])], 0)
        one.send((number, b"x" * size), [file] * (number % 3))
        os.close(file)
    for number in range(4):
        (seen, _), fds = other.receive()
        assert seen == number
        assert [bytes(read_all(fd, 0, 1)) for fd in fds] == [bytes([number])] * (number % 3)
        files += fds
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["inline", "in a file"])
def test_many_descriptors(pair, size):
    one, other = pair
    file = anonymous_file()
    try:
        one.send(b"x" * size, [file] * (channels.MAX_FDS - 1))
        message, fds = other.receive()
        assert len(message) == size
        assert len(set(fds)) == channels.MAX_FDS - 1
        for fd in fds:
            os.close(fd)
        with pytest.raises(ValueError, match="250 file descriptors in one message"):
            one.send(b"", [file] * channels.MAX_FDS)
    finally:
        os.close(file)


def test_a_large_message_leaves_no_descriptor_open(pair):
    one, other = pair
    one.send(b"warm up")
    other.receive()
    before = os.listdir("/proc/self/fd")
    one.send(b"x" * (1 << 20))
    other.receive()
    assert os.listdir("/proc/self/fd") == before


def test_the_end_of_the_other_side(pair):
    one, other = pair
    one.send("last words")
    one.close()
    assert other.receive() == ("last words", [])
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError):
        other.send("hello?")


@pytest.mark.parametrize("cut", [1, 5, 6, 7, 20])
def test_a_side_that_dies_in_the_middle_of_a_message(pair, cut):
    one, other = pair
    whole, spy = socket.socketpair()
    Channel(whole).send(list(range(30)))
    data = spy.recv(4096)
    assert len(data) > 20
    one.sock.sendall(data[:cut])
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    whole.close()
    spy.close()


@pytest.mark.timeout(20)
def test_a_message_that_comes_byte_by_byte(pair):
    one, other = pair
    whole, spy = socket.socketpair()
    Channel(whole).send(["a", "message"])
    data = spy.recv(4096)

    def trickle():
        for byte in data:
            one.sock.sendall(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()
    assert other.receive() == (["a", "message"], [])
    sender.join()
    whole.close()
    spy.close()


def test_what_is_defined_here_travels_by_value(pair):
    one, other = pair
    one.send(lambda x: x + 1)
    function, _ = other.receive()
    assert function(1) == 2


def test_tensors_that_are_views_pack_their_own_elements_only():
    import torch

    rows = list(torch.arange(100_000.0).reshape(1000, 100))
    data = packed(rows)
    assert len(data) < 3 * 400_000
    (again,) = unpack(memoryview(data))
    assert all(torch.equal(one, other) for one, other in zip(rows, again, strict=True))
    again[0][0] = 7  # and can be changed
    odd = [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.ones(3, 2).T,
    ]
    (back,) = unpack(memoryview(packed(odd)))
    assert [(t.dtype, t.requires_grad, t.layout) for t in back] == [(t.dtype, t.requires_grad, t.layout) for t in odd]
    assert torch.equal(back[3], odd[3])
