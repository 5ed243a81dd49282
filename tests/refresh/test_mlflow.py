"""A registry of MLflow as a source of new versions of models: a real one, in SQLite."""

from __future__ import annotations

import http.server
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy
from penstock.io.mlflow import MlflowModel
from penstock.io.model_versions import ModelMetadata, ModelSource

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"


class Registry:
    """Registered models, each version with a scikit-learn model that multiplies by its number."""

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient

        self.folder = folder
        self.uri = f"sqlite:///{folder}/registry.db"
        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = self.client.create_experiment("training", artifact_location=str(folder / "artifacts"))

    def new_model(self, name: str, versions: int) -> None:
        self.client.create_registered_model(name)
        for number in range(1, versions + 1):
            run = self.client.create_run(self.experiment).info
            self.client.log_artifact(run.run_id, str(save_model(self.folder / "model.pkl", number)), "model")
            self.client.create_model_version(name, f"{run.artifact_uri}/model", run.run_id)

    def point(self, name: str, version: int, alias: str = "champion") -> None:
        self.client.set_registered_model_alias(name, alias, str(version))


def save_model(path: Path, factor: int) -> Path:
    model = LinearRegression().fit([[0.0], [1.0]], [0.0, float(factor)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(model))
    return path


def answer(path: str) -> int:
    return round(float(pickle.loads(Path(path).read_bytes()).predict([[1.0]])[0]))


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Registry:
    return Registry(tmp_path_factory.mktemp("mlflow"))


def test_the_version_that_an_alias_points_to(registry):
    registry.new_model("iris", versions=2)
    source = MlflowModel("iris", tracking_uri=registry.uri, artifact_path="model.pkl")
    assert isinstance(source, ModelSource)
    assert source.look() == []  # no alias yet
    for version in (1, 2, 1):
        registry.point("iris", version)
        (new,) = source.look()
        assert isinstance(new, ModelMetadata)
        assert new.model_name == f"iris/{version}"
        assert answer(new.model_id) == version
        assert new.model_id.startswith(str(registry.folder / "artifacts"))  # a local store needs no copy
        assert source.look() == []


class Rows(ps.Source):
    """Numbers, until a file says that it is enough: not so many that nothing else gets a turn."""

    def __init__(self, folder):
        self.enough = str(folder / "enough")

    def splits(self, goal):
        return [0, 1]

    def read(self, split):
        for at in range(0, 160_000, 8):
            if os.path.exists(self.enough):
                return
            yield [[float(row)] for row in range(at, at + 8)]
            time.sleep(0.002)


class Moves:
    """When the model of one version has answered, the alias is moved to the next; after the last, it is enough."""

    def __init__(self, folder, registry, name, factors):
        self.folder, self.uri, self.name, self.factors = folder, registry.uri, name, factors

    def __call__(self, answer):
        done = self.__dict__.setdefault("done", 0)
        row, given = answer.example[0], answer.inference
        if done < len(self.factors) and row and round(float(given) / row) == self.factors[done]:
            self.done += 1
            mark = self.folder / f"done-{done}"
            if self.done == len(self.factors):
                (self.folder / "enough").touch()
            elif not mark.exists():
                mark.touch()
                from mlflow import MlflowClient

                MlflowClient(tracking_uri=self.uri).set_registered_model_alias(
                    self.name, "champion", str(self.factors[self.done])
                )
        return answer


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 2}], ids=["here", "workers"])
def test_an_alias_that_is_moved_while_a_pipeline_runs_changes_its_model_and_changes_it_back(
    registry, remote, tmp_path, settings
):
    registry.point(remote, 1)
    source = MlflowModel(remote, tracking_uri=registry.uri, artifact_path="model.pkl")
    handler = SklearnModelHandlerNumpy("none.pkl", ModelFileType.PICKLE, trusted=True, max_batch_size=8)
    with ps.Pipeline(**settings) as p:
        new = p | ps.WatchModels(source, interval=0.2)
        answers = p | ps.Read(Rows(tmp_path)) | ps.RunInference(handler, model_metadata_pcoll=new)
        made = (answers | ps.Map(Moves(tmp_path, registry, remote, [1, 2, 4, 1]))).collect()
    given: dict[str, set[int]] = {}
    for each in made:
        if each.example[0]:
            given.setdefault(each.model_id, set()).add(round(float(each.inference) / each.example[0]))
    assert all(len(factors) == 1 for factors in given.values()), "each model_id is one version"
    assert sorted(factor for factors in given.values() for factor in factors) == [1, 1, 2, 4]
    assert p.result.metrics.counter("model_refreshes") == 4


def test_an_alias_that_is_deleted_and_set_again(registry, caplog):
    registry.new_model("deleted", versions=2)
    registry.point("deleted", 1, "staging")
    source = MlflowModel("deleted", "staging", tracking_uri=registry.uri)
    (first,) = source.look()
    assert answer(os.path.join(first.model_id, "model.pkl")) == 1  # all that the version holds is a folder
    registry.client.delete_registered_model_alias("deleted", "staging")
    assert [source.look(), source.look()] == [[], []]
    registry.point("deleted", 1, "staging")
    assert source.look() == []
    registry.point("deleted", 2, "staging")
    assert [each.model_name for each in source.look()] == ["deleted/2"]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("penstock")]
    assert len(told) == 2
    assert "no such model or alias yet" in told[0]
    assert "can be read again" in told[1]


def test_a_model_may_be_registered_after_the_first_look(registry):
    source = MlflowModel("later", tracking_uri=registry.uri, artifact_path="model.pkl")
    assert source.look() == []
    registry.new_model("later", versions=1)
    registry.point("later", 1)
    assert [each.model_name for each in source.look()] == ["later/1"]


