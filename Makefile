# make run   set up, then answer a prompt with the embedded model and show what was done to it
# make test  set up, then lint, type-check and run the tests, less those marked exhaustive
# make test-all  the same with all of them
# make sanitize  the native kernels under address, undefined-behaviour and thread sanitizers
# make fuzz  the property tests with new random examples
# make docs  the documentation as a site, build/site/index.html
# make setup  the environment, and the line that activates it
.PHONY: run test test-all sanitize fuzz check docs bench setup clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROMPT ?= The capital of France is

run: $(READY)
	$(BIN)/graft run "$(PROMPT)" --table --compare
	@echo "serve it: $(BIN)/graft serve smollm2-135m, then http://127.0.0.1:8000/v1 speaks OpenAI's API (docs/serve.md)"

# processes with one thread each: most tests are many small calls; one order of sets, so that a run repeats; bytecode
# is kept, whatever the environment says: each process would compile all that it imports
TESTS := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# the checks run beside the tests, of which the first half minute is one process; what they say comes when they end
BESIDE = @log=$$(mktemp); { $(MAKE) --no-print-directory check > $$log 2>&1; status=$$?; cat $$log; rm $$log; exit $$status; } & \
	  checks=$$!; $(1); tests=$$?; wait $$checks || { echo "make check failed: see above" >&2; exit 1; }; exit $$tests

# the short run compiles native code in half the time; make test-all has it as it is shipped
test: $(READY)
	$(call BESIDE,GRAFT_CXXFLAGS=-O1 $(TESTS))

test-all: $(READY)
	$(call BESIDE,HYPOTHESIS_PROFILE=all $(TESTS) -m '')

# once as programs of their own, and once inside of Python, where a model's whole step runs
sanitize: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" tests/unit/backends/test_native_sanitizers.py
	OMP_NUM_THREADS=1 GRAFT_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1" \
	  GRAFT_NATIVE_CACHE_DIR="$$(mktemp -d)" ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so)" \
	  $(BIN)/python -m pytest -p no:xdist -m "" tests/unit/backends/test_native_kernels.py tests/unit/backends/test_native_attention.py tests/unit/backends/test_native_experts.py \
	  tests/unit/backends/test_native_rows.py "tests/e2e/test_native_families.py" -k "not families or llama or gpt_oss or gemma-2"

# the property tests with examples that no run has seen
fuzz: $(READY)
	HYPOTHESIS_PROFILE=fuzz OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "" $(shell grep -rl --include=test_*.py "from hypothesis" tests/unit)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/site/check_links.py --paths

# its tools are an extra of their own, so that no other target installs them
docs: $(VENV)/.docs
	@echo "building the site: half a minute"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/engine.py

# the last line is what a person types next
setup: $(READY)
	@echo "ready: . $(BIN)/activate"

# pip itself comes first: the one that Python brings takes twice as long to choose among all versions of all packages;
# then torch, from the pinned version: a range would take gigabytes of CUDA packages. Bytecode is written by all cores,
# that of torch beside pip: pip would take 45 seconds over it, on one; what few programs import, two fifths of it, is
# compiled when it is imported
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
SELDOM := /(tests|transformers/models|matplotlib|fontTools|pygments|openai|setuptools|pip)/
BYTECODE = $(BIN)/python -m compileall -qq -x '$(SELDOM)' $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
$(READY): pyproject.toml constraints.txt
	@echo "a virtual environment in $(VENV), with torch and graft: some minutes where nothing is cached" >&2
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip || echo "pip stays as Python brought it: what follows takes longer" >&2
	$(INSTALL) torch
	$(BYTECODE)/torch & $(BYTECODE)/sympy & $(INSTALL) hatchling editables && $(INSTALL) --no-build-isolation -e ".[dev,serve]" && wait
	$(BYTECODE) -j 0 || echo "some files of packages are for other versions of Python, and have no bytecode" >&2
	touch $(READY)

$(VENV)/.docs: $(READY) docs/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -c docs/constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV)
