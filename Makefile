# make run     creates .venv if needed, runs the default trace, then `ffn params` side by side (ARGS="..." runs anything)
# make test    creates .venv if needed, runs every test but those of the targets test-* and fuzz
# make test-runs     whole runs of `ffn bench` with real workers, and what kills or starves them
# make test-models     tiny models of transformers, run on prompts and corpora: lens, what if, experts, units
# make test-architectures   every architecture of transformers: its config read, counted, traced, compared with its module
# make test-hub      a local server as the Hub: slow, broken, lying
# make test-ranks    blocks split over 2 and 4 processes: outputs, gradients, collectives; and over simulated ranks
# make test-cheats   kernels that cheat, each of which must be caught, honest ones, none of which may be accused, and ones
#              that hang, flood, eat memory or end their process, which cost their own rows
# make results       docs/results.md, the public table, from the files in benchmarks/results/ffn-1
# make bench   creates .venv if needed, runs `ffn bench` (ARGS="512x2048:swiglu --quick")
# make unchanged   what commands of every kind print, against that of BASE=REV, byte for byte (default HEAD~1: what the
#              last commit and the working tree changed; BASE=main for all of a branch)
# make fuzz        input that lies, of every format: FUZZ_CASES=5000 of it beside the tests that make up input
# make wheel         a wheel with the JSON Schemas of all commands, in dist/
# make test-wheel    builds the wheel and tries it in a new environment, away from the checkout
# make test-triton   Triton kernels without a GPU, in an environment of its own (1.8 GB)
# make test-arenas   what `ffn export` writes for FlashInfer-Bench, loaded by its own loader (30 MB)
# make test-install  .ci/install on package indexes of its own, with the time and the bytes of each case
# make docs    the manual as a searchable site, in site/
# make test-docs    runs every command that README.md and docs/ show; make docs-update writes their output anew
# make check   ruff, mypy --strict, the floors (import-linter), then the tests
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

.PHONY: run test fuzz test-runs test-models test-architectures test-hub test-ranks test-kills test-cheats test-browser wheel test-wheel test-install test-triton test-arenas check lint bench bench-timers bench-method bench-sweep bench-conv bench-grouped bench-corpus bench-trained bench-kernels bench-plan plan-published bench-grids certificates results demo bench-startup bench-memory bench-headers bench-trace-read bench-trace-scale bench-peers \
    bench-approximate bench-in-model facts catalog architectures trace-architectures claims picture unchanged docs test-docs docs-update clean
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

# What runs every command of the manual, installs or removes packages, makes up input, measures with real workers, waits
# for a server, runs models of transformers or builds every architecture has a target of its own: `make test` stays
# within 5 minutes.
DOCS := tests/test_docs.py tests/test_schemas.py tests/test_claims.py tests/test_notebook.py
INSTALL := tests/test_install.py tests/cli/test_missing_packages.py
BROWSER := tests/browser
CHEATS := tests/cheats tests/run/verify/test_referee.py tests/run/user/test_hosted.py tests/bench/test_hostile_kernels.py
FUZZ := tests/cli/test_any_input.py tests/models/files/test_headers.py tests/models/files/test_bounded_work.py tests/fuzz/test_fuzz.py
RUNS := tests/bench/test_suite.py tests/bench/test_kills.py tests/cli/bench/test_bench.py \
    $(addprefix tests/bench/timing/test_,worker.py device_lost.py measure_case.py)
ARCHITECTURES := tests/architectures tests/models/config tests/models/tensors/test_non_ffn.py
HUB := tests/cli/params/test_hub.py tests/models/files/test_hub.py tests/models/files/test_hub_requests.py
RANKS := tests/ranks
MODELS := tests/run/pretrained tests/run/what_if tests/run/corpus tests/run/experts tests/run/user/test_in_memory.py \
    tests/run/in_model tests/run/verify/checks/test_layouts.py \
    $(addprefix tests/run/trace/test_,lens.py unembed.py session.py) tests/run/activations/test_on_data.py \
    $(addprefix tests/cli/trace/test_,prompt.py corpus.py gguf_prompt.py) tests/cli/activations/test_data.py tests/cli/experts
FUZZ_CASES ?= 5000
KILLS ?= 100
HEAVY := $(BROWSER) $(DOCS) $(INSTALL) $(FUZZ) $(CHEATS) $(RUNS) $(ARCHITECTURES) $(HUB) $(RANKS) $(MODELS)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(HEAVY))

wheel: $(VENV)/.installed-test
	@$(BIN)/python -m docs.schemas
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

test-wheel: $(VENV)/.installed-test
	@.ci/test_wheel $(VENV)

test-install: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -s $(INSTALL)

test-cheats: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(CHEATS)

test-runs: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(RUNS)

test-architectures: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARCHITECTURES)

test-models: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(MODELS)

# Its tests wait more than they compute.
test-hub: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 4 --dist worksteal $(HUB)

test-ranks: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(RANKS)

# FlashInfer-Bench's own loader on what ffn export writes: without its dependencies, which are CUDA packages.
ARENAS := .venv-arenas

test-arenas: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ARENAS) \
	    flashinfer-bench==0.1.2 apache-tvm-ffi docstring-parser
	@PYTHONPATH=$(ARENAS) $(BIN)/python -m pytest tests/run/export/test_flashinfer.py

fuzz: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(FUZZ)
	@$(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) & \
	$(BIN)/python -m tests.fuzz --only families --cases 2000; families=$$?; wait $$! && exit $$families

# Runs that are killed at drawn moments and resumed: `make test` has four, this KILLS=100.
test-kills: $(VENV)/.installed-test
	@FFN_KILLS=$(KILLS) $(BIN)/python -m pytest -n 2 --dist worksteal tests/bench/test_kills.py

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

bench-startup: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/startup.py $(ARGS)

bench-memory: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/memory.py $(ARGS)

bench-trace-scale: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/trace_scale.py $(ARGS)

bench-approximate: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/approximate.py $(ARGS)

bench: $(VENV)/.installed
	@$(BIN)/ffn bench $(ARGS)

bench-timers: $(VENV)/.installed-peers
	@$(BIN)/python -m benchmarks.timers $(ARGS)

bench-method: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.bench_method $(ARGS)

bench-sweep: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.sweep $(ARGS)

# Published measurements against a plan's defaults; a test compares the file with what the tool predicts.
plan-published: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.plan_published --save benchmarks/results/plan_published.csv

bench-plan: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.plan_measured $(ARGS)

bench-conv: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.conv1x1 $(ARGS)

bench-in-model: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.in_model $(ARGS)

bench-kernels: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.kernel_map $(ARGS)

bench-corpus: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.corpus $(ARGS)

bench-trained: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.trained $(ARGS)

bench-grouped: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.grouped $(ARGS)

bench-grids: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.grid_over_machines $(ARGS)

certificates: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.certificates $(ARGS)

demo: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.demo --into docs/benchmarking.md $(ARGS)

# The public suite's table.
results: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.results_table $(ARGS)

facts: $(VENV)/.installed
	@$(BIN)/ffn params --all -o docs/facts.csv --force

bench-headers: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/headers.py $(ARGS)

bench-trace-read: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/trace_read.py $(ARGS)

bench-peers: $(VENV)/.installed-peers
	@$(BIN)/python benchmarks/peers.py $(ARGS)

architectures: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.architectures --save benchmarks/results/architectures.csv $(ARGS)

catalog: $(VENV)/.installed-test
	@$(BIN)/python -m tests.oracles.catalog_modules

picture: $(VENV)/.installed
	@$(BIN)/python -m docs.picture

claims: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.claims > docs/claims.md.new && mv docs/claims.md.new docs/claims.md

trace-architectures: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.trace_architectures --save benchmarks/results/trace_architectures.csv $(ARGS)

unchanged: BASE ?= HEAD~1
unchanged: $(VENV)/.installed-test
	@scratch=$$(mktemp -d) && trap 'git worktree remove --force '$$scratch'/base; rm -rf '$$scratch EXIT && \
	git worktree add -q --detach $$scratch/base $(BASE) && \
	$(BIN)/python -m benchmarks.unchanged record $$scratch/before --package $$scratch/base --inputs $$scratch/inputs && \
	$(BIN)/python -m benchmarks.unchanged record $$scratch/after --inputs $$scratch/inputs && \
	$(BIN)/python -m benchmarks.unchanged compare $$scratch/before $$scratch/after

# The manual as a site, in site/: it fetches nothing when it is read. Needs mkdocs-material (the group `docs`).
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-test $(VENV)/.installed-docs
	@$(BIN)/python -m docs.schemas
	@$(BIN)/mkdocs build --strict --quiet && echo "site/index.html; to search in it: python3 -m http.server -d site"

$(VENV)/.installed-docs: $(NEEDS)
	@.ci/install $(VENV) docs
	@touch $@

# Runs the commands that README.md and docs/ show, and compares; docs-update writes what they print, and the generated
# pages, anew (ARGS=--measured: times too).
test-docs: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(DOCS)

# Pages of ffn report in headless Chromium, which is installed where that is allowed.
test-browser: $(VENV)/.installed-test
	@.ci/chromium && $(BIN)/python -m pytest $(BROWSER) || [ $$? -eq 77 ]

docs-update: $(VENV)/.installed-test
	@$(BIN)/python -m docs.generated
	@$(BIN)/python -m docs.blocks update $(ARGS)

clean:
	rm -rf $(VENV) $(TRITON) $(ARENAS) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
