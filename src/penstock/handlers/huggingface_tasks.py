"""The tasks of transformers' pipelines that are run here: text tasks whose rows are tokenised beside the data, and image
tasks whose answers are arrays.

token ids -> pad ------------------> the pipeline's own forward() -> arrays, or its own postprocess(), row by row
images -> its own preprocess() ----> the pipeline's own forward() -> arrays
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.handlers.huggingface_classes import classes_of, is_count
from penstock.handlers.huggingface_tokens import Tokens, collated, ids_of, padded

# transformers knows these; importing it to ask takes seconds. It is asked about others.
KNOWN_TASKS = frozenset(
    {"any-to-any", "audio-classification", "automatic-speech-recognition", "depth-estimation", "document-question-answering"}
    | {"feature-extraction", "fill-mask", "image-classification", "image-feature-extraction", "image-segmentation"}
    | {"image-text-to-text", "keypoint-matching", "mask-generation", "object-detection", "table-question-answering"}
    | {"text-classification", "text-generation", "text-to-audio", "token-classification", "video-classification"}
    | {"zero-shot-audio-classification", "zero-shot-classification", "zero-shot-image-classification"}
    | {"zero-shot-object-detection"}
)
ALIASES = {"sentiment-analysis": "text-classification", "ner": "token-classification", "text-to-speech": "text-to-audio"}

TEXT_TASKS = frozenset(
    {"feature-extraction", "fill-mask", "text-classification", "text-generation", "token-classification"}
    | {"zero-shot-classification"}
)
IMAGE_TASKS = frozenset(  # of one image
    {"depth-estimation", "image-classification", "image-feature-extraction", "image-segmentation", "mask-generation"}
    | {"object-detection", "zero-shot-image-classification"}
)

# Arguments of pipeline() that change neither what a text is tokenised to nor what comes out.
_NEUTRAL = {"revision", "token", "device", "device_map", "dtype", "torch_dtype", "model_kwargs", "tokenizer"}
_KNOWN_TOKENIZER_ARGS = {
    "truncation": (True, "longest_first"),
    "padding": (False, True, "longest"),
    "max_length": range(1, 10**9),
}


@dataclass(frozen=True)
class TokenTask:
    """What is known of a task's pipeline."""

    tokenizer_args: str | None  # the argument that has its tokenizer's settings; "": they stand by themselves; None: none
    args: frozenset[str]  # arguments that are for what comes after the model

    def knows(self, load_args: Mapping[str, Any], inference_args: Mapping[str, Any]) -> bool:
        """Whether these arguments are all known here."""
        nested = {self.tokenizer_args} if self.tokenizer_args else set()
        plain = self.args | nested | (set(_KNOWN_TOKENIZER_ARGS) if self.tokenizer_args == "" else set())
        given = {name for name, value in load_args.items() if name != "trust_remote_code" or value}
        if not given <= plain | _NEUTRAL or not inference_args.keys() <= plain:
            return False
        settings = {**self.settings(load_args), **self.settings(inference_args)}
        return all(value in _KNOWN_TOKENIZER_ARGS.get(name, ()) for name, value in settings.items())

    def settings(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the pipeline passes on to its tokenizer, of the arguments that it was given."""
        if self.tokenizer_args is None:
            return {}
        return args.get(self.tokenizer_args) or {} if self.tokenizer_args else _without(args, self.args | _NEUTRAL)

    def with_settings(self, args: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with these defaults for the tokenizer."""
        if not self.tokenizer_args:
            return {**defaults, **args}
        return {**args, self.tokenizer_args: {**defaults, **self.settings(args)}}


TOKEN_TASKS = {
    "text-classification": TokenTask("", frozenset({"top_k", "function_to_apply"})),
    "token-classification": TokenTask(None, frozenset({"aggregation_strategy", "ignore_labels"})),
    "feature-extraction": TokenTask("tokenize_kwargs", frozenset({"return_tensors"})),
    "fill-mask": TokenTask("tokenizer_kwargs", frozenset({"top_k", "targets"})),
}
ARRAY_IMAGE_TASKS = {  # whose answers are of one shape, and arguments of a call that leave it so
    "image-classification": {"top_k", "function_to_apply", "timeout"},
    "image-feature-extraction": {"pool", "timeout"},
}
PADDING_TASKS = [name for name, task in TOKEN_TASKS.items() if task.tokenizer_args is not None]


def run_tokens(pipeline: Any, task: str, rows: Sequence[Any], length: int, inference_args: Mapping[str, Any]) -> Any:
    """What pipeline(texts, **inference_args) gives, for the tokens of the texts."""
    import torch

    from penstock.handlers.pytorch_running import attention_without_plans

    inputs = {name: torch.from_numpy(each) for name, each in collated(rows, pipeline.tokenizer, length).items()}
    settings = {**pipeline._postprocess_params, **pipeline._sanitize_parameters(**inference_args)[2]}
    if task == "token-classification":
        inputs |= _of_tokens(rows, length, pipeline.tokenizer.padding_side == "left")
    with attention_without_plans(pipeline.device):
        outputs = pipeline.forward(inputs, **pipeline._forward_params)
    if task == "feature-extraction":
        return _features(pipeline, outputs, rows, settings)
    if task == "token-classification":
        return [pipeline.postprocess([_only(outputs, at)], **settings) for at in range(len(rows))]
    if task == "text-classification" and (classes := classes_of(pipeline, outputs["logits"], settings)) is not None:
        return classes
    names = ("logits", "input_ids") if task == "fill-mask" else ("logits",)
    return [
        pipeline.postprocess({name: outputs[name][at : at + 1] for name in names}, **settings) for at in range(len(rows))
    ]


def run_images(pipeline: Any, task: str, images: Sequence[Any], inference_args: Mapping[str, Any]) -> Any:
    """What pipeline(images, **inference_args) gives, as arrays; None where that cannot be."""
    if task not in ARRAY_IMAGE_TASKS or not inference_args.keys() <= ARRAY_IMAGE_TASKS[task]:
        return None
    import torch
    from transformers import pipelines

    before, _, after = pipeline._sanitize_parameters(**inference_args)
    settings = {**pipeline._postprocess_params, **after}
    known = (pipelines.ImageClassificationPipeline, pipelines.ImageFeatureExtractionPipeline)
    if type(pipeline) not in known or settings.get("return_tensors") or not is_count(settings.get("top_k")):
        return None
    options = {**pipeline._preprocess_params, **before}
    made = [dict(pipeline.preprocess(image, **options)) for image in images]
    inputs = {name: torch.cat([each[name] for each in made]) for name in made[0]}
    outputs = pipeline.forward(inputs, **pipeline._forward_params)
    if task == "image-classification":
        return classes_of(pipeline, outputs["logits"], settings)
    if settings.get("pool") and "pooler_output" not in outputs:
        return None
    features = outputs["pooler_output"] if settings.get("pool") else outputs[0]
    return features.float().numpy()[:, np.newaxis]


def _of_tokens(rows: Sequence[Any], length: int, left: bool) -> dict[str, Any]:
    """What classes of tokens are made of, beside the model's answer."""
    import torch

    tokens: list[Tokens] = list(rows)
    special = [each.special for each in tokens if each.special is not None]
    offsets = np.zeros((len(tokens), length, 2), np.int64)
    for at, each in enumerate(tokens):
        assert each.offsets is not None
        begin = length - len(each.ids) if left else 0
        offsets[at, begin : begin + len(each.ids)] = each.offsets
    return {
        "special_tokens_mask": torch.from_numpy(padded(special, length, 1, left)),
        "offset_mapping": torch.from_numpy(offsets),
        "sentence": [each.text for each in tokens],
        "is_last": [True] * len(tokens),
    }


def _only(outputs: Mapping[str, Any], at: int) -> dict[str, Any]:
    """The outputs for one row of a batch, as a batch of one."""
    return {
        name: each if each is None else each[at : at + 1] if hasattr(each, "shape") else each[at]
        for name, each in outputs.items()
        if name != "is_last"
    }


def _features(pipeline: Any, outputs: Any, rows: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """A text's features without those of the padding, which depends on the other rows of its batch."""
    tensors = pipeline.postprocess(outputs, return_tensors=True)
    left = pipeline.tokenizer.padding_side == "left"
    own = []
    for at, row in enumerate(rows):
        length = len(ids_of(row))
        own.append(tensors[at : at + 1, -length:] if left else tensors[at : at + 1, :length])
    if settings.get("return_tensors"):
        return [each.clone() for each in own]
    if len({each.shape for each in own}) > 1:
        return [each.float().numpy().copy() for each in own]
    return np.stack([each.float().numpy() for each in own])


def _without(args: Mapping[str, Any], names: frozenset[str] | set[str]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name not in names and name != "trust_remote_code"}
