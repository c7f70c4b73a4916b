# Two commands a newcomer needs: `make demo` and `make test`. Everything they need they install into .venv.
PY := .venv/bin/python
JOBS ?= 2

.PHONY: demo test test-all lint bench coverage clean

.venv/ready: pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	.venv/bin/kilter demo

test: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not slow'

test-all: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal

coverage: .venv/ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not slow' --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

bench: .venv/ready
	$(PY) benchmarks/speed.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache
