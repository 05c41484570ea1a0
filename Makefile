# make run     creates .venv if needed, runs the default trace, then `ffn params` side by side (ARGS="..." runs anything)
# make test    creates .venv if needed, runs every test but those with a mark, within 5 minutes
# make test M=hub      the tests with that mark (pyproject.toml says what each is), or with one of several (M="runs or hub");
#              also as `make test-hub`
# make test-all        all of both, mark after mark
# make test-kills      runs that are killed at drawn moments and resumed: KILLS=100 of them
# make fuzz            the mark `fuzz`, then FUZZ_CASES=5000 damaged files of every format, 2000 configs, 2000 library calls
# make test-wheel      builds the wheel and tries it in a new environment, away from the checkout
# make test-triton     Triton kernels without a GPU, in an environment of its own (1.8 GB)
# make test-arenas     what `ffn export` writes for FlashInfer-Bench, loaded by its own loader (30 MB)
# make check   ruff, mypy --strict, the floors (import-linter), then the tests
# make docs    the manual as a searchable site, in site/; make docs-update writes the output of its commands anew
# make wheel   a wheel with the JSON Schemas of all commands, in dist/
# make bench   creates .venv if needed, runs `ffn bench` (ARGS="512x2048:swiglu --quick")
# make bench-NAME      a script of benchmarks/: bench-timers, bench-startup, bench-memory, ... (ARGS="--save FILE.csv")
# make results         the public table in docs/results.md, from the files in benchmarks/results/ffn-1
# make unchanged   what commands and calls of every kind answer, against BASE=REV (default HEAD~1: what the last commit and
#              the working tree changed; BASE=main for all of a branch): same keys, numbers and exit codes, or it fails;
#              sentences in other words as a table, also in PROSE=FILE.md
#
# Every install goes through .ci/install, which uses constraints.txt. Where pip would take torch's CUDA build (gigabytes),
# uv chooses the build that fits the machine; TORCH_CUDA=1 takes pip's all the same. TORCH_INDEX= takes torch from another
# package index, PyTorch's CPU wheels for example.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEEDS := pyproject.toml constraints.txt .ci/install .ci/install_torch.py
export PYTHON TORCH_INDEX TORCH_CUDA
# Where bytecode is not written, each of hundreds of processes compiles the package again, and pytest every test file.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-kills test-browser test-wheel test-triton test-arenas fuzz lint check bench results demo \
    facts catalog architectures trace-architectures plan-published claims picture unchanged docs docs-update wheel clean
.DEFAULT_GOAL := run

$(VENV)/.installed: $(NEEDS)
	@.ci/install $(VENV)
	@touch $@

$(VENV)/.installed-test: $(NEEDS)
	@.ci/install $(VENV) test
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-peers: $(NEEDS)
	@.ci/install $(VENV) peers
	@touch $@ $(VENV)/.installed

run: $(VENV)/.installed
ifdef ARGS
	@$(BIN)/ffn $(ARGS)
else
	@$(BIN)/ffn trace
	@echo
	@$(BIN)/ffn params llama-2-7b gpt2 mixtral-8x7b
endif

# What takes long or needs something of its own has a mark, in its file or, by its folder, in tests/conftest.py.
MARKS := runs models architectures hub ranks fuzz cheats docs install browser
PYTEST := $(BIN)/python -m pytest
SPREAD := -n 3 --dist load  # for two cores: tests that start processes also wait for them
SPREAD_hub := -n 4 --dist load  # these wait more than they compute
SPREAD_cheats := $(SPREAD_hub)
SPREAD_ranks := -n 2 --dist loadfile --no-loadscope-reorder
SPREAD_install := -s  # shows the time and the bytes of each case
SPREAD_browser := -n 0
EMPTY :=
OR := $(EMPTY) or $(EMPTY)

test: $(VENV)/.installed-test
ifdef M
	@$(PYTEST) $(or $(SPREAD_$(M)),$(SPREAD)) -m "$(M)"
else
	@$(PYTEST) $(SPREAD) -m "not ($(subst $(EMPTY) $(EMPTY),$(OR),$(MARKS)))"
endif

# Installed here too: two of these side by side (make -j) would each install.
test-%: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory test M=$*

test-all: test $(addprefix test-,$(MARKS))

