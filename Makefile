# Everything here sets itself up: the first target that needs it makes .venv from the lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two processes of one thread each: quicker than one of two, and a file stays in its process.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-quick guard lab lint lock clean

demo: $(READY)
	$(BIN)/minispec demo

test: $(READY)  ## the whole suite and every notebook from a clean kernel
	$(BIN)/minispec fetch
	$(BIN)/python -m pytest $(TWO)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) --nbval --nbval-current-env \
		--nbval-sanitize-with notebooks/nbval.cfg --nbval-cell-timeout=1200 notebooks
	$(MAKE) guard

guard: $(READY)  ## ratios of speed with wide bounds; last, with nothing else running
	$(BIN)/python -m pytest benchmarks

test-quick: $(READY)  ## tiny models only, no notebooks
	$(BIN)/python -m pytest $(TWO) -m "not slow"

lab: $(READY)
	$(BIN)/jupyter lab notebooks

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "minispec needs Python 3.11 or newer; say: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV)
