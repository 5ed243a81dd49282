"""Memory that runs out: the rows run again in smaller batches, on every way of running."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import StepError


class Cramped(ps.ModelHandler):
    """Runs out of memory above a size that changes as rows go by."""

    def load_model(self):
        return {"rows": 0}

    def run_inference(self, batch, model, inference_args=None):
        limit = 40 if model["rows"] < 1500 else 11
        if len(batch) > limit:
            raise MemoryError(f"{len(batch)} rows")
        if "large" in batch:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        model["rows"] += len(batch)
        return [(row, len(batch)) for row in batch]


@pytest.mark.parametrize(
    "settings_", [{}, {"max_batch_size": 64}, {"batch_length_fn": lambda row: 1}], ids=["found", "count", "length"]
)
def test_the_same_rows_run_again_in_smaller_batches(pipeline, settings_):
    p = pipeline()
    made = (p | ps.Create(range(4000)) | ps.RunInference(Cramped(**settings_))).collect()
    assert [row for row, _ in made] == list(range(4000))
    assert max(size for _, size in made) <= 40
    assert p.result.metrics.counter("out_of_memory_counter") > 0
    assert p.result.metrics.counter("failed_batches_counter") == 0
    assert p.result.metrics.counter("num_inferences") == 4000


def test_the_limit_is_remembered():
    p = ps.Pipeline(workers=0)
    _ = p | ps.Create(range(1400)) | ps.RunInference(Cramped(max_batch_size=64))
    failures = p.run().metrics.counter("out_of_memory_counter")
    assert failures <= 3


def test_only_a_row_that_does_not_fit_alone_fails(pipeline):
    rows = pipeline() | ps.Create([1, 2, 3, "large", 4]) | "m" >> ps.RunInference(Cramped())
    with pytest.raises(StepError, match=r"step 'm': RuntimeError: CUDA out of memory.*\n  row: 'large'"):
        rows.collect()


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_errors_that_mean_that_memory_ran_out(error, counts):
    assert ps.ModelHandler().is_out_of_memory(error) is counts


def test_a_handler_can_say_what_else_counts(pipeline):
    class Odd(ps.ModelHandler):
        def load_model(self):
            return None

        def run_inference(self, batch, model, inference_args=None):
            if len(batch) > 5:
                raise ValueError("RESOURCE_EXHAUSTED")
            return batch

        def is_out_of_memory(self, error):
            return "RESOURCE_EXHAUSTED" in str(error)

    assert (pipeline() | ps.Create(range(300)) | ps.RunInference(Odd(max_batch_size=50))).collect() == list(range(300))
