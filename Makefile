# SPDX-License-Identifier: MIT
#
# hreduce: one Makefile, no generated build system. `make help` lists the targets.
#
# A part is a directory; every .c file in it is built, so adding a file needs no edit here:
#   proto/ kernels/          archives used by both sides
#   daemon/ (not ctl/)       hreduced = daemon/main.c + an archive of the rest
#   daemon/ctl/              hreducectl
#   client/                  libhclient.so.0; client/perf/ = hreduce-perf; client/examples/X.c = examples/X
#   tests/lib/               helpers that C tests link
#   tests/sim/fake_cuda/     libcuda_fake.so.1, a CUDA driver without a GPU
#   tests/sim/fake_ibverbs/  fake_ibverbs/libibverbs.so.1, verbs without a device
#   tests/sim/fake_rdmacm/   fake_rdmacm/librdmacm.so.1, RDMA-CM without an address
#   tests/unit/test_X.c      one cmocka program each, linked with every part as archives
#   tests/cluster|fault/X.c  programs that use the library as a job would
#   tests/gpu/X.c            programs for machines with GPUs (make test-gpu)
#   tests/bench/X.c          developers' benchmarks; tests/fuzz/fuzz_X.c libFuzzer targets
# A part that does not exist yet is left out.

# ---------------------------------------------------------------- what a user may set

BUILD ?= build
# A sanitizer list as gcc takes it (address,undefined or thread); empty: a release build.
SANITIZE ?=
# auto: CUDA kernels are built when nvcc is found. 0: never. 1: it is an error when they cannot be.
CUDA ?= auto
CUDA_HOME ?= /usr/local/cuda
WERROR ?= 1

PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
SBINDIR ?= $(PREFIX)/sbin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
MANDIR ?= $(PREFIX)/share/man
# Where Debian's interpreter looks below /usr and below /usr/local.
PYTHONDIR ?= $(PREFIX)/lib/python$(if $(filter /usr,$(PREFIX)),3,$(PYTHON_VERSION))/dist-packages
PYTHON_VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
SYSUSERSDIR ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR ?= $(PREFIX)/lib/tmpfiles.d

FUZZ_SECONDS ?= 60
# Jobs of the composed targets (demo, test, lint, ...) when make was not given -j.
JOBS ?= $(shell nproc)
# Passed to tests/run, for instance: make test TESTFLAGS='-k ring'
TESTFLAGS ?=
# Debian's interpreter by path: another python3 may come first in PATH and has no torch.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)

# The version stands in one place, the public header.
VERSION_WORD = $(shell sed -n 's/^\#define HCLIENT_$(1)[ ]*\([0-9]*\).*/\1/p' client/hclient.h 2>/dev/null)
VERSION = $(call VERSION_WORD,MAJOR).$(call VERSION_WORD,MINOR).$(call VERSION_WORD,PATCH)

.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
.PHONY: all
all:

# ---------------------------------------------------------------- flags

WARN := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
ifeq ($(WERROR),1)
WARN += -Werror
endif

# -ffp-contract=off: the result of a reduction is defined bit for bit; a fused multiply-add would change it.
# -fno-strict-aliasing: shared memory and received bytes are viewed through the structs of proto/, and user
#   buffers through any element type; no optimisation here is worth a miscompiled view of them.
# -fPIC everywhere: one set of objects serves the library, the executables (PIE) and the unit tests.
CFLAGS_ALL = -std=gnu11 -O2 -g $(WARN) -ffp-contract=off -fno-strict-aliasing -fPIC -fvisibility=hidden \
             -D_GNU_SOURCE -I. -pthread $(CFLAGS)
LDFLAGS_ALL = -pthread -Wl,--as-needed $(LDFLAGS)

ifeq ($(SANITIZE),)
CFLAGS_ALL += -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -fstack-protector-strong -fstack-clash-protection
LDFLAGS_ALL += -Wl,-z,relro,-z,now,-z,noexecstack
SHARED_LDFLAGS := -Wl,-z,defs
EXE_LDFLAGS := -pie
ifeq ($(shell uname -m),x86_64)
CFLAGS_ALL += -fcf-protection
endif
else
CFLAGS_ALL += -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS_ALL += -fsanitize=$(SANITIZE)
endif
ifeq ($(SANITIZE),thread)
# gcc warns that it does not model fences: they are no error, only invisible to it.
CFLAGS_ALL += -Wno-tsan
endif
ifeq ($(FUZZ),1)
CFLAGS_ALL += -fsanitize=fuzzer-no-link
endif

