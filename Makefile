# Everything a newcomer needs: `make demo` and `make test` set the machine up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Triton is built for Linux only; without it the kernels' tests run their plain twins.
TRITON := $(if $(filter Linux,$(shell uname -s)),triton)
NATIVE := CMakeLists.txt $(wildcard native/*)

.PHONY: help demo test check format bench browser wheel docs clean
help:
	@echo "make demo     make a session log, prepare it, train on it, evaluate (3 minutes)"
	@echo "make test     run the tests"
	@echo "make check    lint, formatting, types; the native core is always built with warnings as errors"
	@echo "make format   let ruff mend what it can"
	@echo "make browser  get Chromium and axe-core, to test pages with; tests of pages are skipped without"
	@echo "make wheel    build the sdist and a wheel of it, install that apart and try it"
	@echo "make docs     write the generated pages of docs/ again"
	@echo "make bench    hotrow bench store, against FBGEMM and torch.nn.EmbeddingBag"
	@echo "make clean    remove what the other targets made"

demo: $(VENV)/ready
	@$(BIN)/hotrow demo

test: $(VENV)/ready $(VENV)/peers $(VENV)/browser
	@echo "== running the tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

check: $(VENV)/ready
	@echo "== ruff, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/ready $(VENV)/peers
	@$(BIN)/hotrow bench store

$(VENV)/tools: constraints.txt
	@echo "== making $(VENV) and installing PyTorch and tools (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Hotrow needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip
	@$(BIN)/python -m pip install -q -c constraints.txt torch scikit-build-core nanobind cmake ninja \
		duckdb hypothesis mypy plotly pytest pytest-xdist ray ruff tensorboard $(TRITON)
	@touch $@

$(VENV)/ready: $(VENV)/tools pyproject.toml $(NATIVE)
	@echo "== building the native core and installing hotrow"
	@$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation \
		-C cmake.define.HOTROW_STRICT=ON -e '.[tensorboard]'
	@touch $@

# TorchRec and FBGEMM, to be tested and measured against. Without their dependencies: those would bring CUDA builds.
$(VENV)/peers: $(VENV)/tools requirements-peers.txt
	@echo "== installing the peers: TorchRec and FBGEMM for CPU"
	@$(BIN)/python -m pip install -q --no-deps -r requirements-peers.txt
	@touch $@

# Optional: where neither root nor npm is at hand, tests of pages are skipped and say so.
browser: $(VENV)/browser
$(VENV)/browser: $(VENV)/tools
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "== installing Chromium, to test pages with" && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium \
		>/dev/null; } || echo "== no Chromium here: tests of pages will be skipped (apt-get install chromium)"
	@command -v npm >/dev/null && npm install --prefix $(VENV) --no-save --no-audit --no-fund --loglevel=error \
		axe-core@4.14.0 >/dev/null || echo "== no axe-core here: pages are not checked for accessibility (needs npm)"
	@touch $@

# From the sdist, as an installer would; tried beside the libraries of $(VENV), without the source tree in sight.
wheel: $(VENV)/ready
	@echo "== building the sdist and a portable wheel of it, and trying that"
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("build/wheel")' >build/wheel/log 2>&1 \
		&& $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -C cmake.define.HOTROW_PORTABLE=ON \
		-w build/wheel build/wheel/*.tar.gz || { cat build/wheel/log; exit 1; }
	@$(PYTHON) -m venv build/wheel/venv
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$(build/wheel/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@build/wheel/venv/bin/python -m pip install -q --no-deps build/wheel/*.whl
	@cd build/wheel && venv/bin/hotrow --version && venv/bin/python -c \
		'import hotrow; from hotrow import _native; assert "wheel" in hotrow.__file__, hotrow.__file__'
	@ls build/wheel/*.whl build/wheel/*.tar.gz

docs: $(VENV)/ready
	@$(BIN)/python -m hotrow.reference > docs/settings.md
	@$(BIN)/python -m hotrow.bench.page docs/benchmarks/*.json > docs/benchmarks.md

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
