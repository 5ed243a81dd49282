"""Programs that were written for Beam's RunInference. Each is given the module that it imports its names from: that is all
that changes between Beam's and Penstock's; it gives its outputs by name."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import apache_beam as beam
import numpy as np
from apache_beam.transforms import window


def plain(base, p, folder):
    class Squares(base.ModelHandler):
        def __init__(self):
            super().__init__(min_batch_size=2, max_batch_size=7)

        def load_model(self):
            return lambda number: number * number

        def run_inference(self, batch, model, inference_args=None):
            return [base.PredictionResult(each, model(each), "squares") for each in batch]

    return {"answers": p | beam.Create(range(50)) | base.RunInference(Squares())}


def never_calls_init(base, p, folder):
    class Adds(base.ModelHandler):
        def __init__(self, much):
            self.much = much

        def load_model(self):
            return Weights(self.much)

        def run_inference(self, batch, model, inference_args=None):
            return (each + model.much for each in batch)

        def batch_elements_kwargs(self):
            return {"min_batch_size": 3, "max_batch_size": 10, "target_batch_overhead": 0.1}

    return {"answers": p | beam.Create(range(30)) | base.RunInference(Adds(100))}


def generator_answers(base, p, folder):
    class Yields(base.ModelHandler):
        def load_model(self):
            return Weights(2)

        def run_inference(self, batch, model, inference_args=None):
            for each in batch:
                yield base.PredictionResult(each, each * model.much)

    return {"answers": p | beam.Create(range(30)) | base.RunInference(Yields())}


class Weights:
    """A model of one number."""

    def __init__(self, much):
        self.much = much

    def plus(self, row):
        return row + self.much


def adding(base):
    class Adding(base.ModelHandler):
        def __init__(self, much, **settings):
            super().__init__(**settings)
            self.much = much

        def load_model(self):
            return Weights(self.much)

        def run_inference(self, batch, model, inference_args=None):
            more = (inference_args or {}).get("more", 0)
            return [model.plus(each) + more for each in batch]

    return Adding


def keyed(base, p, folder):
    rows = [(f"key {number % 3}", number) for number in range(40)]
    return {"answers": p | beam.Create(rows) | base.RunInference(base.KeyedModelHandler(adding(base)(5)))}


def maybe_keyed(base, p, folder):
    with_keys = p | "Keyed" >> beam.Create([("a", 1), ("b", 2)])
    without = p | "Unkeyed" >> beam.Create([1, 2])
    handler = base.MaybeKeyedModelHandler(adding(base)(5))
    return {
        "keyed": with_keys | "1" >> base.RunInference(handler),
        "unkeyed": without | "2" >> base.RunInference(handler),
    }


def model_per_key(base, p, folder):
    adds = adding(base)
    models = [base.KeyModelMapping(["a", "b"], adds(1)), base.KeyModelMapping(keys=["c"], mh=adds(1000))]
    handler = base.KeyedModelHandler(models, max_models_per_worker_hint=2)
    rows = [("abc"[number % 3], number) for number in range(30)]
    return {"answers": p | beam.Create(rows) | base.RunInference(handler)}


def functions_around(base, p, folder):
    handler = (
        adding(base)(1)
        .with_preprocess_fn(lambda number: number * 10)
        .with_preprocess_fn(int)
        .with_postprocess_fn(lambda number: number + 0.5)
        .with_postprocess_fn(str)
    )
    return {"answers": p | beam.Create(["1", "2", "3"]) | base.RunInference(handler)}


def inference_args(base, p, folder):
    return {"answers": p | beam.Create(range(20)) | base.RunInference(adding(base)(1), inference_args={"more": 100})}


def no_batching(base, p, folder):
    class Means(base.ModelHandler):
        def load_model(self):
            return Weights(0)

        def run_inference(self, batch, model, inference_args=None):
            mean = sum(batch) / len(batch)
            return [(each, mean) for each in batch]

    handler = Means().with_no_batching().with_preprocess_fn(lambda batch: [each * 2 for each in batch])
    return {"answers": p | beam.Create([[1, 2, 3], [10, 20], [5]]) | base.RunInference(handler)}


def failing_rows(base, p, folder):
    class Halves(base.ModelHandler):
        def __init__(self):
            super().__init__(max_batch_size=1)

        def load_model(self):
            return Weights(2)

        def run_inference(self, batch, model, inference_args=None):
            if batch[0] % 10 == 3:
                raise ValueError(f"{batch[0]} is a bad number")
            return [each / model.much for each in batch]

    handler = (
        Halves()
        .with_preprocess_fn(refuse(5, KeyError))
        .with_preprocess_fn(refuse(6, TypeError))
        .with_postprocess_fn(refuse(10.0, RuntimeError))
    )
    main, other = p | beam.Create(range(40)) | base.RunInference(handler).with_exception_handling()
    outputs = {"answers": main, "inferences": other.failed_inferences}
    for number, each in enumerate(other.failed_preprocessing):
        outputs[f"preprocessing {number}"] = each
    for number, each in enumerate(other.failed_postprocessing):
        outputs[f"postprocessing {number}"] = each
    return {name: each if name == "answers" else each | f"Told {name}" >> beam.Map(told) for name, each in outputs.items()}


def refuse(bad, error):
    def function(value):
        if value == bad:
            raise error(f"{value} is not for me")
        return value

    return function


def told(failed):
    """Beam's dead letters of a model are batches, here of one."""
    row, (kind, text, traceback) = failed
    assert any("Traceback" in line for line in traceback)
    return row if isinstance(row, list) else [row], kind.__name__, text.split("(")[0]


