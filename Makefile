# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup train test lint format docs clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/setup
	PYTHON=$(PYTHON) bash .ci/setup $(VENV)
	touch $@
