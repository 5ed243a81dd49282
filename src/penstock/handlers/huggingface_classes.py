"""Classes and their scores as arrays, as the pipelines of transformers make them row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.handlers.huggingface_tokens import Array


def classes_of(pipeline: Any, logits: Any, settings: Mapping[str, Any]) -> Any:
    """What pipeline.postprocess(..., **settings) gives for each row of the logits: the best class as a dict of two arrays,
    or those of top_k as Arrow's lists of structs. None where it does anything else."""
    from transformers.pipelines import image_classification, text_classification

    texts, images = text_classification.TextClassificationPipeline, image_classification.ImageClassificationPipeline
    known = next((kind for kind in (texts, images) if type(pipeline).postprocess is kind.postprocess), None)
    top_k = settings.get("top_k", 5 if known is images else 1)
    if known is None or not is_count(top_k):
        return None
    labels = [pipeline.model.config.id2label.get(at) for at in range(logits.shape[1])]
    if not all(isinstance(label, str) for label in labels):
        return None  # Arrow has one type of labels; one that is missing is an error only where its class is among the best
    logits = logits.float() if known is texts or logits.itemsize < 4 else logits
    scores = _scores(pipeline.model.config, logits.numpy(), settings.get("function_to_apply"))
    if known is texts and settings.get("_legacy", True):
        best = np.empty(len(scores), object)
        best[:] = [labels[at] for at in scores.argmax(axis=1).tolist()]
        return {"label": best, "score": scores.max(axis=1).astype(np.float64)}
    return _ranked(labels, scores, top_k)


def is_count(top_k: Any) -> bool:
    """Whether it is a number of classes, or None for all of them."""
    return top_k is None or (isinstance(top_k, int) and top_k > 0)


def _scores(config: Any, logits: Array, function: Any) -> Array:
    """By the function of the problem, unless another one was chosen."""
    from transformers.pipelines import text_classification

    if function is not None:
        name = function.value
    elif config.problem_type == "regression":
        name = "none"
    else:
        name = "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"
    functions = {"sigmoid": text_classification.sigmoid, "softmax": text_classification.softmax}
    made: Array = functions[name](logits) if name in functions else logits
    return made


def _ranked(labels: list[Any], scores: Array, top_k: int | None) -> Any:
    """The best classes of each row, with the highest score first."""
    import pyarrow as pa

    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    rows, count = order.shape
    best = np.take_along_axis(scores, order, axis=1).astype(np.float64)
    each = pa.StructArray.from_arrays(
        [pa.array(labels).take(pa.array(order.ravel())), pa.array(best.ravel())], ["label", "score"]
    )
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(count)), each)