def from_file(base):
    class FromFile(base.ModelHandler):
        def __init__(self, path, **settings):
            super().__init__(**settings)
            self.path = path

        def load_model(self):
            return Weights(json.loads(Path(self.path).read_text()))

        def run_inference(self, batch, model, inference_args=None):
            return [each + model.much for each in batch]

        def update_model_path(self, model_path=None):
            self.path = model_path or self.path

    return FromFile


def written(folder, name, much):
    path = Path(folder) / name
    path.write_text(json.dumps(much))
    return str(path)


def refresh_by_side_input(base, p, folder):
    old, new = written(folder, "old.json", 1), written(folder, "new.json", 1000)
    metadata = p | "Versions" >> beam.Create([base.ModelMetadata(model_id=new, model_name="new")])
    handler = from_file(base)(old)
    return {"answers": p | beam.Create(range(20)) | base.RunInference(handler, model_metadata_pcoll=metadata)}


def refresh_without_a_version(base, p, folder):
    """No version came: the model is the one that the handler names."""
    metadata = p | "Versions" >> beam.Create([]) | beam.Map(lambda _: base.ModelMetadata("", ""))
    handler = from_file(base)(written(folder, "old.json", 1))
    return {"answers": p | beam.Create(range(20)) | base.RunInference(handler, model_metadata_pcoll=metadata)}


def refresh_by_pattern(base, p, folder):
    old = written(folder, "old.json", 1)
    os.replace(written(folder, "new", 1000), f"{folder}/model-2.json")  # at once: it is never half there
    pattern, until = f"{folder}/model-*.json", time.time() + 1
    # It is looked at once. The interval is a window of Beam's: where one ends meanwhile, its look gives two versions.
    step = base.RunInference(from_file(base)(old), watch_model_pattern=pattern, interval=86_400, stop_timestamp=until)
    return {"answers": p | beam.Create(range(20)) | step}


def refresh_per_key(base, p, folder):
    of_file = from_file(base)
    paths = {key: written(folder, f"{key}.json", much) for key, much in [("a", 1), ("b", 2), ("c", 1000)]}
    models = [base.KeyModelMapping(["a"], of_file(paths["a"])), base.KeyModelMapping(["b"], of_file(paths["b"]))]
    new = [base.KeyModelPathMapping(["a"], paths["c"], "new"), base.KeyModelPathMapping(["b"], paths["b"], "same")]
    metadata = p | "Versions" >> beam.Create([new])
    step = base.RunInference(base.KeyedModelHandler(models), model_metadata_pcoll=metadata)
    return {"answers": p | beam.Create([("ab"[number % 2], number) for number in range(20)]) | step}


def remote(base, p, folder):
    class Service(base.RemoteModelHandler):
        def __init__(self):
            super().__init__(namespace="service", num_retries=3, throttle_delay_secs=0)

        def create_client(self):
            return Weights(3)

        def request(self, batch, model, inference_args=None):
            return [base.PredictionResult(each, each * model.much) for each in batch]

    return {"answers": p | beam.Create(range(20)) | base.RunInference(Service())}


def pytorch(base, p, folder):
    import torch
    from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor

    path = f"{folder}/linear.pt"
    torch.save({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.tensor([1.0])}, path)
    handler = PytorchModelHandlerTensor(path, torch.nn.Linear, {"in_features": 2, "out_features": 1}, max_batch_size=8)
    keyed = base.KeyedModelHandler(handler)
    rows = [torch.tensor([float(number), float(-number)]) for number in range(20)]
    return {
        "answers": p | beam.Create(rows) | base.RunInference(handler) | beam.Map(as_lists),
        "keyed": p | "Keyed" >> beam.Create([("k", row) for row in rows]) | "K" >> base.RunInference(keyed)
        | "Lists" >> beam.MapTuple(lambda key, found: (key, as_lists(found))),
    }  # fmt: skip


