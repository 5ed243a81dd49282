"""The command as a user runs it: a process of its own, its output and its exit code."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.observe.result import RunResult, StepCount
from penstock.observe.summary import summary, warnings

HELP = Path(__file__).parent / "help"


@pytest.fixture
def penstock(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "penstock.cli", *arguments]
        environment = os.environ | {"COLUMNS": "100"}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)

    return run


def script(tmp_path, text, name="pipeline.py"):
    (tmp_path / name).write_text(f"import penstock as ps\n{text}")
    return name


DOUBLES = """
with ps.Pipeline() as p:
    p | ps.Create(range(5)) | ps.Map(lambda x: str(2 * x)) | ps.WriteToText("out")
"""


@pytest.mark.parametrize("words", ["version", "--version"])
def test_version(penstock, words):
    done = penstock(words)
    assert (done.returncode, done.stdout) == (0, f"penstock {ps.__version__}\n")


@pytest.mark.parametrize("command", ["", "run", "explain", "status", "verify"])
def test_help_is_what_the_file_says(penstock, command):
    shown = penstock(*filter(None, [command]), "--help").stdout
    assert shown.replace("cli.py", "penstock") == (HELP / f"{command or 'penstock'}.txt").read_text()


def test_run_a_script_with_a_with_block(penstock, tmp_path):
    done = penstock("run", script(tmp_path, DOUBLES))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("penstock: 5 rows in ")
    assert (tmp_path / "out" / "part-00000.txt").read_text() == "0\n2\n4\n6\n8\n"


def test_run_a_pipeline_that_the_script_only_builds(penstock, tmp_path):
    text = "import sys\np = ps.Pipeline()\np | ps.Create(sys.argv[1:]) | ps.Map(print)\n"
    done = penstock("run", "--workers", "0", script(tmp_path, text), "a", "--b")
    assert (done.returncode, done.stdout) == (0, "a\n--b\n")


SHOWS = """
import sys
print(sys.argv[1:])
p = ps.Pipeline()
p | ps.Create(["a"]) | ps.WriteToText("out")
"""


@pytest.mark.parametrize(
    ("arguments", "is_journaled", "passed"),
    [
        (["pipeline.py", "--run-dir", "run"], True, []),
        (
            ["pipeline.py", "a", "--b=1", "-c", "--run-dir=run", "d", "--wo", "-5"],
            True,
            ["a", "--b=1", "-c", "d", "--wo", "-5"],
        ),
        (
            ["--workers", "0", "pipeline.py", "a", "--", "--run-dir", "run", "--", "-h"],
            False,
            ["a", "--run-dir", "run", "--", "-h"],
        ),
        (["pipeline.py", "--", "--workers", "x"], False, ["--workers", "x"]),
        (["pipeline.py", "--", "--run-dri", "run"], False, ["--run-dri", "run"]),
        (["--run-dir", "run", "--", "pipeline.py", "--fresh"], True, ["--fresh"]),
    ],
)
def test_flags_on_both_sides_of_the_script(penstock, tmp_path, arguments, is_journaled, passed):
    script(tmp_path, SHOWS)
    done = penstock("run", *arguments)
    assert (done.returncode, done.stdout) == (0, f"{passed}\n"), done.stderr
    assert (tmp_path / "run" / "journal.db").exists() == is_journaled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: script"),
        (["--work", "1", "pipeline.py"], "--work: did you mean --workers?"),
        (["--run-dri", "run", "pipeline.py"], "--run-dri: did you mean --run-dir?"),
        (["--colour", "pipeline.py"], "unrecognized arguments: --colour"),
        (
            ["pipeline.py", "--workers", "x"],
            "argument --workers: 'x': expected a number, or two such as 2-8",
        ),
        (["pipeline.py", "--run-dir"], "argument --run-dir: expected one argument"),
    ],
)
def test_flags_that_are_wrong(penstock, tmp_path, arguments, message):
    script(tmp_path, SHOWS)
    done = penstock("run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: penstock run ")
    assert done.stderr.endswith(f"penstock run: error: {message}\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--run-dri", "r2"], "--run-dir"),
        (["--run-di=r2"], "--run-dir"),
        (["--run_dir", "r2"], "--run-dir"),
        (["-run-dir", "r2"], "--run-dir"),
        (["a", "--worker", "2"], "--workers"),
        (["--work", "2"], "--workers"),
        (["--fres"], "--fresh"),
        (["--no-progres"], "--no-progress"),
        (["--threads-per"], "--threads-per-worker"),
        (["--accept-changes=code"], "--accept-change"),
        (["--deterministc"], "--deterministic"),
    ],
)
def test_a_slip_in_a_flag_is_not_left_to_the_script(penstock, tmp_path, given, meant):
    script(tmp_path, SHOWS)
    done = penstock("run", "pipeline.py", *given)
    slip = next(each for each in given if each.startswith("-"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: {slip}: did you mean {meant}? pass arguments of the script after --\n")


def test_options_that_are_plainly_the_script_s_own(penstock, tmp_path):
    own = [
        "--input",
        "--input-dir",
        "--threads",
        "--run",
        "--run-id",
        "--num-workers",
        "--workdir",
        "--refresh",
        "--in",
        "-w",
        "-",
    ]
    own += ["--process", "--accept", "--no", "--model=runs-dir", "runs-dir", "--seed"]
    done = penstock("run", script(tmp_path, SHOWS), *own)
    assert (done.returncode, done.stdout) == (0, f"{own}\n"), done.stderr


def test_help_is_penstock_s_on_both_sides_of_the_script(penstock, tmp_path):
    assert penstock("run", script(tmp_path, SHOWS), "--help").stdout == penstock("run", "--help").stdout


@pytest.mark.parametrize("arguments", [["status", "run"], ["explain", "pipeline.py"]])
def test_a_reader_that_goes_away(penstock, tmp_path, arguments):
    assert penstock("run", script(tmp_path, DOUBLES), "--run-dir", "run").returncode == 0
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_flags_win_over_the_script(penstock, tmp_path):
    text = """
