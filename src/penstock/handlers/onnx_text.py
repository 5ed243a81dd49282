"""A handler for ONNX models of texts: the tokenizer works beside the data, the model pads and runs.

texts -> token ids, beside the data -> one batch, padded to its longest text (or to a bucket) -> run() -> pooled, or cut
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np

from penstock.errors import MissingPackageError, UsageError
from penstock.handlers.array_answers import as_rows
from penstock.handlers.array_columns import Array
from penstock.handlers.arrays import InferenceArgs
from penstock.handlers.onnx_models import OnnxModelHandlerNumpy, SessionOptions
from penstock.handlers.onnx_sessions import Provider
from penstock.handlers.prepared_rows import prepared, raise_bad_rows
from penstock.inference.handler_settings import HandlerSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.handlers.huggingface_tokens import TextTokenizer

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Row(NamedTuple):
    """A text as the model takes it."""

    ids: Array
    pad: int  # what fills a batch up behind it


class OnnxTextModelHandler(OnnxModelHandlerNumpy):
    """Examples are texts. The model takes input_ids, and attention_mask and token_type_ids if it likes.

    columns="text": the column that has them.
    """

    def __init__(
        self,
        model_uri: str,
        tokenizer: str | PathLike[str],
        session_options: SessionOptions = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        pooling: Literal["mean", "cls"] | None = None,
        normalize_embeddings: bool = False,
        max_seq_length: int | None = None,
        output_names: Sequence[str] | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in an .onnx file, and its tokenizer: a folder, or a name in the Hugging Face cache or hub.

        pooling: of an output with a vector for each token, their mean ("mean") or the first one ("cls") is the answer; None:
            the vectors of the text's own tokens are.
        normalize_embeddings: answers are divided by their length.
        max_seq_length: texts are cut after so many tokens; None: what the tokenizer says.
        The other arguments are those of OnnxModelHandlerNumpy.
        """
        super().__init__(model_uri, session_options, providers, provider_options, output_names=output_names, **settings)
        if pooling not in (None, "mean", "cls"):
            raise UsageError(f"pooling={pooling!r}: expected 'mean', 'cls' or None")
        if max_seq_length is not None and max_seq_length < 1:
            raise UsageError(f"max_seq_length={max_seq_length}: expected at least 1 token")
        if len(self.input_columns() or ()) > 1:
            raise UsageError(f"columns={list(self.input_columns() or ())}: expected one column, which has the texts")
        self._tokenizer = fspath(tokenizer)
        self._pooling, self._normalizes = pooling, normalize_embeddings
        self._max_seq_length = max_seq_length

    # Beside the data.

    def prepare_key(self) -> str | None:
        return repr((self._tokenizer, self._max_seq_length))

    def load_prepare(self) -> tuple[TextTokenizer, int]:
        """The tokenizer, and the id that fills batches up."""
        try:
            from penstock.handlers import huggingface_files as files
            from penstock.handlers import huggingface_models, huggingface_tokens
        except ModuleNotFoundError as exc:
            raise MissingPackageError(exc.name or "tokenizers", "huggingface") from exc

        files.check_place(self._tokenizer)
        with files.reading(f"the tokenizer {self._tokenizer!r}"):
            loaded = huggingface_models.tokenizer_of(place := files.ModelFiles(self._tokenizer), {}, plainly=True)
        tokenizer = huggingface_tokens.TextTokenizer(loaded, self._max_seq_length or loaded.longest())
        return tokenizer, _pad_id(place.json("tokenizer_config.json") or {}, loaded)

    def prepare(self, examples: Sequence[str], tool: tuple[TextTokenizer, int], inference_args: InferenceArgs = None) -> Any:
        from penstock.handlers.huggingface_tokens import ids_of, text_of

        texts, errors = prepared(examples, text_of)
        rows, more = tool[0].tokenise([text or "" for text in texts])
        made = [None if row is None else Row(ids_of(row), tool[1]) for row in rows]
        return raise_bad_rows({**more, **errors}, made)

    def measures_length(self) -> bool:
        return True

    def get_lengths(self, batch: Sequence[Any]) -> Sequence[int]:
        return super().get_lengths(batch) if self._batch_length_fn is not None else [len(row.ids) for row in batch]

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        values: list[Any] = table.column(0).to_pylist()
        return values

    def takes_columns(self) -> bool:
        return False

    def check_columns(self, schema: pa.Schema) -> None:
        if self._columns is None:
            raise UsageError(f"the rows are dicts with {schema.names}; name the column of texts: columns='text'")
        super().check_columns(schema)

    # Beside the device.

    def run_inference(self, batch: Sequence[Row], model: Any, inference_args: InferenceArgs = None) -> Any:
        specs = {spec.name: spec for spec in self._specs(model, inference_args)}
        names = list(specs)
        if "input_ids" not in names or not set(names) <= set(_INPUTS):
            raise UsageError(
                f"{self.model_id()!r} takes the inputs {names}; expected {list(_INPUTS)}, or some of them: for others use "
                "OnnxModelHandlerNumpy, or give them as inference_args"
            )
        lengths = np.array([len(row.ids) for row in batch])
        padded = np.array([self.padded_length(int(length)) for length in lengths])
        if "attention_mask" not in names and len(set(padded)) > 1:
            return self._run_by_length(batch, padded, model, inference_args)
        length = max(int(padded.max()), 1)
        mask = np.arange(length) < lengths[:, np.newaxis]
        ids = np.full((len(batch), length), batch[0].pad, np.int64)
        ids[mask] = np.concatenate([row.ids for row in batch])
        made = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
        inputs = {name: made[name].astype(specs[name].dtype or np.int64) for name in names}
        output = self._run(model, inputs, len(batch), inference_args)
        if isinstance(output, dict):
            parts = {name: self._pooled(part, mask) for name, part in output.items()}
            return as_rows(parts) if any(isinstance(part, list) for part in parts.values()) else parts
        return self._pooled(output, mask)

    def _run_by_length(self, batch: Sequence[Row], lengths: Array, model: Any, inference_args: InferenceArgs) -> list[Any]:
        """Texts of one length, or bucket of lengths, together: the model does not see which tokens fill a batch up."""
        answers: list[Any] = [None] * len(batch)
        for length in np.unique(lengths):
            own = np.flatnonzero(lengths == length)
            made = self.run_inference([batch[int(at)] for at in own], model, inference_args)
            for at, answer in zip(own, as_rows(made), strict=True):
                answers[at] = answer
        return answers

    def _pooled(self, output: Any, mask: Array) -> Any:
        if output.ndim == 3 and output.shape[:2] == mask.shape:
            if self._pooling is None:
                return [vectors[own].copy() for vectors, own in zip(output, mask, strict=True)]
            output = output[:, 0] if self._pooling == "cls" else _mean(output, mask)
        elif self._pooling is not None:
            raise UsageError(f"pooling={self._pooling!r}: the output has the shape {output.shape}, and no axis for tokens")
        if self._normalizes:
            output = output / np.maximum(np.linalg.norm(output, axis=-1, keepdims=True), 1e-12)
        return output


def _mean(vectors: Array, mask: Array) -> Array:
    weights = mask[..., np.newaxis].astype(vectors.dtype)
    mean: Array = (vectors * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-9)
    return mean


def _pad_id(settings: Mapping[str, Any], loaded: Any) -> int:
    token = settings.get("pad_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if loaded.fast is None:
        return int(loaded.slow.pad_token_id or 0)
    return int(loaded.fast.token_to_id(token) or 0) if token else 0
