# make table: the 20 rows at laptop scale, from nothing.  make test: the whole test suite.  make check: format, lint, types.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: table test check clean

table: .venv/ready
	$(BIN)/aiayn train -cn table3; status=$$?; $(BIN)/aiayn table; exit $$status

test: .venv/tests-ready
	$(BIN)/pytest -n 2 --dist loadfile

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The formats of aiayn export are compared with the programs that read them, the dashboard with what W&B is sent
.venv/tests-ready: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,export,dashboard]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