import os
print(os.getpid())
p = ps.Pipeline(workers=0)
p | ps.Create([1]) | ps.Map(lambda _: print(os.getpid()))
"""
    own, step = penstock("run", "--workers", "1", script(tmp_path, text)).stdout.split()
    assert own != step


def test_explain_runs_nothing(penstock, tmp_path):
    done = penstock("explain", script(tmp_path, DOUBLES))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "runs in this process (5 rows at the sources: at most 1000 run in this process)",
        "pool 0: this process, 1 thread",
        "",
        "stage 0 in pool 0 (starts at a source)",
        "  Create",
        "    Map(lambda at pipeline.py:4)",
        f"      -> WriteToText(out) -> {tmp_path}/out",
    ]
    assert not (tmp_path / "out").exists()


def test_explain_a_script_that_goes_on_to_use_the_rows(penstock, tmp_path):
    done = penstock("explain", script(tmp_path, "rows = (ps.Pipeline() | ps.Create([1])).collect()\nprint(rows[0])\n"))
    assert done.returncode == 0
    assert "stage 0" in done.stdout
    assert "the script stopped after that" in done.stderr


def test_explain_of_the_pipeline_itself_shows_stages_pools_and_models(tmp_path):
    class Model(ps.ModelHandler):
        pass

    p = ps.Pipeline(workers=3, threads_per_worker=2)
    rows = p | ps.Create(range(10)) | ps.Reshuffle()
    rows | "model" >> ps.RunInference(Model(max_batch_size=7)).with_resource_hints(min_ram="1GB")
    text = p.explain()
    assert "pool 1: up to 3 workers, 2 threads each" in text
    assert "model: one model copy in each worker process, batches of at most 7 rows" in text
    assert "(Reshuffle 'Reshuffle')" in text


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("p = ps.Pipeline()\np | ps.Create([1]) | 3\n", 2, "penstock: 3 on the right of | is not a transform"),
        ("p = ps.Pipeline()\np | ps.ReadFromText('none')\n", 2, "there is no such file"),
        ("x = 1\n", 2, "builds no pipeline"),
        ("p = ps.Pipeline()\np | ps.Create([0]) | 'inv' >> ps.Map(lambda x: 1 / x)\n", 1, "step 'inv': ZeroDivisionError"),
    ],
)
def test_mistakes_are_told_without_the_library_s_frames(penstock, tmp_path, text, code, message):
    done = penstock("run", script(tmp_path, text))
    assert done.returncode == code
    assert message in done.stderr
    assert "site-packages" not in done.stderr
    assert f"{os.sep}penstock{os.sep}" not in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


def test_a_row_that_penstock_itself_refuses_is_told_once(penstock, tmp_path):
    text = (
        "class Adds(ps.ModelHandler):\n"
        "    def load_model(self): return 1\n"
        "    def run_inference(self, batch, model, inference_args=None): return batch\n"
        "p = ps.Pipeline()\n"
        "p | ps.Create([[1]]) | ps.RunInference(Adds(columns=['x']))\n"
    )
    done = penstock("run", script(tmp_path, text))
    assert done.returncode == 1
    assert done.stderr.count("need dicts, or a table") == 1
    assert "Traceback" not in done.stderr


def test_a_crash_in_this_process_says_where(penstock, tmp_path):
    text = "import os\ndef crashes(x):\n    os.abort()\np = ps.Pipeline()\np | ps.Create([1]) | ps.Map(crashes)\n"
    done = penstock("run", script(tmp_path, text))
    assert done.returncode == -6
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in crashes\n" in done.stderr


FAILS = """
def check(x):
    if x % LIMIT == 0:
        raise ValueError(f"no {x % 2}\\nand more")
    return x
