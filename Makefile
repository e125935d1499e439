# The two commands of the README, and what CI runs. Everything happens inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test test-full lint proto proto-check bench install clean

install: $(STAMP)

proto: $(STAMP)
	$(BIN)/python scripts/gen_protos.py
