# Two commands for a fresh machine: `make train` and `make test`. Both build .venv first, once:
# `make train` installs what training needs, every other target the development tools, too.
#
#   make train ARGS="--text my/notes"        options of `moe-optim train`, after the recipe
#   make test PYTEST_ARGS="-k config"        anything pytest takes
#   make life-cycle STEPS=100000             random orders of calls, others each time; SEED=N repeats
#   make fuzz CASES=10000                    harmed checkpoints, likewise
#   make train PYTHON=/path/to/python3.12    build .venv with this Python and no other

VENV := .venv
TO_TRAIN := $(VENV)/.installed-to-train
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST_ARGS ?=
STEPS ?= 100000
CASES ?= 10000
SEED ?=
# A worker per core; a file stays with one, since its tests share what they set up. Files come in the
# order of tests/conftest.py, not by their numbers of tests. -n 0: no workers.
SPREAD := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Prints the first Python >= 3.12 that can make a virtual environment. Every candidate is run, not
# only looked up: a pyenv shim is on PATH even where no version stands behind it.
define FIND_PYTHON
if [ -n "$$PYTHON" ]; then
    set -- "$$PYTHON"
else
    set -- python3.12 python3.13 python3.14 \
        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 python3 python
fi
found=
for candidate do
    if ! python=$$(command -v "$$candidate"); then
        if [ -n "$$PYTHON" ]; then
            found="
  $$candidate: not there"
        fi
        continue
    fi
    answer=$$("$$python" -c '
import sys
answer = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info >= (3, 12):
    try:
        import ensurepip, venv
        answer = "ok"
    except ImportError:
        answer += ", but without the venv module"
print(answer)' 2>/dev/null) || answer="does not run"
    if [ "$$answer" = ok ]; then
        echo "$$python"
        exit 0
    fi
    found="$$found
  $$python: $$answer"
done
echo "error: moe_optim needs Python 3.12 or newer, with its venv module. Found:$${found:-
  no Python at all}
Install one, or name one: make $(or $(firstword $(MAKECMDGOALS)),train) PYTHON=/path/to/python3.12" >&2
exit 1
endef
export FIND_PYTHON PYTHON

# Runs the tests that use GPUs, which the run before hides; 5 is pytest's word for none of them. How
# many workers share a GPU, and what each gets, is in tests/support/gpu_sharing.py.
define ON_GPUS
@if $(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.device_count())'; then \
    $(VENV)/bin/python -m pytest --gpus -n auto $(1) || [ $$? -eq 5 ]; \
fi
endef

# Prints the extra "pins". As arguments, pip knows them before it picks a torch; as an extra, it would
# download the newest one first.
PINS := $(VENV)/bin/python -c 'import tomllib; \
    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
    print(*extras["pins"])'

# Compiles what pip has installed, on all cores, where pip itself takes one. Some packages hold files
# that are no Python of this version.
COMPILE := $(VENV)/bin/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: train test test-all life-cycle fuzz lint format docs site python clean

train: $(TO_TRAIN)
	$(VENV)/bin/moe-optim train recipes/quickstart.yaml --out runs/quickstart $(ARGS)
	@echo "moe-optim is $(VENV)/bin/moe-optim; 'source $(VENV)/bin/activate' puts it on PATH."

# Compiled modules are kept even where the environment asks for none: every process that a test
# starts would compile the package, and every worker rewrite all assertions.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(SPREAD) $(PYTEST_ARGS)
	$(call ON_GPUS,$(PYTEST_ARGS))

# Drives the life cycle of weights and gradients through more random steps than the suite does, and
# through others each time. SEED=N repeats those of a run.
life-cycle: $(STAMP)
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); \
	echo "make life-cycle STEPS=$(STEPS) SEED=$$seed repeats this run"; \
	LIFE_CYCLE_STEPS=$(STEPS) LIFE_CYCLE_SEED=$$seed $(VENV)/bin/python -m pytest \
	    tests/buckets/test_state_machine.py

# Reads more damaged checkpoints than the suite does.
fuzz: $(STAMP)
	FUZZ_CASES=$(CASES) $(VENV)/bin/python -m pytest tests/checkpoint/test_fuzz_checkpoints.py

# Also what shows the same at further settings: some minutes more.
test-all: $(STAMP)
	$(VENV)/bin/python -m pytest $(SPREAD) -m "" $(PYTEST_ARGS)
	$(call ON_GPUS,-m "" $(PYTEST_ARGS))

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tools.prose

# Lets ruff rewrite what it can.
format: $(STAMP)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

# Rewrites the tables and pictures of the documents that repeat the code or a measurement, and the
# record of Megatron's flags.
docs: $(STAMP)
	$(VENV)/bin/python -m tools.documents.megatron_flags
	$(VENV)/bin/python -m tools.documents

# Builds the site of all documents and of the API; what fails here fails in the tests. Open
# site/index.html, or serve the folder: it needs nothing from elsewhere.
site: $(STAMP)
	$(VENV)/bin/python -m sphinx -c docs/sphinx -d build/doctrees -E -W --keep-going -q . site

# Prints the Python that .venv would be built with.
python:
	@sh -c "$$FIND_PYTHON"

# Stamps are written last, so that an interrupted set-up is done again.
$(TO_TRAIN): pyproject.toml $(wildcard moe_optim/version.py)
	@if ! $(VENV)/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	then \
	    python=$$(sh -c "$$FIND_PYTHON") || exit 1; \
	    echo "Building $(VENV) with $$python."; \
	    "$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "Installing moe_optim into $(VENV). The first time this downloads 5 GB, most of it torch."
	@$(VENV)/bin/python -m pip install --no-compile --disable-pip-version-check $$($(PINS)) \
	    -e '.[megatron]'
	@$(COMPILE)
	@touch $(TO_TRAIN)

$(STAMP): $(TO_TRAIN)
	@echo "Installing the development tools into $(VENV)."
	@$(VENV)/bin/python -m pip install --no-compile -q --disable-pip-version-check \
	    -e '.[megatron,dev]'
	@$(COMPILE)
	@touch $(STAMP)

# Removes .venv and what the tools left behind; runs/ stays.
clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