def test_a_version_without_the_artifact_is_tried_again(registry, caplog):
    registry.new_model("lacking", versions=1)
    registry.point("lacking", 1)
    source = MlflowModel("lacking", tracking_uri=registry.uri, artifact_path="model.skops")
    assert source.look() == []
    assert "No such artifact" in caplog.text
    stored = registry.client.get_model_version("lacking", "1").source
    save_model(Path(stored) / "model.skops", 5)
    assert [answer(each.model_id) for each in source.look()] == [5]


class Artifacts(http.server.SimpleHTTPRequestHandler):
    """Serves a folder in the way of a tracking server that passes on artifacts."""

    root = "/api/2.0/mlflow-artifacts/artifacts"

    def do_GET(self):
        asked = urlsplit(self.path)
        if "path" not in parse_qs(asked.query):
            self.path = unquote(asked.path).removeprefix(self.root)
            return super().do_GET()
        folder = Path(self.directory, parse_qs(asked.query)["path"][0])
        files = [
            {"path": each.name, "is_dir": each.is_dir(), "file_size": each.stat().st_size}
            for each in (folder.iterdir() if folder.is_dir() else ())
        ]
        body = json.dumps({"files": files}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    """The URL of a store of artifacts with five versions, and the folder that is served."""
    for number in range(1, 6):
        save_model(tmp_path / "store" / f"v{number}" / "model.pkl", number)
    handler = partial(Artifacts, directory=str(tmp_path / "store"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}{Artifacts.root}", tmp_path / "store"
        serving.shutdown()
        thread.join()


@pytest.fixture
def remote(registry, server, request):
    """The name of a model whose versions lie on the server."""
    name = request.node.name
    registry.client.create_registered_model(name)
    for number in range(1, 6):
        registry.client.create_model_version(name, f"{server[0]}/v{number}")
    return name


def test_versions_are_downloaded_and_kept_for_who_loads_them_late(registry, remote):
    source = MlflowModel(remote, tracking_uri=registry.uri, artifact_path="model.pkl")
    paths = []
    for version in (1, 2, 3, 4, 5, 1):
        registry.point(remote, version)
        (new,) = source.look()
        assert answer(new.model_id) == version
        paths.append(new.model_id)
    assert [answer(path) for path in paths] == [1, 2, 3, 4, 5, 1]
    assert paths[0] == paths[-1]


def test_a_folder_of_the_user_keeps_all_and_serves_again(registry, remote, server, tmp_path):
    wanted = MlflowModel(remote, tracking_uri=registry.uri, dst_path=tmp_path / "kept")
    for version in range(1, 6):
        registry.point(remote, version)
        (new,) = wanted.look()
        assert answer(os.path.join(new.model_id, "model.pkl")) == version
    assert len(os.listdir(tmp_path / "kept")) == 5
    (server[1] / "v5" / "model.pkl").unlink()
    (again,) = MlflowModel(remote, tracking_uri=registry.uri, dst_path=tmp_path / "kept").look()
    assert again == new


def test_a_download_that_fails_leaves_nothing_and_is_tried_again(registry, remote, server, tmp_path, caplog):
    stored = server[1] / "v1" / "model.pkl"
    stored.rename(server[1] / "away")
    source = MlflowModel(remote, tracking_uri=registry.uri, artifact_path="model.pkl", dst_path=tmp_path / "kept")
    registry.point(remote, 1)
    assert [source.look(), source.look()] == [[], []]
    assert os.listdir(tmp_path / "kept") == []
    assert len([record for record in caplog.records if record.name.startswith("penstock")]) == 1
    (server[1] / "away").rename(stored)
    assert [answer(each.model_id) for each in source.look()] == [1]


FOLDERS = """
import os, sys
from penstock.io.mlflow import folder_of_process
made = folder_of_process("penstock-mlflow-")
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(made, os.path.isdir(made))
"""


def test_the_folder_of_a_process_goes_with_it_and_not_with_its_children():
    done = subprocess.run([sys.executable, "-c", FOLDERS], capture_output=True, text=True, check=True)
    path, was_there = done.stdout.split()
    assert "penstock-mlflow-" in path
    assert was_there == "True"
    assert not os.path.exists(path)


def test_a_registry_that_cannot_be_reached(caplog):
    source = MlflowModel("iris", tracking_uri="http://user:secret@127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert [source.look(), source.look()] == [[], []]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("penstock")]
    assert len(told) == 1
    assert "secret" not in told[0] + source.describe()
    assert source.describe() == "models:/iris@champion at http://127.0.0.1:9"


def test_what_will_never_work_is_an_error(registry):
    with pytest.raises(ps.UsageError, match="unsupported URI"):
        MlflowModel("iris", tracking_uri="nosuch://registry").look()
    with pytest.raises(ps.UsageError, match="Invalid alias name"):
        MlflowModel("iris", "not an alias!", tracking_uri=registry.uri).look()
    for settings in ({"name": ""}, {"alias": None}, {"artifact_path": "/etc/passwd"}, {"artifact_path": "../other"}):
        with pytest.raises(ps.UsageError, match="MlflowModel"):
            MlflowModel(**{"name": "iris", **settings})


def test_without_mlflow_it_says_what_to_install():
    script = "import sys; sys.modules['mlflow'] = None\nfrom penstock.io.mlflow import MlflowModel; MlflowModel('iris')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "MissingPackageError: mlflow is not installed; run: pip install 'penstock[mlflow]'" in done.stderr