# Files named for an instruction set are compiled for it; everything else stays at the baseline, and the
# choice is made at run time.
ifeq ($(shell uname -m),x86_64)
%_avx2.o %_avx2.ok: ISA_CFLAGS := -mavx2 -mf16c
%_avx512.o %_avx512.ok: ISA_CFLAGS := -mavx2 -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
endif

# Only the daemon and its command line use these; the client library needs libc alone.
DAEMON_PKGS := libuv libsystemd inih jansson hwloc
# Headers only: the libraries are loaded at run time where they are, see daemon/verbs/verbs_api.h.
DAEMON_HEADERS := libibverbs librdmacm
DAEMON_CFLAGS := $(shell pkg-config --cflags $(DAEMON_PKGS) 2>/dev/null)
DAEMON_LIBS = $(shell pkg-config --libs $(DAEMON_PKGS)) -ldl -lm

# ---------------------------------------------------------------- CUDA

CUDA_SRC := $(sort $(wildcard kernels/*.cu))
CUDA_TEXT := $(CUDA_SRC) $(sort $(wildcard kernels/*.cuh tests/sim/*.cpp))
ifeq ($(CUDA),0)
NVCC :=
else
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard $(CUDA_HOME)/bin/nvcc))
ifeq ($(CUDA)$(NVCC),1)
$(error CUDA=1, but nvcc is neither in PATH nor in $(CUDA_HOME)/bin: set CUDA_HOME or NVCC, or build with CUDA=0)
endif
endif
ifneq ($(and $(NVCC),$(CUDA_SRC)),)
# One image of all kernels, embedded by kernels/gpu_image.c and loaded by the driver: no CUDA library is linked.
CUDA_IMAGE := $(BUILD)/obj/kernels/gpu_kernels.fatbin
# Machine code for what this nvcc knows of the list (it runs on every later minor version of its major), and PTX
# of the newest of them for later devices.
NVCC_KNOWS := $(shell $(NVCC) --list-gpu-arch 2>/dev/null)
CUDA_ARCHS ?= $(foreach a,70 75 80 90 100 120,$(if $(filter compute_$(a),$(NVCC_KNOWS)),$(a)))
NVCC_FLAGS = -O3 -std=c++17 -I. -fmad=false -ftz=false -prec-div=true -prec-sqrt=true \
             $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
CFLAGS_ALL += -DHREDUCE_CUDA=1
$(BUILD)/obj/kernels/gpu_image.o: PART_CFLAGS := -DHRG_IMAGE_FILE='"$(CUDA_IMAGE)"'
$(BUILD)/obj/kernels/gpu_image.o: $(CUDA_IMAGE)
else
CFLAGS_ALL += -DHREDUCE_CUDA=0
endif

# ---------------------------------------------------------------- sources

find_c = $(sort $(shell find $(1) -name '*.c' $(2) 2>/dev/null))
objs = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

PROTO_SRC := $(call find_c,proto)
KERNELS_SRC := $(call find_c,kernels)
DAEMON_SRC := $(call find_c,daemon,-not -path 'daemon/ctl/*')
CTL_SRC := $(call find_c,daemon/ctl)
CLIENT_SRC := $(sort $(wildcard client/*.c))
PERF_SRC := $(sort $(wildcard client/perf/*.c))
EXAMPLE_SRC := $(sort $(wildcard client/examples/*.c))
TESTLIB_SRC := $(sort $(wildcard tests/lib/*.c))
SIM_SRC := $(sort $(wildcard tests/sim/*.c))
FAKE_CUDA_SRC := $(sort $(wildcard tests/sim/fake_cuda/*.c))
FAKE_IBVERBS_SRC := $(sort $(wildcard tests/sim/fake_ibverbs/*.c))
FAKE_RDMACM_SRC := $(sort $(wildcard tests/sim/fake_rdmacm/*.c))
# The kernels' own source compiled for the CPU, see there.
EMULATED_SRC := $(wildcard tests/sim/cuda_emulated.cpp)
UNIT_SRC := $(sort $(wildcard tests/unit/test_*.c))
JOB_TEST_SRC := $(sort $(wildcard tests/cluster/*.c tests/fault/*.c))
BENCH_SRC := $(sort $(wildcard tests/bench/*.c))
GPU_TEST_SRC := $(sort $(wildcard tests/gpu/*.c))
# Programs named *_mpi.c run against Open MPI and are built where mpicc is.
MPI_SRC := $(filter %_mpi.c,$(BENCH_SRC))
BENCH_SRC := $(filter-out %_mpi.c,$(BENCH_SRC))
MPICC := $(shell command -v mpicc 2>/dev/null)
FUZZ_SRC := $(sort $(wildcard tests/fuzz/fuzz_*.c))

ALL_SRC := $(PROTO_SRC) $(KERNELS_SRC) $(DAEMON_SRC) $(CTL_SRC) $(CLIENT_SRC) $(PERF_SRC) $(EXAMPLE_SRC) \
           $(TESTLIB_SRC) $(SIM_SRC) $(FAKE_CUDA_SRC) $(FAKE_IBVERBS_SRC) $(FAKE_RDMACM_SRC) $(UNIT_SRC) $(JOB_TEST_SRC) \
           $(BENCH_SRC) $(GPU_TEST_SRC)

PARTS := $(if $(PROTO_SRC),proto) $(if $(KERNELS_SRC),kernels) $(if $(DAEMON_SRC),daemon)
HREDUCED := $(if $(wildcard daemon/main.c),$(BUILD)/hreduced)
HREDUCECTL := $(if $(CTL_SRC),$(BUILD)/hreducectl)
LIBHCLIENT := $(if $(CLIENT_SRC),$(BUILD)/libhclient.so)
PERF := $(if $(PERF_SRC),$(BUILD)/hreduce-perf)
EXAMPLES := $(EXAMPLE_SRC:client/%.c=$(BUILD)/%)
UNIT_TESTS := $(UNIT_SRC:%.c=$(BUILD)/%)
JOB_TESTS := $(JOB_TEST_SRC:%.c=$(BUILD)/%)
GPU_TESTS := $(GPU_TEST_SRC:%.c=$(BUILD)/%)
FAKE_CUDA := $(if $(FAKE_CUDA_SRC),$(BUILD)/tests/libcuda_fake.so.1 $(BUILD)/tests/libcuda_fake_old.so.1)
FAKE_IBVERBS := $(if $(FAKE_IBVERBS_SRC),$(BUILD)/tests/fake_ibverbs/libibverbs.so.1)
FAKE_RDMACM := $(if $(FAKE_RDMACM_SRC),$(BUILD)/tests/fake_rdmacm/librdmacm.so.1)
BENCHES := $(BENCH_SRC:%.c=$(BUILD)/%) $(if $(MPICC),$(MPI_SRC:%.c=$(BUILD)/%))
FUZZERS := $(FUZZ_SRC:%.c=$(BUILD)/%)

.PHONY: tests bench
# The archives are named so that a part is compiled before anything uses it.
all: $(HREDUCED) $(HREDUCECTL) $(LIBHCLIENT) $(PERF) $(EXAMPLES) $(PARTS:%=$(BUILD)/obj/lib%.a)
bench: all $(BENCHES)
# Benchmarks are compiled with the tests so that they do not rot; nobody measures a sanitized build.
tests: all $(UNIT_TESTS) $(JOB_TESTS) $(FAKE_CUDA) $(FAKE_IBVERBS) $(FAKE_RDMACM) $(GPU_TESTS) $(if $(SANITIZE),,$(BENCHES))

# ---------------------------------------------------------------- rules: objects and archives

# Rewritten only when the flags change, so that CUDA=0 after CUDA=1, or a new CFLAGS, rebuilds what it must.
$(BUILD)/obj/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS_ALL) $(DAEMON_CFLAGS) $(NVCC_FLAGS)' | cmp -s - $@ || \
	    echo '$(CC) $(CFLAGS_ALL) $(DAEMON_CFLAGS) $(NVCC_FLAGS)' > $@
.PHONY: FORCE
FORCE:

quiet = @printf '  %-4s %s\n' '$(1)' '$@';

$(BUILD)/obj/daemon/%.o $(BUILD)/obj/tests/unit/%.o $(BUILD)/warn/daemon/%.ok $(BUILD)/warn/tests/unit/%.ok: \
    PART_CFLAGS := $(DAEMON_CFLAGS)
# An example includes what a user has: the public header alone.
$(BUILD)/obj/client/examples/%.o $(BUILD)/warn/client/examples/%.ok: PART_CFLAGS := -Iclient
# Also where CC was given on the command line.
$(BUILD)/obj/tests/bench/%_mpi.o: override CC := mpicc

$(BUILD)/obj/%.o: %.c $(BUILD)/obj/flags
	@mkdir -p $(@D)
	$(call quiet,CC)$(CC) $(CFLAGS_ALL) $(PART_CFLAGS) $(ISA_CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/warn/%.ok: %.c $(BUILD)/obj/flags
	@mkdir -p $(@D)
	$(call quiet,WARN)$(CC) $(CFLAGS_ALL) $(PART_CFLAGS) $(ISA_CFLAGS) -fsyntax-only -MMD -MP -MT $@ -MF $(@:.ok=.d) $< \
	    && touch $@

$(BUILD)/obj/%.fatbin: %.cu $(BUILD)/obj/flags
	@mkdir -p $(@D)
	$(call quiet,NVCC)$(NVCC) $(NVCC_FLAGS) -MMD -MF $(@:.fatbin=.d) -fatbin $< -o $@

# A misaligned access traps, as it does on a GPU; unrolling is left to this compiler.
$(BUILD)/obj/tests/sim/%.o: tests/sim/%.cpp $(BUILD)/obj/flags
	@mkdir -p $(@D)
	$(call quiet,CXX)$(CXX) -std=c++17 -O1 -g -I. -Wall -Wextra -Wno-unknown-pragmas -Wno-maybe-uninitialized $(if $(filter 1,$(WERROR)),-Werror) \
	    -ffp-contract=off -fno-strict-aliasing -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti \
	    -fsanitize=alignment -fsanitize-undefined-trap-on-error -MMD -MP -c $< -o $@

# An archive is made anew when its list of members changes: a deleted source must not live on in it.
define archive
$(BUILD)/obj/lib$(1).list: FORCE
	@mkdir -p $$(@D)
	@echo '$(2)' | cmp -s - $$@ || echo '$(2)' > $$@
$(BUILD)/obj/lib$(1).a: $(2) $(BUILD)/obj/lib$(1).list
	$$(call quiet,AR)rm -f $$@; $(AR) rcs $$@ $(2)
endef
$(eval $(call archive,proto,$(call objs,$(PROTO_SRC))))
$(eval $(call archive,kernels,$(call objs,$(KERNELS_SRC))))
$(eval $(call archive,daemon,$(call objs,$(filter-out daemon/main.c,$(DAEMON_SRC)))))
$(eval $(call archive,ctl,$(call objs,$(filter-out %/main.c,$(CTL_SRC)))))
$(eval $(call archive,client,$(call objs,$(CLIENT_SRC))))
$(eval $(call archive,perf,$(call objs,$(filter-out %/main.c,$(PERF_SRC)))))
$(eval $(call archive,test,$(call objs,$(TESTLIB_SRC))))
$(eval $(call archive,sim,$(call objs,$(SIM_SRC)) $(EMULATED_SRC:%.cpp=$(BUILD)/obj/%.o)))

lib = $(patsubst %,$(BUILD)/obj/lib%.a,$(1))
group = -Wl,--start-group $(call lib,$(1)) -Wl,--end-group
link = $(CC) $(CFLAGS_ALL) $(EXE_LDFLAGS) $(LDFLAGS_ALL) -o $@

# ---------------------------------------------------------------- rules: products

# One sentence instead of a page of missing headers.
.PHONY: daemon-libs
daemon-libs:
	@pkg-config --exists $(DAEMON_PKGS) $(DAEMON_HEADERS) 2>/dev/null || { echo "hreduced needs pkg-config and the development\
	 files of: $(DAEMON_PKGS) $(DAEMON_HEADERS). On Debian 'make deps' installs them (as root) or lists them." >&2; exit 1; }
$(call objs,$(DAEMON_SRC) $(CTL_SRC)): | daemon-libs

DAEMON_PARTS := daemon kernels proto
$(BUILD)/hreduced: $(BUILD)/obj/daemon/main.o $(call lib,$(DAEMON_PARTS))
	$(call quiet,LD)$(link) $< $(call group,$(DAEMON_PARTS)) $(DAEMON_LIBS)

$(BUILD)/hreducectl: $(call objs,$(CTL_SRC)) $(call lib,$(DAEMON_PARTS))
	$(call quiet,LD)$(link) $(call objs,$(CTL_SRC)) $(call group,$(DAEMON_PARTS)) $(DAEMON_LIBS)

# What the library takes from proto/ and kernels/ comes in by archive and stays hidden. nodelete: its watcher
# thread runs in it, so a dlclose() must not unmap it.
HCLIENT_MAP := $(wildcard client/hclient.map)
$(BUILD)/libhclient.so.0: $(call objs,$(CLIENT_SRC)) $(call lib,proto kernels) $(HCLIENT_MAP)
	$(call quiet,LD)$(CC) $(CFLAGS_ALL) -shared -Wl,-soname,libhclient.so.0,-z,nodelete \
	    $(HCLIENT_MAP:%=-Wl,--version-script=%) $(SHARED_LDFLAGS) $(LDFLAGS_ALL) -o $@ \
	    $(call objs,$(CLIENT_SRC)) $(call group,proto kernels)

$(BUILD)/libhclient.so: $(BUILD)/libhclient.so.0
	@ln -sf libhclient.so.0 $@

# Found beside the program in the build directory, in ../lib when installed.
$(BUILD)/hreduce-perf: $(call objs,$(PERF_SRC)) $(call lib,kernels proto) $(BUILD)/libhclient.so
	$(call quiet,LD)$(link) $(call objs,$(PERF_SRC)) $(BUILD)/libhclient.so $(call group,kernels proto) \
	    -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib' -lm

$(EXAMPLES): $(BUILD)/examples/%: $(BUILD)/obj/client/examples/%.o $(BUILD)/libhclient.so
	@mkdir -p $(@D)
	$(call quiet,LD)$(link) $^ -Wl,-rpath,'$$ORIGIN/..' -lm

# ---------------------------------------------------------------- rules: test programs

UNIT_PARTS := test sim daemon ctl client perf kernels proto
$(UNIT_TESTS): $(BUILD)/%: $(BUILD)/obj/%.o $(call lib,$(UNIT_PARTS))
	@mkdir -p $(@D)
	$(call quiet,LD)$(link) $< $(call group,$(UNIT_PARTS)) -lcmocka $(DAEMON_LIBS)

# A CUDA driver without a GPU, and one that is too old.
$(BUILD)/tests/libcuda_fake_old.so.1: FAKE_MAP := tests/sim/fake_cuda/old.map
$(FAKE_CUDA): $(call objs,$(FAKE_CUDA_SRC)) $(call lib,kernels proto) tests/sim/fake_cuda/old.map
	@mkdir -p $(@D)
	$(call quiet,LD)$(CC) $(CFLAGS_ALL) -shared -Wl,-soname,$(@F) $(FAKE_MAP:%=-Wl,--version-script=%) $(SHARED_LDFLAGS) \
	    $(LDFLAGS_ALL) -o $@ $(call objs,$(FAKE_CUDA_SRC)) $(call group,kernels proto) -lm

# Verbs without a device, in a directory of its own: daemons find it there before the real one (LD_LIBRARY_PATH).
$(FAKE_IBVERBS): $(call objs,$(FAKE_IBVERBS_SRC))
$(FAKE_RDMACM): $(call objs,$(FAKE_RDMACM_SRC))
$(FAKE_IBVERBS) $(FAKE_RDMACM):
	@mkdir -p $(@D)
	$(call quiet,LD)$(CC) $(CFLAGS_ALL) -shared -Wl,-soname,$(@F) $(SHARED_LDFLAGS) $(LDFLAGS_ALL) -o $@ $^

JOB_PARTS := test perf kernels proto
$(JOB_TESTS) $(BENCHES) $(GPU_TESTS): $(BUILD)/%: $(BUILD)/obj/%.o $(LIBHCLIENT) $(call lib,$(JOB_PARTS))
	@mkdir -p $(@D)
	$(call quiet,LD)$(link) $< $(call group,$(JOB_PARTS)) $(LIBHCLIENT) -Wl,-rpath,'$$ORIGIN/../..' -lm
$(MPI_SRC:%.c=$(BUILD)/%): override CC := mpicc

$(FUZZERS): $(BUILD)/%: $(BUILD)/obj/%.o $(call lib,$(UNIT_PARTS))
	@mkdir -p $(@D)
	$(call quiet,LD)$(link) -fsanitize=fuzzer $< $(call group,$(UNIT_PARTS)) $(DAEMON_LIBS)

# ---------------------------------------------------------------- the two commands, and the suites

# Sub-makes follow the installation of packages, because what is found decides what is built.
submake = $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS))
deps = @.ci/deps

.PHONY: deps demo demo-ddp test test-verbs test-gpu test-vm asan tsan clang
deps:
	$(deps) build test

demo:
	$(deps) build
	@+$(submake) all
	$(BUILD)/hreduce-perf --local 4x8 -b 4M -e 16M -f 4

demo-ddp:
	$(deps) build ddp
	@+$(submake) all
	HREDUCE_BUILD=$(abspath $(BUILD)) $(PYTHON) client/python/demo_ddp.py --local 2x2

test:
	$(deps) build test
	@+$(submake) tests
	@$(PYTHON) tests/run --build $(BUILD) $(TESTFLAGS)

# All tests that also run over verbs, on simulated devices; the suite has a few of them.
test-verbs:
	@+$(MAKE) --no-print-directory test TESTFLAGS="--verbs $(TESTFLAGS)"

# What needs a real GPU; programs that find none say so and are skipped.
test-gpu:
	$(deps) build test
	@+$(submake) tests
	@$(PYTHON) tests/gpu/run --build $(BUILD) --out $(BUILD)/test-gpu $(TESTFLAGS)

# Without the packages, or the right to install them, the machines are skipped in words (and status 77).
test-vm:
	$(deps) build
	@.ci/deps vm || true
	@+$(submake) all
	@$(PYTHON) tests/vm/run --build $(BUILD) $(TESTFLAGS) || [ $$? = 77 ]

# The same suite on other builds. CUDA=0: the sanitizers cannot see device code, and its driver upsets them.
asan:
	@+$(MAKE) --no-print-directory test BUILD=build-asan SANITIZE=address,undefined CUDA=0
tsan:
	@+$(MAKE) --no-print-directory test BUILD=build-tsan SANITIZE=thread CUDA=0

# A second compiler's warnings, and nothing else of it: what it makes is built and run by `make fuzz`.
clang:
	$(deps) build test lint
	@+$(submake) warnings BUILD=build-clang CC=clang CUDA=0
.PHONY: warnings
warnings: $(ALL_SRC:%.c=$(BUILD)/warn/%.ok)

.PHONY: fuzz fuzzers
fuzzers: $(FUZZERS)
fuzz:
	$(deps) build fuzz
	@+$(submake) fuzzers BUILD=build-fuzz CC=clang SANITIZE=address,undefined FUZZ=1 CUDA=0
	@tests/fuzz/run.sh build-fuzz $(FUZZ_SECONDS)

# ---------------------------------------------------------------- lint

LINT := build/lint
LINT_DIRS := $(wildcard client daemon kernels proto tests)
LINT_H := $(shell find $(LINT_DIRS) -name '*.h')
LINT_SH := $(shell find $(LINT_DIRS) .ci -name '*.sh') .ci/run .ci/deps
LINT_PY := $(shell find $(LINT_DIRS) -name '*.py') tests/run tests/gpu/run tests/gpu/mps tests/vm/run tests/bench/verbs
LINT_C := $(ALL_SRC) $(MPI_SRC) $(FUZZ_SRC)
# clang-tidy has to find the headers.
LINT_TIDY := $(ALL_SRC) $(if $(MPICC),$(MPI_SRC)) $(FUZZ_SRC)
# Longer files are split: see CONTRIBUTING.md.
LINT_MAX_LINES := 900

# X.inc.h is a body that a .c file includes with its own macros set.
LINT_OWN_H := $(filter-out %.inc.h,$(LINT_H))
LINT_TEXT := $(LINT_C) $(LINT_H) $(CUDA_TEXT) $(LINT_SH) $(LINT_PY) Makefile

.PHONY: lint lint-deep lint-all lint-format lint-text lint-cppcheck lint-shell lint-python
lint:
	$(deps) build test lint
	@+$(submake) -k lint-all && echo "lint: clean"

lint-deep:
	@+$(MAKE) --no-print-directory lint LINT=$(LINT)-deep LINT_STATES=225000

lint-all: lint-format lint-text lint-shell lint-python lint-cppcheck $(LINT_OWN_H:%=$(LINT)/header/%.ok) \
          $(LINT_TIDY:%=$(LINT)/tidy/%.ok)

lint-format:
	$(call quiet,FMT)clang-format --dry-run --Werror $(LINT_C) $(LINT_H) $(CUDA_TEXT)

# Length, licence line, and nothing left for later.
lint-text:
	$(call quiet,TEXT)wc -l $(LINT_TEXT) | awk -v max=$(LINT_MAX_LINES) \
	    '$$2 != "total" && $$1 > max { print $$2 ": " $$1 " lines, more than " max ": split it"; bad = 1 } \
	    END { exit bad }'
	@for file in $(LINT_TEXT); do \
	    head -n 3 $$file | grep -q 'SPDX-License-Identifier: MIT' || { echo "$$file: no SPDX line"; bad=1; }; \
	done; [ -z "$$bad" ]
	@! grep -nE '\b(TO''DO|FIX''ME|X''XX)\b' $(LINT_TEXT)

lint-shell:
	$(call quiet,SH)shellcheck -x $(LINT_SH)

lint-python:
	$(call quiet,PY)$(PYTHON) -m pyflakes $(LINT_PY)

# It keeps what it learned of unchanged files in its build directory.
lint-cppcheck:
	@mkdir -p $(LINT)/cppcheck
	$(call quiet,CPPC)cppcheck --quiet -j$(JOBS) --cppcheck-build-dir=$(LINT)/cppcheck --std=c11 -I. -D_GNU_SOURCE \
	    -DHREDUCE_CUDA=0 $(CPPCHECK_MACROS) --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
	    --suppress=missingIncludeSystem --suppress=unknownEvaluationOrder --suppress=uninitStructMember $(LINT_C)
# It reads no system headers, so a loop that is a macro of jansson has to be told (without a semicolon, at which
# it would end). The two suppressed checks take a designated initialiser for an assignment, and do not see that
# && guards a use; the compilers find the real ones.
CPPCHECK_MACROS := '-Djson_array_foreach(a,i,v)=while((i=0,v=json_array_get(a,i)))' \
                   '-Djson_object_foreach(o,k,v)=while((k=0,v=json_object_get(o,k)))'

# Every header can be included alone.
$(LINT)/header/%.ok: %
	@mkdir -p $(@D)
	@echo '#include "$<"' | $(CC) $(LINT_CFLAGS) -Werror -fsyntax-only -x c - && touch $@

# clang-tidy takes seconds a file, so a clean file is remembered until it or a header of it changes. Nearly all of that is
# the analyzer walking through the same lines by more and more paths: with its own limit of 225000 states for each function
# it takes three to five times as long and reaches hardly a block more. lint-deep has that limit, for now and then.
LINT_STATES := 50000
$(LINT)/tidy/%.ok: % .clang-tidy $(wildcard tests/.clang-tidy)
	@mkdir -p $(@D)
	$(call quiet,TIDY)clang-tidy --quiet $< -- $(LINT_CFLAGS) -Xclang -analyzer-config -Xclang max-nodes=$(LINT_STATES) \
	    2>$@.err || \
	    { grep -v 'warnings generated' $@.err >&2; exit 1; }
	@clang $(LINT_CFLAGS) -MM -MP -MT $@ -MF $@.d $< && touch $@
LINT_CFLAGS = -std=gnu11 -D_GNU_SOURCE -DHREDUCE_CUDA=0 -I. $(WARN) -Wno-error $(DAEMON_CFLAGS) $(LINT_ISA)
$(LINT)/tidy/client/examples/%.c.ok: LINT_ISA := -Iclient
$(LINT)/tidy/%_avx2.c.ok: LINT_ISA := -mavx2 -mf16c
$(LINT)/tidy/%_avx512.c.ok: LINT_ISA := -mavx2 -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
$(LINT)/tidy/%_mpi.c.ok: LINT_ISA = $(shell mpicc --showme:compile 2>/dev/null)

# ---------------------------------------------------------------- install

# X.in names places; the file that is installed names what this make was told.
SUBST = sed -e 's|@prefix@|$(PREFIX)|g' -e 's|@bindir@|$(BINDIR)|g' -e 's|@sbindir@|$(SBINDIR)|g' \
            -e 's|@libdir@|$(LIBDIR)|g' -e 's|@includedir@|$(INCLUDEDIR)|g' -e 's|@sysconfdir@|$(SYSCONFDIR)|g' \
            -e 's|@VERSION@|$(VERSION)|g'
install_program = install -D -m 755 $(1) $(2)
install_data = install -D -m 644 $(1) $(2)
install_subst = mkdir -p $(dir $(2)) && $(SUBST) $(1) > $(2)

MAN_PAGES := $(sort $(shell find client daemon -path '*/man/*.[1-9]' 2>/dev/null))
PYTHON_FILES := $(sort $(shell find client/python/hclient -name '*.py' 2>/dev/null))
UNITS := $(sort $(wildcard systemd/*.service systemd/*.service.in systemd/*.socket systemd/*.socket.in))
SYSUSERS := $(wildcard systemd/sysusers.d/*.conf systemd/*sysusers.conf)
TMPFILES := $(wildcard systemd/tmpfiles.d/*.conf systemd/*tmpfiles.conf)

# One list of source|destination|kind, so that uninstall removes what install made.
INSTALLED = \
    $(if $(HREDUCED),$(HREDUCED)|$(SBINDIR)/hreduced|program) \
    $(if $(HREDUCECTL),$(HREDUCECTL)|$(BINDIR)/hreducectl|program) \
    $(if $(PERF),$(PERF)|$(BINDIR)/hreduce-perf|program) \
    $(if $(LIBHCLIENT),$(LIBHCLIENT).0|$(LIBDIR)/libhclient.so.0|data) \
    $(foreach f,$(wildcard client/hclient.h),$(f)|$(INCLUDEDIR)/hclient.h|data) \
    $(foreach f,$(wildcard client/hclient.pc.in),$(f)|$(LIBDIR)/pkgconfig/hclient.pc|subst) \
    $(foreach f,$(UNITS),$(f)|$(UNITDIR)/$(notdir $(f:.in=))|subst) \
    $(foreach f,$(SYSUSERS),$(f)|$(SYSUSERSDIR)/hreduced.conf|subst) \
    $(foreach f,$(TMPFILES),$(f)|$(TMPFILESDIR)/hreduced.conf|subst) \
    $(foreach f,$(PYTHON_FILES),$(f)|$(PYTHONDIR)/$(f:client/python/%=%)|data) \
    $(foreach f,$(MAN_PAGES),$(f)|$(MANDIR)/man$(subst .,,$(suffix $(f)))/$(notdir $(f))|data)
field = $(word $(2),$(subst |, ,$(1)))
CONF := $(wildcard configs/hreduced.conf)
CONF_PLACE = $(DESTDIR)$(SYSCONFDIR)/hreduced/hreduced.conf

.PHONY: install uninstall
# SKIP_BUILD=1 installs what is there, whatever flags it was built with.
install: $(if $(SKIP_BUILD),,all)
	@set -e; $(foreach i,$(INSTALLED),echo '  INST $(DESTDIR)$(call field,$(i),2)'; \
	    $(call install_$(call field,$(i),3),$(call field,$(i),1),$(DESTDIR)$(call field,$(i),2));)
	@$(if $(LIBHCLIENT),ln -sf libhclient.so.0 $(DESTDIR)$(LIBDIR)/libhclient.so)
	@$(if $(CONF),if [ -e $(CONF_PLACE) ]; then echo '  KEEP $(CONF_PLACE)'; \
	    else echo '  INST $(CONF_PLACE)'; $(call install_data,$(CONF),$(CONF_PLACE)); fi)
	@if [ -z '$(DESTDIR)' ] && [ "$$(id -u)" = 0 ]; then ldconfig; \
	    echo 'installed; next: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload'; fi

# The configuration stays: it is the administrator's.
uninstall:
	@set -e; for f in $(foreach i,$(INSTALLED),$(DESTDIR)$(call field,$(i),2)) $(DESTDIR)$(LIBDIR)/libhclient.so; do \
	    echo "  RM   $$f"; rm -f "$$f"; done
	@rmdir $(DESTDIR)$(PYTHONDIR)/hclient $(DESTDIR)$(UNITDIR) 2>/dev/null || true
	@[ ! -e $(CONF_PLACE) ] || echo '  KEEP $(CONF_PLACE)'

# ---------------------------------------------------------------- help, cleaning

.PHONY: help clean
help:
	@echo 'make               builds into build/ (BUILD=DIR, CUDA=0|1|auto, SANITIZE=LIST, CC=clang, CFLAGS=)'
	@echo 'make demo          installs what it needs, builds, runs 4 nodes x 8 ranks on this machine'
	@echo 'make demo-ddp      the same with a PyTorch DDP training'
	@echo "make test          builds and runs the suite (TESTFLAGS='-k PATTERN'; tests/run --help)"
	@echo 'make test-verbs    cluster and fault tests over verbs, on simulated devices'
	@echo 'make test-gpu      what needs GPUs, and the comparison with NCCL, into build/test-gpu'
	@echo 'make test-vm       verbs and systemd in virtual machines (root; TESTFLAGS=--short: a few minutes)'
	@echo 'make asan tsan     the suite under ASan+UBSan, under TSan'
	@echo 'make lint clang    linters (lint-deep: with four times the patience); a build by clang'
	@echo 'make fuzz          libFuzzer targets for FUZZ_SECONDS=60 in all'
	@echo 'make bench         the programs of tests/bench'
	@echo 'make install       PREFIX=/usr/local SYSCONFDIR=/etc DESTDIR=; make uninstall'
	@echo 'make deps          installs the Debian packages for building and testing'

clean:
	rm -rf build build-asan build-tsan build-clang build-fuzz

-include $(shell find $(BUILD)/obj $(BUILD)/warn $(LINT)/tidy -name '*.d' 2>/dev/null)
