# make table: the 20 rows at laptop scale, from nothing.  make overnight: the same at scale=small, a night on two cores.
# make check: format, lint, types, the order of the packages.  make test: what to run before a commit, in minutes.
# make test-all: the whole test suite.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: table overnight test test-all check clean

overnight: SCALE := small
SCALE := mini

table overnight: .venv/ready
	$(BIN)/aiayn train -cn table3 scale=$(SCALE); status=$$?; $(BIN)/aiayn table scale=$(SCALE); exit $$status

# Two processes; who is done first takes over half of what the other has left
test: .venv/tests-ready
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-all: .venv/tests-ready
	$(BIN)/pytest -n 2 --dist worksteal

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_architecture.py -k "module or import or rooms"

.venv/ready: pyproject.toml constraints.txt
	@echo "installing torch and others into .venv: some minutes, 2 GB, more with a CUDA build of torch"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The formats of aiayn export are compared with the programs that read them, the dashboard with what W&B is sent
.venv/tests-ready: .venv/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench,dashboard]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
