"""Wrong inputs and outputs, end to end: a clear error, and nothing half-written left as if it were whole."""

from __future__ import annotations

import gzip
import os
import traceback
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import GraphError, InputError, OutputError, TransientError
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
from penstock.io.files import list_files, without_secrets


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def leaves_nothing(out):
    return not out.exists() or not any(out.rglob("*"))


def whole_parquet(path):
    pq.write_table(pa.table({"x": list(range(1000))}), path)
    return path


def truncated_parquet(tmp_path):
    path = whole_parquet(tmp_path / "in.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    return ps.ReadFromParquet(str(path))


def bad_utf8(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"good\n" * 5000 + b"bad \xff\xfe\n" + b"good\n" * 5000)
    return ps.ReadFromText(str(path))


def bad_json(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1}\n' * 5000 + '{"x": \n' + '{"x": 1}\n' * 5000)
    return ps.ReadFromJsonl(str(path))


def short_csv_row(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("a,b,c\n" + "1,2,3\n" * 5000 + "1,2\n")
    return ps.ReadFromCsv(str(path))


def torn_gzip(tmp_path):
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(100_000).hex().encode())[:-5000])
    return ps.ReadFromText(str(path))


WRONG = [
    (lambda tmp_path: ps.ReadFromText(str(tmp_path / "missing.txt")), "missing.txt: there is no such file"),
    (lambda tmp_path: ps.ReadFromText(str(tmp_path / "*.none")), "no file matches"),
    (truncated_parquet, "in.parquet: not a whole Parquet file"),
    (bad_utf8, "in.txt.*UTF-8"),
    (bad_json, "in.jsonl.*JSON"),
    (short_csv_row, "in.csv.*2.*3"),
    (torn_gzip, "in.txt.gz"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_inputs(pipeline, tmp_path, out, make, message):
    p = pipeline()
    p | make(tmp_path) | ps.Map(str) | ps.WriteToText(str(out))
    with pytest.raises(InputError, match=message):
        p.run()
    assert leaves_nothing(out)


def test_a_model_file_that_is_not_there(pipeline, tmp_path, out):
    p = pipeline()
    model = SklearnModelHandlerNumpy(model_uri=str(tmp_path / "model.skops"))
    p | ps.Create([1]) | "m" >> ps.RunInference(model) | ps.WriteToJsonl(str(out))
    with pytest.raises(InputError, match="model.skops"):
        p.run()
    assert leaves_nothing(out)


def test_an_output_folder_that_cannot_be_written(pipeline, tmp_path):
    (tmp_path / "file").write_text("in the way")
    p = pipeline()
    ran = tmp_path / "ran"
    p | ps.Create(["x"]) | ps.Map(lambda x: ran.touch() or x) | ps.WriteToText(str(tmp_path / "file" / "out"))
    with pytest.raises(OutputError, match="file/out: cannot be written"):
        p.run()
    assert not ran.exists()


def test_an_output_that_is_there_already(pipeline, tmp_path, out):
    def write(rows, **options):
        with pipeline() as p:
            p | ps.Create(rows) | ps.WriteToText(str(out), **options)

    write([str(i) for i in range(5000)])
    before = {path.name: path.read_text() for path in out.iterdir()}
    with pytest.raises(OutputError, match="part file.*overwrite=True"):
        write(["new"])
    assert {path.name: path.read_text() for path in out.iterdir()} == before
    write(["new"], overwrite=True)
    assert [path.read_text() for path in out.iterdir()] == ["new\n"]


def test_a_failed_run_leaves_the_old_output_alone(pipeline, tmp_path, out):
    with pipeline() as p:
        p | ps.Create(["old"]) | ps.WriteToText(str(out))
    p = pipeline()
    p | ps.Create(range(5000)) | ps.Map(lambda x: str(1 // (4999 - x))) | ps.WriteToText(str(out), overwrite=True)
    with pytest.raises(ps.RowError, match="ZeroDivisionError"):
        p.run()
    assert [path.name for path in out.iterdir()] == ["part-00000.txt"]
    assert (out / "part-00000.txt").read_text() == "old\n"


def test_a_row_that_a_sink_cannot_take(pipeline, out):
    p = pipeline()
    p | ps.Create([*map(str, range(3000)), "two\nlines"]) | ps.WriteToText(str(out))
    with pytest.raises(ps.PenstockError, match="has a line end in it"):
        p.run()
    assert leaves_nothing(out)


class Flaky(ps.Source):
    """A source whose disk recovers after some tries."""

    def __init__(self, folder, failures):
        self.folder = folder
        self.failures = failures

    def splits(self, goal):
        return [0, 1, 2]

    def read(self, split):
        yield [split * 10]
        tries = self.folder / f"tries-{split}"
        with open(tries, "a+") as file:
            file.write("x")
            file.seek(0)
            if split == 1 and len(file.read()) <= self.failures:
                raise OSError(5, "Input/output error")
        yield [split * 10 + 1]


class Reads(ps.Source):
    """A source whose read() returns what it was given, and whose count() says what it is told to."""

    def __init__(self, read, count=None):
        self.given, self.counted = read, count

    def splits(self, goal):
        return [0]

    def read(self, split):
        return self.given() if callable(self.given) else self.given

    def count(self):
        return self.counted


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (["ab", "cd"], r"'rows'.*read\(\) yielded str; expected a list of rows.*yield \[row\]"),
        ([{"a": 1}], "yielded dict"),
        ([ps.PredictionResult(1, 2)], "yielded PredictionResult"),
        (None, "'rows': TypeError while reading"),
        (lambda: 1 / 0, "'rows': ZeroDivisionError while reading"),
    ],
)
def test_a_source_that_gives_rows_where_lists_of_rows_are_expected(pipeline, read, message):
    with pytest.raises(ps.PenstockError, match=message):
        (pipeline() | "rows" >> ps.Read(Reads(read))).collect()


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("counted", [2, 4])
def test_a_source_that_gives_other_rows_than_it_counts(pipeline, tmp_path, out, journaled, counted):
    p = pipeline(**({"run_dir": tmp_path / "run"} if journaled else {}))
    p | "rows" >> ps.Read(Reads([[1, 2], [3]], counted)) | ps.WriteToJsonl(out)
    with pytest.raises(InputError, match=rf"'rows': 3 rows were read, and the source has {counted} by its count\(\)"):
        p.run()


def test_a_source_may_give_record_batches(pipeline):
    batches = [pa.record_batch({"n": [1]}), pa.record_batch({"n": [2]})]
    steps = ps.MapBatches(lambda table: table, format="arrow")
    assert (pipeline() | ps.Read(Reads(batches)) | steps).collect() == [{"n": 1}, {"n": 2}]


def test_passing_trouble_is_tried_again(pipeline, tmp_path, out):
    p = pipeline()
    p | ps.Read(Flaky(tmp_path, failures=3)) | ps.Map(str) | ps.WriteToText(str(out))
    result = p.run()
    assert "".join(path.read_text() for path in sorted(out.iterdir())) == "0\n1\n10\n11\n20\n21\n"
    assert result.retries == 3


def test_trouble_that_does_not_pass_ends_the_run(pipeline, tmp_path, out):
    p = pipeline()
    p | "disk" >> ps.Read(Flaky(tmp_path, failures=100)) | ps.Map(str) | ps.WriteToText(str(out))
    with pytest.raises(TransientError, match="step 'disk': reading failed: OSError"):
        p.run()
    assert leaves_nothing(out)
    assert (tmp_path / "tries-1").read_text() == "xxxx"


def test_a_full_disk(pipeline, tmp_path):
    """/dev/full takes nothing: every write says that no space is left."""

    class Full(ps.Sink):
        def open(self, part):
            return FullWriter()

        def describe(self):
            return "/dev/full"

    class FullWriter(ps.Writer):
        def write(self, block):
            with open("/dev/full", "w") as file:
                file.write("x")

        def close(self):
            return None

        def abort(self):
            (tmp_path / "aborted").touch()

    p = pipeline()
    p | ps.Create(["x"]) | "w" >> ps.Write(Full())
    with pytest.raises(TransientError, match="step 'w': writing to /dev/full failed: OSError: .*No space left"):
        p.run()
    assert (tmp_path / "aborted").exists()


# Files that change, files that are both read and replaced.


def append(path):
    with open(path, "a") as file:
        file.write("one more\n")


def truncate(path):
    os.truncate(path, 1000)


def put_another(path):
    Path(f"{path}.new").write_text("other\n")
    os.replace(f"{path}.new", path)


def put_another_alike(path):
    """Of the same size and date."""
    before = os.stat(path)
    Path(f"{path}.new").write_text(Path(path).read_text().replace("1", "2"))
    os.utime(f"{path}.new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(f"{path}.new", path)


class Whole(ps.Source):
    """A source that says which files it reads, but not which of its splits reads which."""

    def __init__(self, path):
        self.path = path

    def inputs(self):
        return list_files(self.path)

    def splits(self, goal):
        return [0]

    def read(self, split):
        yield Path(self.path).read_text().splitlines()


def read_whole(path):
    return ps.Read(Whole(path))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        *((ps.ReadFromText, change) for change in (append, truncate, put_another, put_another_alike, os.remove)),
        (read_whole, append),
    ],
)
def test_an_input_that_changes_while_it_is_read_ends_the_run(pipeline, tmp_path, out, read, change):
    path = str(tmp_path / "in.txt")
    Path(path).write_text("".join(f"{n}\n" for n in range(20_000)))

    def change_it(row):
        if row == "7":
            change(path)
        return row

    p = pipeline()
    p | read(path) | ps.Map(change_it) | ps.WriteToText(out)
    with pytest.raises(InputError, match=r"in\.txt"):
        p.run()
    assert leaves_nothing(out)


def test_an_input_may_get_links_and_other_rights_while_it_is_read(pipeline, tmp_path, out):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{n}\n" for n in range(20_000)))

    def link_it(row):
        if row == "7":
            os.link(path, f"{path}.too")
            os.chmod(path, 0o400)
        return row

    with pipeline() as p:
        p | ps.ReadFromText(path) | ps.Map(link_it) | ps.WriteToText(out)
    assert sum(len(part.read_text().splitlines()) for part in out.iterdir()) == 20_000


def test_a_link_to_a_part_of_the_output_is_not_replaced_while_it_is_read(pipeline, tmp_path, out):
    with pipeline() as p:
        p | ps.Create(["a"]) | ps.WriteToText(out)
    (tmp_path / "in.txt").symlink_to(out / "part-00000.txt")
    p = pipeline()
    p | ps.ReadFromText(tmp_path / "in.txt") | ps.WriteToText(out, overwrite=True)
    with pytest.raises(OutputError, match=r"would replace 1 file\(s\) that this pipeline reads"):
        p.run()
    assert (out / "part-00000.txt").read_text() == "a\n"


# Addresses with secrets in them.

SIGNED = "memory://store/rows.jsonl?X-Amz-Signature=SECRET/SECRET&X-Amz-Date=1"


@pytest.fixture
def signed():
    store, path = fsspec.filesystem("memory"), SIGNED.removeprefix("memory:/")
    yield lambda text: store.pipe(path, text.encode())
    store.rm("/", recursive=True)


def test_the_signature_of_an_address_is_in_nothing_that_is_shown_or_kept(signed, tmp_path, out, capfd):
    signed('{"x": 1}\n')
    with ps.Pipeline(workers=0, run_dir=tmp_path / "run") as p:
        p | ps.ReadFromJsonl(SIGNED) | ps.WriteToJsonl(out)
    shown = [p.explain(), repr(p.result), (tmp_path / "run" / "manifest.json").read_text(), *capfd.readouterr()]
    assert p.result.counts["ReadFromJsonl(rows.jsonl?...)"].rows_out == 1
    assert "SECRET" not in "".join(shown)


@pytest.mark.parametrize("text", [None, '{"x": \n', '{"x": \n' * 50_000])
@pytest.mark.parametrize("journaled", [False, True])
def test_errors_do_not_show_the_signature_of_an_address(signed, tmp_path, out, text, journaled):
    if text is not None:
        signed(text)
    p = ps.Pipeline(workers=0, **({"run_dir": tmp_path / "run"} if journaled else {}))
    p | ps.ReadFromJsonl(SIGNED) | ps.WriteToJsonl(out)
    with pytest.raises(InputError, match=r"memory:///?store/rows\.jsonl\?\.\.\.") as caught:
        p.run()
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:p@ss@host/a/b.csv?token", "https://host/a/b.csv?..."),
        ("s3://bucket/key?versionId=3", "s3://bucket/key?..."),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("/folder/a?b=c", "/folder/a?b=c"),
        (
            "no 'https://host/a?sig=x/y'; see\nhttps://host/b?sig=z again",
            "no 'https://host/a?...'; see\nhttps://host/b?... again",
        ),
    ],
)
def test_what_is_shown_of_an_address(text, shown):
    assert without_secrets(text) == shown


def test_a_model_s_answers_do_not_hold_the_signature_of_its_address():
    handler = SklearnModelHandlerNumpy(SIGNED)
    assert handler.model_id() == "memory://store/rows.jsonl?..."
    with pytest.raises(InputError, match="model file") as caught:
        handler.load_model()
    assert "SECRET" not in str(caught.value)


def test_a_run_that_fails_leaves_no_folders(pipeline, tmp_path):
    (tmp_path / "kept").mkdir()
    p = pipeline()
    rows = p | ps.Create(range(2000)) | ps.Map(lambda x: 1 // (1999 - x))
    rows | ps.WriteToText(tmp_path / "new" / "deep" / "text")
    rows | ps.WriteToText(tmp_path / "kept" / "text")
    with pytest.raises(ps.RowError):
        p.run()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != "in"] == ["kept"]


@pytest.mark.parametrize(
    "step", [ps.Map(int).with_exception_handling(), ps.ParDo(iter).with_outputs("a").with_exception_handling()]
)
def test_two_things_where_one_collection_is_expected(step):
    both = ps.Pipeline() | ps.Create([1]) | step
    with pytest.raises(GraphError, match="gives two things.*good, failures = rows"):
        both | ps.Map(str)
