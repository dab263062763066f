#!/usr/bin/env bash
# Installs the engines that some tests need, where they are missing: Debian's Docker engine, PostgreSQL
# server and Java compiler.
# Needs root. Safe to repeat: where nothing is missing it ends at once. Nothing is started: tests start their own.
#
# Usage: scripts/engines.sh [docker] [postgres] [java]      none named: all
set -euo pipefail

POLICY=${POLICY:-/usr/sbin/policy-rc.d}
readonly APT=(apt-get -o DPkg::Lock::Timeout=400 -qq -y)

say() { printf 'engines: %s\n' "$*"; }
die() {
  printf 'engines: %s\n' "$@" >&2
  exit 1
}

has() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; }
has_compose() { has docker-compose || docker compose version >/dev/null 2>&1; }
has_docker() { has dockerd && has docker && has_compose; }
has_java() { has javac && has java; }
has_postgres() { has initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; }

# The Debian packages that an engine lacks, one a line: never docker.io beside an engine from elsewhere.
packages_of() {
  case $1 in
    docker)
      has dockerd || echo docker.io
      # A package of its own since Debian 13.
      if ! has docker && apt-cache show docker-cli >/dev/null 2>&1; then echo docker-cli; fi
      has_compose || echo docker-compose
      ;;
    postgres) echo postgresql ;;
    java) echo default-jdk-headless ;;
  esac
}

# While this runs, apt starts no service: a policy of this machine's own is left as it is.
forbid_starting() {
  if [[ -e $POLICY ]]; then return; fi
  trap 'rm -f "$POLICY"' EXIT
  trap 'exit 130' INT TERM
  printf '#!/bin/sh\nexit 101\n' >"$POLICY"
  chmod 755 "$POLICY"
}

install() {
  local log
  log=$(DEBIAN_FRONTEND=noninteractive "${APT[@]}" install --no-install-recommends "$@" 2>&1) && return
  # Most often the machine's list of packages is missing or old.
  "${APT[@]}" update >/dev/null || say "apt-get update failed; trying with what is there"
  log=$(DEBIAN_FRONTEND=noninteractive "${APT[@]}" install --no-install-recommends "$@" 2>&1) && return
  tail -n 20 <<<"$log" >&2
  die "apt-get could not install: $*"
}

main() {
  local engine
  local -a engines=("$@") missing=() packages=()
  if [[ $# == 0 ]]; then engines=(docker postgres java); fi
  for engine in "${engines[@]}"; do
    case $engine in
      docker | postgres | java) ;;
      *) die "unknown engine $engine; there are: docker postgres java" ;;
    esac
    "has_$engine" || missing+=("$engine")
  done
  if [[ ${#missing[@]} == 0 ]]; then
    say "${engines[*]}: installed"
    return
  fi
  command -v apt-get >/dev/null ||
    die "missing: ${missing[*]}. Install them with this system's package manager; tests that need them skip until then."
  for engine in "${missing[@]}"; do mapfile -t -O "${#packages[@]}" packages < <(packages_of "$engine"); done
  [[ $(id -u) == 0 ]] || die "missing: ${missing[*]}. Run: sudo apt-get install ${packages[*]}"
  # One at a time: the policy file must not be removed under another run.
  exec 9<"${BASH_SOURCE[0]}"
  flock 9
  say "missing: ${missing[*]}; installing ${packages[*]}"
  forbid_starting
  install "${packages[@]}"
  for engine in "${missing[@]}"; do "has_$engine" || die "$engine is still missing after installing ${packages[*]}"; done
  say "installed in $SECONDS s"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
