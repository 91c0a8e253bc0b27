#!/bin/sh
# Installs what this checkout needs into an environment: tools/setup.sh .venv python3 [index of torch]
#
# Whether it is there already is known by content, and not by the times of files: $venv/.ready holds the sum of the files
# that say what is needed, and the checkout that installed it. An environment that another checkout made, such as a link
# to it, may be used here, and nothing is ever written into it: that would turn the other checkout's `lib` into this one.
set -eu
venv=$1 python=$2 index=${3:-}
cd "$(dirname "$0")/.."
here=$(pwd -P)
needed=$(cat requirements.txt constraints.txt pyproject.toml tools/ipython_kernel_config.py | cksum)
has='' owner=''
[ ! -s "$venv/.ready" ] || { read -r has; read -r owner; } <"$venv/.ready"
[ "$has" != "$needed" ] || exit 0
lies=$(cd "$venv" 2>/dev/null && pwd -P) || lies=$here/new
case $lies in
"$here"/*) ;; # in this checkout, so it is this checkout's
*)
  if [ "$owner" != "$here" ] && [ -d "${owner:-/}" ]; then
    [ -n "$owner" ] && whose="was made by $owner" || whose="says of no checkout that it made it"
    echo "$venv $whose, and it has not what is needed here. It stays as it is; make VENV=.venv-mine makes one of your" \
      "own" >&2
    exit 1
  fi
  ;;
esac

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "Python 3.11 or newer is needed, and '$python' is not: try make PYTHON=python3.12" >&2
  exit 1
}
pip="$venv/bin/python -m pip"
torch=$(grep '^torch==' constraints.txt)
[ -x "$venv/bin/python" ] || { echo "== Creating $venv"; "$python" -m venv "$venv"; }
printf '%s\n%s\n' "interrupted" "$here" >"$venv/.ready" # whose it is, if this ends here
# torch first, on its own and exact: resolved together with the rest it could be replaced by another build.
echo "== Installing $torch (the long one: minutes on a slow line)"
$pip install --no-deps ${index:+--index-url "$index"} "$torch"
echo "== Installing what requirements.txt names, at the versions of constraints.txt"
$pip install -q -r requirements.txt -c constraints.txt
$pip install -q --no-deps -e .
$pip check
mkdir -p "$venv/etc/ipython"
cp tools/ipython_kernel_config.py "$venv/etc/ipython/"
printf '%s\n%s\n' "$needed" "$here" >"$venv/.ready"
