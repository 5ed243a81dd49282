"""Handlers that pad: to the length that the cost of their batches is reckoned with, on every way of running."""

from __future__ import annotations

import pytest

import penstock as ps


class Padding(ps.ModelHandler):
    """Answers with the row without its padding, and the shape of its batch."""

    def __init__(self, on_device, **settings):
        super().__init__(batch_length_fn=len, **settings)
        self.on_device = on_device

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        length = self.padded_length(max(map(len, batch)))
        padded = [row.ljust(length, ".") for row in batch]
        return [(row.rstrip("."), (len(batch), length)) for row in padded]

    def prepares_ahead(self):
        return self.on_device


TEXTS = ["x" * (9 + number % 4) for number in range(40)]


@pytest.mark.parametrize(
    ("on_device", "settings", "length", "rows"),
    [
        (True, {}, 16, 4),  # 64 // 16
        (True, {"length_buckets": [14]}, 14, 4),
        (False, {}, 12, 5),  # 64 // 12
    ],
)
def test_a_handler_pads_to_what_its_cost_is_reckoned_with(pipeline, on_device, settings, length, rows):
    p = pipeline()
    handler = Padding(on_device, max_padded_cost=64, **settings)
    made = (p | ps.Create(TEXTS) | ps.RunInference(handler)).collect()
    assert [text for text, _ in made] == TEXTS
    shapes = {shape for _, shape in made}
    assert max(shapes, key=lambda shape: (shape[1], shape[0])) == (rows, length)
    assert {shape[1] for shape in shapes} == {length} or not on_device
    metrics = p.result.metrics
    assert metrics.counter("useful_cost") == sum(map(len, TEXTS))
    assert metrics.counter("padded_cost") == sum(shape[1] for _, shape in made)
