# The two commands of the README (serve, test) and what CI runs. Everything happens inside .venv.
# PYTHON=/path/to/python3.12 names the interpreter; without it the first of python3, 3.12, 3.11 that fits.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Serving takes less than testing: a first `make serve` need not wait for compilers of protos and oracles.
SERVES := $(VENV)/.serves
TOOLS := .cache/tools/.stamp

.PHONY: help install serve test test-full simulate lint proto proto-check bench bench-mixed dashboards clean
.DEFAULT_GOAL := help

help:
	@echo "make serve       start everything on this machine: Ray, workers, router (ARGS=... as for pdserve up)"
	@echo "make test        the test suite, with progress (ARGS=... as for pytest)"
	@echo "make test-full   full matrices, 20,000 more seeds, long storms: hours"
	@echo "make simulate    the fleet under simulated faults (SEEDS=100000; SEED=7 replays one with its trace)"
	@echo "make lint        ruff, mypy, import contracts, buf"
	@echo "make proto       regenerate pdserve/rpc/v1 from protos/; proto-check fails on a difference"
	@echo "make bench       the benchmark table, beside the peers (ARGS=... as for the runner)"
	@echo "make bench-mixed chats with long prompts among them, over the load, beside the peers: 15 minutes"
	@echo "make dashboards  pictures of the dashboards from a running Prometheus (ARGS=... as for pdserve dashboards preview)"
	@echo "make install     .venv with everything pinned; clean removes it and all caches"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@bash scripts/install.sh "$(STAMP)" dev $(PYTHON)
	@touch $(SERVES)

$(SERVES): pyproject.toml constraints.txt scripts/install.sh
	@bash scripts/install.sh "$(SERVES)" worker,http,jwt,tls $(PYTHON)

$(TOOLS): scripts/test_tools.sh scripts/unpack_layer.py | $(STAMP)
	@bash scripts/test_tools.sh "$(TOOLS)"

serve: $(SERVES)
	@exec $(BIN)/pdserve up $(ARGS)

# The smoke set runs once more with the vector units most laptops have; its own closing line comes first.
test: $(STAMP) $(TOOLS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest -q -m "smoke and not full" || [ $$? -eq 5 ]
	PDSERVE_TEST_REPORT=1 $(BIN)/pytest -m "not full" --durations=15 $(ARGS)

test-full: $(STAMP) $(TOOLS)
	PDSERVE_TEST_REPORT=1 $(BIN)/pytest --durations=30 $(ARGS)

SEEDS ?= 100000
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation.run $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS)) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python scripts/gen_config_docs.py --check
	$(BIN)/python scripts/gen_metrics_docs.py --check
	$(BIN)/python scripts/gen_dashboards.py --check
	$(BIN)/python scripts/sync_chart.py --check

proto: $(STAMP)
	$(BIN)/python scripts/gen_protos.py

proto-check: $(STAMP)
	$(BIN)/python scripts/gen_protos.py --check

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-mixed: $(STAMP)
	$(BIN)/python -m benchmarks.mixed $(ARGS)

dashboards: $(STAMP)
	$(BIN)/pdserve dashboards preview $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