p = ps.Pipeline()
good, bad = p | ps.Create(range(1, 11)) | "Check" >> ps.Map(check).with_exception_handling()
good | "Again" >> ps.Map(lambda x: 1 // (x - 1)).with_exception_handling()
good | ps.Map(str) | ps.WriteToText("out")
"""


def test_the_last_line_says_how_many_rows_failed_and_where(penstock, tmp_path):
    done = penstock("run", script(tmp_path, FAILS.replace("LIMIT", "3")))
    assert done.returncode == 0, done.stderr
    told = rf"penstock: 10 rows in [\d.]+ s, 4 failed \(Check: 3, Again: 1\) -> {tmp_path}/out\n"
    assert re.fullmatch(told, done.stderr)


def test_a_step_that_failed_for_every_row_is_told_apart(penstock, tmp_path):
    done = penstock("run", script(tmp_path, FAILS.replace("LIMIT", "1")))
    assert done.returncode == 0, "that rows may fail was asked for"
    warning, last = done.stderr.splitlines()
    assert warning == "penstock: warning: step 'Check' failed for all 10 rows; the commonest error: 5 x ValueError: no 1"
    assert "10 failed (Check: 10)" in last


def test_failures_of_many_steps_are_put_together():
    counts = {f"step {n}": StepCount(100, 100 - n, n) for n in range(8)}
    told = summary(RunResult(run="", seconds=1, counts={"read": StepCount(0, 100)} | counts), None)
    assert told == ("100 rows in 1.0 s, 28 failed (step 7: 7, step 6: 6, step 5: 5, step 4: 4, step 3: 3, other steps: 3)")
    assert warnings(RunResult(run="", seconds=1, counts=counts)) == []


def test_a_missing_script(penstock):
    done = penstock("run", "none.py")
    assert (done.returncode, done.stderr) == (
        2,
        "penstock: none.py: no such file; expected a Python script that builds a pipeline\n",
    )


def test_an_error_of_the_script_itself_shows_its_own_traceback(penstock, tmp_path):
    done = penstock("run", script(tmp_path, "1 / 0\n"))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "cli.py" not in done.stderr


@pytest.mark.parametrize("content", [b"PK\x03\x04\x00\x00", b"\x80\x05\xff", b"PAR1\x00"])
def test_a_model_in_the_place_of_a_script_is_said_to_be_none(penstock, tmp_path, content):
    (tmp_path / "model.skops").write_bytes(content)
    done = penstock("explain", "model.skops")
    assert done.returncode == 2
    assert done.stderr == "penstock: model.skops: not a text file; expected a Python script that builds a pipeline\n"


def test_progress_in_a_terminal(tmp_path):
    text = """
class Model(ps.ModelHandler):
    def load_model(self): return None
    def run_inference(self, batch, model, inference_args=None): return batch
with ps.Pipeline(workers=1) as p:
    p | ps.Create(range(3000)) | "model" >> ps.RunInference(Model(max_batch_size=10))
"""
    name = script(tmp_path, text)
    terminal, child = pty.openpty()
    command = [sys.executable, "-m", "penstock.cli", "run", name]
    environment = os.environ | {"COLUMNS": "120"}
    subprocess.run(command, cwd=tmp_path, stderr=child, stdout=child, env=environment, timeout=60, check=True)
    os.close(child)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            break
    os.close(terminal)
    last = shown.decode().replace("\r", "").split("\n")[-3]
    assert "stage 0: model | 3,000 of 3,000 rows | " in last
    assert re.search(r"rows/s \| batch (10|9\.\d+) \| 0 failed", last)