def sklearn(base, p, folder):
    import pickle

    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
    from sklearn.linear_model import LinearRegression

    inputs = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]])
    with open(f"{folder}/linear.pickle", "wb") as file:
        pickle.dump(LinearRegression().fit(inputs, inputs @ [2.0, 3.0]), file)
    handler = SklearnModelHandlerNumpy(f"{folder}/linear.pickle", min_batch_size=2)
    rows = [np.array([float(number), 1.0]) for number in range(20)]
    return {"answers": p | beam.Create(rows) | base.RunInference(handler) | beam.Map(as_lists)}


def as_lists(found):
    """What can be compared and printed of arrays; floating sums depend on the sizes of batches."""
    inference = np.round(np.asarray(found.inference, dtype=float), 3).tolist()
    return np.asarray(found.example).tolist(), inference, type(found.inference).__name__


def fixed_windows(base, p, folder):
    return {"answers": timed(p) | beam.WindowInto(window.FixedWindows(10)) | base.RunInference(adding(base)(1))}


def sliding_windows(base, p, folder):
    windows = window.SlidingWindows(size=20, period=10)
    return {"answers": timed(p) | beam.WindowInto(windows) | base.RunInference(adding(base)(1, max_batch_size=4))}


def session_windows(base, p, folder):
    return {"answers": timed(p) | beam.WindowInto(window.Sessions(5)) | base.RunInference(adding(base)(1))}


def timed(p):
    return p | beam.Create(range(60)) | "Timed" >> beam.Map(lambda number: window.TimestampedValue(number, number))


def monitored(base, p, folder):
    """A transform that sees the answers, too."""

    class Count(beam.PTransform):
        def expand(self, answers):
            return answers | beam.combiners.Count.Globally() | beam.Map(lambda count: written(folder, "seen.json", count))

    step = base.RunInference(adding(base)(1)).with_monitoring_transform(Count())
    return {"answers": p | beam.Create(range(20)) | step}


def monitored_functions(base, p, folder):
    """It sees what the model gave; the functions behind it come later, and may fail."""
    seen = []

    class Keep(beam.PTransform):
        def expand(self, answers):
            seen.append(answers | beam.Map(lambda answer: answer))
            return seen[0]

    handler = adding(base)(1).with_preprocess_fn(refuse(7, KeyError)).with_postprocess_fn(refuse(5, ValueError))
    step = base.RunInference(handler.with_postprocess_fn(refuse(6, TypeError)), monitoring_transform=Keep())
    main, other = p | beam.Create(range(20)) | step.with_exception_handling()
    outputs = {"answers": main, "seen": seen[0]}
    for number, each in enumerate([*other.failed_preprocessing, *other.failed_postprocessing]):
        outputs[f"failed {number}"] = each | f"Told {number}" >> beam.Map(told)
    return outputs


def monitored_keys(base, p, folder):
    """Without handling of errors, and with keys."""
    seen = []

    class Keep(beam.PTransform):
        def expand(self, answers):
            seen.append(answers | beam.Map(lambda answer: answer))
            return seen[0]

    handler = base.KeyedModelHandler(adding(base)(1)).with_postprocess_fn(lambda pair: (pair[0], str(pair[1])))
    rows = p | beam.Create([("ab"[number % 2], number) for number in range(10)])
    answers = rows | base.RunInference(handler).with_monitoring_transform(Keep())
    return {"answers": answers, "seen": seen[0]}


def changed_in_place(base, p, folder):
    """A step is changed by the methods that say how it handles errors; what they give back need not be used."""
    step = base.RunInference(adding(base)(1, max_batch_size=1))
    step.with_exception_handling()
    main, other = p | beam.Create([1, 2, "three"]) | step
    return {"answers": main, "failed": other.failed_inferences | beam.Map(told)}


def shared_model(base, p, folder):
    """One model of one process for two steps."""
    handler = adding(base)(7, large_model=True)
    first = p | beam.Create(range(20)) | "1" >> base.RunInference(handler, model_identifier="one")
    return {"first": first, "second": first | "2" >> base.RunInference(handler, model_identifier="one")}


PROGRAMS = [
    plain,
    never_calls_init,
    generator_answers,
    keyed,
    maybe_keyed,
    model_per_key,
    functions_around,
    inference_args,
    no_batching,
    failing_rows,
    refresh_by_side_input,
    refresh_without_a_version,
    refresh_by_pattern,
    remote,
    pytorch,
    sklearn,
    fixed_windows,
    sliding_windows,
    session_windows,
    monitored,
    monitored_functions,
    monitored_keys,
    changed_in_place,
    shared_model,
]