# Installs Chromium where that is allowed; where there is none (77), there is nothing to test.
test-browser: $(VENV)/.installed-test
	@.ci/chromium && $(MAKE) --no-print-directory test M=browser || [ $$? -eq 77 ]

# Runs that are killed at drawn moments and resumed: `make test-runs` has four, this KILLS=100.
KILLS ?= 100
test-kills: $(VENV)/.installed-test
	@FFN_KILLS=$(KILLS) $(PYTEST) $(SPREAD) tests/bench/test_kills.py

FUZZ_CASES ?= 5000
fuzz: test-fuzz
	@$(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) & \
	{ $(BIN)/python -m tests.fuzz --only families --cases 2000 && $(BIN)/python -m tests.fuzz --only calls --cases 2000; }; \
	others=$$?; wait $$! && exit $$others

test-wheel: $(VENV)/.installed-test
	@.ci/test_wheel $(VENV)

# FlashInfer-Bench's own loader on what ffn export writes: without its dependencies, which are CUDA packages.
ARENAS := .venv-arenas

test-arenas: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ARENAS) \
	    flashinfer-bench==0.1.2 apache-tvm-ffi docstring-parser
	@PYTHONPATH=$(ARENAS) $(BIN)/python -m pytest tests/run/export/test_flashinfer.py

# Triton's kernels as Python in its interpreter, then compiled for an H100. triton is large, so no other target needs it.
TRITON := .venv-triton

$(TRITON)/.installed: $(NEEDS)
	@.ci/install $(TRITON) triton || { echo "make test-triton: triton cannot be installed here" >&2; exit 3; }
	@touch $@

test-triton: $(TRITON)/.installed
	@TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest $(addprefix tests/kernels/test_triton_,interpreted.py products.py)
	@$(TRITON)/bin/python -m pytest tests/kernels/test_triton_compiled.py

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint test

bench: $(VENV)/.installed
	@$(BIN)/ffn bench $(ARGS)

# Scripts of benchmarks/: bench-trace-read is benchmarks/trace_read.py.
bench-%: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

bench-timers bench-peers: $(VENV)/.installed-peers

# What the repository keeps of a command's output.
architectures trace-architectures plan-published: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.$(subst -,_,$@) --save benchmarks/results/$(subst -,_,$@).csv $(ARGS)

results: bench-results-table

demo: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.demo --into docs/benchmarking.md $(ARGS)

facts: $(VENV)/.installed
	@$(BIN)/ffn params --all -o docs/facts.csv --force

catalog: $(VENV)/.installed-test
	@$(BIN)/python -m tests.oracles.catalog_modules

picture: $(VENV)/.installed
	@$(BIN)/python -m docs.picture

claims: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.claims

unchanged: BASE ?= HEAD~1
unchanged: $(VENV)/.installed-test
	@scratch=$$(mktemp -d) && trap 'git worktree remove --force '$$scratch'/base; rm -rf '$$scratch EXIT && \
	git worktree add -q --detach $$scratch/base $(BASE) && \
	$(BIN)/python -m benchmarks.unchanged record $$scratch/before --package $$scratch/base --inputs $$scratch/inputs && \
	$(BIN)/python -m benchmarks.unchanged record $$scratch/after --inputs $$scratch/inputs && \
	$(BIN)/python -m benchmarks.unchanged compare $$scratch/before $$scratch/after $(if $(PROSE),--prose $(PROSE))

# The manual as a site, in site/: it fetches nothing when it is read. Needs mkdocs-material (the group `docs`).
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-test $(VENV)/.installed-docs
	@$(BIN)/python -m docs.schemas
	@$(BIN)/mkdocs build --strict --quiet && echo "site/index.html; to search in it: python3 -m http.server -d site"

$(VENV)/.installed-docs: $(NEEDS)
	@.ci/install $(VENV) docs
	@touch $@

wheel: $(VENV)/.installed-test
	@$(BIN)/python -m docs.schemas
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# Writes what the commands of README.md and docs/ print, and the generated pages, anew (ARGS=--measured: times too);
# `make test-docs` compares.
docs-update: $(VENV)/.installed-test
	@$(BIN)/python -m docs.generated
	@$(BIN)/python -m docs.blocks update $(ARGS)

clean:
	rm -rf $(VENV) $(TRITON) $(ARENAS) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
