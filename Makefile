# The two commands a newcomer needs are `make demo` and `make test`. Everything they need, they install into .venv.
PY := .venv/bin/python
JOBS ?= 2

.PHONY: demo test test-processes test-docs test-devices test-all test-hostile test-gpu reproduce-check docs reference dist lint bench bench-gpu coverage clean

.venv/ready: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	.venv/bin/kilter demo

test: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not hostile and not docs and not processes'

# Servers, sites, peers, hubs and agents as processes of their own; runs and studies that are killed.
test-processes: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'processes and not slow and not hostile'

# Every shell and Python block of the documentation, the tutorial notebooks and the examples.
test-docs: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m docs

# Every method on a device that exists only in Python: it refuses to mix devices, as a GPU would.
test-devices: .venv/ready
	$(PY) -m pytest -n $(JOBS) tests/fast/test_placement.py

test-all: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal

# Lying servers, members, peers and relays; mutated messages, kills and flipped bits. Under ten minutes.
test-hostile: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m hostile

# Agreement with the CPU on a real accelerator; skipped with a reason where there is none.
test-gpu: .venv/ready
	$(PY) -m pytest -m gpu -rs

# One cheap run of every published study, on this machine: "same bits", or how far it is off.
reproduce-check: .venv/ready
	$(PY) tools/reproduce_check.py

# The documentation site, in site/. Warnings are errors.
docs: .venv/ready
	.venv/bin/zensical build --strict --clean

# The pages that are generated from the code: command line and JSON schema.
reference: .venv/ready
	$(PY) tools/reference.py

# Wheel and source distribution, in dist/.
dist: .venv/ready
	$(PY) -m build --outdir dist

coverage: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not hostile and not docs' --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

bench: .venv/ready
	$(PY) benchmarks/speed.py

# The same workloads on a GPU. Writes benchmarks/results/gpu.md.
bench-gpu: .venv/ready
	$(PY) benchmarks/gpu.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv build dist site src/*.egg-info .mypy_cache .ruff_cache
