PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/*.proto)

.PHONY: protos
protos: protos/.stamp
protos/.stamp: $(PROTOS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
		--mypy_out=. --mypy_grpc_out=. $(PROTOS)
	@touch $@
