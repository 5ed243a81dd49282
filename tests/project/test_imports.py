"""What the package offers, and what importing it costs: no framework, no engine, nothing that is for a run alone."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import penstock
import penstock.beam
import penstock.testing


def test_all_is_sorted_and_complete():
    for module in (penstock, penstock.beam, penstock.testing):
        for name in module.__all__:
            getattr(module, name)  # some are imported now
        public = {name for name, value in vars(module).items() if not name.startswith("_") and not is_module(value)}
        assert list(module.__all__) == sorted(module.__all__)
        assert set(module.__all__) - {"__version__"} == public


def without_docstrings(name, public):
    """Names of what has none: the class or function, and methods that a class defines and no base describes."""
    text = public.__doc__ or ""
    if not text or text.startswith(f"{public.__name__}("):  # a dataclass has one that only repeats its fields
        yield name
    for own in vars(public) if isinstance(public, type) else ():
        member = getattr(public, own)
        if not own.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
            yield from [] if inspect.getdoc(member) else [f"{name}.{own}"]


def test_everything_public_has_a_docstring():
    named = {f"{m.__name__}.{n}": getattr(m, n) for m in (penstock, penstock.beam, penstock.testing) for n in m.__all__}
    ours = {name: value for name, value in named.items() if getattr(value, "__module__", "").startswith("penstock")}
    public = {name: value for name, value in ours.items() if isinstance(value, type) or inspect.isroutine(value)}
    assert [found for name, value in public.items() for found in without_docstrings(name, value)] == []


def is_module(value):
    return type(value).__name__ == "module"


def test_importing_penstock_imports_no_framework():
    script = "import sys, penstock; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "sklearn",
        "numpy",
        "pandas",
        "pyarrow",
        "fsspec",
        "ray",
        "apache_beam",
        "transformers",
        "sqlalchemy",
        "mlflow",
        "psycopg",
        "multiprocessing",
        "httpx",
    }
    assert "penstock" in loaded
    assert heavy & set(loaded) == set()


def test_importing_penstock_imports_no_engine_and_no_model_host():
    """What takes most of the time of an import, and is for a run."""
    script = "import sys, penstock; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    later = ("engines", "run", "steps", "journal", "models", "inference", "remote", "transport", "handlers", "io.parquet")
    assert [name for name in loaded if name.startswith(tuple(f"penstock.{each}" for each in later))] == []
    assert not {"cloudpickle", "asyncio", "socket", "subprocess", "sqlite3", "logging", "argparse", "json"} & set(loaded)


def test_who_looks_for_a_handler_in_penstock_itself_is_told_where_it_is():
    with pytest.raises(AttributeError, match=r"XGBoostModelHandlerNumpy'; from penstock\.handlers\.xgboost import XGBoost"):
        penstock.XGBoostModelHandlerNumpy  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'MyModelHandler'; `penstock handlers` lists those of frameworks"):
        penstock.MyModelHandler  # noqa: B018
    assert not hasattr(penstock, "nothing")


def test_importing_the_handlers_of_hugging_face_imports_no_framework():
    script = "import sys, penstock.handlers.huggingface; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "penstock.handlers.huggingface_pipelines" in loaded
    assert not {"torch", "transformers", "sentence_transformers", "sklearn", "pandas"} & set(loaded)
